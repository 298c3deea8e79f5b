"""`lag_scores` as a Triton kernel, launched for K and for V.

A program takes one partition of one KV head. It reads the next partition for its extremes, then
its own tokens for their standard deviations: each token is read twice, the second time by the
program beside, from L2. The softmax over a partition is torch's.
"""

from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

from kvcompress_kernels.builds import DIMS, Build, check_cache, float8, named
from kvcompress_kernels.lag_scores import reference
from kvcompress_kernels.paged_triton import known_block, token_rows

LEAST = tl.constexpr(reference.LEAST)
MOST = tl.constexpr(reference.MOST)
VARY = ["sinks", "lag"]
"""Parameters of the method: the launcher would compile anew for 1 and for multiples of 16."""


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
    """Standard deviations ``[Hkv, parts, lag]``."""
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
    said = (width >= LEAST)[None, :]
    width = tl.where(width >= LEAST, width, 1.0)
    for start in range(0, lag, TILE):
        i = start + tl.arange(0, TILE)
        live = i < lag
        (x,) = token_rows(
            cache, pages, first + i, live, block, s_page, s_slot, s_dim, DIM, BLOCK, PAD
        )
        y = tl.where(said, (x - least[None, :]) / width[None, :], 0.0)
        y = tl.minimum(tl.maximum(y, -MOST), MOST)
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
    """``[Hkv, parts, lag]`` float32 of sum 1, for ``[N, Hkv, block, D]``."""
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
    """Blocks of 16, dims side by side in memory; a cache of bf16 or, a few, of float8."""
    all_builds = []
    for dim, kind in [*product((128,), float8(sm).values()), *product(DIMS, ["*bf16"])]:
        config = dict(_config(dim, 16), s_dim=1)
        warps = config.pop("num_warps")
        kinds = dict(cache=kind, pages="*i64", spread="*fp32")
        names = [name for name in _spread_kernel.arg_names if name not in config]
        all_builds.append(
            Build(
                name=f"lag_scores D{dim}{named(kind)}",
                kernel=_spread_kernel,
                signature={name: kinds.get(name, "i32") for name in names},
                constexprs=config,
                warps=warps,
                aligned=tuple(name for name in names if name not in VARY),
            )
        )
    return all_builds
