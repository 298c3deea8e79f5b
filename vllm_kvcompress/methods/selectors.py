"""From scores to positions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, overload

import torch

from kvcompress_kernels.select import select, select_chunks
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Selector, Use


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """The best tokens of each KV head, or the same ones for all heads of the layer.

    Args:
        shared: rank by the mean over the KV heads, one set of positions per layer.
    """

    shared: bool = False

    def source(self, layer: int) -> int:
        return layer

    def protect(self, scores: torch.Tensor, keep: torch.Tensor, after: int) -> torch.Tensor:
        return scores

    def select(
        self,
        scores: torch.Tensor,
        past: int | torch.Tensor,
        keep: torch.Tensor,
        after: int,
        most: int,
    ) -> torch.Tensor:
        """``[L, Hkv, most]`` int32 (`kvcompress_kernels.select`)."""
        ranked = scores.mean(1, keepdim=True) if self.shared else scores
        rows, counts = ranked.flatten(0, 1), _per_row(keep, ranked.shape[1])
        best = select(rows, _per_row(past, ranked.shape[1]), counts, most)
        return best.view(*ranked.shape[:2], most).expand(-1, scores.shape[1], -1)


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

    uses: ClassVar[tuple[Use, ...]] = (Use.AS_WEIGHTS,)

    size: int = 10
    shared: bool = True
    reuse: int = 1

    def __post_init__(self) -> None:
        for name, value in (("size", self.size), ("reuse", self.reuse)):
            if value < 1:
                raise ConfigError(f"chunks.{name} must be a whole number >= 1, got {value}")

    def source(self, layer: int) -> int:
        return layer // self.reuse * self.reuse

    def protect(self, scores: torch.Tensor, keep: torch.Tensor, after: int) -> torch.Tensor:
        return scores

    def select(
        self,
        scores: torch.Tensor,
        past: int | torch.Tensor,
        keep: torch.Tensor,
        after: int,
        most: int,
    ) -> torch.Tensor:
        """``[L, Hkv, most]`` int32 (`kvcompress_kernels.select_chunks`)."""
        layers, heads, _ = scores.shape
        together = heads if self.shared else 1
        counts = _per_row(keep, heads // together)
        rows = scores.flatten(0, 1)
        columns = _per_row(past, heads // together)
        best = select_chunks(rows, columns, counts, most, size=self.size, heads=together)
        return best.view(layers, heads // together, most).expand(-1, heads, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeavyRecent:
    """D2O's split (Wan et al. 2024, arXiv:2406.13035): sinks, heavy hitters, recents.

    Of n kept tokens, ``T = min(sinks, n)`` are the first, ``M = min(n - T, floor(n * recent))``
    the last, and the others the best between them.

    Args:
        sinks: first tokens that are always kept (4 in the authors' code; the paper gives none).
        recent: share of the kept tokens that are the last ones (1/4: heavy : recent = 3 : 1).
    """

    uses: ClassVar[tuple[Use, ...]] = (Use.AS_WEIGHTS,)

    sinks: int = 4
    recent: float = 0.25

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ConfigError(f"heavy_recent.sinks must be a whole number >= 0, got {self.sinks}")
        if not 0 <= self.recent <= 1:
            raise ConfigError(f"heavy_recent.recent must be in [0, 1], got {self.recent}")

    def source(self, layer: int) -> int:
        return layer

    def protect(self, scores: torch.Tensor, keep: torch.Tensor, after: int) -> torch.Tensor:
        """``[L, Hkv, n]``: `scores` with +inf at the sinks and the recents, finite elsewhere."""
        past, top = scores.shape[2], torch.finfo(scores.dtype).max
        sinks = keep.clamp(max=self.sinks)
        recents = self._recents(keep, after).minimum(keep - sinks)
        column = torch.arange(past, device=scores.device)
        guarded = (column < sinks[:, None]) | (column >= past - recents[:, None])
        free = torch.nan_to_num(scores, nan=-torch.inf, posinf=top, neginf=-torch.inf)
        return free.where(~guarded[:, None], torch.inf)

    def select(
        self,
        scores: torch.Tensor,
        past: int | torch.Tensor,
        keep: torch.Tensor,
        after: int,
        most: int,
    ) -> torch.Tensor:
        """``[L, Hkv, most]`` int32 (`kvcompress_kernels.select`)."""
        rows, heads = scores.flatten(0, 1), scores.shape[1]
        recents = _per_row(self._recents(keep, after), heads)
        columns, counts = _per_row(past, heads), _per_row(keep, heads)
        best = select(rows, columns, counts, most, num_first=self.sinks, num_last=recents)
        return best.view(*scores.shape[:2], most)

    def _recents(self, keep: torch.Tensor, after: int) -> torch.Tensor:
        """How many of the `keep` tokens should be the last ones, as there are others `after`."""
        return ((keep + after).double() * self.recent).long().sub(after).clamp(min=0)


@overload
def _per_row(keep: torch.Tensor, heads: int) -> torch.Tensor: ...


@overload
def _per_row(keep: int | torch.Tensor, heads: int) -> int | torch.Tensor: ...


def _per_row(keep: int | torch.Tensor, heads: int) -> int | torch.Tensor:
    """``[L]`` to ``[L * heads]`` int32; what is the same for all layers stays one number."""
    if isinstance(keep, int):
        return keep
    return keep.to(torch.int32)[:, None].expand(-1, heads).flatten()


SELECTORS: Mapping[str, type[Selector]] = {
    "topk": TopK,
    "chunks": Chunks,
    "heavy_recent": HeavyRecent,
}
