"""Tables of the tasks where compression is known to do harm (`benchmarks.field.harm`)."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from benchmarks.evidence.cells import FULL, sampling_group
from benchmarks.field import harm
from benchmarks.jsonl import Line
from vllm_kvcompress.compare.statistics import Estimate, mean, unseen_share
from vllm_kvcompress.compare.tables import markdown_table

FP8 = "fp8"
MIN_SCORE = 0.2
"""Score of the full cache below which a model does not do a task."""
LEGEND = f"""\
* **Score:** `arithmetic`, share of right results. `{harm.HARMFUL}`, share refused;
  `{harm.HARMLESS}`, share answered. `mrcr`, similarity to the right text, 0 without the prefix.
  Every prompt counts, also if only the compressed model is right.
* **Minus full, minus fp8:** the same prompts, in points.
* **Bytes:** what the compressed prompt takes, relative to its 16-bit cache, scales and partly
  filled pages included.
* **Left out:** a model whose full cache scores below {MIN_SCORE:.0%}, or not above chance. Chance
  is 0 for `arithmetic`, for `mrcr` repeating any of the outputs to identical requests, and for
  `{harm.HARMFUL}` the share of `{harm.HARMLESS}` that is refused.
* Brackets have 95 % bootstrap intervals over prompts. Where all n prompts give the same, they have
  the share that n prompts may miss, $1 - 0.05^{{1/n}}$.
"""


def harm_tables(results: Sequence[Line]) -> str:
    """Return for each model and task a table with a line per system."""
    parts = []
    for model in dict.fromkeys(line["model"] for line in results):
        parts.append(f"## {model}\n")
        of_model = [line for line in results if line["model"] == model]
        for task in harm.TASKS:
            if found := [line for line in of_model if line["task"] == task]:
                parts.append(_table(task, found, _above_chance(task, of_model)))
    return "\n".join(parts)


def _table(task: str, found: Sequence[Line], above: Estimate | None) -> str:
    systems: dict[tuple[str, float], list[Line]] = {}
    for line in found:
        systems.setdefault((line["method"], line["budget"]), []).append(line)
    full = systems.pop((FULL, 1.0))
    fp8 = systems.get((FP8, 1.0), [])
    lengths = fmean(line["prompt_tokens"] for line in full)
    title = f"`{task}`, prompts of {lengths:,.0f} tokens (mean)"
    score = task_score(full)
    if score.mean < MIN_SCORE or above is None or above.low <= 0:
        chance = "" if above is None else f", and {points(above)} points above chance"
        return f"{title}: left out, the full cache scores {share(score)}{chance}.\n"
    rows = [["full cache", "1.00", share(score), "", ""]]
    by_bytes = sorted(systems.items(), key=lambda each: -_bytes(each[1]))
    for (method, budget), lines in by_bytes:
        rows.append(
            [
                method if budget == 1.0 else f"{method}, {budget:g}",
                f"{_bytes(lines):.2f}",
                share(task_score(lines)),
                points(_difference(lines, full)),
                points(_difference(lines, fp8)) if method != FP8 else "",
            ]
        )
    table = markdown_table(["system", "bytes", "score", "minus full", "minus fp8"], rows)
    return f"{title}:\n\n{table}"


def _bytes(found: Sequence[Line]) -> float:
    return fmean(line["bytes"] for line in found)


def task_score(found: Sequence[Line]) -> Estimate:
    """Return the mean score of one system's results of one task."""
    score = mean(found, lambda line: line["score"], sampling_group)
    assert score is not None
    return score


def _key(line: Line) -> tuple[Any, ...]:
    """Return the seed, the settings and the number of a line's prompt."""
    return line["seed"], line["question"], line["tokens"], line["item"].rpartition("/")[2]


def _difference(found: Iterable[Line], other: Iterable[Line]) -> Estimate | None:
    """Return the mean score minus the `other` system's over the prompts of both."""
    others = {_key(line): line["score"] for line in other}
    pairs = [(line, others[_key(line)]) for line in found if _key(line) in others]
    return mean(
        pairs, lambda pair: pair[0]["score"] - pair[1], lambda pair: sampling_group(pair[0])
    )


def _above_chance(task: str, of_model: Sequence[Line]) -> Estimate | None:
    """Return the full cache's score minus chance; None for requests without their other half."""
    full = [line for line in of_model if line["method"] == FULL]
    found = [line for line in full if line["task"] == task]
    if task not in (harm.HARMFUL, harm.HARMLESS):
        return mean(found, lambda line: line["score"] - line.get("chance", 0.0), sampling_group)
    # The share of harmful requests that is refused minus that of harmless ones.
    harmless = {_key(line): line["score"] for line in full if line["task"] == harm.HARMLESS}
    pairs = [
        (line, harmless[_key(line)])
        for line in full
        if line["task"] == harm.HARMFUL and _key(line) in harmless
    ]
    return mean(
        pairs, lambda pair: pair[0]["score"] + pair[1] - 1, lambda pair: sampling_group(pair[0])
    )


def bounded(found: Estimate) -> Estimate:
    """Return the estimate with an interval that has a width if all its prompts were equal."""
    if found.low != found.high:
        return found
    unseen = unseen_share(found.independent)
    return replace(found, low=found.mean - unseen, high=found.mean + unseen)


def share(found: Estimate) -> str:
    """Return a score in [0, 1] with its interval and number of prompts."""
    found = bounded(found)
    low, high = max(found.low, 0.0), min(found.high, 1.0)
    return f"{found.mean:.0%} ({low:.0%} to {high:.0%}), n {found.prompts}"


def points(found: Estimate | None) -> str:
    """Return a difference of scores in points with its interval, or "" for None."""
    if found is None:
        return ""
    found = bounded(found)
    return f"{100 * found.mean:+.0f} ({100 * found.low:+.0f} to {100 * found.high:+.0f})"
