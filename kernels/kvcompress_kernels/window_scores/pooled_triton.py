"""Triton kernel for the maximum over the window's rows after pooling each row over five columns.

It runs in addition to `columns_kernel` if `pooled` is set. The columns of a row are spread across
threads, and the next tile belongs to another program, so averaging them in place would go through
shared memory. Instead the kernel multiplies each tile five times, each time with the keys shifted
by one column. These keys come from the caches, and the results add up in registers. Every column
adds in the same order, so equal keys around a column give equal scores. This costs ``5 w / S`` of
the prefill's attention.

A pooled row is rescaled to the sum of the row. The factor (`shares`) comes from `partials_kernel`
and `log_sum_kernel`, so that no extra pass over K is needed.
"""

import triton
import triton.language as tl

from kvcompress_kernels.float8_triton import widened
from kvcompress_kernels.window_scores.passes_triton import VARIES, key_tile, put, window_rows


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[*VARIES, "size"],
    do_not_specialize_on_alignment=["pages", "lengths"],
)
def pooled_kernel(  # type: ignore[no-untyped-def]
    query,
    keys,
    pages,
    lengths,
    factors,
    row_tops,
    log_sums,
    shares,
    maximum_out,  # [N, lines, size] as in `columns_kernel`; the window's columns are not pooled
    factor,
    w,
    group,
    size,
    s_query_row,
    s_query_token,
    s_query_head,
    s_query_dim,
    s_pages,
    s_page,
    s_head,
    s_dim,
    s_slot,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """Write the maximum over the pooled rows for one span of columns."""
    tiles = tl.cdiv(group, HEADS)
    tile, split = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    kv = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    tokens = tl.load(lengths + row).to(tl.int32)
    if factors is not None:
        factor = tl.load(factors + row)
    past = tokens - w
    first = split * SPAN
    if first >= tokens:
        return
    keys += kv * s_head
    pages += row * s_pages
    query += row * s_query_row + kv * group * s_query_head
    lines = (row * tl.num_programs(1) + kv) * group * w
    row_tops += lines
    log_sums += lines
    shares += lines

    local = tile * HEADS + tl.arange(0, HEADS)
    if GROUPED:
        line = (row * tl.num_programs(1) + kv) * tiles + tile
    else:
        line = (row * tl.num_programs(1) + kv) * group + local
    each = tl.arange(0, HEADS * WINDOW)
    head = tile * HEADS + each // WINDOW
    for start in range(first, tl.minimum(first + SPAN, tokens), COLUMNS):
        column = tl.multiple_of(start, COLUMNS) + tl.arange(0, COLUMNS)
        old = column < past
        maximum = tl.zeros([COLUMNS, HEADS], tl.float32)
        for chunk in range(CHUNKS):
            i = chunk * WINDOW + each % WINDOW
            q = window_rows(
                query, head, i, group, w, s_query_token, s_query_head, s_query_dim, DIM, PAD
            )
            q = tl.trans(q)  # [PAD, ROWS]
            # Rows past the last one get A = 2 ** -1e30 = 0.
            real = (head < group) & (i < w)
            top = tl.load(row_tops + head * w + i, mask=real, other=1e30)
            log_sum = tl.load(log_sums + head * w + i, mask=real, other=0.0)
            share = tl.load(shares + head * w + i, mask=real, other=0.0)
            pooled = tl.zeros([COLUMNS, HEADS * WINDOW], tl.float32)
            for shift in range(-2, 3):
                near = column + shift
                counts = tl.where(old, (near >= 0) & (near < past), shift == 0)
                # Clamp to the past. A column of the window reads itself.
                near = tl.where(old, tl.maximum(tl.minimum(near, past - 1), 0), column)
                k = key_tile(
                    keys, pages, 0, near, tokens, s_page, s_dim, s_slot, DIM, PAD, BLOCK, True
                )
                k = widened(k, q.dtype, (near < tokens)[:, None])
                if q.dtype != k.dtype:
                    s = tl.dot(k.to(tl.float32), q.to(tl.float32), input_precision="ieee")
                else:
                    s = tl.dot(k, q, input_precision="ieee")  # [COLUMNS, ROWS]
                a = tl.exp2(tl.fma(s, factor, -top[None, :]) - log_sum[None, :])
                pooled += tl.where(counts[:, None] & (near[:, None] <= (past + i)[None, :]), a, 0.0)
            pooled *= tl.where(old[:, None], share[None, :], 1.0)
            pooled = tl.reshape(pooled, [COLUMNS, HEADS, WINDOW])
            maximum = tl.maximum(maximum, tl.max(pooled, 2))
        if GROUPED:
            maximum = tl.max(maximum, 1)
        known = column < tokens
        put(maximum_out, line, size, column, maximum, known, local < group, GROUPED, True)
