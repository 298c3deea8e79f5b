"""Triton kernel of `value_norms`, launched once for N rows. It reads V once.

A program handles one tile of tokens of one KV head and row.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kvcompress_kernels.builds import Build, check_cache, dims_and_kinds, float8_suffix
from kvcompress_kernels.paged_triton import VARY, known_block, tile_of, token_rows

_VARY = ["s_pages", *VARY]
"""Integers that differ by prompt. Triton would specialise for 1 and for multiples of 16."""


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=_VARY,
    do_not_specialize_on_alignment=["pages"],
)
def _norm_kernel(  # type: ignore[no-untyped-def]
    values,
    pages,
    norms,
    tokens,
    block,
    s_pages,
    s_page,
    s_head,
    s_slot,
    s_dim,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the norms ``[N, Hkv, tokens]``."""
    head, n = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = token < tokens
    pages += n * s_pages
    values += head * s_head
    v = token_rows(values, pages, token, live, block, s_page, s_slot, s_dim, DIM, BLOCK)
    total = tl.abs(v[0])
    for c in tl.static_range(1, len(v)):
        total += tl.abs(v[c])
    row = n * tl.num_programs(1) + head
    tl.store(norms + row * tokens + token, tl.sum(total, 1), mask=live)


def run_rows(value_pages: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    check_cache("value_norms", value_pages)
    _, kv_heads, block, dim = value_pages.shape
    rows, pages = len(pages), pages.contiguous()
    norms = value_pages.new_empty(rows, kv_heads, tokens, dtype=torch.float32)
    config = _config(dim, block)
    grid = triton.cdiv(tokens, config["TILE"]), kv_heads, rows
    sizes = tokens, block, pages.shape[1], *value_pages.stride()
    _norm_kernel[grid](value_pages, pages, norms, *sizes, **config)
    return norms


def _config(dim: int, block: int) -> dict[str, Any]:
    return dict(DIM=dim, BLOCK=known_block(block), TILE=tile_of(dim), num_warps=8)


def builds(sm: int) -> list[Build]:
    """Return builds for blocks of 16 and contiguous head dims, in bf16 and partly in float8."""
    return [
        Build(
            name=f"value_norms D{dim}{float8_suffix(kind)}",
            kernel=_norm_kernel,
            config=dict(_config(dim, 16), s_dim=1),
            types=dict(values=kind, pages="*i64", norms="*fp32"),
        )
        for dim, kind in dims_and_kinds(sm)
    ]
