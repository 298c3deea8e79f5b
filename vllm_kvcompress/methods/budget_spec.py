"""Inputs of a method's parts: budget, layer statistics, attention statistics, keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSpec:
    """The budget of one prompt, as an allocator sees it. Lengths are tokens per KV head.

    Args:
        num_layers: layers that share the budget, N.
        tokens: prompt length S.
        window: observation window w: the last tokens, always kept.
        budget: mean tokens to keep per layer, B, window included.
        total: tokens to keep over all layers; None means ``num_layers * budget``.
        protected: always-kept tokens before the window. They count towards the budget.
    """

    num_layers: int
    tokens: int
    window: int
    budget: int
    total: int | None = None
    protected: int = 0

    @property
    def always_kept(self) -> int:
        """Return the tokens that each layer always keeps: the window and the protected tokens."""
        return self.window + self.protected

    @property
    def past(self) -> int:
        """Return the evictable tokens per layer, ``S - w`` if no token is protected."""
        return max(self.tokens - self.always_kept, 0)

    @property
    def base(self) -> int:
        """Return the mean past tokens to keep per layer, ``B - w`` if no token is protected."""
        return self.budget - self.always_kept

    @property
    def kept(self) -> int:
        """Return the tokens to keep over all layers, always-kept tokens included."""
        return self.num_layers * self.budget if self.total is None else self.total

    @property
    def past_total(self) -> int:
        """Return the past tokens to keep over all layers, at most all of them."""
        if self.total is None:
            return self.num_layers * min(self.base, self.past)
        return min(self.total - self.num_layers * self.always_kept, self.num_layers * self.past)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStats:
    """Statistics of N layers, on the layers' device until all layers are observed.

    An allocator gets None for those that it does not read.

    Args:
        entropy: ``[N]``, ``H = -sum A log A`` over heads, window queries and past columns (CAKE).
        shift: ``[N]``, ``V = sum Var_i A`` over heads and past columns, ddof 1 (CAKE).
        column_variance: ``[N, Hq]``, variance over positions of the column sums of the whole causal
            attention, or of the column means, ddof 1 (D2O). ``[N, Hkv]`` if only the mean over a KV
            head's query heads is known.
        scores: ``[N, Hkv, P]`` float32 scores of the past tokens (DynamicKV, global). Rows of
            layers that reuse another layer's scores are not initialised.
    """

    entropy: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    column_variance: torch.Tensor | None = None
    scores: torch.Tensor | None = None

    def __getitem__(self, layers: slice) -> "LayerStats":
        """Return the statistics of some of the layers, as views."""
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        return LayerStats(**{name: x[layers] for name, x in known.items() if x is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKeys:
    """A prompt's keys in their cache pages.

    Args:
        key_pages: ``[N, Hkv, D, block_size]``, rotated.
        pages: ``[ceil(tokens / block_size)]`` int64, the prompt's pages in order; for several
            layers ``[layers, ceil(tokens / block_size)]``.
        tokens: prompt length S.
    """

    key_pages: torch.Tensor
    pages: torch.Tensor
    tokens: int

    @property
    def pages_by_layer(self) -> torch.Tensor:
        """Return `pages` as ``[layers, ceil(tokens / block_size)]``, also for one layer."""
        return self.pages.view(-1, self.pages.shape[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedValues:
    """A prompt's values in their cache pages.

    Args:
        value_pages: ``[N, Hkv, block_size, D]``.
        pages: ``[ceil(tokens / block_size)]`` int64, the prompt's pages in order; for several
            layers ``[layers, ceil(tokens / block_size)]``. If the layers differ in length, each
            has `AttentionStats.lengths` tokens.
        tokens: prompt length S, or that of the longest layer.
        scale: factor on the cached values: one number, or ``[layers]`` float32. If the layers
            differ in length, it may be 1, because scores are then compared only within a layer.
    """

    value_pages: torch.Tensor
    pages: torch.Tensor
    tokens: int
    scale: float | torch.Tensor = 1.0

    @property
    def pages_by_layer(self) -> torch.Tensor:
        """Return `pages` as ``[layers, ceil(tokens / block_size)]``, also for one layer."""
        return self.pages.view(-1, self.pages.shape[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStats:
    """Attention statistics of one layer or several for a scorer, reduced to one number per key.

    Several layers come as one layer with ``num_layers`` times the heads, each layer's heads side by
    side. A layer's scores must not depend on the other layers. If the layers' lengths differ, S is
    the longest. Columns that a shorter layer does not have are 0. The window's columns in `maximum`
    are still the last w, and in `last` every column is at its slot.

    For a scorer with `Reads.KV_HEADS`, the window's statistics may have Hkv instead of Hq lines.

    Args:
        num_kv_heads: KV heads of the layer, or of all layers together.
        past: past tokens, P.
        device: device of the scores.
        layers: index of each layer. Callers may leave it empty if they set `lengths`.
        num_layers: number of layers.
        lengths: ``[num_layers]`` int32, tokens of each layer; None if all have S.
        num_queries: window queries in all statistics but `maximum`; 0 if attention was not read.
            For a scorer with `Reads.PROMPT_MAXIMUM`, `maximum` is over the queries before them.
        total: ``[Hq, P]`` float32, the window's attention to the past, summed over its queries;
            None if attention was not read.
        variance: ``[Hq, P]`` float32, over queries, ddof 1; None unless a part reads it.
        recent: ``[Hq, w]`` float32, the window's attention to itself, summed over its queries.
        last: ``[Hq, S]`` float32, attention of the last query to every key; None unless the scorer
            reads it.
        maximum: ``[Hq, S]`` float32, the maximum attention of a window query to every key. Past
            columns may be pooled per query (`WindowScores`). None unless a part reads it.
        sums: ``[Hq, S]`` float32, column sums of the whole causal attention; None unless a part
            reads them.
        keys: the prompt's keys; None unless a part reads them.
        values: the prompt's values; None unless a part reads them.
    """

    num_kv_heads: int
    past: int
    device: torch.device
    layers: Sequence[int] = (0,)
    num_layers: int = 1
    lengths: torch.Tensor | None = None
    num_queries: int = 0
    total: torch.Tensor | None = None
    variance: torch.Tensor | None = None
    recent: torch.Tensor | None = None
    last: torch.Tensor | None = None
    maximum: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    keys: PagedKeys | None = None
    values: PagedValues | None = None
