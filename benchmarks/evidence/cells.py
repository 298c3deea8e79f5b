"""Summarise result lines as cells: means with confidence intervals per method and budget."""

import json
import lzma
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.field import reading, ruler
from vllm_kvcompress.compare import measures, tasks
from vllm_kvcompress.compare.statistics import Estimate, estimate

FULL = "full"
ALL = "all tasks"
ORDINARY = "ordinary requests"
"""Name of the cell over all tasks without expected answers."""
RULER, REASONS, SECOND_TURNS = "RULER", "answers with reasons", "second turns"
FAMILIES: Mapping[str, str] = {
    **dict.fromkeys(ruler.TASKS, RULER),
    **{name: REASONS if name.endswith("_reasons") else SECOND_TURNS for name in reading.TASKS},
}
"""Name of the cell over all tasks of a family, by the name of a field task."""
AFTER_LOOKAHEAD = "from 33"
"""Name of the range that starts after a look-ahead of 32 tokens."""
POSITION_RANGES: Mapping[str, slice] = {
    **measures.POSITION_RANGES,
    AFTER_LOOKAHEAD: slice(32, None),
}
"""Ranges of token positions in the full cache's output, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionStats:
    """Statistics over one range of token positions in the full cache's outputs.

    Args:
        kl: nats per token. Each token has the same weight, so long outputs weigh more.
        top1: share of tokens that the compressed cache would choose, too.
    """

    kl: Estimate
    top1: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One method at one budget, over prompts that the full cache answers at least in part.

    Args:
        model, question, task: the prompts; `task` is ALL or ORDINARY for several tasks together.
        tokens: maximum prompt length in tokens.
        score: share of the full cache's score that the compressed cache reaches. None for tasks
            without expected answers.
        same: share of greedy outputs that equal the full cache's output.
        kl: nats per token along the full cache's output, averaged over prompts.
        kept: kept share of the prompt tokens, over the compressed prompts.
        bytes: bytes of the compressed prompts, relative to the same prompts in 16 bits. None for
            results without bytes.
        packed: share of prompts that were compressed. A prompt stays uncompressed if its output
            ends within the look-ahead.
        along: statistics by name of the position range. Empty for tasks with expected answers.
        similarity: word similarity of the greedy output to the full cache's output, in [0, 1].
        length: length of the greedy output in tokens, relative to the full cache's output.
        loops, full_loops: share of compressed and full-cache outputs that end in a loop. These
            two, `similarity` and `length` are None for tasks with expected answers, and if outputs
            were not decoded to their end.
        answer_f1, answer_same: token F1 and exact match of the final answer with the full cache's
            own answer. None for tasks without short answers.
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
    bytes: float | None
    packed: float
    along: Mapping[str, PositionStats]
    similarity: Estimate | None
    length: Estimate | None
    loops: float | None
    full_loops: float | None
    answer_f1: Estimate | None = None
    answer_same: Estimate | None = None


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the lines of all files; the last line wins for one prompt, method and budget."""
    last: dict[tuple[Any, ...], dict[str, Any]] = {}
    keys = ("model", "question", "tokens", "seed", "item", "method", "budget")
    for path in paths:
        for line in lines(path):
            last[tuple(line[key] for key in keys)] = line
    return list(last.values())


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a results file, skipping incomplete lines. No file means no lines.

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


def cells(results: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """Return a cell per method and budget, for each task and for all tasks together."""
    grouped: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in results:
        if line["method"] == FULL:
            continue
        prompts = (line["model"], line["question"], line["tokens"])
        combined = _combined_task(line)
        for task in [line["task"], *([combined] if combined else [])]:
            key = (*prompts, task, line["method"], line["budget"])
            grouped.setdefault(key, []).append(line)
    return [_cell(key, found) for key, found in grouped.items()]


def _combined_task(line: Mapping[str, Any]) -> str | None:
    """Return the name of the combined cell that a line also counts in, or None."""
    if line["task"] in FAMILIES:
        return FAMILIES[line["task"]]
    if line["full"]:
        return ALL
    # The plain texts of the task `texts` are not requests.
    return ORDINARY if line["task"] in tasks.ORDINARY else None


def _cell(key: tuple[Any, ...], found: Sequence[Mapping[str, Any]]) -> Cell:
    model, question, tokens, task, method, budget = key
    groups = _sampling_groups(found)
    score = None
    if any(line["full"] for line in found):
        score = estimate(
            [line["score"] for line in found], groups, sizes=[line["full"] for line in found]
        )
    with_kl = [line for line in found if line["kl"] is not None]
    kl = None
    if with_kl:
        kl = estimate([line["kl"] for line in with_kl], _sampling_groups(with_kl))
    complete = [line for line in found if "similarity" in line]
    complete_groups = _sampling_groups(complete)
    packed = [line for line in found if line.get("packed", True)]
    with_bytes = [line["bytes"] for line in packed or found if "bytes" in line]
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
        bytes=fmean(with_bytes) if with_bytes else None,
        packed=len(packed) / len(found),
        along=_position_stats(found),
        similarity=estimate([line["similarity"] for line in complete], complete_groups)
        if complete
        else None,
        length=estimate(
            [line["length"] for line in complete],
            complete_groups,
            sizes=[line["full_length"] for line in complete],
        )
        if complete
        else None,
        loops=fmean(line["loops"] for line in complete) if complete else None,
        full_loops=fmean(line["full_loops"] for line in complete) if complete else None,
        answer_f1=_mean_of("answer_f1", found),
        answer_same=_mean_of("answer_same", found),
    )


def _mean_of(key: str, found: Sequence[Mapping[str, Any]]) -> Estimate | None:
    """Return the mean of a field over the lines that have it."""
    with_key = [line for line in found if key in line]
    if not with_key:
        return None
    return estimate([float(line[key]) for line in with_key], _sampling_groups(with_key))


def _sampling_groups(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the sampling group of each line."""
    return [sampling_group(line) for line in found]


def sampling_group(line: Mapping[str, Any]) -> str:
    """Return the group of a line: lines with one seed and text are not independent samples."""
    return f"{line.get('seed')}:{line['group'] or line['item']}"


def _position_stats(found: Sequence[Mapping[str, Any]]) -> dict[str, PositionStats]:
    """Return statistics by POSITION_RANGES, without ranges that no output reaches."""
    stats = {}
    for name, positions in POSITION_RANGES.items():
        # The lists leave out the first token: the prefill computes it, so it always agrees.
        parts = [
            (line, [0.0, *line["kl_at"]][positions], ("1" + line["agreed_at"])[positions])
            for line in found
            if "kl_at" in line
        ]
        parts = [part for part in parts if part[1]]
        if not parts:
            continue
        groups = _sampling_groups([line for line, _, _ in parts])
        sizes = [len(kl) for _, kl, _ in parts]
        stats[name] = PositionStats(
            kl=estimate([sum(kl) for _, kl, _ in parts], groups, sizes=sizes),
            top1=estimate([agreed.count("1") for _, _, agreed in parts], groups, sizes=sizes),
        )
    return stats


def answered_counts(results: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, int, str], str]:
    """Return "N of M" prompts that the full cache answers, by model, question, tokens and task."""
    scores: dict[tuple[str, str, int, str], list[float]] = {}
    for line in results:
        if line["method"] == FULL:
            key = (line["model"], line["question"], line["tokens"], line["task"])
            scores.setdefault(key, []).append(line["score"])
    return {key: f"{sum(s > 0 for s in found)} of {len(found)}" for key, found in scores.items()}


def as_json(found: Iterable[Cell]) -> list[dict[str, Any]]:
    """Return the cells as JSON objects with numbers rounded to 5 digits."""

    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rounded(item) for key, item in value.items()}
        return round(value, 5) if isinstance(value, float) else value

    return [rounded(asdict(cell)) for cell in found]
