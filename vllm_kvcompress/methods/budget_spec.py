"""What a method is shown of a prompt, or of what a request holds."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSpec:
    """What an allocator may know of one prompt. Lengths are tokens per KV head.

    Args:
        num_layers: layers that share the budget, N.
        tokens: prompt length S.
        window: observation window w: the last tokens, always kept.
        budget: mean tokens to keep per layer, B; the window is included.
        total: tokens to keep over all layers; None stands for ``num_layers * budget``.
        protected: tokens before the window that are kept in any case, as it is; in the budget too.
    """

    num_layers: int
    tokens: int
    window: int
    budget: int
    total: int | None = None
    protected: int = 0

    @property
    def always_kept(self) -> int:
        """Tokens of each layer that are kept in any case, w and those that are protected."""
        return self.window + self.protected

    @property
    def past(self) -> int:
        """Evictable tokens, ``S - w`` where none is protected."""
        return max(self.tokens - self.always_kept, 0)

    @property
    def base(self) -> int:
        """Mean past tokens to keep per layer, ``B - w`` where none is protected."""
        return self.budget - self.always_kept

    @property
    def kept(self) -> int:
        """Tokens to keep over all layers, what stands in any case included."""
        return self.num_layers * self.budget if self.total is None else self.total

    @property
    def past_total(self) -> int:
        """Past tokens to keep over all layers, at most all of them."""
        if self.total is None:
            return self.num_layers * min(self.base, self.past)
        return min(self.total - self.num_layers * self.always_kept, self.num_layers * self.past)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStats:
    """What an allocator that reads attention knows of the N layers, on their device.

    Args:
        entropy: ``[N]``, ``H = -sum A log A`` over heads, window rows and past columns (CAKE).
        shift: ``[N]``, ``V = sum Var_i A`` over heads and past columns, ddof 1 (CAKE).
        column_variance: ``[N, Hq]``, the variance over positions of the column sums of the whole
            causal attention, or of their means, ddof 1 (D2O).
        scores: ``[N, Hkv, P]`` float32 scores of the past tokens (DynamicKV, global).
    """

    entropy: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    column_variance: torch.Tensor | None = None
    scores: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKeys:
    """A prompt's keys where they lie.

    Args:
        key_pages: ``[N, Hkv, D, block_size]``, rotated.
        pages: ``[ceil(tokens / block_size)]`` int64, the prompt's pages in order.
        tokens: prompt length S.
    """

    key_pages: torch.Tensor
    pages: torch.Tensor
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedValues:
    """A prompt's values where they lie.

    Args:
        value_pages: ``[N, Hkv, block_size, D]``.
        pages: ``[ceil(tokens / block_size)]`` int64, the prompt's pages in order. Several layers
            have ``[layers, ceil(tokens / block_size)]``, and `AttentionStats.lengths` limits each.
        tokens: prompt length S, or the longest layer's.
        scale: factor on the cached values of one layer; of several, which are not compared, 1.
    """

    value_pages: torch.Tensor
    pages: torch.Tensor
    tokens: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStats:
    """What a scorer may know of one layer's attention, reduced to one figure per key.

    Several layers come as one with as many heads, a layer's heads side by side. Where they differ
    in length, S is the longest one's. What a shorter one has no column for is 0 then, the window's
    own columns of `maximum` are the last w all the same, and `last` has every column in its slot.

    Args:
        num_kv_heads: KV heads of the layer, or of all of them.
        past: past tokens, P.
        device: where scores are made.
        layer: index of the layer; of several, the first one's.
        layers: how many there are.
        lengths: ``[layers]`` int32, tokens of each layer; None where all have S.
        rows: rows of the window that all but `maximum` is of; 0 when attention was not read. For a
            scorer that reads them apart (`Reads.APART`), `maximum` is of the rows before them.
        total: ``[Hq, P]`` float32, the window's attention to the past summed over its rows; None
            when attention was not read.
        variance: ``[Hq, P]`` float32, over rows, ddof 1; None unless it was asked for.
        recent: ``[Hq, w]`` float32, the window's attention to itself summed over its rows.
        last: ``[Hq, S]`` float32, attention of the last row to every key.
        maximum: ``[Hq, S]`` float32, the most that a row of the window attends to every key, of the
            past's columns perhaps in pooled rows (`WindowScores`); None unless it was asked for.
        sums: ``[Hq, S]`` float32, column sums of the whole causal attention; None unless they
            were asked for.
        keys: the prompt's keys; None unless they were asked for.
        values: the prompt's values; likewise.
    """

    num_kv_heads: int
    past: int
    device: torch.device
    layer: int = 0
    layers: int = 1
    lengths: torch.Tensor | None = None
    rows: int = 0
    total: torch.Tensor | None = None
    variance: torch.Tensor | None = None
    recent: torch.Tensor | None = None
    last: torch.Tensor | None = None
    maximum: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    keys: PagedKeys | None = None
    values: PagedValues | None = None
