"""JSON schemas of operator objects with only the fields that deploy/ uses; others are errors.

The operators publish their schemas in no Python package. Field names and types in
operator_schemas.yaml are those of the API versions there. Pod templates inside them are checked
with the Kubernetes schema.

In that file, "!" after a name marks a required field, and "+" a list that must not be empty. A
value is a name of `_TYPES`, alternatives "a|b", a constant "=a", a regular expression "~a", or
JSON types "integer,string".
"""

from pathlib import Path
from typing import Any

import yaml

_TYPES: dict[str, dict[str, Any]] = {
    "count": {"type": "integer", "minimum": 0},
    "positive": {"type": "integer", "minimum": 1},
    "share": {"type": ["integer", "string"]},
    "strings": {"type": "object", "additionalProperties": {"type": "string"}},
    "duration": {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h|d))+$"},
    "path": {"type": "string", "pattern": "^/"},
    "pod": {"type": "object"},  # checked with the Kubernetes schema
}


def _schema(fields: Any) -> dict[str, Any]:
    """Return the JSON schema of a value in operator_schemas.yaml."""
    if isinstance(fields, list):
        return {"type": "array", "items": _schema(fields[0])}
    if isinstance(fields, dict):
        properties = {name.rstrip("!+"): _schema(value) for name, value in fields.items()}
        for name in fields:
            if name.endswith("+"):
                properties[name.rstrip("!+")]["minItems"] = 1
        return {
            "type": "object",
            "properties": properties,
            "required": sorted(name.rstrip("!+") for name in fields if "!" in name),
            "additionalProperties": False,
        }
    if fields in _TYPES:
        return _TYPES[fields]
    if fields[0] in "=~":
        return (
            {"const": fields[1:]} if fields[0] == "=" else {"type": "string", "pattern": fields[1:]}
        )
    if "|" in fields:
        return {"enum": fields.split("|")}
    return {"type": fields.split(",") if "," in fields else fields}


def _kind(kind: str, version: str, spec: Any) -> dict[str, Any]:
    metadata = {"name!": "string", "namespace": "string", "labels": "strings"}
    metadata["annotations"] = "strings"
    header = {"apiVersion!": f"={version}", "kind!": f"={kind}", "metadata!": metadata}
    return _schema({**header, "spec!": spec})


_FIELDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
PRODUCTION_STACK = _schema(_FIELDS.pop("production-stack"))
SCHEMAS = {title.split()[0]: _kind(*title.split(), spec) for title, spec in _FIELDS.items()}
