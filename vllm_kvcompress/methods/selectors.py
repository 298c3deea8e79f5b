"""Selectors: choose the kept positions by score."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, overload

import torch

from kvcompress_kernels.select import select, select_chunks
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import ScoreUse, Selector


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """Keep the tokens with the highest scores, per KV head or for all heads of the layer.

    Args:
        shared: rank by the mean over the KV heads, with one set of positions per layer.
    """

    shared: bool = False

    def source(self, layer: int) -> int:
        return layer

    def protect(self, scores: torch.Tensor, keep: torch.Tensor, kept_after: int) -> torch.Tensor:
        return scores

    def select(
        self,
        scores: torch.Tensor,
        past: int | torch.Tensor,
        keep: torch.Tensor,
        kept_after: int,
        width: int,
    ) -> torch.Tensor:
        """Return ``[L, Hkv, width]`` int32 positions (`kvcompress_kernels.select`)."""
        ranked = scores.mean(1, keepdim=True) if self.shared else scores
        rows, counts = ranked.flatten(0, 1), _per_row(keep, ranked.shape[1])
        best = select(rows, _per_row(past, ranked.shape[1]), counts, width)
        return best.view(*ranked.shape[:2], width).expand(-1, scores.shape[1], -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """ChunkKV (Liu et al. 2025, arXiv:2502.00299, algorithms 1 and 2): keep runs of tokens.

    A chunk's score is the mean of its tokens' scores, summed over KV heads. Ties go to the earlier
    chunk. If the last chosen chunk does not fit, its first tokens are kept, so that exactly `keep`
    tokens are kept; the paper's floor of complete chunks and kvpress's share of chunks miss the
    budget. Layers that reuse a ranking fill their own budget from it.

    Args:
        size: tokens in a chunk (10 in the paper, 20 in kvpress).
        shared: one ranking for all heads of the layer; False ranks per KV head.
        reuse: number of layers that share the first one's ranking (N_reuse); 1 means no reuse.
    """

    uses: ClassVar[tuple[ScoreUse, ...]] = (ScoreUse.AS_WEIGHTS,)

    size: int = 10
    shared: bool = True
    reuse: int = 1

    def __post_init__(self) -> None:
        for name, value in (("size", self.size), ("reuse", self.reuse)):
            if value < 1:
                raise ConfigError(f"chunks.{name} must be a whole number >= 1, got {value}")

    def source(self, layer: int) -> int:
        return layer // self.reuse * self.reuse

    def protect(self, scores: torch.Tensor, keep: torch.Tensor, kept_after: int) -> torch.Tensor:
        return scores

    def select(
        self,
        scores: torch.Tensor,
        past: int | torch.Tensor,
        keep: torch.Tensor,
        kept_after: int,
        width: int,
    ) -> torch.Tensor:
        """Return ``[L, Hkv, width]`` int32 positions (`kvcompress_kernels.select_chunks`)."""
        layers, heads, _ = scores.shape
        heads_per_ranking = heads if self.shared else 1
        counts = _per_row(keep, heads // heads_per_ranking)
        rows = scores.flatten(0, 1)
        columns = _per_row(past, heads // heads_per_ranking)
        best = select_chunks(rows, columns, counts, width, size=self.size, heads=heads_per_ranking)
        return best.view(layers, heads // heads_per_ranking, width).expand(-1, heads, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeavyRecent:
    """D2O's split (Wan et al. 2024, arXiv:2406.13035): sinks, heavy hitters and recent tokens.

    Of n kept tokens, the first ``T = min(sinks, n)`` and the last ``M = min(n - T, floor(n *
    recent))`` tokens are always kept. The other kept tokens are the best between them.

    Args:
        sinks: first tokens that are always kept (4 in the authors' code; the paper gives none).
        recent: share of the kept tokens that are the last ones (1/4: heavy : recent = 3 : 1).
    """

    uses: ClassVar[tuple[ScoreUse, ...]] = (ScoreUse.AS_WEIGHTS,)

    sinks: int = 4
    recent: float = 0.25

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ConfigError(f"heavy_recent.sinks must be a whole number >= 0, got {self.sinks}")
        if not 0 <= self.recent <= 1:
            raise ConfigError(f"heavy_recent.recent must be in [0, 1], got {self.recent}")

    def source(self, layer: int) -> int:
        return layer

    def protect(self, scores: torch.Tensor, keep: torch.Tensor, kept_after: int) -> torch.Tensor:
        """Return `scores` ``[L, Hkv, n]``, +inf at sinks and recent tokens and finite elsewhere."""
        past, top = scores.shape[2], torch.finfo(scores.dtype).max
        sinks = keep.clamp(max=self.sinks)
        recents = self._recents(keep, kept_after).minimum(keep - sinks)
        column = torch.arange(past, device=scores.device)
        always_kept = (column < sinks[:, None]) | (column >= past - recents[:, None])
        finite = torch.nan_to_num(scores, nan=-torch.inf, posinf=top, neginf=-torch.inf)
        return finite.where(~always_kept[:, None], torch.inf)

    def select(
        self,
        scores: torch.Tensor,
        past: int | torch.Tensor,
        keep: torch.Tensor,
        kept_after: int,
        width: int,
    ) -> torch.Tensor:
        """Return ``[L, Hkv, width]`` int32 positions (`kvcompress_kernels.select`)."""
        rows, heads = scores.flatten(0, 1), scores.shape[1]
        recents = _per_row(self._recents(keep, kept_after), heads)
        columns, counts = _per_row(past, heads), _per_row(keep, heads)
        best = select(rows, columns, counts, width, num_first=self.sinks, num_last=recents)
        return best.view(*scores.shape[:2], width)

    def _recents(self, keep: torch.Tensor, kept_after: int) -> torch.Tensor:
        """Return how many of the `keep` tokens are recent, given the tokens kept after them."""
        return ((keep + kept_after).double() * self.recent).long().sub(kept_after).clamp(min=0)


@overload
def _per_row(keep: torch.Tensor, heads: int) -> torch.Tensor: ...


@overload
def _per_row(keep: int | torch.Tensor, heads: int) -> int | torch.Tensor: ...


def _per_row(keep: int | torch.Tensor, heads: int) -> int | torch.Tensor:
    """Return ``[L]`` repeated per head, ``[L * heads]`` int32, or a plain number as it is."""
    if isinstance(keep, int):
        return keep
    return keep.to(torch.int32)[:, None].expand(-1, heads).flatten()


SELECTORS: Mapping[str, type[Selector]] = {
    "topk": TopK,
    "chunks": Chunks,
    "heavy_recent": HeavyRecent,
}
