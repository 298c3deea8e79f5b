"""Values that cross layers. Frozen; no behaviour beyond arithmetic on their own fields."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What an allocator may know of one prompt. Lengths are tokens per KV head.

    Args:
        num_layers: layers that share the budget, N.
        tokens: prompt length S.
        window: observation window w: the last tokens, always kept.
        budget: mean tokens to keep per layer, B; the window is included.
    """

    num_layers: int
    tokens: int
    window: int
    budget: int

    @property
    def past(self) -> int:
        """Evictable tokens, ``S - w``."""
        return max(self.tokens - self.window, 0)

    @property
    def base(self) -> int:
        """Mean past tokens to keep per layer, ``B - w``."""
        return self.budget - self.window


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStats:
    """What CAKE's allocator knows of one layer's attention in the window.

    Args:
        entropy: ``H = -sum A log A`` over heads, rows and past columns.
        shift: ``V = sum Var_i A`` over heads and past columns, ddof 1.
    """

    entropy: float
    shift: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowColumns:
    """Attention of the window's rows to each past token, reduced over the rows.

    Args:
        num_kv_heads: KV heads of the layer.
        past: past tokens, P.
        device: where scores are made.
        rows: rows of the window, w; 0 when attention was not read.
        total: ``[Hq, P]`` float32, summed over rows; None when attention was not read.
        variance: ``[Hq, P]`` float32, over rows, ddof 1; None unless it was asked for.
    """

    num_kv_heads: int
    past: int
    device: torch.device
    rows: int = 0
    total: torch.Tensor | None = None
    variance: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePlan:
    """How many pages and blocks a compressed prompt keeps: lengths alone decide it.

    A page is one layer's share of a block. The tail, the tokens after the last full block, stays
    where it is.

    Args:
        num_layers: layers L.
        tokens: prompt length S.
        block_size: tokens in a block.
        window: observation window w.
        budget: mean tokens per layer B, window included.
        pages: pages kept over all layers, P.
    """

    num_layers: int
    tokens: int
    block_size: int
    window: int
    budget: int
    pages: int

    @property
    def prompt(self) -> Prompt:
        return Prompt(
            num_layers=self.num_layers,
            tokens=self.tokens,
            window=self.window,
            budget=self.budget,
        )

    @property
    def full_blocks(self) -> int:
        """Full blocks of the prompt, F."""
        return self.tokens // self.block_size

    @property
    def tail(self) -> int:
        """Tokens after the last full block."""
        return self.tokens % self.block_size

    @property
    def floor_pages(self) -> int:
        """Pages that every layer needs for the part of the window before the tail, m."""
        return -(-max(self.window - self.tail, 0) // self.block_size)

    @property
    def blocks(self) -> int:
        """vLLM blocks that hold the pages, K."""
        return -(-self.pages // self.num_layers)


def page_plan(prompt: Prompt, block_size: int) -> PagePlan | None:
    """The plan for a prompt, or None when nothing would be removed.

    ``P = floor(L * (B - t) / block_size)``, at least the window's pages and at most all pages.
    """
    layers, full, tail = prompt.num_layers, prompt.tokens // block_size, prompt.tokens % block_size
    if prompt.tokens <= prompt.budget or full == 0:
        return None
    floor = -(-max(prompt.window - tail, 0) // block_size)
    pages = layers * (prompt.budget - tail) // block_size
    pages = min(max(pages, layers * floor), layers * full)
    if pages == layers * full:
        return None
    return PagePlan(
        num_layers=layers,
        tokens=prompt.tokens,
        block_size=block_size,
        window=prompt.window,
        budget=prompt.budget,
        pages=pages,
    )
