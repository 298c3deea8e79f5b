"""From scores to positions."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies.base import Selector


def top_k(scores: torch.Tensor, keep: int) -> torch.Tensor:
    """The `keep` best positions of each KV head, exact ties included.

    Higher scores first, then lower positions: max pooling makes plateaus of equal scores, so ties
    at the boundary are the normal case, and ``torch.topk`` leaves their order open. NaN ranks
    last, level with -inf.

    Args:
        scores: ``[Hkv, n]`` float32.
        keep: 0 to n.

    Returns:
        ``[Hkv, keep]`` int64, ascending.

    Raises:
        ValueError: `keep` is outside 0 to n.
    """
    heads, n = scores.shape
    if not 0 <= keep <= n:
        raise ValueError(f"top_k: keep must be in 0..{n}, got {keep}")
    if keep == 0:
        return torch.empty(heads, 0, dtype=torch.int64, device=scores.device)
    if keep == n:
        return torch.arange(n, device=scores.device).expand(heads, n)
    scores = _without_nan(scores)
    boundary = scores.topk(keep, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, level = scores > boundary, scores == boundary
    room = keep - above.sum(-1, keepdim=True)
    return _positions(above | (level & (level.cumsum(-1) <= room)), keep)


def _without_nan(scores: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(scores, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _positions(kept: torch.Tensor, keep: int) -> torch.Tensor:
    """``[H, n]`` bool with `keep` set in each row to ``[H, keep]`` int64, ascending."""
    # the count is known: unlike nonzero, this need not ask a GPU for it
    return torch.nonzero_static(kept, size=len(kept) * keep)[:, 1].view(len(kept), keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """The best tokens of each KV head, or the same ones for all heads of the layer.

    Args:
        shared: rank by the mean over the KV heads, one set of positions per layer.
    """

    shared: bool = False

    def source(self, layer: int) -> int:
        return layer

    def protect(self, scores: torch.Tensor, keep: int, after: int) -> torch.Tensor:
        return scores

    def select(self, scores: torch.Tensor, keep: int, after: int) -> torch.Tensor:
        """``[Hkv, keep]`` int64 ascending (`top_k`)."""
        if self.shared:
            return top_k(scores.mean(0, keepdim=True), keep).expand(len(scores), keep)
        return top_k(scores, keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """ChunkKV (Liu et al. 2025, arXiv:2502.00299, algorithms 1 and 2): whole runs of tokens.

    A chunk's score is the mean of its tokens' scores, summed over KV heads; ties to the earlier
    chunk. The chunk that does not fit gives its first tokens, so exactly `keep` are kept; the
    paper's floor of whole chunks, and kvpress's share of chunks, miss the budget. Layers that
    reuse a ranking fill their own budget from it.

    Args:
        size: tokens in a chunk (10 in the paper, 20 in kvpress).
        shared: one ranking for all heads of the layer; False ranks per KV head.
        reuse: layers that share the first one's ranking (N_reuse); 1 is off.
    """

    size: int = 10
    shared: bool = True
    reuse: int = 1

    def __post_init__(self) -> None:
        for name, value in (("size", self.size), ("reuse", self.reuse)):
            if value < 1:
                raise ConfigError(f"chunks.{name} must be a whole number >= 1, got {value}")

    def source(self, layer: int) -> int:
        return layer // self.reuse * self.reuse

    def protect(self, scores: torch.Tensor, keep: int, after: int) -> torch.Tensor:
        return scores

    def select(self, scores: torch.Tensor, keep: int, after: int) -> torch.Tensor:
        """``[Hkv, keep]`` int64 ascending.

        Raises:
            ValueError: `keep` is outside 0 to n.
        """
        heads, n = scores.shape
        if not 0 <= keep <= n:
            raise ValueError(f"chunks: keep must be in 0..{n}, got {keep}")
        if keep in (0, n):
            return top_k(scores, keep)
        if self.shared:
            scores = scores.sum(0, keepdim=True, dtype=torch.float64)
        count = -(-n // self.size)
        start = torch.arange(count, device=scores.device) * self.size
        length = (n - start).clamp(max=self.size)
        rows = pad(_without_nan(scores), (0, count * self.size - n)).view(-1, count, self.size)
        mean = _without_nan(rows.sum(-1, dtype=torch.float64) / length)  # equal chunks must tie
        order = mean.sort(stable=True, dim=-1, descending=True).indices
        ranked = length.expand_as(order).gather(-1, order)
        taken = torch.minimum(ranked, (keep - ranked.cumsum(-1) + ranked).clamp(min=0))
        share = torch.empty_like(taken).scatter_(-1, order, taken)
        position = torch.arange(n, device=scores.device)
        kept = position % self.size < share[:, position // self.size]
        return _positions(kept, keep).expand(heads, keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeavyRecent:
    """D2O's split (Wan et al. 2024, arXiv:2406.13035): sinks, heavy hitters, recents.

    Of n kept tokens, ``T = min(sinks, n)`` are the first, ``M = min(n - T, floor(n * recent))``
    the last, and the others the best between them.

    Args:
        sinks: first tokens that are always kept (4 in the authors' code; the paper gives none).
        recent: share of the kept tokens that are the last ones (1/4: heavy : recent = 3 : 1).
    """

    sinks: int = 4
    recent: float = 0.25

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ConfigError(f"heavy_recent.sinks must be a whole number >= 0, got {self.sinks}")
        if not 0 <= self.recent <= 1:
            raise ConfigError(f"heavy_recent.recent must be in [0, 1], got {self.recent}")

    def source(self, layer: int) -> int:
        return layer

    def protect(self, scores: torch.Tensor, keep: int, after: int) -> torch.Tensor:
        """``[Hkv, n]``: `scores` with +inf at the sinks and the recents, finite elsewhere."""
        n, kept = scores.shape[1], keep + after
        sinks = min(self.sinks, keep)
        recents = min(max(int(kept * self.recent) - after, 0), keep - sinks)
        top = torch.finfo(scores.dtype).max
        lifted = torch.nan_to_num(scores, nan=-torch.inf, posinf=top, neginf=-torch.inf)
        lifted[:, :sinks] = torch.inf
        lifted[:, n - recents :] = torch.inf
        return lifted

    def select(self, scores: torch.Tensor, keep: int, after: int) -> torch.Tensor:
        """``[Hkv, keep]`` int64 ascending (`top_k` of the protected scores)."""
        return top_k(self.protect(scores, keep, after), keep)


SELECTORS: Mapping[str, type[Selector]] = {
    "topk": TopK,
    "chunks": Chunks,
    "heavy_recent": HeavyRecent,
}
