"""Triton kernel of `lag_scores`, launched once for K and once for V of N rows.

A program scores one partition of one KV head and row. It reads the next partition for the minimum
and maximum, then its own tokens for their standard deviations. Each token is read twice, by two
adjacent programs, the second time from L2. The softmax over a partition runs in torch.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kvcompress_kernels.builds import Build, check_cache, dims_and_kinds, float8_suffix
from kvcompress_kernels.lag_scores import reference
from kvcompress_kernels.paged_triton import known_block, token_rows

MIN_RANGE = tl.constexpr(reference.MIN_RANGE)
MAX_SCALED = tl.constexpr(reference.MAX_SCALED)
VARY = ["sinks", "lag", "s_part", "s_pages"]
"""Integers that differ by method and prompt. Triton would specialise for 1 and multiples of 16."""
ALIGN = 4
"""Partitions are padded to a multiple of this, so that each starts at a multiple of 16 bytes.

Above 1,024 tokens, torch's CUDA softmax sums in an order that depends on the row's alignment.
"""


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=VARY,
    do_not_specialize_on_alignment=["pages"],
)
def _spread_kernel(  # type: ignore[no-untyped-def]
    cache,
    pages,
    spread,
    sinks,
    lag,
    s_part,
    block,
    s_pages,
    s_page,
    s_head,
    s_slot,
    s_dim,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the standard deviations ``[N, Hkv, parts, s_part]``, -inf from column `lag` on."""
    part, head, n = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    pages += n * s_pages
    cache += head * s_head
    first = sinks + part * lag
    low = tl.full([TILE, PAD], float("inf"), tl.float32)
    high = tl.full([TILE, PAD], -float("inf"), tl.float32)
    for start in range(0, lag, TILE):
        i = start + tl.arange(0, TILE)
        live = i < lag
        token = first + lag + i
        (x,) = token_rows(cache, pages, token, live, block, s_page, s_slot, s_dim, DIM, BLOCK, PAD)
        low = tl.minimum(low, tl.where(live[:, None], x, float("inf")))
        high = tl.maximum(high, tl.where(live[:, None], x, -float("inf")))
    least = tl.min(low, 0)
    width = tl.max(high, 0) - least  # 0 past the head dim
    inside = (tl.arange(0, PAD) < DIM)[None, :]
    varies = (width >= MIN_RANGE)[None, :]
    width = tl.where(width >= MIN_RANGE, width, 1.0)
    spread += ((n * tl.num_programs(1) + head) * tl.num_programs(0) + part) * s_part
    for start in range(0, lag, TILE):
        i = start + tl.arange(0, TILE)
        live = i < lag
        (x,) = token_rows(
            cache, pages, first + i, live, block, s_page, s_slot, s_dim, DIM, BLOCK, PAD
        )
        y = tl.where(varies, (x - least[None, :]) / width[None, :], 0.0)
        y = tl.minimum(tl.maximum(y, -MAX_SCALED), MAX_SCALED)
        y = tl.where(inside, y - (tl.sum(y, 1) / DIM)[:, None], 0.0)
        deviation = tl.sqrt(tl.sum(y * y, 1) / (DIM - 1 if DIM > 1 else 1))
        tl.store(spread + i, tl.where(live, deviation, -float("inf")), mask=i < s_part)


def run_rows(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    parts: int,
    sinks: int,
    lag: int,
) -> torch.Tensor:
    key_shares, value_shares = (
        _shares(cache, pages, parts, sinks, lag) for cache in (key_pages.mT, value_pages)
    )
    return (key_shares + value_shares).div_(2)


def _shares(
    cache: torch.Tensor, pages: torch.Tensor, parts: int, sinks: int, lag: int
) -> torch.Tensor:
    """Return the softmax over each partition, ``[rows, Hkv, parts, lag]``.

    Args:
        cache: ``[N, Hkv, block, D]``.
        pages: ``[rows, W]``.
    """
    check_cache("lag_scores", cache)
    _, kv_heads, block, dim = cache.shape
    rows, pages = len(pages), pages.contiguous()
    s_part = -(-lag // ALIGN) * ALIGN
    spread = cache.new_empty(rows, kv_heads, parts, s_part, dtype=torch.float32)
    sizes = sinks, lag, s_part, block, pages.shape[1], *cache.stride()
    grid = parts, kv_heads, rows
    _spread_kernel[grid](cache, pages, spread, *sizes, **_config(dim, block))
    return spread.softmax(-1)[..., :lag]


def _config(dim: int, block: int) -> dict[str, Any]:
    pad = triton.next_power_of_2(dim)
    tile = max(16, min(64, 4096 // pad))
    return dict(DIM=dim, PAD=pad, BLOCK=known_block(block), TILE=tile, num_warps=4)


def builds(sm: int) -> list[Build]:
    """Return builds for blocks of 16 and contiguous head dims, in bf16 and partly in float8."""
    return [
        Build(
            name=f"lag_scores D{dim}{float8_suffix(kind)}",
            kernel=_spread_kernel,
            config=dict(_config(dim, 16), s_dim=1),
            types=dict(cache=kind, pages="*i64", spread="*fp32"),
        )
        for dim, kind in dims_and_kinds(sm)
    ]
