"""Triton kernels of `key_cosines`. They read K twice. Each is launched once for N rows.

1. `_sum_kernel`, per tile of tokens, KV head and row: the sum of the tile's unit keys.
2. `_anchor_kernel`, per KV head and row: the normalised sum of the tiles' sums.
3. `_cosine_kernel`, per tile of tokens, KV head and row: the cosines.

All tiles have the same size, each sum has a fixed order, and there are no atomics, so results are
the same bit for bit in every run.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kvcompress_kernels.builds import DIMS, Build, check_cache, dims_and_kinds, float8_suffix
from kvcompress_kernels.paged_triton import CHUNK, VARY, known_block, tile_of, token_rows

ROWS = 32
"""Sums of tiles that `_anchor_kernel` loads at a time."""
_VARY = ["s_pages", *VARY]
"""Integers that differ by prompt. Triton would specialise for 1 and for multiples of 16."""


@triton.jit
def _inverse_norms(k):  # type: ignore[no-untyped-def]
    """Return the inverse norm of each token ``[tokens]``, from a tuple of ``[tokens, CHUNK]``."""
    squares = k[0] * k[0]
    for c in tl.static_range(1, len(k)):
        squares += k[c] * k[c]
    return 1.0 / tl.maximum(tl.sqrt(tl.sum(squares, 1)), 1e-12)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=_VARY,
    do_not_specialize_on_alignment=["pages"],
)
def _sum_kernel(  # type: ignore[no-untyped-def]
    keys,
    pages,
    sums,
    tokens,
    block,
    s_pages,
    s_page,
    s_head,
    s_dim,
    s_slot,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the sums ``[N, Hkv, tiles, D]`` of unit keys."""
    tile, head, n = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    token = tile * TILE + tl.arange(0, TILE)
    live = token < tokens
    pages += n * s_pages
    keys += head * s_head
    k = token_rows(keys, pages, token, live, block, s_page, s_slot, s_dim, DIM, BLOCK)
    scale = _inverse_norms(k)
    sums += ((n * tl.num_programs(1) + head) * tl.num_programs(0) + tile) * DIM
    for c in tl.static_range(len(k)):
        dim = c * CHUNK + tl.arange(0, CHUNK)
        tl.store(sums + dim, tl.sum(k[c] * scale[:, None], 0), mask=dim < DIM)


@triton.jit(do_not_specialize=["tiles", *VARY])  # type: ignore[untyped-decorator]
def _anchor_kernel(  # type: ignore[no-untyped-def]
    sums, anchors, tokens, tiles, DIM: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr
):
    """Write the normalised mean of the unit keys, ``[N * Hkv, D]``."""
    head = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, PAD)
    sums += head * tiles * DIM
    total = tl.zeros([ROWS, PAD], tl.float32)
    for first in range(0, tiles, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < tiles)[:, None] & (dim < DIM)[None, :]
        total += tl.load(sums + row[:, None] * DIM + dim[None, :], mask=inside, other=0.0)
    mean = tl.sum(total, 0) / tokens
    norm = tl.maximum(tl.sqrt(tl.sum(mean * mean, 0)), 1e-12)
    tl.store(anchors + head * DIM + dim, mean / norm, mask=dim < DIM)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=_VARY,
    do_not_specialize_on_alignment=["pages"],
)
def _cosine_kernel(  # type: ignore[no-untyped-def]
    keys,
    pages,
    anchors,
    cosines,
    tokens,
    block,
    s_pages,
    s_page,
    s_head,
    s_dim,
    s_slot,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the cosines ``[N, Hkv, tokens]``."""
    head, n = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = token < tokens
    pages += n * s_pages
    keys += head * s_head
    k = token_rows(keys, pages, token, live, block, s_page, s_slot, s_dim, DIM, BLOCK)
    scale = _inverse_norms(k)
    products = tl.zeros(k[0].shape, tl.float32)
    row = n * tl.num_programs(1) + head
    for c in tl.static_range(len(k)):
        dim = c * CHUNK + tl.arange(0, CHUNK)
        anchor = tl.load(anchors + row * DIM + dim, mask=dim < DIM, other=0.0)
        products += k[c] * anchor[None, :]
    tl.store(cosines + row * tokens + token, tl.sum(products, 1) * scale, mask=live)


def run_rows(key_pages: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    check_cache("key_cosines", key_pages)
    _, kv_heads, dim, block = key_pages.shape
    rows, pages = len(pages), pages.contiguous()
    config = _config(dim, block)
    tiles = triton.cdiv(tokens, config["TILE"])
    sums = key_pages.new_empty(rows, kv_heads, tiles, dim, dtype=torch.float32)
    anchors = sums.new_empty(rows, kv_heads, dim)
    cosines = sums.new_empty(rows, kv_heads, tokens)
    sizes = tokens, block, pages.shape[1], *key_pages.stride()
    grid = tiles, kv_heads, rows
    _sum_kernel[grid](key_pages, pages, sums, *sizes, **config)
    _anchor_kernel[(rows * kv_heads,)](sums, anchors, tokens, tiles, **_joining(dim))
    _cosine_kernel[grid](key_pages, pages, anchors, cosines, *sizes, **config)
    return cosines


def _config(dim: int, block: int) -> dict[str, Any]:
    return dict(DIM=dim, BLOCK=known_block(block), TILE=tile_of(dim), num_warps=8)


def _joining(dim: int) -> dict[str, Any]:
    return dict(DIM=dim, PAD=triton.next_power_of_2(dim), ROWS=ROWS, num_warps=4)


def builds(sm: int) -> list[Build]:
    """Return builds for blocks of 16 and contiguous head dims, in bf16 and partly in float8."""
    types = dict(pages="*i64", sums="*fp32", anchors="*fp32", cosines="*fp32")
    anchors = [
        Build(
            name=f"key_cosines anchor D{dim}",
            kernel=_anchor_kernel,
            config=_joining(dim),
            types=types,
        )
        for dim in DIMS
    ]
    return [
        *(
            Build(
                name=f"key_cosines {step} D{dim}{float8_suffix(kind)}",
                kernel=kernel,
                config=dict(_config(dim, 16), s_dim=1),
                types=dict(types, keys=kind),
            )
            for dim, kind in dims_and_kinds(sm)
            for step, kernel in (("sums", _sum_kernel), ("cosines", _cosine_kernel))
        ),
        *anchors,
    ]
