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
    if not any(points for _, points in _lines(report)):
        return "no result has both a quality and a share of kept tokens; see --kv-usage."
    return None


def draw(report: Report) -> bytes:
    """Return a PNG with one line per method, 95 % intervals, and the full cache as a dashed line.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.ticker import PercentFormatter

    by = report.recommendation.by
    figure = new_figure(8.0, 5.0)
    axes = figure.add_subplot()
    for number, (summary, points) in enumerate(_lines(report)):
        style = (
            {"color": QUIET, "markersize": 3, "linewidth": 0.8, "linestyle": ":", "zorder": 1.5}
            if summary.baseline
            else {"color": LINES[number % len(LINES)], "markersize": 5, "linewidth": 1.4}
        )
        style |= {"label": summary.cell.name, "marker": MARKS[number % len(MARKS)]}
        if points:
            plot_estimates(axes, points, **style)
    axes.axhline(
        _full_quality(report.summaries, by), color=INK, linewidth=0.9, linestyle=(0, (4, 3)),
        label="full cache",
    )  # fmt: skip
    axes.set_xlabel(
        "bytes of the prompt's KV cache, relative to an uncompressed one"
        if _has_bytes(report)
        else "share of prompt tokens kept"
    )
    axes.set_ylabel(_AXES[by])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    decorate(axes, report.title)
    axes.legend(fontsize=8, frameon=False)
    png = BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def _has_bytes(report: Report) -> bool:
    """Return whether every cell with results also has bytes."""
    return all(summary.bytes is not None for summary in report.summaries if summary.exact)


def _lines(report: Report) -> list[tuple[Summary, list[tuple[float, Estimate]]]]:
    """Return the points of each cell name, baselines last, with one of its summaries.

    A point is a pair of size and quality. The size is the share of the bytes, or else of the kept
    tokens. If the server does not report the share, a ratio budget stands for it.
    """
    by_bytes = _has_bytes(report)
    lines: dict[str, tuple[Summary, list[tuple[float, Estimate]]]] = {}
    for summary in sorted(report.summaries, key=lambda s: s.baseline):
        _, points = lines.setdefault(summary.cell.name, (summary, []))
        quality = {
            "score": summary.score,
            "agreement": summary.exact,
            "similarity": summary.similarity,
        }[report.recommendation.by]
        size, budget = summary.bytes if by_bytes else summary.kept, summary.cell.budget
        if size is None and isinstance(budget, float) and summary.compressed is None:
            size = budget
        if quality is not None and size is not None:
            points.append((size, quality))
            points.sort(key=lambda point: point[0])
    return list(lines.values())


def _full_quality(summaries: Sequence[Summary], by: Measure) -> float:
    scores = [s.full_score.mean for s in summaries if s.full_score is not None]
    return sum(scores) / len(scores) if by == "score" and scores else 1.0
