"""Triton kernel of `packed_attention`: one launch, which may run inside a CUDA graph.

A program handles a share of the tokens of one row, for one KV head and a tile of query tokens. All
query heads of the KV head and all query tokens of the tile are the lines of its matrix products.
First it reads packed groups, then ordinary tokens. Tokens and channels are on the M side of the
products, because a decode step has few lines.

Both products run on tensor cores, and no key or value is dequantised. The query times the key
scales and the probabilities times the value scales are rounded to 16 bits. Codes are exact in 16
bits. Whatever makes them codes around 0, which enlarge the rounding errors of the other operand
least, is added in float32.

Packed groups are bound by instructions, so that their loop avoids all it can:

* Each of four warps attends to 16 tokens of a group and has its own softmax. The warps are the
  batch of the products, and are joined after the last group.
* Copies of the next two groups to shared memory are in flight.
* Bits that are written around a code make it a float, in both halves of a word at once.
* Tokens and channels are in an order in which the words that a thread reads are its operands of the
  tensor cores.

With few rows, several programs share the tokens of a row. Each writes its partial result to the
workspace and increments a counter. The last one joins the partial results in order, so that equal
calls give equal bits, and resets the counter. The grid depends on shapes only, and programs without
work exit at once.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kvcompress_kernels.builds import (
    DIMS,
    Build,
    check_cache,
    float8,
    float8_suffix,
)
from kvcompress_kernels.contract import require
from kvcompress_kernels.float8_triton import widened
from kvcompress_kernels.k4v3 import GROUP
from kvcompress_kernels.packed_attention.codes_triton import (
    as_codes,
    as_words,
    in_channel_order,
    key_codes,
    key_numbers,
    repeated,
    token_numbers,
    value_codes,
)
from kvcompress_kernels.packed_attention.offsets import Offsets
from kvcompress_kernels.packed_attention.scratch import PROGRAM_LINES, PROGRAMS, workspace
from kvcompress_kernels.paged_triton import in_row

LOWEST = tl.constexpr(-1e30)
SPLITS = 64
"""Maximum programs that share the tokens of a row."""
MIN_CHUNKS = tl.constexpr(4)
"""Least chunks of a program that shares a row."""
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@triton.jit
def _product(a, b):  # type: ignore[no-untyped-def]
    """Return ``a @ b``, in float32 if the dtypes differ."""
    if a.dtype != b.dtype:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _weights(s, live, top, total):  # type: ignore[no-untyped-def]
    """Return a chunk's weights, 0 where not `live`, and each line's new top, total and factor."""
    s = tl.where(live, s, LOWEST)
    new = tl.maximum(top, tl.max(s, 0))
    rise = tl.exp2(top - new)
    p = tl.where(live, tl.exp2(s - new[None, :]), 0.0)
    return p, new, total * rise + tl.sum(p, 0), rise


@triton.jit  # type: ignore[untyped-decorator]
def _key_rows(q, rows, live, PART: tl.constexpr, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scores ``[tokens, lines]`` of half the channels of ordinary keys."""
    dim = tl.arange(0, q.shape[1])
    real = live[:, None] & (dim < DIM // 2)[None, :]
    k = tl.load(rows[:, None] + (PART * (DIM // 2) + dim)[None, :], mask=real, other=0.0)
    return _product(widened(k, q.dtype, live[:, None]), tl.trans(q))


@triton.jit  # type: ignore[untyped-decorator]
def _channels(DIM: tl.constexpr, PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the channel of each column of eighths that are padded to PAD, and which exist."""
    column = tl.arange(0, 8 * PAD)
    if DIM == 8 * PAD:
        return column, column < DIM
    return column // PAD * (DIM // 8) + column % PAD, column % PAD < DIM // 8


@triton.jit  # type: ignore[untyped-decorator]
def _attend_to_groups(  # type: ignore[no-untyped-def]
    query,  # [LINES] pointers
    real,  # [LINES]: which lines exist
    words,  # the pages of one head, as int32
    units,  # the same memory as integers of UNIT bytes
    packed,  # [C]
    counted,  # [], `count` in memory
    count,
    first,
    last,
    factor,
    s_page,
    s_row,
    DIM: tl.constexpr,
    LINES: tl.constexpr,
    WARPS: tl.constexpr,
    UNIT: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    QUARTER: tl.constexpr,
):
    """Return the lines' tops and totals over the groups from `first` to `last`, and their sums.

    The sums are ``[4 * QUARTER, LINES]`` in the order of `_channels`.
    """
    GROUP_TOKENS: tl.constexpr = 16 * WARPS
    ROW: tl.constexpr = 2 * DIM * ITEMSIZE
    GROUP_ROWS: tl.constexpr = 32 // ITEMSIZE
    PAGE_GROUPS: tl.constexpr = BLOCK // GROUP_ROWS
    q_dtype: tl.constexpr = query.dtype.element_ty
    part = tl.arange(0, 4 * QUARTER)
    channel = part // (2 * QUARTER) * (DIM // 2) + part % (2 * QUARTER)
    inside = real[:, None] & (part % (2 * QUARTER) < DIM // 2)[None, :]
    scored = tl.load(query[:, None] + channel[None, :], mask=inside, other=0.0)
    # What `key_codes` adds to the codes less 7.5.
    offset = tl.where(part < QUARTER, 1031.5 if q_dtype == tl.float16 else 135.5, 23.5)
    scored = as_codes(scored.to(tl.float32))
    # Far above the score of a missing token, whose weight is thus 0 even if a warp has no token.
    highest = tl.full([WARPS, LINES], -1e25, tl.float32)
    parts = tl.zeros([WARPS, 16, LINES], tl.float32)
    bases = tl.zeros([WARPS, 16, LINES], tl.float32)
    sums = tl.zeros([WARPS, 4 * QUARTER, LINES], tl.float32)
    PER_WORD: tl.constexpr = 4 // ITEMSIZE
    s_words = s_row // PER_WORD
    s_units = s_row * ITEMSIZE // UNIT
    s_page_words = s_page // PER_WORD

    warp = tl.arange(0, WARPS)[:, None] * 16
    spot = tl.arange(0, 16)[None, :]
    number = warp + spot % 8 * 2 + spot // 8
    word = tl.arange(0, QUARTER // 2)
    key_at = number[:, :, None] * (DIM // 8) + word[None, None, :]
    key_at = in_row(key_at, s_words, ROW // 4)
    known_word = (word < DIM // 8)[None, None, :]

    twin = tl.arange(0, 8)[None, :]
    twin = (warp + twin % 4 * 4 + twin // 4)[:, :, None]
    # Columns of the value codes' tiles: the first and the second eighth of each quarter.
    UNITS: tl.constexpr = DIM // 8 // UNIT
    WIDTH: tl.constexpr = QUARTER // 2 // UNIT
    unit = tl.arange(0, WIDTH)[None, None, :]
    column = tl.arange(0, 2 * WIDTH)[None, None, :]
    second, known_column = column // WIDTH, column % WIDTH < UNITS
    low_at = (32 * DIM + twin * (DIM // 4)) // UNIT + second * UNITS + column % WIDTH
    high_at = (48 * DIM + twin * (DIM // 8)) // UNIT + unit
    low_next = in_row(low_at + 4 * UNITS, s_units, ROW // UNIT)
    high_next = in_row(high_at + 2 * UNITS, s_units, ROW // UNIT)
    low_at = in_row(low_at, s_units, ROW // UNIT)
    high_at = in_row(high_at, s_units, ROW // UNIT)
    known_unit = unit < UNITS

    kind = tl.arange(0, 2)[None, None, :]
    scale_at = tl.arange(0, QUARTER)[None, :, None]
    known_scale = scale_at < DIM // 4
    scale_at += tl.arange(0, 2)[:, None, None] * (DIM // 4)
    scale_at = in_row(14 * DIM + scale_at + kind * (DIM // 2), s_words, ROW // 4)
    range_at = (warp // 2 + tl.arange(0, 8)[None, :])[:, :, None] + kind * 32
    range_at = in_row(15 * DIM + range_at, s_words, ROW // 4)

    # Operands of codes may depend on loads, but not on a lane's number: a layout could not follow.
    shift = tl.load(counted + tl.zeros_like(column), mask=second > 0, other=0)
    shift = (shift > 0).to(tl.uint32)
    zero = tl.load(counted + tl.zeros_like(warp)[:, :, None], mask=warp[:, :, None] > 0, other=0)
    zero = (zero >> 31).to(tl.uint32, bitcast=True)
    upcoming = tl.load(packed + tl.minimum(first, last - 1) // PAGE_GROUPS)
    for group in tl.range(first, last, num_stages=STAGES):
        page = upcoming.to(tl.int64)
        upcoming = tl.load(packed + tl.minimum(group + 1, last - 1) // PAGE_GROUPS)
        at = page * s_page_words + group % PAGE_GROUPS * GROUP_ROWS * s_words
        in_words = words + at
        in_units = in_words if UNIT == 4 else units + at * (4 // UNIT)
        key = tl.load(in_words + key_at, mask=known_word, other=0).to(tl.uint32, bitcast=True)
        bounds = tl.load(in_words + scale_at, mask=known_scale, other=0)
        bounds = tl.split(bounds.to(tl.uint32, bitcast=True))
        ranges = tl.split(tl.load(in_words + range_at).to(tl.uint32, bitcast=True))
        low = as_words(tl.load(in_units + low_at, mask=known_column, other=0))
        low2 = as_words(tl.load(in_units + low_next, mask=known_column, other=0))
        high = as_words(tl.load(in_units + high_at, mask=known_unit, other=0))
        high2 = as_words(tl.load(in_units + high_next, mask=known_unit, other=0))
        high, high2 = repeated(high) >> shift, repeated(high2) >> shift

        scale, minimum = key_numbers(bounds[0]), key_numbers(bounds[1])
        scaled = (scored * scale[None, :]).to(q_dtype)
        middle = minimum + 7.5 * scale
        base = tl.sum(scored * middle[None, :] - offset[None, :] * scaled.to(tl.float32), 1)
        scaled = tl.broadcast_to(tl.trans(scaled)[None, :, :], (WARPS, 4 * QUARTER, LINES))
        s = tl.dot(key_codes(key, zero, q_dtype), scaled, input_precision="ieee")
        s += base[None, None, :]

        filled = number < count - group * GROUP_TOKENS
        s = tl.where(filled[:, :, None], s, LOWEST)
        new = tl.maximum(highest, tl.max(s, 1) * factor)
        rise = tl.exp2(highest - new)[:, None, :]
        p = tl.exp2(s * factor - new[:, None, :])
        highest, parts = new, parts * rise + p
        # Memory after the last token may hold NaN.
        scale = tl.where(filled, token_numbers(ranges[0]), 0.0)
        minimum = tl.where(filled, token_numbers(ranges[1]), 0.0)
        w = (p * scale[:, :, None]).to(q_dtype)
        # Codes carry an offset of 8.
        bases = bases * rise + p * (minimum + 3.5 * scale)[:, :, None] - 11.5 * w.to(tl.float32)
        codes = value_codes(low, low2, high, high2, zero, UNIT, q_dtype)
        sums = tl.dot(codes, w, sums * rise, input_precision="ieee")

    top = tl.max(highest, 0)
    weight = tl.exp2(highest - top[None, :])[:, None, :]
    total = tl.sum(tl.sum(parts * weight, 0), 0)
    base = tl.sum(tl.sum(bases * weight, 0), 0)
    sums = in_channel_order(tl.sum(sums * weight, 0), UNIT) + base[None, :]

    return top, total, sums


@triton.jit  # type: ignore[untyped-decorator]
def _joined(  # type: ignore[no-untyped-def]
    shares, size, used, lines, real, tops, DIM: tl.constexpr, PAD: tl.constexpr,
    JOINED: tl.constexpr,
):  # fmt: skip
    """Return the sums ``[8 * PAD, lines]`` of all shares, relative to the lines' tops.

    Args:
        lines: the place of each line in a share.
        real: which lines exist.
    """
    channel, known = _channels(DIM, PAD)
    result = tl.zeros([8 * PAD, tops.shape[0]], tl.float32)
    for start in range(0, used, JOINED):
        share = start + tl.arange(0, JOINED)
        at = share[:, None] * size + lines[None, :]
        live = (share < used)[:, None] & real[None, :]
        top = tl.load(shares + at, mask=live, other=LOWEST, cache_modifier=".cg")
        at = at[:, None, :] + (2 + channel)[None, :, None]
        live = live[:, None, :] & known[None, :, None]
        part = tl.load(shares + at, mask=live, other=0.0, cache_modifier=".cg")
        result += tl.sum(part * tl.exp2(top - tops[None, :])[:, None, :], 0)
    return result


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["splits", "tiles", "s_packed_tokens", "s_packed", "s_tables"]
)
def _packed_attention_kernel(  # type: ignore[no-untyped-def]
    query,  # [T, Hq, D]
    output,  # [T, Hq, D]
    elements,  # [N, Hkv, BLOCK, 2 * D]
    words,  # the same memory as int32
    units,  # the same memory as integers of UNIT bytes
    packed,  # [S, C]
    packed_tokens,  # [S]
    tables,  # [R, W]
    lengths,  # [R]
    query_start,  # [>= R + 1]
    slots,  # [>= R]
    live,  # []
    sinks,  # [Hq] or None
    counters,  # [PROGRAMS] int32, zero between launches; None if no row is shared
    partials,  # [programs, LINES, D + 2]: top, total and sums of each line
    factor,  # scale / ln 2
    key_factor,  # the same times the scale of ordinary keys
    value_scale,  # scale of ordinary values
    splits,
    tiles,
    s_query_token,
    s_query_head,
    s_output_token,
    s_output_head,
    s_page,
    s_head,
    s_row,
    s_packed,
    s_packed_tokens,
    s_tables,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    WARPS: tl.constexpr,  # 16 tokens of a group each
    UNIT: tl.constexpr,  # bytes of value codes that are read at once
    STAGES: tl.constexpr,  # one group is computed while the others are read
    CHUNK: tl.constexpr,  # ordinary tokens that are read at once
    BLOCK: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    HALF: tl.constexpr,  # DIM / 2, padded
    QUARTER: tl.constexpr,  # DIM / 4, padded
    JOINED: tl.constexpr,  # partial results that are read at once
):
    """Write the output of one tile of lines, or a share of its tokens to `partials`."""
    row = tl.program_id(2).to(tl.int64)
    if row >= tl.load(live):
        return
    slot = tl.load(slots + row).to(tl.int64)
    count = tl.load(packed_tokens + slot * s_packed_tokens)
    if count == 0:
        return
    TILE: tl.constexpr = LINES // GROUP
    split = tl.program_id(0)
    head, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    start = tl.load(query_start + row)
    queries = tl.load(query_start + row + 1) - start
    if tile * TILE >= queries:
        return
    length = tl.load(lengths + row)
    packed_groups = tl.cdiv(count, 16 * WARPS)
    # Ordinary tokens that the tile's last query attends to.
    seen = length - queries + tl.minimum(tile * TILE + TILE, queries)
    chunks = packed_groups + tl.cdiv(seen, CHUNK)
    used = tl.minimum(splits, tl.cdiv(chunks, MIN_CHUNKS))
    if split >= used:
        return
    first, stop = chunks * split // used, chunks * (split + 1) // used

    line = tl.arange(0, LINES)
    i = tile * TILE + line // GROUP
    q_head = head * GROUP + line % GROUP
    real = (line < TILE * GROUP) & (i < queries)
    token = (start + i).to(tl.int64)
    from_query = query + token * s_query_token + q_head * s_query_head
    group_first, group_last = tl.minimum(first, packed_groups), tl.minimum(stop, packed_groups)
    of_head = head.to(tl.int64) * s_head * ITEMSIZE
    top, total, sums = _attend_to_groups(
        from_query, real, words + of_head // 4, units + of_head // UNIT, packed + slot * s_packed,
        packed_tokens + slot * s_packed_tokens, count, group_first, group_last, factor,
        s_page, s_row, DIM, LINES, WARPS, UNIT, STAGES, BLOCK, ITEMSIZE, QUARTER,
    )  # fmt: skip

    dim = tl.arange(0, HALF)
    inside = real[:, None] & (dim < DIM // 2)[None, :]
    q_low = tl.load(from_query[:, None] + dim[None, :], mask=inside, other=0.0)
    q_high = tl.load(from_query[:, None] + (DIM // 2 + dim)[None, :], mask=inside, other=0.0)
    each = tl.arange(0, CHUNK)
    channel, known = _channels(DIM, QUARTER // 2)
    for chunk in range(tl.maximum(first, packed_groups), tl.maximum(stop, packed_groups)):
        place = (chunk - packed_groups) * CHUNK + each
        listed = place < seen
        page = tl.load(tables + row * s_tables + place // BLOCK, mask=listed, other=0)
        at = page.to(tl.int64) * s_page + head.to(tl.int64) * s_head
        rows = elements + at + (place % BLOCK).to(tl.int64) * s_row
        s = _key_rows(q_low, rows, listed, 0, DIM) + _key_rows(q_high, rows, listed, 1, DIM)
        visible = place[:, None] <= (length - queries + i)[None, :]
        p, top, total, rise = _weights(s * key_factor, visible, top, total)
        w = (p * value_scale).to(q_low.dtype)
        there = listed[:, None] & known[None, :]
        v = tl.load(rows[:, None] + (DIM + channel)[None, :], mask=there, other=0.0)
        v = widened(v, w.dtype, listed[:, None])
        sums = sums * rise[None, :] + _product(tl.trans(v), w)

    last = used == 1
    if counters is not None and used > 1:
        tile_index = row * tl.num_programs(1) + tl.program_id(1)
        size = LINES * (DIM + 2)
        shares = partials + tile_index * splits * size
        lines = line * (DIM + 2)
        own = shares + split * size + lines
        tl.store(own, top, mask=real)
        tl.store(own + 1, total, mask=real)
        place = own[None, :] + (2 + channel)[:, None]
        tl.store(place, sums, mask=real[None, :] & known[:, None])
        tl.debug_barrier()  # the atomic operation of one thread publishes the stores of all
        arrived = tl.atomic_add(counters + tile_index, 1, sem="acq_rel", scope="gpu")
        last = arrived == used - 1
        if last:
            tl.store(counters + tile_index, 0)
            top = tl.full([LINES], LOWEST, tl.float32)
            total = tl.zeros([LINES], tl.float32)
            for begin in range(0, used, 8):
                share = begin + tl.arange(0, 8)
                at = share[:, None] * size + lines[None, :]
                there = (share < used)[:, None] & real[None, :]
                tops = tl.load(shares + at, mask=there, other=LOWEST, cache_modifier=".cg")
                totals = tl.load(shares + at + 1, mask=there, other=0.0, cache_modifier=".cg")
                new = tl.maximum(top, tl.max(tops, 0))
                total = total * tl.exp2(top - new)
                total += tl.sum(totals * tl.exp2(tops - new[None, :]), 0)
                top = new
            sums = _joined(shares, size, used, lines, real, top, DIM, QUARTER // 2, JOINED)

    if last:
        inverse = 1.0 / tl.where(real, total, 1.0)
        if sinks is not None:
            # Scores are exponents of 2.
            sink = tl.load(sinks + q_head, mask=real, other=0.0) * 1.4426950408889634
            new = tl.maximum(top, sink)
            rise = tl.exp2(top - new)
            inverse = rise / (tl.where(real, total, 1.0) * rise + tl.exp2(sink - new))
        place = output + token * s_output_token + q_head * s_output_head
        place = place[None, :] + channel[:, None]
        tl.store(place, sums * inverse[None, :], mask=real[None, :] & known[:, None])


def run(
    query: torch.Tensor,
    output: torch.Tensor,
    pages: torch.Tensor,
    offsets: Offsets | None,
    packed: torch.Tensor,
    packed_tokens: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    query_start: torch.Tensor,
    slots: torch.Tensor,
    live: torch.Tensor,
    *,
    scale: float,
    max_query_tokens: int,
    key_scale: float,
    value_scale: float,
    sinks: torch.Tensor | None,
    scratch: torch.Tensor | None,
) -> None:
    name, rows = "packed_attention", len(lengths)
    check_cache(name, pages)
    require(scale > 0, name, "scale must be positive", scale)
    (count, heads, dim), (_, kv_heads, block, _) = query.shape, pages.shape
    if rows == 0 or count == 0:
        return
    group = heads // kv_heads
    config = _config(dim, group, max_query_tokens, query.itemsize)
    tiles = triton.cdiv(max_query_tokens, config["LINES"] // group)
    programs = kv_heads * tiles * rows
    splits = max(1, min(SPLITS, PROGRAMS // programs, PROGRAM_LINES // config["LINES"] // programs))
    counters, partials = None, None
    if splits > 1:
        if scratch is None:
            scratch = workspace(heads, kv_heads, dim, rows=rows, device=query.device)
        size = PROGRAMS + programs * splits * config["LINES"] * (dim + 2)
        rule = f"workspace must hold {size} numbers"
        require(len(scratch) >= size, name, rule, len(scratch))
        counters, partials = scratch.view(torch.int32), scratch[PROGRAMS:]
    factor = scale / math.log(2)
    _packed_attention_kernel[(splits, kv_heads * tiles, rows)](
        query,
        output,
        pages,
        pages.view(torch.int32),
        pages.view(_UNITS[config["UNIT"]]),
        packed,
        packed_tokens,
        tables,
        lengths,
        query_start,
        slots,
        live,
        sinks,
        counters,
        partials,
        factor,
        factor * key_scale,
        value_scale,
        splits,
        tiles,
        *query.stride()[:2],
        *output.stride()[:2],
        *pages.stride()[:3],
        packed.stride(0),
        packed_tokens.stride(0),
        tables.stride(0),
        BLOCK=block,
        ITEMSIZE=pages.itemsize,
        **config,
    )


def _config(dim: int, group: int, max_query_tokens: int, itemsize: int) -> dict[str, Any]:
    """Return the configuration and launch options.

    Args:
        dim: head dim.
        group: query heads per KV head.
        max_query_tokens: upper bound of a row's query tokens.
        itemsize: bytes of a number of the query. Float32 is multiplied without tensor cores.
    """
    # Each warp holds sums of all lines and channels.
    most = 8 if dim > 128 or itemsize == 4 else 16
    lines = min(most, triton.next_power_of_2(group * max_query_tokens))
    lines = max(8, lines, triton.next_power_of_2(group))
    quarter = triton.next_power_of_2(dim // 4)
    return {
        "DIM": dim,
        "GROUP": group,
        "LINES": lines,
        "HALF": triton.next_power_of_2(dim // 2),
        "QUARTER": quarter,
        "WARPS": GROUP // 16,
        "UNIT": next(u for u in (4, 2, 1) if dim % (8 * u) == 0 and dim > 16 * u),
        "STAGES": 4,
        "CHUNK": 16 if itemsize == 4 else 32,
        "JOINED": max(1, 1024 // (quarter * lines)),
        "num_warps": GROUP // 16,
        "num_stages": 3,
        # 168 let three programs share an SM. With a head dim of 96 they would spill.
        "maxnreg": {64: 168, 96: 200, 128: 168}.get(dim) if lines == 8 and itemsize == 2 else None,
    }


def builds(sm: int) -> list[Build]:
    """Return builds of decode steps for blocks of 16, in bf16, float32 and float8."""
    all_builds = [_build(dim, group, "*bf16", sm) for dim in DIMS for group in (4, 8)]
    all_builds.append(_build(128, 7, "*bf16", sm))
    all_builds.append(_build(128, 4, "*bf16", sm, queries=64))
    all_builds.append(_build(128, 4, "*fp32", sm))
    all_builds += [_build(128, 4, kind, sm) for kind in float8(sm).values()]
    return all_builds


def _build(dim: int, group: int, kind: str, sm: int, *, queries: int = 1) -> Build:
    float32 = kind == "*fp32"
    itemsize = 4 if float32 else 2 if kind == "*bf16" else 1
    config = _config(dim, group, queries, 4 if float32 else 2)
    integers: Sequence[str] = (
        "packed", "packed_tokens", "tables", "lengths", "query_start", "slots", "live", "counters",
    )  # fmt: skip
    types = {
        **dict.fromkeys(("query", "output"), "*fp32" if float32 else "*bf16"),
        **dict.fromkeys(integers, "*i32"),
        **dict.fromkeys(("factor", "key_factor", "value_scale"), "fp32"),
        "elements": kind,
        "words": "*i32",
        "units": {1: "*u8", 2: "*i16", 4: "*i32"}[config["UNIT"]],
        "partials": "*fp32",
    }
    suffix = " float32" if float32 else float8_suffix(kind)
    suffix += f" q{queries}" if queries > 1 else ""
    return Build(
        name=f"packed_attention D{dim} G{group}{suffix}",
        kernel=_packed_attention_kernel,
        config={
            "sinks": None,
            "BLOCK": max(16, 32 // itemsize),
            "ITEMSIZE": itemsize,
            **config,
        },
        types=types,
        tensor_cores=not float32,
        unpacked=2 * GROUP * dim,
    )
