"""Summarise result lines as cells: means with confidence intervals per method and budget."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.field import reading, ruler
from benchmarks.jsonl import Line, lines
from vllm_kvcompress.compare import measures, tasks
from vllm_kvcompress.compare.statistics import Estimate, mean

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
        bytes: bytes of the compressed prompts, relative to the same prompts in 16 bits. None for
            results without bytes.
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
    bytes: float | None
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


def _cell(key: tuple[Any, ...], found: Sequence[Line]) -> Cell:
    model, question, tokens, task, method, budget = key
    packed = [line for line in found if line.get("packed", True)]
    same = _mean_of("same", found)
    assert same is not None
    return Cell(
        model=model,
        question=question,
        tokens=tokens,
        task=task,
        method=method,
        budget=budget,
        score=_mean_of("score", found, "full") if any(line["full"] for line in found) else None,
        same=same,
        kl=_mean_of("kl", found),
        bytes=_share_of("bytes", packed or found),
        along=_position_stats(found),
        similarity=_mean_of("similarity", found),
        length=_mean_of("length", found, "full_length"),
        loops=_share_of("loops", found),
        full_loops=_share_of("full_loops", [line for line in found if "similarity" in line]),
        answer_f1=_mean_of("answer_f1", found),
        answer_same=_mean_of("answer_same", found),
    )


def _mean_of(key: str, found: Sequence[Line], size: str | None = None) -> Estimate | None:
    """Return the mean of a field over the lines that have it, perhaps per unit of another field."""
    return mean(
        [line for line in found if line.get(key) is not None],
        lambda line: float(line[key]),
        sampling_group,
        None if size is None else lambda line: line[size],
    )


def _share_of(key: str, found: Sequence[Line]) -> float | None:
    values = [line[key] for line in found if key in line]
    return fmean(values) if values else None


def sampling_group(line: Line) -> str:
    """Return the group of a line: lines with one seed and text are not independent samples."""
    return f"{line.get('seed')}:{line['group'] or line['item']}"


def compared_tokens(line: Line, positions: slice) -> tuple[int, float, int]:
    """Return the equal tokens, the sum of KL, and the number of tokens at these positions."""
    # The fields leave out the first token: the prefill computes it, so it always agrees.
    agreed, kl = ("1" + line["agreed_at"])[positions], [0.0, *line["kl_at"]][positions]
    return agreed.count("1"), sum(kl), len(agreed)


def _position_stats(found: Sequence[Line]) -> dict[str, PositionStats]:
    """Return statistics by POSITION_RANGES, without ranges that no output reaches."""
    stats = {}
    for name, positions in POSITION_RANGES.items():
        parts = [
            (sampling_group(line), *compared_tokens(line, positions))
            for line in found
            if "kl_at" in line
        ]
        parts = [part for part in parts if part[3]]
        top1 = mean(parts, lambda part: part[1], lambda part: part[0], lambda part: part[3])
        kl = mean(parts, lambda part: part[2], lambda part: part[0], lambda part: part[3])
        if kl is not None and top1 is not None:
            stats[name] = PositionStats(kl=kl, top1=top1)
    return stats


BOTH = "first and last"
"""Stands for the question's position in lines that `pooled` returns."""
AFTER_FIRST = slice(1, None)
"""All output tokens that the compressed cache computes: the prefill computes the first one."""
System = tuple[str, float]
"""Method and budget."""


def pooled(results: Sequence[Line]) -> list[dict[str, Any]]:
    """Return the lines of ordinary requests as if the question had one position in all."""
    return [
        {**line, "question": BOTH, "item": f"{line['question']}:{line['item']}"}
        for line in results
        if line["task"] in tasks.ORDINARY
    ]


def differences(
    found: Sequence[Line], positions: slice = POSITION_RANGES[AFTER_LOOKAHEAD]
) -> dict[tuple[System, System], tuple[Estimate, Estimate, int]]:
    """Return by pair of systems the difference of equal tokens and of KL, and the token count.

    Args:
        found: results of one model over ordinary requests.
        positions: the output tokens that count.
    """
    systems: dict[System, dict[Any, Line]] = {}
    for line in found:
        if "kl_at" in line:
            key = (line["question"], line["seed"], line["item"])
            systems.setdefault((line["method"], line["budget"]), {})[key] = line
    result = {}
    for one, other in combinations(systems, 2):
        pairs = [
            (sampling_group(line), a, compared_tokens(systems[other][key], positions))
            for key, line in systems[one].items()
            if key in systems[other] and (a := compared_tokens(line, positions))[2]
        ]
        top1 = mean(pairs, lambda p: p[1][0] - p[2][0], lambda p: p[0], lambda p: p[1][2])
        kl = mean(pairs, lambda p: p[1][1] - p[2][1], lambda p: p[0], lambda p: p[1][2])
        if top1 is not None and kl is not None:
            result[one, other] = top1, kl, sum(a[2] for _, a, _ in pairs)
    return result


def answered_counts(results: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, int, str], str]:
    """Return "N of M" prompts that the full cache answers, by model, question, tokens and task."""
    scores: dict[tuple[str, str, int, str], list[float]] = {}
    for line in results:
        if line["method"] == FULL:
            key = (line["model"], line["question"], line["tokens"], line["task"])
            scores.setdefault(key, []).append(line["score"])
    return {key: f"{sum(s > 0 for s in found)} of {len(found)}" for key, found in scores.items()}
