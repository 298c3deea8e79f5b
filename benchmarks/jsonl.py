"""Files of results: a JSON object per line, appended as results come in."""

import json
import lzma
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file, skipping incomplete ones. No file means no lines.

    Args:
        path: a ``.jsonl`` file, or ``.jsonl.xz`` for results that git keeps.
    """
    if path.exists():
        raw = path.read_bytes()
        for line in (lzma.decompress(raw) if path.suffix == ".xz" else raw).splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def append(path: Path, results: Iterable[Line]) -> None:
    """Append lines to a file, which is created with its folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        out.writelines(json.dumps(result) + "\n" for result in results)


def by_key(found: Iterable[Line], key: str) -> dict[Any, list[Line]]:
    """Return the lines by their value of `key`, in order of appearance."""
    groups: dict[Any, list[Line]] = {}
    for line in found:
        groups.setdefault(line[key], []).append(line)
    return groups
