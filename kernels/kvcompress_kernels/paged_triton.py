"""Find tokens of a paged cache and bytes of packed groups in a Triton kernel."""

import torch
import triton
import triton.language as tl

CHUNK = tl.constexpr(32)
"""Head dimensions per register tile. Four threads load 16 bytes each of a token, so a sum over the
head dimension takes 2 shuffles."""
VARY = ["tokens"]
"""Arguments that differ by prompt. Triton would specialise for 1 and for multiples of 16."""


@triton.jit  # type: ignore[untyped-decorator]
def token_rows(  # type: ignore[no-untyped-def]
    cache, pages, token, live, block, s_page, s_slot, s_dim,
    DIM: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr = CHUNK,
):  # fmt: skip
    """Return a tuple of ``[tokens, CHUNK]`` float32 tiles, 0 outside `live` and past the head dim.

    `cache` points to the pages of one KV head. BLOCK is `block` if that is a power of two, else 0.
    """
    if BLOCK:  # dividing by a constant is cheaper
        index, slot = token // BLOCK, token % BLOCK
    else:
        index, slot = token // block, token % block
    page = tl.load(pages + index, mask=live, other=0).to(tl.int64)
    row = (page * s_page + slot.to(tl.int64) * s_slot)[:, None]
    rows = ()
    for c in tl.static_range(0, DIM, CHUNK):
        dim = c + tl.arange(0, CHUNK)
        at = row + dim[None, :].to(tl.int64) * s_dim
        x = tl.load(cache + at, mask=live[:, None] & (dim < DIM)[None, :], other=0.0)
        rows = rows + (x.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@triton.jit  # type: ignore[untyped-decorator]
def in_row(at, s_row, ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the memory offset of byte (or half) `at` of a packed group in rows of ROW."""
    return at // ROW * s_row + at % ROW


def dense(table: torch.Tensor) -> torch.Tensor:
    """Return a table with a last axis of stride 1: itself or a copy."""
    return table if table.stride(-1) == 1 else table.contiguous()


def tile_of(dim: int) -> int:
    """Return the tokens per tile that 8 warps hold with 64 elements per thread."""
    return 128 if dim <= 128 else 64


def known_block(block: int) -> int:
    """Return the BLOCK argument of `token_rows` for pages of `block` tokens."""
    return block if block & (block - 1) == 0 and block <= 1024 else 0
