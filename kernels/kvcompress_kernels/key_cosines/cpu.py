"""Torch code of `key_cosines` for a CPU: float32, tiled over pages. It reads the keys twice."""

from collections.abc import Iterator

import torch
from torch.linalg import vector_norm

TILE = 8 << 20
"""Bytes of the float32 keys of one tile of pages."""


def run(key_pages: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    _, kv_heads, dim, _ = key_pages.shape
    anchor = key_pages.new_zeros(kv_heads, dim, dtype=torch.float32)
    for unit in _unit_keys(key_pages, pages, tokens):
        anchor += unit.sum(1)
    anchor /= tokens
    anchor /= vector_norm(anchor, dim=-1, keepdim=True).clamp_min(1e-12)
    tiles = [(unit * anchor[:, None]).sum(-1) for unit in _unit_keys(key_pages, pages, tokens)]
    return torch.cat(tiles, dim=1)


def run_rows(key_pages: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the cosines ``[N, Hkv, tokens]`` of N rows, one row at a time."""
    return torch.stack([run(key_pages, row_pages, tokens) for row_pages in pages])


def _unit_keys(key_pages: torch.Tensor, pages: torch.Tensor, tokens: int) -> Iterator[torch.Tensor]:
    """Yield the normalised keys ``[Hkv, n, D]``, one tile of pages at a time."""
    _, kv_heads, dim, block = key_pages.shape
    step = max(TILE // (4 * kv_heads * block * dim), 1)
    for first in range(0, len(pages), step):
        k = key_pages[pages[first : first + step]].permute(1, 0, 3, 2)  # [Hkv, n, block, D]
        # Contiguous head dims: sums over strided dims differ in order between slots.
        k = k.to(torch.float32, memory_format=torch.contiguous_format).flatten(1, 2)
        k = k[:, : tokens - first * block]
        yield k / vector_norm(k, dim=-1, keepdim=True).clamp_min(1e-12)
