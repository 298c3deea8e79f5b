"""From lines of results to figures with intervals."""

import json
import lzma
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_kvcompress.compare.statistics import Estimate, estimate

FULL = "full"
ALL = "all tasks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One method at one budget, over prompts that the full cache answers at least in part.

    Args:
        model, question, task: of which prompts; `task` is ALL for those of all tasks.
        tokens: longest prompt.
        score: share of what the full cache names that the compressed one names too; None where
            nothing is asked.
        same: share of greedy answers that are the full cache's, token for token.
        kl: nats per token along the full cache's answers.
        kept: share of the prompts' tokens.
    """

    model: str
    question: str
    tokens: int
    task: str
    method: str
    budget: float
    score: Estimate | None
    same: Estimate
    kl: Estimate | None
    kept: float


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The lines of some files; the last of two that say the same prompt, method and budget."""
    last: dict[tuple[Any, ...], dict[str, Any]] = {}
    keys = ("model", "question", "tokens", "seed", "item", "method", "budget")
    for path in paths:
        for line in lines(path):
            last[tuple(line[key] for key in keys)] = line
    return list(last.values())


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """What a file of results has so far; a line that was cut off is none.

    What is kept for good is packed, as ``.jsonl.xz``.
    """
    if path.exists():
        raw = path.read_bytes()
        for line in (lzma.decompress(raw) if path.suffix == ".xz" else raw).splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def cells(results: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """A cell for each method and budget, of each task and of all tasks together."""
    grouped: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in results:
        if line["method"] == FULL:
            continue
        where = (line["model"], line["question"], line["tokens"])
        # A text that is only gone on with is no task: nothing is asked of it.
        for task in (line["task"], ALL) if line["full"] else (line["task"],):
            key = (*where, task, line["method"], line["budget"])
            grouped.setdefault(key, []).append(line)
    return [_cell(key, found) for key, found in grouped.items()]


def _cell(key: tuple[Any, ...], found: Sequence[Mapping[str, Any]]) -> Cell:
    model, question, tokens, task, method, budget = key
    groups = [line["group"] or line["item"] for line in found]
    score = None
    if any(line["full"] for line in found):
        score = estimate(
            [line["score"] for line in found], groups, sizes=[line["full"] for line in found]
        )
    diverged = [line for line in found if line["kl"] is not None]
    kl = None
    if diverged:
        kl = estimate(
            [line["kl"] for line in diverged], [line["group"] or line["item"] for line in diverged]
        )
    return Cell(
        model=model,
        question=question,
        tokens=tokens,
        task=task,
        method=method,
        budget=budget,
        score=score,
        same=estimate([float(line["same"]) for line in found], groups),
        kl=kl,
        kept=sum(line["kept"] for line in found) / len(found),
    )


def answered(results: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, int, str], str]:
    """How many of the prompts the full cache answered, by model, question, tokens and task."""
    asked: dict[tuple[str, str, int, str], list[float]] = {}
    for line in results:
        if line["method"] == FULL:
            key = (line["model"], line["question"], line["tokens"], line["task"])
            asked.setdefault(key, []).append(line["score"])
    return {key: f"{sum(s > 0 for s in found)} of {len(found)}" for key, found in asked.items()}


def as_json(found: Iterable[Cell]) -> list[dict[str, Any]]:
    """Figures rounded to what they are worth."""

    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rounded(each) for key, each in value.items()}
        return round(value, 5) if isinstance(value, float) else value

    return [rounded(asdict(cell)) for cell in found]
