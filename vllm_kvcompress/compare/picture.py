"""Chart of output quality against the share of tokens kept. Needs matplotlib."""

from collections.abc import Sequence
from io import BytesIO

from vllm_kvcompress.compare.figures import (
    INK,
    LINES,
    MARKS,
    QUIET,
    decorate,
    new_figure,
    plot_estimates,
)
from vllm_kvcompress.compare.report import Report
from vllm_kvcompress.compare.statistics import Estimate
from vllm_kvcompress.compare.summary import SCORES_NOTHING, Measure, Summary, scores_nothing

_AXES = {
    "score": "score: share of expected answers and rules",
    "agreement": "share of outputs equal to the full cache's",
    "similarity": "similarity to the full cache's outputs",
}


def why_empty(report: Report) -> str | None:
    """Return why a picture of the report would have nothing to show, or None."""
    by = report.recommendation.by
    if scores_nothing(report.summaries, by):
        return SCORES_NOTHING
    if not any(summary.asked for summary in report.summaries):
        return "the server completed no prompt."
    by_bytes = _has_bytes(report.summaries)
    if not any(_points([summary], by, by_bytes=by_bytes) for summary in report.summaries):
        return "no result has both a quality and a share of kept tokens; see --kv-usage."
    return None


def draw(report: Report) -> bytes:
    """Return a PNG with one line per method, 95 % intervals, and the full cache as a dashed line.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.ticker import PercentFormatter

    by, by_bytes = report.recommendation.by, _has_bytes(report.summaries)
    figure = new_figure(8.0, 5.0)
    axes = figure.add_subplot()
    for number, (method, summaries) in enumerate(_by_method(report.summaries).items()):
        points = _points(summaries, by, by_bytes=by_bytes)
        if not points:
            continue
        style = (
            {"color": QUIET, "markersize": 3, "linewidth": 0.8, "linestyle": ":", "zorder": 1.5}
            if summaries[0].baseline
            else {"color": LINES[number % len(LINES)], "markersize": 5, "linewidth": 1.4}
        )
        plot_estimates(axes, points, label=method, marker=MARKS[number % len(MARKS)], **style)
    axes.axhline(
        _full_quality(report.summaries, by), color=INK, linewidth=0.9, linestyle=(0, (4, 3)),
        label="full cache",
    )  # fmt: skip
    axes.set_xlabel(
        "bytes of the prompt's KV cache, relative to an uncompressed one"
        if by_bytes
        else "share of prompt tokens kept"
    )
    axes.set_ylabel(_AXES[by])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    decorate(axes, report.title)
    axes.legend(fontsize=8, frameon=False)
    png = BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def _by_method(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """Return the summaries by cell name, baselines last."""
    found: dict[str, list[Summary]] = {}
    for summary in sorted(summaries, key=lambda s: s.baseline):
        found.setdefault(summary.cell.name, []).append(summary)
    return found


def _has_bytes(summaries: Sequence[Summary]) -> bool:
    """Return whether every cell with results also has bytes."""
    return all(summary.bytes is not None for summary in summaries if summary.exact is not None)


def _points(
    summaries: Sequence[Summary], by: Measure, *, by_bytes: bool
) -> list[tuple[float, Estimate]]:
    """Return pairs of size and quality, sorted by size: share of the bytes, or of kept tokens.

    Uses a ratio budget as the kept share if the server does not report the share.
    """
    found = []
    for summary in summaries:
        quality = {
            "score": summary.score,
            "agreement": summary.exact,
            "similarity": summary.similarity,
        }[by]
        kept = summary.bytes if by_bytes else summary.kept
        budget = summary.cell.budget
        if kept is None and isinstance(budget, float) and summary.compressed is None:
            kept = budget
        if quality is not None and kept is not None:
            found.append((kept, quality))
    return sorted(found, key=lambda point: point[0])


def _full_quality(summaries: Sequence[Summary], by: Measure) -> float:
    scores = [s.full_score.mean for s in summaries if s.full_score is not None]
    return sum(scores) / len(scores) if by == "score" and scores else 1.0
