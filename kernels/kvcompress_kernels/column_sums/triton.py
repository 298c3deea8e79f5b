"""Triton kernels of `column_sums`: two launches, no S x S matrix.

The kernels support several prompts per launch (axis N), but `run` passes one.

1. `_lse_kernel`, per tile of query rows and query head: the LSE of each row, with an online maximum
   and sum over the key tiles that the rows see.
2. `_sum_kernel`, per tile of keys and query head: the transposed logits ``k q^T`` of each row tile
   that sees the keys, and the sums of ``exp(s - LSE)``. Each column belongs to one program, so
   there are no atomics. Keys are the rows of the product, so that a thread sums most of its
   elements itself, and the sum of a column takes two registers instead of a tile of them.

Logits are in base 2. Both launches start the longest programs first. Programs of the G query heads
of a KV head are adjacent in the grid, so that all except the first read the keys from L2. Every row
visits key tiles in one order and every column visits row tiles in one order, so results do not
depend on the batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kvcompress_kernels.builds import (
    FLOAT8,
    FLOATS,
    Build,
    check_cache,
    dims_and_kinds,
    float8_suffix,
)
from kvcompress_kernels.contract import require
from kvcompress_kernels.float8_triton import widened
from kvcompress_kernels.paged_triton import known_block

LOG2_E = 1.4426950408889634
VARY = ["width", "s_pages", "s_lse"]
"""Integers that differ by prompt. Triton would specialise for 1 and for multiples of 16."""


@triton.jit  # type: ignore[untyped-decorator]
def _keys(  # type: ignore[no-untyped-def]
    keys,
    pages,
    token,
    tokens,
    dim,
    block,
    s_page,
    s_dim,
    s_slot,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
):
    """Load keys ``[D, tokens]`` of one KV head, 0 past the head dim and past the prompt.

    RUN slots share a mask, because a mask per slot would load each slot separately. So up to
    RUN - 1 tokens past the prompt may be read. They only affect their own columns.
    """
    if BLOCK:  # dividing by a constant is cheaper
        index, slot = token // BLOCK, token % BLOCK
    else:
        index, slot = token // block, token % block
    live = token // RUN * RUN < tokens
    page = tl.load(pages + index, mask=live, other=0).to(tl.int64)
    at = (page * s_page + slot.to(tl.int64) * s_slot)[None, :] + dim.to(tl.int64)[:, None] * s_dim
    if RUN > 1:  # The compiler cannot see through the page table that slots are contiguous.
        at = tl.max_contiguous(tl.multiple_of(at, [1, RUN]), [1, RUN])
    return tl.load(keys + at, mask=live[None, :] & (dim < DIM)[:, None], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _queries(query, first, row, rows, head, dim, s_row, s_head, s_dim, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load queries ``[rows, D]`` of one head, 0 past the last row and past the head dim."""
    at = (first + row)[:, None] * s_row + head * s_head + dim.to(tl.int64)[None, :] * s_dim
    return tl.load(query + at, mask=(row < rows)[:, None] & (dim < DIM)[None, :], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _lse_tile(top, total, q, k, scale, row, token, MASK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the row maxima and sums, base 2, updated with another tile of keys."""
    s = tl.dot(q, widened(k, q.dtype), input_precision="ieee")
    if MASK:
        s = tl.where(token[None, :] <= row[:, None], s, -float("inf"))
    higher = tl.maximum(top, tl.max(s, 1) * scale)
    total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(s * scale - higher[:, None]), 1)
    return higher, total


@triton.jit(do_not_specialize=VARY)  # type: ignore[untyped-decorator]
def _lse_kernel(  # type: ignore[no-untyped-def]
    query,
    starts,
    keys,
    pages,
    tokens,
    lse,
    sinks,  # [Hq] in base 2, or None
    scale,
    block,
    s_row,
    s_query_head,
    s_query_dim,
    s_pages,
    s_page,
    s_head,
    s_dim,
    s_slot,
    s_lse,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the base-2 LSE ``[Hq, R]`` of each row's scaled logits. `scale` includes log2(e)."""
    head, n = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    first = tl.load(starts + n).to(tl.int64)
    rows = (tl.load(starts + n + 1).to(tl.int64) - first).to(tl.int32)
    if start >= rows:
        return
    count = tl.load(tokens + n).to(tl.int32)
    past = count - rows
    pages += n * s_pages
    keys += head // GROUP * s_head
    row = start + tl.arange(0, ROWS)
    dim = tl.arange(0, PAD)
    q = _queries(query, first, row, rows, head, dim, s_row, s_query_head, s_query_dim, DIM)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        # A sink adds a term to the row's sum but has no column.
        top = tl.zeros([ROWS], tl.float32) + tl.load(sinks + head)
        total += 1.0
    seen = (past + start + 1) // COLUMNS * COLUMNS  # every row sees all tiles below this column
    for at in range(0, seen, COLUMNS):
        token = at + tl.arange(0, COLUMNS)
        k = _keys(keys, pages, token, count, dim, block, s_page, s_dim, s_slot, DIM, BLOCK, RUN)
        top, total = _lse_tile(top, total, q, k, scale, past + row, token, False)
    for at in range(seen, past + tl.minimum(start + ROWS, rows), COLUMNS):
        token = at + tl.arange(0, COLUMNS)
        k = _keys(keys, pages, token, count, dim, block, s_page, s_dim, s_slot, DIM, BLOCK, RUN)
        top, total = _lse_tile(top, total, q, k, scale, past + row, token, True)
    tl.store(lse + head * s_lse + first + row, top + tl.log2(total), mask=row < rows)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_tile(total, k, q, lse, scale, row, token, MASK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the column sums, updated with another tile of rows."""
    s = tl.dot(k, tl.trans(q), input_precision="ieee")  # [columns, rows]
    s = s * scale - lse[None, :]
    if MASK:  # before exp2, because the logit of a future key may overflow
        s = tl.where(token[:, None] <= row[None, :], s, -float("inf"))
    return total + tl.sum(tl.exp2(s), 1)


@triton.jit(do_not_specialize=VARY)  # type: ignore[untyped-decorator]
def _sum_kernel(  # type: ignore[no-untyped-def]
    query,
    starts,
    keys,
    pages,
    tokens,
    lse,
    sums,
    scale,
    block,
    width,
    s_row,
    s_query_head,
    s_query_dim,
    s_pages,
    s_page,
    s_head,
    s_dim,
    s_slot,
    s_lse,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the column sums ``[N, Hq, width]``, 0 past a prompt."""
    head, n = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    at = tl.program_id(1) * COLUMNS
    token = at + tl.arange(0, COLUMNS)
    first = tl.load(starts + n).to(tl.int64)
    rows = (tl.load(starts + n + 1).to(tl.int64) - first).to(tl.int32)
    count = tl.load(tokens + n).to(tl.int32)
    past = count - rows
    pages += n * s_pages
    keys += head // GROUP * s_head
    lse += head * s_lse + first
    dim = tl.arange(0, PAD)
    total = tl.zeros([COLUMNS], tl.float32)
    if at < count:
        k = _keys(keys, pages, token, count, dim, block, s_page, s_dim, s_slot, DIM, BLOCK, RUN)
        k = tl.trans(widened(k, query.dtype.element_ty))
        # Row tiles below `low` see none of the keys; row tiles from `full` on see all of them.
        low = tl.maximum(at - past, 0) // ROWS * ROWS
        full = tl.cdiv(tl.maximum(at + COLUMNS - 1 - past, 0), ROWS) * ROWS
        for start in range(low, tl.minimum(full, rows), ROWS):
            row = start + tl.arange(0, ROWS)
            q = _queries(query, first, row, rows, head, dim, s_row, s_query_head, s_query_dim, DIM)
            # Rows past the last one add exp2(0 - inf) = 0.
            of = tl.load(lse + row, mask=row < rows, other=float("inf"))
            total = _sum_tile(total, k, q, of, scale, past + row, token, True)
        for start in range(full, rows, ROWS):
            row = start + tl.arange(0, ROWS)
            q = _queries(query, first, row, rows, head, dim, s_row, s_query_head, s_query_dim, DIM)
            of = tl.load(lse + row, mask=row < rows, other=float("inf"))
            total = _sum_tile(total, k, q, of, scale, past + row, token, False)
    here = sums + (n * tl.num_programs(0) + head) * width + token
    tl.store(here, tl.where(token < count, total, 0.0), mask=token < width)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes that determine the kernel configurations.

    Args:
        group: query heads per KV head.
        dim: head dimension.
        block: tokens per page.
        run: RUN argument of `_keys`.
        bytes: bytes of an element of the query.
    """

    group: int
    dim: int
    block: int
    run: int
    bytes: int

    def lse(self) -> dict[str, Any]:
        return self._tiles(128)

    def sums(self) -> dict[str, Any]:
        # With 64 rows two programs share a multiprocessor: one multiplies while the other
        # computes exp2.
        return self._tiles(64)

    def _tiles(self, rows: int) -> dict[str, Any]:
        pad = max(triton.next_power_of_2(self.dim), 16)
        side = 32 if self.bytes == 4 else 128 if pad <= 128 else 64
        return dict(
            GROUP=self.group,
            DIM=self.dim,
            PAD=pad,
            BLOCK=known_block(self.block),
            RUN=self.run,
            ROWS=min(rows, side),
            COLUMNS=side,
            num_warps=8 if side == 128 else 4,
            num_stages=3,
        )


def run(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    name, dtypes = "column_sums", (query.dtype, key_pages.dtype)
    check_cache(name, key_pages)
    ok = dtypes[0] in FLOATS and dtypes[1] in (dtypes[0], *FLOAT8)
    rule = f"queries must be one of {list(FLOATS)}, and keys the same dtype or float8"
    require(ok, name, rule, dtypes)
    rows, heads, dim = query.shape
    _, kv_heads, _, block = key_pages.shape
    shape = _Shape(heads // kv_heads, dim, block, _run(key_pages), query.element_size())
    # Fill on the device, because a copy from the host would sync.
    starts = torch.arange(0, 2 * rows, rows, dtype=torch.int32, device=query.device)
    count = torch.full((1,), tokens, dtype=torch.int32, device=query.device)
    lse = query.new_empty(heads, rows, dtype=torch.float32)
    sums = query.new_empty(heads, tokens, dtype=torch.float32)
    inputs = query, starts, key_pages, pages, count, lse
    strides = *query.stride(), len(pages), *key_pages.stride(), rows
    factor = scale * LOG2_E
    config = shape.lse()
    _lse_kernel[heads, triton.cdiv(rows, config["ROWS"]), 1](
        *inputs, None if sinks is None else sinks * LOG2_E, factor, block, *strides, **config
    )
    config = shape.sums()
    _sum_kernel[heads, triton.cdiv(tokens, config["COLUMNS"]), 1](
        *inputs, sums, factor, block, tokens, *strides, **config
    )
    return sums


def _run(key_pages: torch.Tensor) -> int:
    """Return how many slots of a page every load may assume contiguous: 16 or 1."""
    page, head, dim, slot = key_pages.stride()
    aligned = all(s % 16 == 0 for s in (page, head, dim, key_pages.shape[3]))
    return 16 if slot == 1 and aligned and key_pages.data_ptr() % 16 == 0 else 1


def builds(sm: int) -> list[Build]:
    """Return builds for blocks of 16 and 32 query heads on 8 KV heads, in bf16 and partly float8.

    Head dims of a key are contiguous, as in every CUDA backend of vLLM. Only the CPU backend stores
    keys transposed, and no Triton kernel runs there.
    """
    types = dict(query="*bf16", pages="*i64", starts="*i32", tokens="*i32", scale="fp32")
    types |= dict(lse="*fp32", sums="*fp32", sinks="*fp32")
    all_builds = []

    def add(step: str, kernel: Any, config: dict[str, Any], kind: str) -> None:
        all_builds.append(
            Build(
                name=f"column_sums {step}",
                kernel=kernel,
                config=dict(config, s_query_dim=1, s_dim=1),
                types=dict(types, keys=kind),
                tensor_cores=True,
            )
        )

    for dim, kind in dims_and_kinds(sm):
        shape = _Shape(4, dim, 16, 1, 2)
        if dim in (64, 128) and kind == "*bf16":  # gpt-oss has 64
            add(f"lse D{dim} sinks", _lse_kernel, shape.lse(), kind)
        suffix = f"D{dim}{float8_suffix(kind)}"
        add(f"lse {suffix}", _lse_kernel, dict(shape.lse(), sinks=None), kind)
        add(f"sums {suffix}", _sum_kernel, shape.sums(), kind)
    return all_builds
