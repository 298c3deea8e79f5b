"""The style of our charts. Needs matplotlib."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vllm_kvcompress.compare.statistics import Estimate

INK, QUIET, RULE = "#1f2933", "#616e7c", "#cbd2d9"
LINES = ("#2171b5", "#d9730d", "#3f9b5f", "#8a5bb5", "#b5342f", "#7a6a53", "#c0579a", "#5f6b76")
MARKS = "osD^vPX*ph"


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure with a size in inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = (width, height)
    figure = Figure(figsize=size, dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def decorate(axes: "Axes", title: str) -> None:
    """Set the title, the colours, and a grid."""
    axes.set_title(title, size=10, color=INK, loc="left", parse_math=False)
    axes.tick_params(labelsize=8, colors=QUIET)
    axes.grid(color=RULE, linewidth=0.5)
    for spine in axes.spines.values():
        spine.set(color=RULE)


def plot_estimates(axes: "Axes", points: "list[tuple[float, Estimate]]", **style: Any) -> None:
    """Draw a line through estimates, with their intervals."""
    errors = [
        [max(found.mean - found.low, 0.0) for _, found in points],
        [max(found.high - found.mean, 0.0) for _, found in points],
    ]
    x, y = [at for at, _ in points], [found.mean for _, found in points]
    axes.errorbar(x, y, yerr=errors, capsize=3, **style)
