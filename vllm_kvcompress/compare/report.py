"""What a comparison found, as a document: JSON, and the rows of its tables with their meaning."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm_kvcompress.compare.measures import PLACES
from vllm_kvcompress.compare.statistics import RESAMPLES, Estimate
from vllm_kvcompress.compare.summary import Along, Recommendation, Summary

NONE = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a comparison found.

    Args:
        title: what was compared.
        complete: whether every prompt was asked in every cell.
        summaries: a cell's figures each, in the order of the tables' rows.
        recommendation: the cell to run, or why there is none.
        notes: what else must be known, a sentence each.
        settings: of the run.
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
            "cells": [asdict(summary) for summary in self.summaries],
            "meaning": {
                column.name: column.meaning for table in TABLES.values() for column in table
            },
            "notes": list(self.notes),
            "settings": self.settings,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One figure of a table.

    Args:
        meaning: in a sentence.
        cell: what stands in the row of a cell.
    """

    name: str
    meaning: str
    cell: Callable[[Summary], str]


def _share(found: Estimate | None) -> str:
    return NONE if found is None else f"{found.mean:.1%}"


def _with_interval(found: Estimate | None, digits: int = 3) -> str:
    if found is None:
        return NONE
    return f"{found.mean:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def _compressed(s: Summary) -> str:
    return f"{'?' if s.compressed is None else s.compressed} of {s.asked}"


def _loss(s: Summary) -> str:
    return NONE if s.loss is None else f"{s.loss.mean:.3f} (<= {s.bound:.3f})"


def _milliseconds(full: float | None, other: float | None) -> str:
    return NONE if full is None or other is None else f"{full * 1e3:,.0f} -> {other * 1e3:,.0f}"


_ANSWERS = (
    Column(
        name="method",
        meaning="What chooses the tokens, behind `ahead` how many tokens of the answer judge it,"
        " and behind a + what is protected.",
        cell=lambda s: s.cell.name,
    ),
    Column(
        name="budget",
        meaning="Share of a prompt's tokens, or tokens per layer, that was asked for.",
        cell=lambda s: f"{s.budget:g}",
    ),
    Column(
        name="compressed",
        meaning="Prompts that were compressed, of those answered. A ? where the server does not"
        " say. Where it says, every other figure is of these prompts alone.",
        cell=_compressed,
    ),
    Column(
        name="kept",
        meaning="Share of the compressed prompts' tokens that was kept, mean of the layers.",
        cell=lambda s: NONE if s.kept is None else f"{s.kept:.1%}",
    ),
    Column(
        name="loss",
        meaning="What the recommendation goes by, and in brackets what it is at most at 95 %"
        " confidence: the bootstrap's bound, or, where that is less, the share of prompts that"
        " could lose everything and be missing from so few.",
        cell=_loss,
    ),
    Column(
        name="score",
        meaning="Share of the known answers that are named, and of the rules that are obeyed, mean"
        " of the prompts, with its 95 % interval.",
        cell=lambda s: _with_interval(s.score),
    ),
    Column(
        name="full score",
        meaning="The same with the full cache, on the same prompts.",
        cell=lambda s: NONE if s.full_score is None else f"{s.full_score.mean:.3f}",
    ),
)

_BESIDE_FULL = (
    *_ANSWERS[:2],
    Column(
        name="exact",
        meaning="Greedy answers that are the full cache's, token by token.",
        cell=lambda s: _share(s.exact),
    ),
    Column(
        name="similarity",
        meaning="1 less the edit distance of the two answers over the longer one's length, mean of"
        " the prompts, with its 95 % interval.",
        cell=lambda s: _with_interval(s.similarity),
    ),
    Column(
        name="parts at",
        meaning="Median of the tokens until an answer is another than the full cache's, of those"
        " that become another.",
        cell=lambda s: NONE if s.diverged is None else f"{s.diverged:g}",
    ),
    Column(
        name="tokens",
        meaning="Tokens that the next two are of: those that both answers share, and the one where"
        " they part, without each first, which comes from the full cache on both sides.",
        cell=lambda s: f"{s.places:,}",
    ),
    Column(
        name="top-1",
        meaning="Share of them whose most likely token is the full cache's.",
        cell=lambda s: _share(s.same_first),
    ),
    Column(
        name="KL",
        meaning="Nats per token from the full cache's distribution to the compressed one's, of the"
        " likely tokens that both tell and all others as one: a lower bound.",
        cell=lambda s: _with_interval(s.kl, 4),
    ),
)


def _in_place(place: str, figure: Callable[[Along], str]) -> Callable[[Summary], str]:
    return lambda s: figure(s.along[place]) if place in s.along else NONE


_ALONG = (
    *_ANSWERS[:2],
    Column(
        name="length",
        meaning="Length of the answers over the full cache's.",
        cell=lambda s: NONE if s.length is None else f"{s.length.mean:.2f}",
    ),
    Column(
        name="loops",
        meaning="Answers that end by saying the same words four times or more, or say the same"
        " eight words in three places, full cache -> compressed.",
        cell=lambda s: (
            NONE
            if s.loops is None or s.full_loops is None
            else f"{s.full_loops:.0%} -> {s.loops:.0%}"
        ),
    ),
    *(
        Column(
            name=place,
            meaning=f"KL and top-1 as above, of the tokens {place} of an answer alone. Few answers"
            " are the same for long, and those that are lose less.",
            cell=_in_place(place, lambda a: f"{a.kl.mean:.4f}, {a.same_first.mean:.0%}"),
        )
        for place in PLACES
    ),
)

_TIMES = (
    *_ANSWERS[:2],
    Column(
        name="first token, ms",
        meaning="Median time to first token, full cache -> compressed, in this run, at its"
        " concurrency, each prompt computed in full.",
        cell=lambda s: (
            NONE
            if s.times is None
            else _milliseconds(s.times.full_first_token_s, s.times.first_token_s)
        ),
    ),
    Column(
        name="per token, ms",
        meaning="Median time per token behind the first, full cache -> compressed, likewise. It"
        " has the time between prefill and second token in it, in which a prompt is compressed.",
        cell=lambda s: (
            NONE if s.times is None else _milliseconds(s.times.full_token_s, s.times.token_s)
        ),
    ),
)

TABLES: Mapping[str, Sequence[Column]] = {
    "Answers": _ANSWERS,
    "Beside the full cache's": _BESIDE_FULL,
    "Along the answers": _ALONG,
    "Times": _TIMES,
}
"""By title; each fits a terminal of 80 columns."""


def meanings() -> dict[str, str]:
    """What each figure means, by its name."""
    return {column.name: column.meaning for table in TABLES.values() for column in table}


def markdown(report: Report) -> str:
    """The report as a Markdown page."""
    parts = [f"# {report.title}", f"**{report.recommendation.sentence}**"]
    if report.notes:
        parts.append("\n".join(f"* {note}" for note in report.notes))
    parts += [_table(title, columns, report.summaries) for title, columns in TABLES.items()]
    if any(summary.tasks for summary in report.summaries):
        parts.append(_by_task(report.summaries))
    if any(summary.obeyed for summary in report.summaries):
        parts += [_obeyed(report.summaries), OBEYED]
    if any(summary.roles for summary in report.summaries):
        columns = role_columns(report.summaries, counts=True)
        parts += [_table("Kept by role", columns, report.summaries), ROLES]
    parts.append("## What the figures mean")
    parts.append("\n".join(f"* **{name}**: {meaning}" for name, meaning in meanings().items()))
    if any(summary.baseline for summary in report.summaries):
        parts.append(BASELINES)
    parts.append(f"{METHOD} {_loss_sentence(report.recommendation)}")
    return "\n\n".join(parts) + "\n"


OBEYED = (
    "Rules count where the full cache obeys them, and each figure is the share of those that the"
    " compressed cache obeys too, with its 95 % interval and the prompts that it is of."
)
ROLES = (
    "The share of each role's tokens that was kept, mean of all layers and KV heads, of all tokens"
    " that it has in the prompts of which the server tells it. `system` is the developer's messages"
    " as well, `tools` the schemas, and `template` whatever the chat template writes around the"
    " texts of messages, tool calls among it. `other` also holds roles that cannot be told apart."
)
BASELINES = (
    "Methods in italics stand beside the others, for what those have to beat: they choose tokens"
    " without reading the prompt, and are never recommended."
)
METHOD = (
    "Every answer is greedy (temperature 0). Both sides answer the same prompts in the same run."
    f" Intervals are percentile bootstraps of {RESAMPLES:,} seeded draws of prompts; prompts about"
    " one text are drawn together."
)


def _loss_sentence(recommendation: Recommendation) -> str:
    means = {
        "score": "the full cache's score less the compressed one's, prompt by prompt",
        "agreement": "the share of answers that are not the full cache's",
        "similarity": "1 less the similarity",
    }
    return f"The loss is {means[recommendation.by]} (`--by {recommendation.by}`)."


def _table(title: str, columns: Sequence[Column], summaries: Sequence[Summary]) -> str:
    """A row for each cell; those that stand beside are in italics."""
    lines = [
        "| " + " | ".join(column.name for column in columns) + " |",
        "|" + "---|" * len(columns),
    ]
    for summary in summaries:
        cells = [column.cell(summary) for column in columns]
        if summary.baseline:
            cells[0] = f"*{cells[0]}*"
        lines.append("| " + " | ".join(cells) + " |")
    return f"## {title}\n\n" + "\n".join(lines)


def _by_task(summaries: Sequence[Summary]) -> str:
    names = dict.fromkeys(name for summary in summaries for name in summary.tasks)
    columns = [
        Column(
            name=name,
            meaning="",
            cell=lambda s, name=name: (  # type: ignore[misc]
                f"{s.tasks[name][0]:.3f} ({s.tasks[name][1]:.3f})" if name in s.tasks else NONE
            ),
        )
        for name in names
    ]
    return _table("Score by task (full cache)", [*_ANSWERS[:2], *columns], summaries)


def obeyed_columns(summaries: Sequence[Summary], *, by_rule: bool) -> list[Column]:
    """Of each task with rules, and perhaps of each rule, what is still obeyed."""
    found = dict.fromkeys(name for summary in summaries for name in summary.obeyed)
    names = [name for name in found if by_rule or ": " not in name]
    return [
        *_ANSWERS[:2],
        *(Column(name=name, meaning=OBEYED, cell=_obeyed_of(name)) for name in names),
    ]


def _obeyed_of(name: str) -> Callable[[Summary], str]:
    def cell(summary: Summary) -> str:
        found = summary.obeyed.get(name)
        return NONE if found is None else f"{_with_interval(found, 2)}, {found.prompts}"

    return cell


def _obeyed(summaries: Sequence[Summary]) -> str:
    return _table("Rules obeyed", obeyed_columns(summaries, by_rule=True), summaries)


def role_columns(summaries: Sequence[Summary], *, counts: bool) -> list[Column]:
    """Of each role the share that was kept, and perhaps of how many tokens."""
    names = dict.fromkeys(role for summary in summaries for role in summary.roles)
    return [
        *_ANSWERS[:2],
        *(Column(name=name, meaning=ROLES, cell=_kept_of(name, counts)) for name in names),
    ]


def _kept_of(role: str, counts: bool) -> Callable[[Summary], str]:
    def cell(summary: Summary) -> str:
        if role not in summary.roles:
            return NONE
        tokens, share = summary.roles[role]
        return f"{share:.0%} of {tokens:,}" if counts else f"{share:.0%}"

    return cell
