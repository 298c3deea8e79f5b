"""What the two environments give each other: prompts, the full cache's tokens, and results.

kvpress needs an older transformers than vLLM, so it runs in a process of its own, from an
environment of its own. Both sides write lines of JSON into the same folder. This file needs nothing
but the standard library.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

NEEDLE, TEXT = "needle", "text"
FULL = "full cache"
KVPRESS, OURS, VLLM = "kvpress", "ours", "vllm"

Record = TypeVar("Record", "Prompt", "Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt and what the full cache says to it.

    Args:
        name: unique.
        kind: NEEDLE, a question that `answer` answers, or TEXT, whose next tokens are compared.
        ids: its tokens.
        said: the full cache's greedy tokens after it.
        answer: what an answer must contain; empty for a TEXT.
    """

    name: str
    kind: str
    ids: tuple[int, ...]
    said: tuple[int, ...]
    answer: str = ""

    def __post_init__(self) -> None:
        if self.kind not in (NEEDLE, TEXT):
            raise ValueError(f"a prompt's kind must be {NEEDLE!r} or {TEXT!r}, got {self.kind!r}")
        if not self.ids or not self.said:
            raise ValueError(f"prompt {self.name!r} must have tokens and the full cache's answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One method's cache of one prompt, and what was decoded from it.

    Args:
        side: KVPRESS, OURS or VLLM.
        budget: share of the prompt's tokens that was to be kept.
        tokens: of the prompt.
        kept: entries of the cache, a layer's mean over its KV heads, one for each layer.
        answered: whether a needle was; None for a text.
        kl: nats of each token of a text after the first; empty for a needle.
        decode_seconds: median of a decode step.
        cache_bytes: what the cache holds after compression, whether or not it is still read.
        full_bytes: of the same prompt's full cache.
        note: what a reader must know of this line.
    """

    side: str
    method: str
    budget: float
    prompt: str
    tokens: int
    kept: tuple[float, ...]
    answered: bool | None
    kl: tuple[float, ...]
    decode_seconds: float
    cache_bytes: int
    full_bytes: int
    note: str = ""

    @property
    def key(self) -> tuple[str, float, str]:
        return self.method, self.budget, self.prompt


def write(path: Path, records: Iterable[Prompt | Result]) -> None:
    """Write records anew, a line each; the file is whole or is not there."""
    part = path.with_suffix(".part")
    part.write_text("".join(_line(record) for record in records))
    part.rename(path)


def append(path: Path, record: Prompt | Result) -> None:
    with path.open("a") as file:
        file.write(_line(record))


def read(path: Path, kind: type[Record]) -> list[Record]:
    """The records of a file, none if it is not there.

    Raises:
        ValueError: a line is not a record of this kind; its number is named.
    """
    return list(_read(path, kind)) if path.exists() else []


def _read(path: Path, kind: type[Record]) -> Iterator[Record]:
    names = {field.name for field in fields(kind)}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            raw: Any = json.loads(line)
            if not isinstance(raw, dict) or not set(raw) <= names:
                raise TypeError(f"its keys must be among {sorted(names)}")
            named: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()
            }
            yield kind(**named)
        except (TypeError, ValueError) as e:
            raise ValueError(
                f"{path}, line {number}, must be a {kind.__name__}: {e};"
                " delete the file and run `make peers` again"
            ) from None


def _line(record: Prompt | Result) -> str:
    return json.dumps(asdict(record)) + "\n"
