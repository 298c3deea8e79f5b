"""Triton kernel of `lag_scores`, launched once for K and once for V.

A program scores one partition of one KV head. It reads the next partition for the minimum and
maximum, then its own tokens for their standard deviations. Each token is read twice, by two
adjacent programs, the second time from L2. The softmax over a partition runs in torch.
"""

from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

from kvcompress_kernels.builds import DIMS, Build, check_cache, float8, float8_suffix
from kvcompress_kernels.lag_scores import reference
from kvcompress_kernels.paged_triton import known_block, token_rows

MIN_RANGE = tl.constexpr(reference.MIN_RANGE)
MAX_SCALED = tl.constexpr(reference.MAX_SCALED)
VARY = ["sinks", "lag"]
"""Settings of the method. Triton would specialise for 1 and for multiples of 16."""


@triton.jit(do_not_specialize=VARY)  # type: ignore[untyped-decorator]
def _spread_kernel(  # type: ignore[no-untyped-def]
    cache,
    pages,
    spread,
    sinks,
    lag,
    block,
    s_page,
    s_head,
    s_slot,
    s_dim,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the standard deviations ``[Hkv, parts, lag]``."""
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
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
        here = spread + (head * tl.num_programs(0) + part) * lag + i
        tl.store(here, deviation, mask=live)


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
    """Return the softmax over each partition, ``[Hkv, parts, lag]``, of ``[N, Hkv, block, D]``."""
    check_cache("lag_scores", cache)
    _, kv_heads, block, dim = cache.shape
    spread = cache.new_empty(kv_heads, parts, lag, dtype=torch.float32)
    config = _config(dim, block)
    _spread_kernel[parts, kv_heads](
        cache, pages, spread, sinks, lag, block, *cache.stride(), **config
    )
    return spread.softmax(-1)


def _config(dim: int, block: int) -> dict[str, Any]:
    pad = triton.next_power_of_2(dim)
    tile = max(16, min(64, 4096 // pad))
    return dict(DIM=dim, PAD=pad, BLOCK=known_block(block), TILE=tile, num_warps=4)


def builds(sm: int) -> list[Build]:
    """Return builds for blocks of 16 and contiguous head dims, in bf16 and partly in float8."""
    all_builds = []
    for dim, kind in [*product((128,), float8(sm).values()), *product(DIMS, ["*bf16"])]:
        config = dict(_config(dim, 16), s_dim=1)
        warps = config.pop("num_warps")
        kinds = dict(cache=kind, pages="*i64", spread="*fp32")
        names = [name for name in _spread_kernel.arg_names if name not in config]
        all_builds.append(
            Build(
                name=f"lag_scores D{dim}{float8_suffix(kind)}",
                kernel=_spread_kernel,
                signature={name: kinds.get(name, "i32") for name in names},
                constexprs=config,
                warps=warps,
                aligned=tuple(name for name in names if name not in VARY),
            )
        )
    return all_builds
