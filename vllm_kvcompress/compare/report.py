"""Report of a comparison: its JSON form, its Markdown page, and the columns of its tables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from vllm_kvcompress.compare.measures import POSITION_RANGES
from vllm_kvcompress.compare.statistics import RESAMPLES, Estimate
from vllm_kvcompress.compare.summary import PositionStats, Recommendation, Summary
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
        recommendation = asdict(self.recommendation)
        return {
            "title": self.title,
            "complete": self.complete,
            "recommendation": recommendation,
            "cells": [summary.to_json() for summary in self.summaries],
            "meaning": meanings(),
            "notes": list(self.notes),
            "settings": self.settings,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table.

    Args:
        name: heading. Also a key of "meaning" in ``report.json``.
        meaning: one or more sentences for the report.
        text: returns the text for the row of a cell.
    """

    name: str
    meaning: str
    text: Callable[[Summary], str]


def _share(found: Estimate | None) -> str:
    return MISSING if found is None else f"{found.mean:.1%}"


def _with_interval(found: Estimate | None, digits: int = 3) -> str:
    if found is None:
        return MISSING
    return f"{found.mean:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def _compressed(s: Summary) -> str:
    unknown = MISSING if s.cell.server else "?"
    return f"{unknown if s.compressed is None else s.compressed} of {s.asked}"


def _loss(s: Summary) -> str:
    return MISSING if s.loss is None else f"{s.loss.mean:.3f} (<= {s.bound:.3f})"


def _milliseconds(full: float | None, compressed: float | None) -> str:
    if full is None or compressed is None:
        return MISSING
    return f"{full * 1e3:,.0f} -> {compressed * 1e3:,.0f}"


_SCORE_COLUMNS = (
    Column(
        name="method",
        meaning="The compression method and the format of kept tokens, if the budgets name formats."
        " `ahead` gives the output tokens whose attention scores the prompt, and `+` the protected"
        " parts of the chat.",
        text=lambda s: s.cell.name,
    ),
    Column(
        name="budget",
        meaning="The requested budget: a share of the prompt's tokens, or tokens per layer.",
        text=lambda s: f"{s.cell.budget:g}",
    ),
    Column(
        name="compressed",
        meaning="Compressed prompts, of all prompts with an output. `?` if the server does not"
        " report it. If it does, every other figure covers the compressed prompts only. Other"
        " servers show `-`; their figures cover all prompts.",
        text=_compressed,
    ),
    Column(
        name="kept",
        meaning="Share of the compressed prompts' tokens that was kept, mean over layers.",
        text=lambda s: MISSING if s.kept is None else f"{s.kept:.1%}",
    ),
    Column(
        name="bytes",
        meaning="Bytes of the compressed prompts' KV cache, relative to an uncompressed cache in"
        " the model's dtype, whole blocks and scales included. For another server, those of its"
        " cache's dtype: an estimate, because scales depend on the model's shapes.",
        text=lambda s: MISSING if s.bytes is None else f"{s.bytes:.0%}",
    ),
    Column(
        name="loss",
        meaning="The loss that the recommendation uses, with its upper bound at 95 % confidence in"
        " brackets. The bound is the bootstrap's, or the largest share of prompts that a sample of"
        " this size may miss, whichever is larger.",
        text=_loss,
    ),
    Column(
        name="score",
        meaning="Share of the known answers that the output contains and of the rules that it"
        " obeys, mean over prompts, with its 95 % interval.",
        text=lambda s: _with_interval(s.score),
    ),
    Column(
        name="full score",
        meaning="The score of the full cache on the same prompts.",
        text=lambda s: MISSING if s.full_score is None else f"{s.full_score.mean:.3f}",
    ),
)
_CELL_COLUMNS = _SCORE_COLUMNS[:2]

_AGREEMENT_COLUMNS = (
    *_CELL_COLUMNS,
    Column(
        name="exact",
        meaning="Share of greedy outputs that equal the full cache's, token by token.",
        text=lambda s: _share(s.exact),
    ),
    Column(
        name="similarity",
        meaning="1 minus the edit distance of the two outputs divided by the longer one's length,"
        " mean over prompts, with its 95 % interval.",
        text=lambda s: _with_interval(s.similarity),
    ),
    Column(
        name="parts at",
        meaning="Median number of output tokens before the first difference from the full cache's"
        " output, over outputs that differ.",
        text=lambda s: MISSING if s.diverged is None else f"{s.diverged:g}",
    ),
    Column(
        name="tokens",
        meaning="Output tokens that top-1 and KL cover: the common start of the two outputs and"
        " the first different token. The first output token is left out, because it comes from the"
        " full cache on both sides.",
        text=lambda s: f"{s.places:,}",
    ),
    Column(
        name="top-1",
        meaning="Share of these tokens at which both sides have the same most likely token.",
        text=lambda s: _share(s.same_first),
    ),
    Column(
        name="KL",
        meaning="KL divergence from the full cache's to the compressed cache's distribution, in"
        " nats per token. A lower bound: it uses the top tokens that both sides report, and counts"
        " all other tokens as one.",
        text=lambda s: _with_interval(s.kl, 4),
    ),
)


def _at_position(position: str, text: Callable[[PositionStats], str]) -> Callable[[Summary], str]:
    return lambda s: text(s.along[position]) if position in s.along else MISSING


_POSITION_COLUMNS = (
    *_CELL_COLUMNS,
    Column(
        name="length",
        meaning="Length of the outputs divided by the full cache's.",
        text=lambda s: MISSING if s.length is None else f"{s.length.mean:.2f}",
    ),
    Column(
        name="loops",
        meaning="Share of outputs that end with the same words four times or more in a row, or"
        " repeat a passage of eight words three times. Full cache -> compressed.",
        text=lambda s: (
            MISSING
            if s.loops is None or s.full_loops is None
            else f"{s.full_loops:.0%} -> {s.loops:.0%}"
        ),
    ),
    *(
        Column(
            name=position,
            meaning=f"KL and top-1 as above, for output tokens {position} only. Late positions"
            " cover few outputs: those that still equal the full cache's, which lose less.",
            text=_at_position(position, lambda a: f"{a.kl.mean:.4f}, {a.same_first.mean:.0%}"),
        )
        for position in POSITION_RANGES
    ),
)

_TIME_COLUMNS = (
    *_CELL_COLUMNS,
    Column(
        name="first token, ms",
        meaning="Median time to first token, full cache -> compressed. Measured in this run at its"
        " concurrency, without prefix-cache hits.",
        text=lambda s: (
            MISSING
            if s.times is None
            else _milliseconds(s.times.full_first_token_s, s.times.first_token_s)
        ),
    ),
    Column(
        name="per token, ms",
        meaning="Median time per output token after the first, full cache -> compressed. Measured"
        " in this run at its concurrency. Includes the time to compress the prompt, between"
        " prefill and the second token.",
        text=lambda s: (
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
    parts.append(f"{_METHOD_NOTE} {_loss_sentence(report.recommendation)}")
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
_METHOD_NOTE = (
    "Every output is greedy (temperature 0). Both sides run the same prompts in the same run."
    f" Intervals are percentile bootstraps of {RESAMPLES:,} seeded draws of prompts. Prompts about"
    " the same text are drawn together."
)


def _loss_sentence(recommendation: Recommendation) -> str:
    definitions = {
        "score": "the full cache's score minus the compressed cache's, prompt by prompt",
        "agreement": "the share of outputs that differ from the full cache's",
        "similarity": "1 minus the similarity",
    }
    return f"The loss is {definitions[recommendation.by]} (`--by {recommendation.by}`)."


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
    return _columns_by_name(names, _RULES_NOTE, text)


def _task_columns(summaries: Sequence[Summary]) -> list[Column]:
    def text(task: str, summary: Summary) -> str:
        if task not in summary.tasks:
            return MISSING
        score, full_score = summary.tasks[task]
        return f"{score:.3f} ({full_score:.3f})"

    names = dict.fromkeys(name for summary in summaries for name in summary.tasks)
    return _columns_by_name(names, "", text)


def _columns_by_name(
    names: Iterable[str], meaning: str, text: Callable[[str, Summary], str]
) -> list[Column]:
    """Return the columns of the cell, and one for each name; `text` gets its name."""
    columns = (Column(name=name, meaning=meaning, text=partial(text, name)) for name in names)
    return [*_CELL_COLUMNS, *columns]
