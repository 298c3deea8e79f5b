"""Selector `topk`: keep the tokens with the highest scores (docs/methods.md 1.6)."""

from dataclasses import dataclass
from typing import overload

import torch

from kvcompress_kernels.select import select


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
        rows, counts = ranked.flatten(0, 1), per_row(keep, ranked.shape[1])
        best = select(rows, per_row(past, ranked.shape[1]), counts, width)
        return best.view(*ranked.shape[:2], width).expand(-1, scores.shape[1], -1)


@overload
def per_row(keep: torch.Tensor, heads: int) -> torch.Tensor: ...


@overload
def per_row(keep: int | torch.Tensor, heads: int) -> int | torch.Tensor: ...


def per_row(keep: int | torch.Tensor, heads: int) -> int | torch.Tensor:
    """Return ``[L]`` repeated per head, ``[L * heads]`` int32, or a plain number as it is."""
    if isinstance(keep, int):
        return keep
    return keep.to(torch.int32)[:, None].expand(-1, heads).flatten()
