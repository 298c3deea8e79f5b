"""How kernels read the keys or values of a tile of tokens."""

import triton
import triton.language as tl

CHUNK = tl.constexpr(32)
"""Dims that a register tile has: 4 threads load 16 bytes each of a token, and a sum over the dims
takes 2 shuffles."""
VARY = ["tokens"]
"""Differs by prompt: the launcher compiles anew for 1 and for multiples of 16."""


@triton.jit  # type: ignore[untyped-decorator]
def token_rows(  # type: ignore[no-untyped-def]
    cache, pages, token, live, block, s_page, s_slot, s_dim,
    DIM: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr = CHUNK,
):  # fmt: skip
    """A tuple of ``[tokens, CHUNK]`` float32, 0 where not `live` or past the head dim.

    `cache` points to the pages of one KV head. BLOCK is `block` where it is a power of two, or 0.
    """
    if BLOCK:  # a division by a constant
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


def tile_of(dim: int) -> int:
    """Tokens whose rows 8 warps hold, 64 elements in a thread."""
    return 128 if dim <= 128 else 64


def known_block(block: int) -> int:
    """The BLOCK of `token_rows` for pages of so many tokens."""
    return block if block & (block - 1) == 0 and block <= 1024 else 0
