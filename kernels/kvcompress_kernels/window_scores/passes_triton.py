"""Three Triton kernels of `window_scores`, which `triton.py` launches.

The sum of a softmax row must be known before its columns can be added, so K is read twice. A single
exact pass would have to store the logits, and the G * w float32 logits of a column are larger than
its key (512 bytes instead of 256 at G 4, w 32, D 128, bf16). There are three launches:

    partials   maximum and sum of each row over SPAN columns      [N, splits, Hq * w] each
    log_sum    maximum and log2 of the sum of each complete row   [N, Hq * w] each
    columns    ``A = 2 ** (s - maximum - log_sum)`` from new logits, reduced over the window's rows

and a fourth with `pooled` (`pooled_triton.py`). For it, the first two launches also compute the
factor that rescales a pooled row: the sum of the row over the past, divided by that of the pooled
row.

If the caller passes each query's log-sum-exp, `columns` runs first and reads K once. It also sums
each query's attention. `flags` then marks the layers in which a sum is not 1, for example because
float32 cannot hold a log-sum-exp in the thousands exactly enough. The three launches above follow
in any case, because the host does not read the marks. Programs of unmarked layers return at once.

The maximum and the log2 of the sum are stored separately. Their sum, the LSE, would have an error
of 3e-4 in float32 for logits in the thousands, and so would A.

A program handles one KV head. The w rows of up to HEADS of its query heads are the rows of one
matrix product, so K is read from memory once per KV head. In `columns`, keys are on the M side of
the product and rows on the N side. A tensor core keeps the N side within four adjacent threads, so
sums over the window take two shuffles instead of shared memory. The warps of a program share the
keys of a tile and have all its rows, so no sum over rows or heads crosses warps. Every column uses
the same operations in the same order whatever its position, its page and the rest of the batch. So
equal keys get equal scores, and a layer's scores do not depend on the batch. There are no atomics:
each program writes a partial entropy and shift.

Only the window's own columns and the prompt's last tile need a causal mask or a bound. Loops run
over unmasked tiles first, then over the EDGE tiles. A NaN in an unused slot only affects its own
column, which the EDGE code drops with a select. Masks never split a page, because that would split
the 16-byte loads of transposed keys.
"""

import triton
import triton.language as tl

from kvcompress_kernels.float8_triton import widened

VARIES = ["w", "group", "s_pages"]
"""Integers that differ by prompt or model. Triton would specialise for 1 and multiples of 16."""


@triton.jit  # type: ignore[untyped-decorator]
def window_rows(  # type: ignore[no-untyped-def]
    query, head, i, group, w, s_token, s_head, s_dim, DIM: tl.constexpr, PAD: tl.constexpr
):
    """Load queries ``[rows, PAD]``, 0 past the last row and past the head dim."""
    dim = tl.arange(0, PAD)
    real = ((head < group) & (i < w))[:, None] & (dim < DIM)[None, :]
    at = (
        i.to(tl.int64)[:, None] * s_token
        + head[:, None] * s_head
        + dim[None, :].to(tl.int64) * s_dim
    )
    return tl.load(query + at, mask=real, other=0.0)  # [ROWS, PAD]


@triton.jit  # type: ignore[untyped-decorator]
def key_tile(  # type: ignore[no-untyped-def]
    keys,
    pages,
    start,
    place,
    tokens,
    s_page,
    s_dim,
    s_slot,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Load the keys ``[columns, PAD]`` of columns ``start + place``, 0 past the head dim.

    `start` is a multiple of the number of columns. EDGE also masks pages past the prompt.
    """
    dim = tl.arange(0, PAD)
    live = (dim < DIM)[None, :]
    if BLOCK == 0:
        page, slot = tl.load(pages + tl.zeros_like(place)), start + place
        if EDGE:
            live &= (slot < tokens)[:, None]
    else:
        if place.shape[0] % BLOCK == 0:
            # All tiles have the same slots, so the compiler can compute them once, before the loop.
            page, slot = start // BLOCK + place // BLOCK, place % BLOCK
        else:
            page, slot = (start + place) // BLOCK, (start + place) % BLOCK
        if EDGE:
            listed = page * BLOCK < tokens
            live &= listed[:, None]
            page = tl.load(pages + page, mask=listed, other=0)
        else:
            page = tl.load(pages + page)
    inside = (slot.to(tl.int64) * s_slot)[:, None] + (dim.to(tl.int64) * s_dim)[None, :]
    # page * s_page exceeds 2**31 in an ordinary cache. As a product of two int32 it takes one
    # instruction.
    at = page.to(tl.int32).to(tl.int64) * s_page
    return tl.load(keys + inside + at[:, None], mask=live, other=0.0)  # [COLUMNS, PAD]


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[*VARIES, "splits"],
    do_not_specialize_on_alignment=["pages", "lengths"],
)
def partials_kernel(  # type: ignore[no-untyped-def]
    query,  # [N, w, Hq, D]
    keys,  # [pages, Hkv, D, block]
    pages,  # [N, W]
    lengths,  # [N]
    factors,  # [N], one `factor` per row, or None
    tops,  # [N, splits, Hq * w]
    sums,  # [N, splits, Hq * w]
    past_sums,  # [N, splits, Hq * w], sums over the past, or None without `pooled`
    pooled_sums,  # [N, splits, Hq * w], sums of the pooled rows, times 5
    flags,  # [N] int32, 0 where there is nothing to do, or None
    factor,  # scale / ln 2
    w,
    group,
    splits,
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
    BLOCK: tl.constexpr,  # 0 if each prompt is one page
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Write the maximum and the sum of ``exp2`` of each row over one span of columns."""
    # Tiles of rows are adjacent in the grid, so that all except the first read K from L2.
    tiles = tl.cdiv(group, HEADS) * tl.cdiv(w, WINDOW)
    tile, split = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    kv = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    if flags is not None and tl.load(flags + row) == 0:
        return
    tokens = tl.load(lengths + row).to(tl.int32)
    if factors is not None:
        factor = tl.load(factors + row)
    past = tokens - w
    first = split * SPAN
    if first >= tokens:
        return
    each = tl.arange(0, HEADS * WINDOW)
    head = tile // tl.cdiv(w, WINDOW) * HEADS + each // WINDOW
    i = tile % tl.cdiv(w, WINDOW) * WINDOW + each % WINDOW
    q = window_rows(
        query + row * s_query_row + kv * group * s_query_head,
        head,
        i,
        group,
        w,
        s_query_token,
        s_query_head,
        s_query_dim,
        DIM,
        PAD,
    )
    keys += kv * s_head
    pages += row * s_pages

    top = tl.full([HEADS * WINDOW], float("-inf"), tl.float32)
    total = tl.zeros([HEADS * WINDOW], tl.float32)
    past_sum = tl.zeros([HEADS * WINDOW], tl.float32)
    pooled_sum = tl.zeros([HEADS * WINDOW], tl.float32)
    whole = tl.maximum(first, tl.minimum(first + SPAN, past // COLUMNS * COLUMNS))
    stop = tl.minimum(first + SPAN, tokens)
    place = tl.arange(0, COLUMNS)
    for EDGE in tl.static_range(2):
        for start in tl.range(
            whole if EDGE else first,
            stop if EDGE else whole,
            COLUMNS,
            num_stages=1 if EDGE else None,
        ):
            column = start + place
            k = key_tile(
                keys, pages, start, place, tokens, s_page, s_dim, s_slot, DIM, PAD, BLOCK, EDGE
            )
            k = widened(k, q.dtype)
            if q.dtype != k.dtype:
                s = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee")
            else:
                s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [ROWS, COLUMNS]
            if EDGE:
                s = tl.where(column[None, :] <= (past + i)[:, None], s, float("-inf"))
            new = tl.maximum(top, tl.max(s, 1) * factor)
            # A row that has seen no key has a maximum of -inf, which must not be subtracted.
            less = tl.where(new == float("-inf"), 0.0, new) if EDGE else new
            rise = tl.exp2(top - less)
            seen = tl.exp2(tl.fma(s, factor, -less[:, None]))
            total = total * rise + tl.sum(seen, 1)
            if past_sums is not None:
                old = (column < past)[None, :]
                # A column counts five times, less the positions before the first and past the last.
                places = 5 - tl.maximum(2 - column, 0) - tl.maximum(column + 3 - past, 0)
                seen = tl.where(old, seen, 0.0) if EDGE else seen
                past_sum = past_sum * rise + tl.sum(seen, 1)
                pooled_sum = pooled_sum * rise + tl.sum(seen * places.to(tl.float32)[None, :], 1)
            top = new
    lines = tl.num_programs(1) * group * w
    at = (row * splits + split) * lines + (kv * group + head) * w + i
    real = (head < group) & (i < w)
    tl.store(tops + at, top, mask=real)
    tl.store(sums + at, total, mask=real)
    if past_sums is not None:
        tl.store(past_sums + at, past_sum, mask=real)
        tl.store(pooled_sums + at, pooled_sum, mask=real)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["lines", "splits", "w"],
    do_not_specialize_on_alignment=["lengths"],
)
def log_sum_kernel(  # type: ignore[no-untyped-def]
    tops,
    sums,
    lengths,
    past_sums,
    pooled_sums,
    row_tops,  # [N, Hq * w]
    log_sums,  # [N, Hq * w]
    shares,  # [N, Hq * w], factor on the sum of five columns, or None without `pooled`
    sinks,  # [N, Hq] divided by ln 2, or None
    flags,  # as in `partials_kernel`
    lines,
    splits,
    w,
    SPAN: tl.constexpr,
    LINES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Join the partial maxima and sums of each row, and write its maximum and log2 of its sum."""
    row = tl.program_id(1).to(tl.int64)
    if flags is not None and tl.load(flags + row) == 0:
        return
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    real = line < lines
    line = tl.minimum(line, lines - 1)
    count = tl.cdiv(tl.load(lengths + row).to(tl.int32), SPAN)
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    past_sum = tl.zeros([LINES], tl.float32)
    pooled_sum = tl.zeros([LINES], tl.float32)
    if sinks is not None:
        # A sink adds a term to the row's sum but has no column.
        top = tl.load(sinks + row * (lines // w) + line // w)
        total += 1.0
    for start in range(0, count, SPLITS):
        split = start + tl.arange(0, SPLITS)
        at = (row * splits + split)[:, None] * lines + line[None, :]
        live = (split < count)[:, None]
        tops_now = tl.load(tops + at, mask=live, other=float("-inf"))  # [SPLITS, LINES]
        sums_now = tl.load(sums + at, mask=live, other=0.0)
        new = tl.maximum(top, tl.max(tops_now, 0))  # finite: all rows see column 0
        rise, below = tl.exp2(top - new), tl.exp2(tops_now - new[None, :])
        total = total * rise + tl.sum(sums_now * below, 0)
        if shares is not None:
            now = tl.load(past_sums + at, mask=live, other=0.0)
            past_sum = past_sum * rise + tl.sum(now * below, 0)
            now = tl.load(pooled_sums + at, mask=live, other=0.0)
            pooled_sum = pooled_sum * rise + tl.sum(now * below, 0)
        top = new
    tl.store(row_tops + row * lines + line, top, mask=real)
    tl.store(log_sums + row * lines + line, tl.log2(total), mask=real)
    if shares is not None:
        # Both sums are 0 in a row without attention to the past, and so are its columns.
        share = past_sum / tl.maximum(pooled_sum, 1e-37)
        tl.store(shares + row * lines + line, share, mask=real)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["lines", "splits"],
    do_not_specialize_on_alignment=["lengths"],
)
def flags_kernel(  # type: ignore[no-untyped-def]
    row_sums,  # [N, splits, Hq * w]
    lengths,  # [N]
    flags,  # [N] int32
    lines,
    splits,
    SPAN: tl.constexpr,
    LINES: tl.constexpr,
    SPLITS: tl.constexpr,
    MAX_ERROR: tl.constexpr,
):
    """Write 1 for each layer in which a query's attention does not sum to 1, else 0."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.cdiv(tl.load(lengths + row).to(tl.int32), SPAN)
    wrong = tl.zeros([LINES], tl.int32)
    for first in range(0, lines, LINES):
        line = first + tl.arange(0, LINES)
        total = tl.zeros([LINES], tl.float32)
        for start in range(0, count, SPLITS):
            split = start + tl.arange(0, SPLITS)
            at = (row * splits + split)[:, None] * lines + line[None, :]
            live = (split < count)[:, None] & (line < lines)[None, :]
            total += tl.sum(tl.load(row_sums + at, mask=live, other=0.0), 0)
        right = tl.abs(total - 1.0) <= MAX_ERROR  # false for NaN
        wrong = tl.maximum(wrong, tl.where((line < lines) & (right == 0), 1, 0))
    tl.store(flags + row, tl.max(wrong, 0))


@triton.jit  # type: ignore[untyped-decorator]
def put(  # type: ignore[no-untyped-def]
    out, line, size, column, values, live, heads_live, GROUPED: tl.constexpr, EDGE: tl.constexpr
):
    """Store ``[COLUMNS, HEADS]`` values in lines of `size` elements, or ``[COLUMNS]`` in one line.

    Without EDGE, all columns are stored.
    """
    if GROUPED:
        if EDGE:
            tl.store(out + line * size + column, values, mask=live)
        else:
            tl.store(out + line * size + column, values)
    else:
        at = (line * size)[None, :] + column[:, None]
        mask = live[:, None] & heads_live[None, :] if EDGE else heads_live[None, :]
        tl.store(out + at, values, mask=mask)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[*VARIES, "size"],
    do_not_specialize_on_alignment=["pages", "lengths"],
)
def columns_kernel(  # type: ignore[no-untyped-def]
    query,
    keys,
    pages,
    lengths,
    factors,
    row_tops,  # [N, Hq * w], or None
    log_sums,  # [N, Hq * w]; without `row_tops`, the natural logsumexp of each line
    row_sums,  # [N, splits, Hq * w], sums of each line of A, or None
    flags,  # as in `partials_kernel`
    total_out,  # [N, lines, size - w], with Hq lines, or Hkv * tiles if GROUPED
    variance_out,  # [N, lines, size - w] or None
    recent_out,  # [N, lines, w]
    last_out,  # [N, lines, size] or None
    maximum_out,  # [N, lines, size] or None
    entropies,  # [N, Hkv * tiles * splits]
    shifts,  # the same; None without `variance_out`
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
    CHUNKS: tl.constexpr,  # of WINDOW rows, in a window
    GROUPED: tl.constexpr,  # whether to reduce over the program's query heads
):
    """Reduce the attention of one span of columns over the window's rows."""
    tiles = tl.cdiv(group, HEADS)
    tile, split = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    kv = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    if flags is not None and tl.load(flags + row) == 0:
        return
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
    if row_tops is not None:
        row_tops += (row * tl.num_programs(1) + kv) * group * w
    log_sums += (row * tl.num_programs(1) + kv) * group * w

    local = tile * HEADS + tl.arange(0, HEADS)
    heads_live = local < group
    if GROUPED:
        line = (row * tl.num_programs(1) + kv) * tiles + tile
    else:
        line = (row * tl.num_programs(1) + kv) * group + local
    each = tl.arange(0, HEADS * WINDOW)
    head, i = tile * HEADS + each // WINDOW, each % WINDOW
    q = tl.trans(
        window_rows(query, head, i, group, w, s_query_token, s_query_head, s_query_dim, DIM, PAD)
    )  # [PAD, ROWS]
    # Rows past the last one get A = 2 ** -1e30 = 0, and A * log A = -0 instead of NaN.
    real = (head < group) & (i < w)
    if row_tops is None:
        log_sum = tl.load(log_sums + head * w + i, mask=real, other=1e30) * 1.4426950408889634
        # Treat a query whose log-sum-exp is NaN or infinite as masked. Its sum of 0 marks the
        # layer.
        log_sum = tl.where(tl.abs(log_sum) < 1e30, log_sum, 1e30)
        top = log_sum
    else:
        top = tl.load(row_tops + head * w + i, mask=real, other=1e30)
        log_sum = tl.load(log_sums + head * w + i, mask=real, other=0.0)

    # These sums add up over all tiles without crossing threads.
    entropy = tl.zeros([COLUMNS, 8], tl.float32)
    shift = tl.zeros([COLUMNS, HEADS], tl.float32)
    row_sum = tl.zeros([COLUMNS // 16, 8, HEADS * WINDOW], tl.float32)
    # Multiply by these instead of dividing, which takes ten times as long.
    per_head, per_pair = 1.0 / group, 1.0 / tl.maximum(w - 1, 1)
    whole = tl.maximum(first, tl.minimum(first + SPAN, past // COLUMNS * COLUMNS))
    stop = tl.minimum(first + SPAN, tokens)
    place = tl.arange(0, COLUMNS)
    for EDGE in tl.static_range(2):
        for start in tl.range(
            whole if EDGE else first,
            stop if EDGE else whole,
            COLUMNS,
            num_stages=1 if EDGE else None,
        ):
            column = start + place
            old, known = column < past, column < tokens
            k = key_tile(
                keys, pages, start, place, tokens, s_page, s_dim, s_slot, DIM, PAD, BLOCK, EDGE
            )
            k = widened(k, q.dtype, known[:, None])
            total = tl.zeros([COLUMNS, HEADS], tl.float32)
            squares = tl.zeros([COLUMNS, HEADS], tl.float32)
            last = tl.zeros([COLUMNS, HEADS], tl.float32)
            maximum = tl.zeros([COLUMNS, HEADS], tl.float32)
            for chunk in range(CHUNKS):
                q_now, top_now, log_sum_now = q, top, log_sum
                if CHUNKS > 1:
                    now = chunk * WINDOW + i
                    q_now = window_rows(
                        query,
                        head,
                        now,
                        group,
                        w,
                        s_query_token,
                        s_query_head,
                        s_query_dim,
                        DIM,
                        PAD,
                    )
                    q_now = tl.trans(q_now)
                    real = (head < group) & (now < w)
                    top_now = tl.load(row_tops + head * w + now, mask=real, other=1e30)
                    log_sum_now = tl.load(log_sums + head * w + now, mask=real, other=0.0)
                if q.dtype != k.dtype:
                    s = tl.dot(k.to(tl.float32), q_now.to(tl.float32), input_precision="ieee")
                else:
                    s = tl.dot(k, q_now, input_precision="ieee")  # [COLUMNS, ROWS]
                s = tl.fma(s, factor, -top_now[None, :])
                if row_tops is not None:
                    s -= log_sum_now[None, :]
                if EDGE:
                    seen_by = past + chunk * WINDOW + i
                    s = tl.where(column[:, None] <= seen_by[None, :], s, float("-inf"))
                a = tl.exp2(s)
                if row_sums is not None:
                    pairs = tl.reshape(a, [COLUMNS // 16, 2, 8, HEADS * WINDOW])
                    row_sum += tl.sum(pairs, 1)
                # 0 * -1e30 is 0, and 0 * -inf would be NaN.
                mass = a * (tl.maximum(s, -1e30) if EDGE else s)
                mass = tl.sum(tl.reshape(mass, [COLUMNS, HEADS * WINDOW // 8, 8]), 1)
                entropy += tl.where(old[:, None], mass, 0.0) if EDGE else mass
                a = tl.reshape(a, [COLUMNS, HEADS, WINDOW])
                part = tl.sum(a, 2)
                at = chunk * WINDOW + tl.arange(0, WINDOW)[None, None, :]
                if last_out is not None:
                    last += tl.sum(a * tl.where(at == w - 1, 1.0, 0.0), 2)
                if maximum_out is not None:
                    maximum = tl.maximum(maximum, tl.max(a, 2))
                if variance_out is not None:
                    # Sum squares about the chunk's mean, then combine with earlier chunks (Chan).
                    # Rows past the last one weigh 0. An explicit fma gives the same bits in both
                    # loops.
                    seen = chunk * WINDOW
                    rows = tl.minimum(w - seen, WINDOW)
                    weight = tl.where(at < w, 1.0 / rows, 0.0)
                    off = tl.fma(-part[:, :, None], weight, a)
                    squares += tl.sum(off * off, 2)
                    if CHUNKS > 1:
                        apart = part / rows - total / tl.maximum(seen, 1)
                        squares += apart * apart * (seen * (rows / (seen + rows)))
                total += part

            if variance_out is not None:
                shift += tl.where(old[:, None], squares, 0.0) if EDGE else squares
            if GROUPED:
                total = tl.sum(total, 1) * per_head
                squares = tl.sum(squares, 1) * per_head
                last = tl.sum(last, 1) * per_head
                maximum = tl.max(maximum, 1)
            put(total_out, line, size - w, column, total, old, heads_live, GROUPED, EDGE)
            if variance_out is not None:
                variance = squares * per_pair
                put(variance_out, line, size - w, column, variance, old, heads_live, GROUPED, EDGE)
            if last_out is not None:
                put(last_out, line, size, column, last, known, heads_live, GROUPED, EDGE)
            if maximum_out is not None:
                put(maximum_out, line, size, column, maximum, known, heads_live, GROUPED, EDGE)
            if EDGE:
                own = (column >= past) & known
                put(recent_out, line, w, column - past, total, own, heads_live, GROUPED, EDGE)

    part = (row * tl.num_programs(1) + kv) * tl.num_programs(0) + tl.program_id(0)
    tl.store(entropies + part, tl.sum(tl.sum(entropy, 1), 0) * -0.6931471805599453)
    if variance_out is not None:
        tl.store(shifts + part, tl.sum(tl.sum(shift, 1), 0) * per_pair)
    if row_sums is not None:
        lines = tl.num_programs(1) * group * w
        at = (row * (tl.num_programs(0) // tiles) + split) * lines + (kv * group + head) * w + i
        tl.store(row_sums + at, tl.sum(tl.sum(row_sum, 1), 0), mask=real)
