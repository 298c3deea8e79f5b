"""Plot results of `bench_pieces.py` over prompt length.

    cd benchmarks/results
    PYTHONPATH=../.. python -m benchmarks.pieces_picture pieces_qwen2_8000.json \\
        pieces_qwen2_16000_explain_first.json pieces_qwen2_30000.json --out pieces.png

One panel shows seconds to first token, the other the maximum number of blocks. Each engine with
results for two or more lengths is a line. Pass only one file per length, because the plot would
otherwise depend on the order of the files.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

_INK, _QUIET = "#1f2933", "#616e7c"
_COLORS = ("#616e7c", "#b5342f", "#2171b5", "#d9730d", "#3f9b5f")
_PANELS = (("first_token_s", "seconds to first token"), ("most_blocks", "maximum number of blocks"))


def lines_of(results: Sequence[dict[str, Any]], figure: str) -> dict[str, dict[int, float]]:
    """Return a figure by engine and prompt length in tokens.

    Raises:
        ValueError: two files have results of an engine for the same length.
    """
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for result in results:
        tokens = result["shapes"]["tokens"]
        for name, row in result["rows"].items():
            if tokens in found[name]:
                raise ValueError(
                    f"each prompt length must be in one file, got {name} twice with {tokens}"
                    " tokens: pass only one of the files"
                )
            found[name][tokens] = row[figure]
    return found


def name_of(engine: str) -> str:
    """Return the legend of an engine."""
    engine, _, max_whole = engine.partition("@")
    piece, _, probe = engine.partition(":")
    if not piece.isdigit():
        return {"off": "vLLM alone", "whole": "compressed after prefill"}[piece]
    scorer = "scored by themselves" if probe == "0" else "scored by the prompt's ends"
    limit = f" in {int(max_whole):,} tokens" if max_whole else ""
    return f"pieces of {int(piece):,}{limit}, {scorer}"


def save_picture(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Save both panels as a PNG with logarithmic axes."""
    canvas = Figure(figsize=(10.4, 4.2), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(canvas)
    lengths = sorted({result["shapes"]["tokens"] for result in results})
    for number, (figure, title) in enumerate(_PANELS, 1):
        axes = canvas.add_subplot(1, len(_PANELS), number)
        lines = lines_of(results, figure).items()
        plotted = [(engine, line) for engine, line in lines if len(line) > 1]
        for color, (engine, line) in zip(_COLORS, plotted, strict=False):
            x = sorted(line)
            axes.plot(x, [line[tokens] for tokens in x], "o-", color=color, label=name_of(engine))
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{int(tokens):,}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("prompt length in tokens", color=_INK)
        axes.set_title(title, color=_INK, fontsize=10)
        axes.tick_params(colors=_QUIET, labelsize=8)
        axes.grid(visible=True, which="major", color="#e4e7eb", linewidth=0.7)
        if number == 1:
            axes.legend(fontsize=8, frameon=False)
    canvas.savefig(path, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", nargs="+", type=Path, help="outputs of bench_pieces.py")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    save_picture([json.loads(path.read_text()) for path in args.results], args.out)


if __name__ == "__main__":
    main()
