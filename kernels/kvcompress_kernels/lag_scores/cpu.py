"""CPU form of `lag_scores`: float32, tiled over partitions."""

import torch
from torch.linalg import vector_norm

from kvcompress_kernels.lag_scores.reference import LEAST, MOST

TILE = 8 << 20
"""Bytes of the float32 keys, or values, of the partitions that are read at a time."""


def run(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    parts: int,
    sinks: int,
    lag: int,
) -> torch.Tensor:
    scores = _shares(key_pages.mT, pages, parts, sinks, lag)
    scores += _shares(value_pages, pages, parts, sinks, lag)
    return scores.div_(2)


def _shares(
    cache: torch.Tensor, pages: torch.Tensor, parts: int, sinks: int, lag: int
) -> torch.Tensor:
    """``[Hkv, parts, lag]`` float32 of sum 1, for ``[N, Hkv, block, D]``."""
    _, kv_heads, block, dim = cache.shape
    spread = cache.new_empty(kv_heads, parts, lag, dtype=torch.float32)
    step = max(TILE // (4 * kv_heads * lag * dim), 2) - 1
    head = torch.arange(kv_heads, device=cache.device)[:, None]
    for first in range(0, parts, step):
        last = min(first + step, parts)
        # one partition more: the last one is judged by it
        token = torch.arange(sinks + first * lag, sinks + (last + 1) * lag, device=cache.device)
        x = cache[pages[token // block], head, token % block]  # [Hkv, n, D]
        # dims side by side: sums over strided ones differ in order between tokens
        x = x.to(torch.float32, memory_format=torch.contiguous_format)
        x = x.view(kv_heads, -1, lag, dim)
        low, high = x[:, 1:].amin(2, keepdim=True), x[:, 1:].amax(2, keepdim=True)
        y = (x[:, :-1] - low) / (high - low)
        y = y.masked_fill_(high - low < LEAST, 0.0).clamp_(-MOST, MOST)
        y -= y.mean(-1, keepdim=True)
        spread[:, first:last] = vector_norm(y, dim=-1)
    spread /= max(dim - 1, 1) ** 0.5
    return spread.softmax(-1)
