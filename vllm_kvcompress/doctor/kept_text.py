"""Prints a prompt's kept tokens as text."""

import math
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console

from vllm_kvcompress.doctor.kept_map import KeptMap

_SHADES = " ▁▂▃▄▅▆▇█"
_BAR, _STRIP = 20, 60


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
        cells.append(_SHADES[math.ceil(min(part, 1) * 8)])
    return "".join(cells)
