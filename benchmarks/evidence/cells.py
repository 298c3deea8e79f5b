"""From lines of results to figures with intervals."""

import json
import lzma
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from vllm_kvcompress.compare import measures, tasks
from vllm_kvcompress.compare.statistics import Estimate, estimate

FULL = "full"
ALL = "all tasks"
ORDINARY = "ordinary requests"
"""All tasks whose right answers nobody knows, together."""
PLACES: Mapping[str, slice] = {**measures.PLACES, "from 33": slice(32, None)}
"""Tokens of an answer, from which to which one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Along:
    """Some tokens of the full cache's answers, of those that are long enough.

    Args:
        kl: nats per token, over all of them; an answer of more tokens weighs more.
        top1: share of them that the compressed cache would choose as well.
    """

    kl: Estimate
    top1: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One method at one budget, over prompts that the full cache answers at least in part.

    Args:
        model, question, task: of which prompts; `task` is ALL for those of all tasks.
        tokens: longest prompt.
        score: share of what the full cache names that the compressed one names too; None where
            nothing is asked.
        same: share of greedy answers that are the full cache's, token for token.
        kl: nats per token along the full cache's answers, mean of the prompts.
        kept: share of the prompts' tokens, of those that were packed.
        packed: share of the prompts; a look-ahead leaves those whole whose answers end before.
        along: by PLACES; empty where answers are known.
        similarity: of the words of the greedy answer to the full cache's, in [0, 1].
        length: tokens of the greedy answer over the full one's.
        loops, full_loops: share of greedy answers that end in a loop. These four are None where
            answers are known, or were not decoded to their end.
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
    packed: float
    along: Mapping[str, Along]
    similarity: Estimate | None
    length: Estimate | None
    loops: float | None
    full_loops: float | None


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
        together = _together(line)
        for task in [line["task"], *([together] if together else [])]:
            key = (*where, task, line["method"], line["budget"])
            grouped.setdefault(key, []).append(line)
    return [_cell(key, found) for key, found in grouped.items()]


def _together(line: Mapping[str, Any]) -> str | None:
    """With which other tasks' prompts one is judged together."""
    if line["full"]:
        return ALL
    # A text that is only gone on with is no task: nothing is asked of it.
    return ORDINARY if line["task"] in tasks.ORDINARY else None


def _cell(key: tuple[Any, ...], found: Sequence[Mapping[str, Any]]) -> Cell:
    model, question, tokens, task, method, budget = key
    groups = _drawn_with(found)
    score = None
    if any(line["full"] for line in found):
        score = estimate(
            [line["score"] for line in found], groups, sizes=[line["full"] for line in found]
        )
    diverged = [line for line in found if line["kl"] is not None]
    kl = None
    if diverged:
        kl = estimate([line["kl"] for line in diverged], _drawn_with(diverged))
    told = [line for line in found if "similarity" in line]
    told_groups = _drawn_with(told)
    packed = [line for line in found if line.get("packed", True)]
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
        kept=fmean(line["kept"] for line in packed or found),
        packed=len(packed) / len(found),
        along=_along(found),
        similarity=estimate([line["similarity"] for line in told], told_groups) if told else None,
        length=estimate(
            [line["length"] for line in told],
            told_groups,
            sizes=[line["full_length"] for line in told],
        )
        if told
        else None,
        loops=fmean(line["loops"] for line in told) if told else None,
        full_loops=fmean(line["full_loops"] for line in told) if told else None,
    )


def _drawn_with(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each prompt is no independent sample of: its text, and each seed has other texts."""
    return [drawn_with(line) for line in found]


def drawn_with(line: Mapping[str, Any]) -> str:
    """The same of one prompt."""
    return f"{line.get('seed')}:{line['group'] or line['item']}"


def _along(found: Sequence[Mapping[str, Any]]) -> dict[str, Along]:
    """By PLACES, where some answer is so long."""
    made = {}
    for name, places in PLACES.items():
        # The first token is the full cache's own, and stands in no list.
        parts = [
            (line, [0.0, *line["kl_at"]][places], ("1" + line["agreed_at"])[places])
            for line in found
            if "kl_at" in line
        ]
        parts = [part for part in parts if part[1]]
        if not parts:
            continue
        groups = _drawn_with([line for line, _, _ in parts])
        sizes = [len(kl) for _, kl, _ in parts]
        made[name] = Along(
            kl=estimate([sum(kl) for _, kl, _ in parts], groups, sizes=sizes),
            top1=estimate([same.count("1") for _, _, same in parts], groups, sizes=sizes),
        )
    return made


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
