"""The kept tokens of one prompt, by layer and range of positions: as data, text and picture."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.settings.packed_dtype import AUTO

_BARS = " ▁▂▃▄▅▆▇█"
_BAR, _STRIP = 20, 60
_INK, _QUIET, _RULE = "#1f2933", "#616e7c", "#cbd2d9"
_SHADES = ("#f5f7fa", "#c6dbef", "#6baed6", "#2171b5", "#08306b")
_WIDTH_IN, _ROW_IN, _MIN_ROWS_IN, _MARGINS_IN = 11.0, 0.13, 1.6, 2.1


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptMap:
    """Kept tokens of one compressed prompt.

    Args:
        model: name or folder of the model.
        method: compression method.
        budget: the configured budget, a ratio or tokens per layer.
        packed_dtype: format of kept tokens.
        prompt_tokens: length of the prompt.
        kv_heads: KV heads of a layer, over all ranks.
        kept_tokens: kept tokens of each layer, as the mean over ranks.
        share: ``[L][buckets]``, the kept share of all pairs of a KV head and a position in the
            bucket. Bucket b holds the positions ``p`` with ``p * buckets // prompt_tokens == b``.
        numbers: model-wide indices of the layers; empty if all layers are compressed.
        parts: for a chat, by role (also the tools and the template), the number of tokens and their
            kept share over all layers and KV heads.
    """

    model: str
    method: str
    budget: float | int
    packed_dtype: str
    prompt_tokens: int
    kv_heads: int
    kept_tokens: Sequence[float]
    share: Sequence[Sequence[float]]
    numbers: Sequence[int] = ()
    parts: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def names(self) -> Sequence[int]:
        """Model-wide index of each layer."""
        return self.numbers or range(self.layers)

    @property
    def layers(self) -> int:
        return len(self.kept_tokens)

    @property
    def mean(self) -> float:
        """Kept tokens, as the mean over layers."""
        return sum(self.kept_tokens) / self.layers

    @property
    def title(self) -> str:
        """The model, method and budget, and the format of kept tokens if it is not the cache's."""
        name = self.model.rstrip("/").rsplit("/", 1)[-1]
        title = f"{name}, {self.method}, budget {self.budget}"
        return title if self.packed_dtype == AUTO else f"{title}, {self.packed_dtype}"

    @property
    def summary(self) -> str:
        """Return the number of kept tokens, in one line."""
        part = self.mean / self.prompt_tokens
        return (
            f"{self.prompt_tokens:,} prompt tokens; a layer keeps {self.mean:,.0f} on average"
            f" ({part:.1%}), from {min(self.kept_tokens):,.0f} to {max(self.kept_tokens):,.0f}"
        )

    @property
    def by_part(self) -> str:
        """The kept share of each part, in one line; empty if the prompt is not a chat."""
        shares = (f"{name} {share:.0%} of {n:,}" for name, (n, share) in self.parts.items())
        return f"kept by part: {', '.join(shares)} tokens" if self.parts else ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, payload: dict[str, Any]) -> "KeptMap":
        return cls(**payload)


# -- text -----------------------------------------------------------------------------------------


def show_kept(kept_map: KeptMap, console: Console) -> None:
    """Print a line per layer: a bar for the number of kept tokens, a strip for their positions."""
    console.print(kept_map.title, style="bold", highlight=False)
    console.print(kept_map.summary, highlight=False)
    if kept_map.parts:
        console.print(kept_map.by_part, highlight=False)
    width = max(len(f"{tokens:,.0f}") for tokens in kept_map.kept_tokens)
    end = f"{kept_map.prompt_tokens:,}"
    head = "kept".rjust(width)
    console.print(
        f"layer  {head} {'':{_BAR}}  where in the prompt: 0 {end:>{_STRIP - 23}}", highlight=False
    )
    largest = max(kept_map.kept_tokens)
    rows = zip(kept_map.names, kept_map.kept_tokens, kept_map.share, strict=True)
    for layer, tokens, share in rows:
        bar = "█" * max(round(_BAR * tokens / largest), 1)
        line = f"{layer:5d}  {tokens:{width},.0f} {bar:{_BAR}}  {strip(share)}"
        console.print(line, highlight=False, soft_wrap=True)
    console.print(
        "Height of a strip: the share of KV heads that keep the tokens there; full is all of them.",
        highlight=False,
    )


def strip(share: Sequence[float], width: int = _STRIP) -> str:
    """Return one layer's shares as a line of at most `width` characters."""
    width = min(width, len(share))
    edges = [column * len(share) // width for column in range(width + 1)]
    cells = []
    for start, stop in pairwise(edges):
        part = sum(share[start:stop]) / (stop - start)
        # Round up, so that a range with any kept token is visible.
        cells.append(_BARS[math.ceil(min(part, 1) * 8)])
    return "".join(cells)


# -- picture --------------------------------------------------------------------------------------


def require_matplotlib() -> None:
    """Check that matplotlib is installed.

    Raises:
        ConfigError: it is not; the message says what to install.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "a picture needs matplotlib; run pip install matplotlib, or pip install '.[pictures]'"
            " in the plugin's source folder, or leave --picture out for the text alone"
        )


def save_picture(kept_map: KeptMap, path: Path) -> None:
    """Draw `kept_map` to a PNG file.

    The left panel shows the share of KV heads that keep each range of positions. The right panel
    shows the kept tokens of each layer.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    rows = max(_MIN_ROWS_IN, _ROW_IN * kept_map.layers)
    height = rows + _MARGINS_IN
    figure = Figure(figsize=(_WIDTH_IN, height), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    bottom, left, where, gap, bars = 0.62 / height, 0.062, 0.65, 0.034, 0.228
    heat = figure.add_axes((left, bottom, where, rows / height))
    kept = figure.add_axes((left + where + gap, bottom, bars, rows / height), sharey=heat)

    shades = LinearSegmentedColormap.from_list("kept", _SHADES)
    image = heat.imshow(
        kept_map.share,
        aspect="auto",
        interpolation="nearest",
        cmap=shades,
        vmin=0,
        vmax=1,
        extent=(0, kept_map.prompt_tokens, kept_map.layers - 0.5, -0.5),
    )
    heat.set_xlabel("position in the prompt (tokens)")
    heat.set_ylabel("layer")
    marks = range(0, kept_map.layers, -(-kept_map.layers // max(round(rows / 0.3), 1)))
    heat.set_yticks(marks, [str(kept_map.names[mark]) for mark in marks])
    kept.barh(range(kept_map.layers), kept_map.kept_tokens, height=0.78, color=_SHADES[3])
    kept.axvline(kept_map.mean, color=_INK, linewidth=0.9, linestyle=(0, (3, 2)))
    kept.set_xlim(0, max(kept_map.kept_tokens) * 1.12)
    kept.set_xlabel("tokens kept (per KV head)")
    kept.tick_params(axis="y", left=False, labelleft=False)
    for axes in (heat, kept):
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        _style(axes, framed=axes is heat)
    kept.xaxis.set_major_locator(MaxNLocator(nbins=4))

    _add_heading(figure, kept_map, image, left)
    kept.annotate(
        f"mean {kept_map.mean:,.0f}", xy=(kept_map.mean, 1), xycoords=("data", "axes fraction"),
        xytext=(0, 4), textcoords="offset points", ha="center", size=8, color=_INK,
    )  # fmt: skip
    try:
        figure.savefig(path, format="png")
    except OSError as e:
        raise ConfigError(f"--picture {path} cannot be written ({e})") from None


def _style(axes: Any, *, framed: bool) -> None:
    """Set colours and sizes; draw all spines if `framed`, else only the bottom one."""
    axes.tick_params(labelsize=8, colors=_QUIET, length=3)
    axes.xaxis.label.set(size=9, color=_INK)
    axes.yaxis.label.set(size=9, color=_INK)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom" or framed)
        spine.set(color=_RULE, linewidth=0.8)


def _add_heading(figure: Any, kept_map: KeptMap, image: Any, left: float) -> None:
    """Add the title, the summary and the colour scale above the axes.

    Args:
        figure: the figure.
        kept_map: the data.
        image: the heat map to which the colour scale belongs.
        left: left edge of the text, as a share of the figure's width.
    """
    height: float = figure.get_figheight()

    def inches_from_top(inches: float) -> float:
        return 1 - inches / height

    figure.text(
        left, inches_from_top(0.36), f"Kept tokens: {kept_map.title}", size=13, weight="bold",
        color=_INK,
    )  # fmt: skip
    summary = "; ".join(filter(None, (kept_map.summary, kept_map.by_part)))
    figure.text(left, inches_from_top(0.62), summary, size=9.5, color=_QUIET)
    scale = figure.add_axes((left, inches_from_top(1.04), 0.16, 0.1 / height))
    bar = figure.colorbar(image, cax=scale, orientation="horizontal", ticks=[0, 0.5, 1])
    bar.ax.set_xticklabels(["0 %", "50 %", "100 %"])
    bar.ax.tick_params(labelsize=7.5, colors=_QUIET, length=2)
    bar.outline.set(edgecolor=_RULE, linewidth=0.8)
    figure.text(
        left + 0.175, inches_from_top(1.03), f"of a layer's {kept_map.kv_heads} KV heads keep it",
        size=8.5, color=_QUIET,
    )  # fmt: skip
