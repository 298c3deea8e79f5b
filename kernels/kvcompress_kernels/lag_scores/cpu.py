"""Torch code of `lag_scores` for a CPU: float32, tiled over partitions."""

import torch
from torch.linalg import vector_norm

from kvcompress_kernels.lag_scores.reference import MAX_SCALED, MIN_RANGE

TILE = 8 << 20
"""Bytes of the float32 keys or values of one tile of partitions."""


def run_rows(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    parts: int,
    sinks: int,
    lag: int,
) -> torch.Tensor:
    """Return the scores ``[N, Hkv, parts, lag]`` of N rows, one row at a time."""
    scores = []
    for row_pages in pages:
        shares = _shares(key_pages.mT, row_pages, parts, sinks, lag)
        shares += _shares(value_pages, row_pages, parts, sinks, lag)
        scores.append(shares.div_(2))
    return torch.stack(scores)


def _shares(
    cache: torch.Tensor, pages: torch.Tensor, parts: int, sinks: int, lag: int
) -> torch.Tensor:
    """Return the softmax over each partition, ``[Hkv, parts, lag]``, of ``[N, Hkv, block, D]``."""
    _, kv_heads, block, dim = cache.shape
    spread = cache.new_empty(kv_heads, parts, lag, dtype=torch.float32)
    step = max(TILE // (4 * kv_heads * lag * dim), 2) - 1
    head = torch.arange(kv_heads, device=cache.device)[:, None]
    for first in range(0, parts, step):
        last = min(first + step, parts)
        # Read one more partition, which scales the last one.
        token = torch.arange(sinks + first * lag, sinks + (last + 1) * lag, device=cache.device)
        x = cache[pages[token // block], head, token % block]  # [Hkv, n, D]
        # Contiguous head dims: sums over strided dims differ in order between tokens.
        x = x.to(torch.float32, memory_format=torch.contiguous_format)
        x = x.view(kv_heads, -1, lag, dim)
        low, high = x[:, 1:].amin(2, keepdim=True), x[:, 1:].amax(2, keepdim=True)
        y = (x[:, :-1] - low) / (high - low)
        y = y.masked_fill_(high - low < MIN_RANGE, 0.0).clamp_(-MAX_SCALED, MAX_SCALED)
        y -= y.mean(-1, keepdim=True)
        spread[:, first:last] = vector_norm(y, dim=-1)
    spread /= max(dim - 1, 1) ** 0.5
    return spread.softmax(-1)
