"""Report of a comparison: its JSON form, its Markdown page, and the columns of its tables."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from vllm_kvcompress.compare.measures import POSITION_RANGES
from vllm_kvcompress.compare.statistics import RESAMPLES, Estimate
from vllm_kvcompress.compare.summary import Measure, Recommendation, Summary
from vllm_kvcompress.compare.tables import markdown_table

MISSING = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Results of a comparison.

    Args:
        title: model and number of prompts.
        summaries: one summary per cell, in the order of the table rows.
        recommendation: the cell to run, or why there is none.
        complete: whether every prompt was run in every cell.
        notes: sentences that qualify the figures.
        settings: settings of the run.
    """

    title: str
    summaries: Sequence[Summary]
    recommendation: Recommendation
    complete: bool
    notes: Sequence[str]
    settings: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "complete": self.complete,
            "recommendation": asdict(self.recommendation),
            "cells": [summary.to_json() for summary in self.summaries],
            "meaning": meanings(),
            "notes": list(self.notes),
            "settings": self.settings,
        }


class Column(NamedTuple):
    """One column of a table."""

    name: str
    """Heading. Also a key of "meaning" in ``report.json``."""
    meaning: str
    """One or more sentences for the report."""
    text: Callable[[Summary], str]
    """Returns the text for the row of a cell."""


def _number(found: float | None, form: str) -> str:
    return MISSING if found is None else f"{found:{form}}"


def _mean(found: Estimate | None, form: str) -> str:
    return MISSING if found is None else f"{found.mean:{form}}"


def _with_interval(found: Estimate | None, digits: int = 3) -> str:
    if found is None:
        return MISSING
    return f"{found.mean:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def _compressed(s: Summary) -> str:
    unknown = MISSING if s.cell.server else "?"
    return f"{unknown if s.compressed is None else s.compressed} of {s.asked}"


def _loss(s: Summary) -> str:
    return MISSING if s.loss is None else f"{s.loss.mean:.3f} (<= {s.loss.bound:.3f})"


def _milliseconds(full: float | None, compressed: float | None) -> str:
    if full is None or compressed is None:
        return MISSING
    return f"{full * 1e3:,.0f} -> {compressed * 1e3:,.0f}"


def _at_position(name: str, s: Summary) -> str:
    found = s.along.get(name)
    return MISSING if found is None else f"{found.kl.mean:.4f}, {found.same_first.mean:.0%}"


_CELL_COLUMNS = (
    Column(
        "method",
        "The compression method and the format of kept tokens, if the budgets name formats."
        " `ahead` gives the output tokens whose attention scores the prompt, and `+` the protected"
        " parts of the chat.",
        lambda s: s.cell.name,
    ),
    Column(
        "budget",
        "The requested budget: a share of the prompt's tokens, or tokens per layer.",
        lambda s: f"{s.cell.budget:g}",
    ),
)

_SCORE_COLUMNS = (
    *_CELL_COLUMNS,
    Column(
        "compressed",
        "Compressed prompts, of all prompts with an output. `?` if the server does not"
        " report it. If it does, every other figure covers the compressed prompts only. Other"
        " servers show `-`; their figures cover all prompts.",
        _compressed,
    ),
    Column(
        "kept",
        "Share of the compressed prompts' tokens that was kept, mean over layers.",
        lambda s: _number(s.kept, ".1%"),
    ),
    Column(
        "bytes",
        "Bytes of the compressed prompts' KV cache, relative to an uncompressed cache in"
        " the model's dtype, whole blocks and scales included. For another server, those of its"
        " cache's dtype: an estimate, because scales depend on the model's shapes.",
        lambda s: _number(s.bytes, ".0%"),
    ),
    Column(
        "loss",
        "The loss that the recommendation uses, with its upper bound at 95 % confidence in"
        " brackets. The bound is the bootstrap's, or the largest share of prompts that a sample of"
        " this size may miss, whichever is larger.",
        _loss,
    ),
    Column(
        "score",
        "Share of the known answers that the output contains and of the rules that it"
        " obeys, mean over prompts, with its 95 % interval.",
        lambda s: _with_interval(s.score),
    ),
    Column(
        "full score",
        "The score of the full cache on the same prompts.",
        lambda s: _mean(s.full_score, ".3f"),
    ),
)
_AGREEMENT_COLUMNS = (
    *_CELL_COLUMNS,
    Column(
        "exact",
        "Share of greedy outputs that equal the full cache's, token by token.",
        lambda s: _mean(s.exact, ".1%"),
    ),
    Column(
        "similarity",
        "1 minus the edit distance of the two outputs divided by the longer one's length,"
        " mean over prompts, with its 95 % interval.",
        lambda s: _with_interval(s.similarity),
    ),
    Column(
        "parts at",
        "Median number of output tokens before the first difference from the full cache's"
        " output, over outputs that differ.",
        lambda s: _number(s.diverged, "g"),
    ),
    Column(
        "tokens",
        "Output tokens that top-1 and KL cover: the common start of the two outputs and"
        " the first different token. The first output token is left out, because it comes from the"
        " full cache on both sides.",
        lambda s: f"{s.places:,}",
    ),
    Column(
        "top-1",
        "Share of these tokens at which both sides have the same most likely token.",
        lambda s: _mean(s.same_first, ".1%"),
    ),
    Column(
        "KL",
        "KL divergence from the full cache's to the compressed cache's distribution, in"
        " nats per token. A lower bound: it uses the top tokens that both sides report, and counts"
        " all other tokens as one.",
        lambda s: _with_interval(s.kl, 4),
    ),
)


_POSITION_COLUMNS = (
    *_CELL_COLUMNS,
    Column(
        "length",
        "Length of the outputs divided by the full cache's.",
        lambda s: _mean(s.length, ".2f"),
    ),
    Column(
        "loops",
        "Share of outputs that end with the same words four times or more in a row, or"
        " repeat a passage of eight words three times. Full cache -> compressed.",
        lambda s: MISSING if s.loops is None else f"{s.full_loops:.0%} -> {s.loops:.0%}",
    ),
    *(
        Column(
            position,
            f"KL and top-1 as above, for output tokens {position} only. Late positions"
            " cover few outputs: those that still equal the full cache's, which lose less.",
            partial(_at_position, position),
        )
        for position in POSITION_RANGES
    ),
)

_TIME_COLUMNS = (
    *_CELL_COLUMNS,
    Column(
        "first token, ms",
        "Median time to first token, full cache -> compressed. Measured in this run at its"
        " concurrency, without prefix-cache hits.",
        lambda s: (
            MISSING
            if s.times is None
            else _milliseconds(s.times.full_first_token_s, s.times.first_token_s)
        ),
    ),
    Column(
        "per token, ms",
        "Median time per output token after the first, full cache -> compressed. Measured"
        " in this run at its concurrency. Includes the time to compress the prompt, between"
        " prefill and the second token.",
        lambda s: (
            MISSING if s.times is None else _milliseconds(s.times.full_token_s, s.times.token_s)
        ),
    ),
)

TABLES: Mapping[str, Sequence[Column]] = {
    "Scores": _SCORE_COLUMNS,
    "Agreement with the full cache": _AGREEMENT_COLUMNS,
    "By position in the output": _POSITION_COLUMNS,
    "Times": _TIME_COLUMNS,
}
"""Columns by table title. Each table fits a terminal of 80 columns."""


def meanings() -> dict[str, str]:
    """Return the meaning of each column by its name."""
    return {column.name: column.meaning for table in TABLES.values() for column in table}


def markdown(report: Report) -> str:
    """Return the report as a Markdown page."""
    parts = [f"# {report.title}", f"**{report.recommendation.sentence}**"]
    if report.notes:
        parts.append("\n".join(f"* {note}" for note in report.notes))
    parts += [_table(title, columns, report.summaries) for title, columns in TABLES.items()]
    if any(summary.tasks for summary in report.summaries):
        columns = _task_columns(report.summaries)
        parts.append(_table("Score by task (full cache)", columns, report.summaries))
    if any(summary.obeyed for summary in report.summaries):
        columns = rule_columns(report.summaries, by_rule=True)
        parts += [_table("Rules obeyed", columns, report.summaries), _RULES_NOTE]
    parts.append("## What the figures mean")
    parts.append("\n".join(f"* **{name}**: {meaning}" for name, meaning in meanings().items()))
    if any(summary.baseline and not summary.cell.server for summary in report.summaries):
        parts.append(_BASELINES_NOTE)
    if others := dict.fromkeys(s.cell.method for s in report.summaries if s.cell.server):
        parts.append(f"{', '.join(others)}: {_OTHERS_NOTE}")
    by = report.recommendation.by
    parts.append(f"{_METHOD_NOTE} The loss is {_LOSSES[by]} (`--by {by}`).")
    return "\n\n".join(parts) + "\n"


_RULES_NOTE = (
    "Only rules that the full cache obeys count. Each figure is the share of them that the"
    " compressed cache obeys too, with its 95 % interval and the number of prompts."
)
_BASELINES_NOTE = (
    "Methods in italics are baselines. They choose tokens without reading the prompt, so a method"
    " should lose less than they do. They are never recommended."
)
_OTHERS_NOTE = (
    "outputs of other servers (`--against`), without compression. They are compared with the first"
    " server's uncompressed outputs. Their first output token may differ, too. The recommendation"
    " at the top leaves them out."
)
_LOSSES: Mapping[Measure, str] = {
    "score": "the full cache's score minus the compressed cache's, prompt by prompt",
    "agreement": "the share of outputs that differ from the full cache's",
    "similarity": "1 minus the similarity",
}
_METHOD_NOTE = (
    "Every output is greedy (temperature 0). Both sides run the same prompts in the same run."
    f" Intervals are percentile bootstraps of {RESAMPLES:,} seeded draws of prompts. Prompts about"
    " the same text are drawn together."
)


def _table(title: str, columns: Sequence[Column], summaries: Sequence[Summary]) -> str:
    """Return a Markdown table with one row per cell, baselines in italics."""
    rows = []
    for summary in summaries:
        name, *figures = (column.text(summary) for column in columns)
        is_baseline = summary.baseline and not summary.cell.server
        rows.append([f"*{name}*" if is_baseline else name, *figures])
    return f"## {title}\n\n{markdown_table([column.name for column in columns], rows).rstrip()}"


def rule_columns(summaries: Sequence[Summary], *, by_rule: bool) -> list[Column]:
    """Return a column of obeyed rules for each task, and for each rule if `by_rule`."""

    def text(name: str, summary: Summary) -> str:
        found = summary.obeyed.get(name)
        return MISSING if found is None else f"{_with_interval(found, 2)}, {found.prompts}"

    found = dict.fromkeys(name for summary in summaries for name in summary.obeyed)
    names = [name for name in found if by_rule or ": " not in name]
    return [*_CELL_COLUMNS, *(Column(name, _RULES_NOTE, partial(text, name)) for name in names)]


def _task_columns(summaries: Sequence[Summary]) -> list[Column]:
    def text(task: str, summary: Summary) -> str:
        if task not in summary.tasks:
            return MISSING
        score, full_score = summary.tasks[task]
        return f"{score:.3f} ({full_score:.3f})"

    names = dict.fromkeys(name for summary in summaries for name in summary.tasks)
    return [*_CELL_COLUMNS, *(Column(name, "", partial(text, name)) for name in names)]
