"""Plot scores against budget and KL against bytes: one panel per model, one line per method."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, PercentFormatter, ScalarFormatter

from benchmarks.evidence.cache_formats import CACHE_FORMATS
from benchmarks.evidence.cells import AFTER_LOOKAHEAD, ALL, ORDINARY, Cell
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


_LINES = ("#b5342f", "#2171b5", "#d9730d", "#3f9b5f", "#7a6a53", "#6a51a3")
_MARKS = "osv^D*PXh"


def save_picture(found: Sequence[Cell], path: Path) -> None:
    """Save a PNG with a panel per model, question position and prompt length.

    Panels of scores are over all tasks; methods that are not highlighted are thin lines. Panels of
    KL over bytes are over all ordinary requests, if the results have bytes.
    """
    scored = [
        c
        for c in found
        if c.task == ALL and (c.method not in VARIANTS or c.method == WITHOUT_LOOKAHEAD)
    ]
    by_bytes = [
        c
        for c in found
        if c.task == ORDINARY and c.bytes is not None and AFTER_LOOKAHEAD in c.along
    ]
    styles = _styles(by_bytes)
    panels: list[tuple[Sequence[Cell], Callable[[Axes, Sequence[Cell]], None], str]] = [
        (scored, _panel, "share of the full cache's answers"),
        (by_bytes, partial(_bytes_panel, styles=styles), f"KL in nats, tokens {AFTER_LOOKAHEAD}"),
    ]
    shown = [
        (group, cells, draw, label)
        for cells, draw, label in panels
        for group in dict.fromkeys((c.model, c.question, c.tokens) for c in cells)
    ]
    columns = max(1, min(len(shown), _COLUMNS))
    rows = max(1, -(-len(shown) // columns))
    size = (5.2 * columns, 4.4 * rows + (0.9 if by_bytes else 0.0))
    figure = Figure(figsize=size, dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    for number, (group, cells, draw, label) in enumerate(shown, 1):
        axes = figure.add_subplot(rows, columns, number)
        of_group = [cell for cell in cells if (cell.model, cell.question, cell.tokens) == group]
        draw(axes, of_group)
        _decorate(axes, f"{group[0]}, question {group[1]}, {group[2]:,} tokens")
        if number % columns == 1 % columns:
            axes.set_ylabel(label, color=_INK)
        if number == 1 and scored:
            axes.legend(fontsize=8, frameon=False, loc="upper left")
    if by_bytes:
        lines = [Line2D([], [], label=method, **style) for method, style in styles.items()]
        figure.legend(
            handles=lines, fontsize=7.5, frameon=False, loc="outside lower center", ncols=4
        )
    figure.savefig(path, format="png")


def save_bytes_picture(found: Sequence[Cell], path: Path) -> None:
    """Save a PNG of KL over bytes with a panel per model, in one row.

    Args:
        found: cells of one task, with the same prompts for all methods of a model.
    """
    models = list(dict.fromkeys(cell.model for cell in found))
    styles = _styles(found)
    figure = Figure(
        figsize=(5.2 * max(1, len(models)), 5.0), dpi=150, facecolor="white", layout="constrained"
    )
    FigureCanvasAgg(figure)
    for number, model in enumerate(models, 1):
        axes = figure.add_subplot(1, len(models), number)
        of_model = [c for c in found if c.model == model and AFTER_LOOKAHEAD in c.along]
        _bytes_panel(axes, of_model, styles)
        _decorate(axes, model)
        if number == 1:
            axes.set_ylabel(f"KL in nats, tokens {AFTER_LOOKAHEAD}", color=_INK)
    handles = [Line2D([], [], label=method, **style) for method, style in styles.items()]
    figure.legend(handles=handles, fontsize=7.5, frameon=False, loc="outside lower center", ncols=4)
    figure.savefig(path, format="png")


def _score(cell: Cell) -> Estimate:
    assert cell.score is not None, "the cell over all tasks has only tasks with expected answers"
    return cell.score


def _panel(axes: Axes, cells: Sequence[Cell]) -> None:
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


def _styles(cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """Return the style of each method. Low-bit caches without eviction are grey points."""
    methods = list(dict.fromkeys(cell.method for cell in cells))
    colors = cycle(_LINES)
    marks = cycle(_MARKS)
    return {
        method: dict(
            color=_QUIET if method in CACHE_FORMATS else next(colors),
            linestyle="none" if method in CACHE_FORMATS else "-",
            marker=next(marks),
            markersize=5,
            linewidth=1.6,
        )
        for method in methods
    }


def _bytes_panel(
    axes: Axes, cells: Sequence[Cell], styles: Mapping[str, Mapping[str, Any]]
) -> None:
    """Draw KL over bytes."""
    for method in dict.fromkeys(cell.method for cell in cells):
        line = sorted(
            (cell.bytes, cell.along[AFTER_LOOKAHEAD].kl.mean)
            for cell in cells
            if cell.method == method and cell.bytes is not None
        )
        axes.plot([share for share, _ in line], [kl for _, kl in line], **styles[method])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([0.1, 0.2, 0.3, 0.5, 1.0])
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("bytes of the prompt, relative to 16 bits", color=_INK)


def _decorate(axes: Axes, title: str) -> None:
    axes.set_title(title, size=9, color=_INK, loc="left")
    axes.tick_params(labelsize=8, colors=_QUIET)
    axes.grid(color=_RULE, linewidth=0.5)
    for spine in axes.spines.values():
        spine.set(color=_RULE)
