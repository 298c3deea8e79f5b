"""``kvcompress methods``: list the methods and parts, built-in and of other packages."""

import dataclasses
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_kvcompress.methods.entry_points import method_entries
from vllm_kvcompress.methods.registry import BUILT_IN, TABLES, checked_entries

BUILT_IN_PACKAGE = "built in"
_PRESET_COLUMNS = ("allocator", "scorer", "selector", "window", "lookahead")


def list_methods() -> dict[str, Any]:
    """Return the presets, the parts and the errors of other packages' entries, as JSON values.

    An entry with an error is not among the presets or parts.
    """
    objects, errors = checked_entries()
    packages = {
        (entry.kind, entry.name): f"{entry.package} {entry.version}" for entry in method_entries()
    }
    listed: dict[str, list[dict[str, Any]]] = {"presets": [], "parts": []}
    for kind, table in TABLES.items():
        built_in = {name: table.data[name] for name in BUILT_IN[kind]}
        for name, value in {**built_in, **objects[kind]}.items():
            package = packages.get((kind, name), BUILT_IN_PACKAGE)
            if kind == "preset":
                values = {column: getattr(value, column) for column in _PRESET_COLUMNS}
                listed["presets"].append({"name": name, **values, "package": package})
            else:
                parameters = {field.name: field.default for field in dataclasses.fields(value)}
                row = {"kind": kind, "name": name, "parameters": parameters, "package": package}
                listed["parts"].append(row)
    return {**listed, "errors": [str(error) for error in errors.values()]}


def run(*, as_json: bool) -> None:
    """Print the list.

    Raises:
        SystemExit: 1 if an entry of another package is wrong, else 0.
    """
    listed = list_methods()
    if as_json:
        sys.stdout.write(json.dumps(listed, indent=2) + "\n")
    else:
        _show(listed, Console())
    raise SystemExit(1 if listed["errors"] else 0)


def _show(listed: dict[str, Any], console: Console) -> None:
    presets = Table("method", *_PRESET_COLUMNS, "package")
    for row in listed["presets"]:
        cells = (row["name"], *(row[column] for column in _PRESET_COLUMNS), row["package"])
        presets.add_row(*map(str, cells))
    parts = Table("part", "name", "parameters", "package")
    for row in listed["parts"]:
        parameters = ", ".join(f"{name}={value!r}" for name, value in row["parameters"].items())
        parts.add_row(row["kind"], row["name"], parameters, row["package"])
    console.print(presets)
    console.print(parts)
    for error in listed["errors"]:
        console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
