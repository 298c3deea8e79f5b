"""Files that the two environments exchange: prompts, the full cache's tokens, and results.

kvpress needs an older transformers than vLLM, so it runs in its own process and environment. Both
sides write JSON lines into the same folder. This file and `benchmarks.jsonl` need only the standard
library.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import jsonl

NEEDLE, TEXT = "needle", "text"
FULL = "full cache"
KVPRESS, OURS = "kvpress", "ours"

Record = TypeVar("Record", "Prompt", "Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt with the full cache's output.

    Args:
        name: unique name.
        kind: NEEDLE, a question with a known answer, or TEXT, whose next tokens are compared.
        ids: token ids of the prompt.
        output_ids: the full cache's greedy output tokens.
        answer: text that a right answer contains; empty for a TEXT.
    """

    name: str
    kind: str
    ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    answer: str = ""

    def __post_init__(self) -> None:
        if self.kind not in (NEEDLE, TEXT):
            raise ValueError(f"a prompt's kind must be {NEEDLE!r} or {TEXT!r}, got {self.kind!r}")
        if not self.ids or not self.output_ids:
            raise ValueError(f"prompt {self.name!r} must have tokens and the full cache's output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One method's cache of one prompt, and the results of decoding from it.

    Args:
        side: KVPRESS or OURS.
        budget: share of the prompt's tokens to keep.
        tokens: prompt length in tokens.
        kept: per layer the kept entries, averaged over KV heads.
        answered: True if a needle was answered; None for a text.
        kl: nats for each token of a text after the first; empty for a needle.
        cache_bytes: bytes of the cache after compression, including masked entries.
        full_bytes: bytes of the full cache.
        note: a remark for the report.
    """

    side: str
    method: str
    budget: float
    prompt: str
    tokens: int
    kept: tuple[float, ...]
    answered: bool | None
    kl: tuple[float, ...]
    cache_bytes: int
    full_bytes: int
    note: str = ""

    @property
    def key(self) -> tuple[str, float, str]:
        return self.method, self.budget, self.prompt


def run_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a run, which `python -m benchmarks.peers` writes."""
    settings: dict[str, Any] = json.loads((folder / "settings.json").read_text())
    return settings


def write(path: Path, records: Iterable[Prompt | Result]) -> None:
    """Write records to a new file, one line each. The file appears only when it is complete."""
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    jsonl.append(part, map(asdict, records))
    part.rename(path)


def append(path: Path, record: Prompt | Result) -> None:
    jsonl.append(path, [asdict(record)])


def read(path: Path, kind: type[Record]) -> list[Record]:
    """Return the complete records of a file; no file means no records.

    Raises:
        ValueError: a line is not a record of this kind.
    """
    records = []
    try:
        for line in jsonl.lines(path):
            fields: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in line.items()
            }
            records.append(kind(**fields))
    except (AttributeError, TypeError, ValueError) as e:
        raise ValueError(
            f"{path} must have lines of {kind.__name__}: {e}; delete the file and run"
            " `make peers` again"
        ) from None
    return records
