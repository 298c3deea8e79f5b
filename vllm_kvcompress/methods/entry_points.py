"""Names of other packages' methods, from the metadata of the installed packages.

A package registers a scorer, an allocator, a selector or a preset as an entry point ``KIND.NAME``
of `GROUP`. This module imports neither these packages nor torch.
"""

import functools
import importlib.metadata
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any, Literal, get_args

from vllm_kvcompress.errors import ConfigError

GROUP = "vllm_kvcompress.methods"
Kind = Literal["allocator", "scorer", "selector", "preset"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_MAX_TEXT = 300
"""Characters of another package's error that ours repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodEntry:
    """An entry point of `GROUP`.

    Args:
        kind: the part of the name before the first dot, which may be none of `KINDS`.
        name: the name that users write.
        package: name of the distribution.
        version: its version.
        point: the entry point.
    """

    kind: str
    name: str
    package: str
    version: str
    point: EntryPoint = field(repr=False)

    def load(self) -> Any:
        """Import the object that the entry names.

        Raises:
            ConfigError: it cannot be imported.
        """
        try:
            return self.point.load()
        except Exception as e:  # importing another package's module may raise anything
            raise self.error(f"its import fails with {described(e)}; repair the package") from e

    def error(self, problem: str) -> ConfigError:
        """Return the error for this entry.

        Args:
            problem: the rule, what was found instead, and the fix.
        """
        return ConfigError(
            f"{self.package} {self.version}, entry point {self.point.name!r} ="
            f" {self.point.value!r} of {GROUP}: {problem}, or uninstall {self.package}"
        )


def described(error: Exception) -> str:
    """Return the type and the text of another package's exception on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_TEXT]}"


@functools.cache
def method_entries() -> tuple[MethodEntry, ...]:
    """Return the entries of all installed packages, by package and name, read once per process."""
    found = []
    for point in importlib.metadata.entry_points(group=GROUP):
        kind, _, name = point.name.partition(".")
        package, version = "an unknown package", "?"
        if point.dist is not None:
            package, version = str(point.dist.name), str(point.dist.version)
        found.append(
            MethodEntry(kind=kind, name=name, package=package, version=version, point=point)
        )
    return tuple(sorted(found, key=lambda entry: (entry.package, entry.point.name)))


def package_summary() -> str:
    """Return the packages with entries, as ``NAME VERSION (ENTRY, ...)``; "" if there are none."""
    entries: dict[str, list[str]] = {}
    for each in method_entries():
        entries.setdefault(f"{each.package} {each.version}", []).append(each.point.name)
    return ", ".join(f"{package} ({', '.join(names)})" for package, names in entries.items())


def added_names(kind: Kind) -> str:
    """Return the names of a kind that other packages add, as ``NAME (PACKAGE), ...``."""
    return ", ".join(
        f"{each.name} ({each.package})" for each in method_entries() if each.kind == kind
    )
