"""Plot scores against budget and KL against bytes: one panel per model, one line per method."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, PercentFormatter, ScalarFormatter

from benchmarks.evidence.cells import AFTER_LOOKAHEAD, ALL, ORDINARY, WITHOUT_LOOKAHEAD, Cell
from vllm_kvcompress.compare.figures import (
    INK,
    LINES,
    MARKS,
    QUIET,
    RULE,
    decorate,
    new_figure,
    plot_estimates,
)
from vllm_kvcompress.planning.cache_dtypes import LOW_BIT_CACHES

_HIGHLIGHTED = {
    WITHOUT_LOOKAHEAD: ("#b5342f", "o", 2.4),
    "chunkkv": ("#2171b5", "s", 1.4),
    "cake": ("#d9730d", "^", 1.4),
    "snapkv": ("#3f9b5f", "D", 1.4),
    "streamingllm": ("#7a6a53", "v", 1.2),
    "random": ("#616e7c", "x", 1.2),
}
Style = Mapping[str, Any]
Draw = Callable[[Axes, Sequence[Cell]], None]


class _Panel(NamedTuple):
    title: str
    cells: Sequence[Cell]
    draw: Draw
    label: str


def save_picture(found: Sequence[Cell], path: Path) -> None:
    """Save a PNG with a panel per model, question position and prompt length.

    Panels of scores are over all tasks; methods that are not highlighted are thin lines. Panels of
    KL over bytes are over all ordinary requests, if the results have bytes.
    """
    by_bytes = [
        cell
        for cell in found
        if cell.task == ORDINARY and cell.bytes is not None and AFTER_LOOKAHEAD in cell.along
    ]
    styles = _styles(by_bytes)
    scored = [cell for cell in found if cell.task == ALL]
    groups: list[tuple[Sequence[Cell], Draw, str]] = [
        (scored, _score_panel, "share of the full cache's answers"),
        (by_bytes, partial(_bytes_panel, styles=styles), f"KL in nats, tokens {AFTER_LOOKAHEAD}"),
    ]
    panels = []
    for shown, draw, label in groups:
        for key in dict.fromkeys((c.model, c.question, c.tokens) for c in shown):
            title = f"{key[0]}, question {key[1]}, {key[2]:,} tokens"
            of_panel = [c for c in shown if (c.model, c.question, c.tokens) == key]
            panels.append(_Panel(title, of_panel, draw, label))

    columns, rows = max(1, min(len(panels), 2)), max(1, -(-len(panels) // 2))
    figure = new_figure(5.2 * columns, 4.4 * rows + (0.9 if styles else 0.0))
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, number)
        panel.draw(axes, panel.cells)
        decorate(axes, panel.title)
        if columns == 1 or number % columns == 1:
            axes.set_ylabel(panel.label, color=INK)
        if number == 1 and axes.get_legend_handles_labels()[0] and panel.draw is _score_panel:
            axes.legend(fontsize=8, frameon=False, loc="upper left")
    if styles:
        lines = [Line2D([], [], label=method, **style) for method, style in styles.items()]
        figure.legend(
            handles=lines, fontsize=7.5, frameon=False, loc="outside lower center", ncols=4
        )
    figure.savefig(path, format="png")


def _score_panel(axes: Axes, cells: Sequence[Cell]) -> None:
    methods = list(dict.fromkeys(cell.method for cell in cells))
    for method in sorted(methods, key=lambda name: name in _HIGHLIGHTED):
        line = sorted((c for c in cells if c.method == method), key=lambda c: c.budget)
        points = [(cell.budget, cell.score) for cell in line if cell.score is not None]
        if method not in _HIGHLIGHTED:
            x, y = [budget for budget, _ in points], [score.mean for _, score in points]
            axes.plot(x, y, color=RULE, linewidth=1.0, zorder=1)
            continue
        color, mark, width = _HIGHLIGHTED[method]
        plot_estimates(
            axes, points, label=method, color=color, marker=mark, markersize=5, linewidth=width,
            elinewidth=0.9, zorder=3,
        )  # fmt: skip
    _log_scale(axes, sorted({cell.budget for cell in cells}), "budget")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(-0.03, 1.05)


def _styles(cells: Sequence[Cell]) -> dict[str, Style]:
    """Return the style of each method. Low-bit caches without eviction are grey points."""
    colors, marks = cycle(LINES), cycle(MARKS)
    return {
        method: {
            "color": QUIET if method in LOW_BIT_CACHES else next(colors),
            "linestyle": "none" if method in LOW_BIT_CACHES else "-",
            "marker": next(marks),
            "markersize": 5,
            "linewidth": 1.6,
        }
        for method in dict.fromkeys(cell.method for cell in cells)
    }


def _bytes_panel(axes: Axes, cells: Sequence[Cell], styles: Mapping[str, Style]) -> None:
    """Draw KL over bytes."""
    for method in dict.fromkeys(cell.method for cell in cells):
        points = sorted(
            (cell.bytes, cell.along[AFTER_LOOKAHEAD].kl.mean)
            for cell in cells
            if cell.method == method and cell.bytes is not None and AFTER_LOOKAHEAD in cell.along
        )
        axes.plot([share for share, _ in points], [kl for _, kl in points], **styles[method])
    axes.set_yscale("log")
    _log_scale(axes, [0.1, 0.2, 0.3, 0.5, 1.0], "bytes of the prompt, relative to 16 bits")


def _log_scale(axes: Axes, ticks: Sequence[float], label: str) -> None:
    axes.set_xscale("log")
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label, color=INK)
