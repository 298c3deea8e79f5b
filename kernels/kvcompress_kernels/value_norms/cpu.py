"""Torch code of `value_norms` for a CPU: float32, tiled over pages."""

import torch

TILE = 8 << 20
"""Bytes of the float32 values of one tile of pages."""


def run(value_pages: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    _, kv_heads, block, dim = value_pages.shape
    step = max(TILE // (4 * kv_heads * block * dim), 1)
    norms = value_pages.new_empty(kv_heads, len(pages) * block, dtype=torch.float32)
    for first in range(0, len(pages), step):
        v = value_pages[pages[first : first + step]]  # [n, Hkv, block, D]
        # Contiguous head dims: sums over strided dims differ in order between slots.
        v = v.to(torch.float32, memory_format=torch.contiguous_format).abs_()
        norms[:, first * block :][:, : v.shape[0] * block] = v.sum(-1).transpose(0, 1).flatten(1)
    return norms[:, :tokens].contiguous()


def run_rows(value_pages: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the norms ``[N, Hkv, tokens]`` of N rows, one row at a time."""
    return torch.stack([run(value_pages, row_pages, tokens) for row_pages in pages])
