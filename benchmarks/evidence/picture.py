"""Plot quality against budget: one panel per model, one line per method."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter, ScalarFormatter

from benchmarks.evidence.cells import ALL, Cell
from benchmarks.evidence.variants import VARIANTS, WITHOUT_LOOKAHEAD
from vllm_kvcompress.compare.statistics import Estimate

_COLUMNS = 2
_INK, _QUIET, _RULE = "#1f2933", "#616e7c", "#cbd2d9"
_HIGHLIGHTED = {
    WITHOUT_LOOKAHEAD: ("#b5342f", "o", 2.4),
    "chunkkv": ("#2171b5", "s", 1.4),
    "cake": ("#d9730d", "^", 1.4),
    "snapkv": ("#3f9b5f", "D", 1.4),
    "streamingllm": ("#7a6a53", "v", 1.2),
    "random": ("#616e7c", "x", 1.2),
}


def save_picture(found: Sequence[Cell], path: Path) -> None:
    """Save a PNG of the scores over all tasks; methods that are not highlighted are thin lines."""
    shown = [
        c
        for c in found
        if c.task == ALL and (c.method not in VARIANTS or c.method == WITHOUT_LOOKAHEAD)
    ]
    groups = list(dict.fromkeys((c.model, c.question, c.tokens) for c in shown))
    columns = max(1, min(len(groups), _COLUMNS))
    rows = max(1, -(-len(groups) // columns))
    size = (5.2 * columns, 4.4 * rows)
    figure = Figure(figsize=size, dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    for number, group in enumerate(groups, 1):
        axes = figure.add_subplot(rows, columns, number)
        cells = [cell for cell in shown if (cell.model, cell.question, cell.tokens) == group]
        _panel(axes, cells, f"{group[0]}, question {group[1]}, {group[2]:,} tokens")
        if number % columns == 1 % columns:
            axes.set_ylabel("share of the full cache's answers", color=_INK)
        if number == 1:
            axes.legend(fontsize=8, frameon=False, loc="upper left")
    figure.savefig(path, format="png")


def _score(cell: Cell) -> Estimate:
    assert cell.score is not None, "the cell over all tasks has only tasks with expected answers"
    return cell.score


def _panel(axes: Axes, cells: Sequence[Cell], title: str) -> None:
    methods = list(dict.fromkeys(cell.method for cell in cells))
    for method in sorted(methods, key=lambda name: name in _HIGHLIGHTED):
        line = sorted((c for c in cells if c.method == method), key=lambda c: c.budget)
        x, y = [c.budget for c in line], [_score(c).mean for c in line]
        if method not in _HIGHLIGHTED:
            axes.plot(x, y, color=_RULE, linewidth=1.0, zorder=1)
            continue
        color, mark, width = _HIGHLIGHTED[method]
        errors = [
            [max(_score(c).mean - _score(c).low, 0.0) for c in line],
            [max(_score(c).high - _score(c).mean, 0.0) for c in line],
        ]
        axes.errorbar(
            x, y, yerr=errors, label=method, color=color, marker=mark, markersize=5,
            linewidth=width, capsize=2.5, elinewidth=0.9, zorder=3,
        )  # fmt: skip
    budgets = sorted({cell.budget for cell in cells})
    axes.set_xscale("log")
    axes.set_xticks(budgets)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(-0.03, 1.05)
    axes.set_xlabel("budget", color=_INK)
    axes.set_title(title, size=9, color=_INK, loc="left")
    axes.tick_params(labelsize=8, colors=_QUIET)
    axes.grid(color=_RULE, linewidth=0.5)
    for spine in axes.spines.values():
        spine.set(color=_RULE)
