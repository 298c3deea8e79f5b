"""Triton kernel of `packed_attention`: one launch, which may run inside a CUDA graph.

A program handles a share of the tokens of one row, for one KV head and a tile of query tokens. All
query heads of the KV head and all query tokens of the tile are the lines of its matrix products.
It reads chunks of up to 64 tokens: first packed groups, then ordinary tokens. Tokens and channels
are on the M side of the products, because a decode step has few lines.

Both products run on tensor cores, and no key or value is dequantised. Codes less 7.5 (keys) and 3.5
(values) are exact in 16 bits, and the rest is added in float32. Codes around 0 enlarge the rounding
errors of the other operand least.

* Keys: the query times the key scales is rounded to 16 bits. A byte holds channels j and j + D/2,
  so there is one product for each half of the channels.
* Values: the probabilities times the value scales are rounded to 16 bits. A byte of the low bits
  holds channels j, j + D/4, j + D/2 and j + 3D/4. Four threads read it, and each takes its bits.

With few rows, several programs share the tokens of a row. Each writes its partial result to the
workspace and increments a counter. The last one joins the partial results in order, so that equal
calls give equal bits, and resets the counter. The grid depends on shapes only, and programs without
work exit at once.
"""

import math
from collections.abc import Sequence

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
from kvcompress_kernels.packed_attention.offsets import Offsets
from kvcompress_kernels.packed_attention.scratch import PROGRAM_LINES, PROGRAMS, workspace
from kvcompress_kernels.paged_triton import in_row

LOWEST = tl.constexpr(-1e30)
SPLITS = 64
"""Maximum programs that share the tokens of a row."""
MIN_CHUNKS = tl.constexpr(4)
"""Least chunks of a program that shares a row."""


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
def _key_codes(  # type: ignore[no-untyped-def]
    q, content, halves, token, s_row, PART: tl.constexpr, DIM: tl.constexpr, ROW: tl.constexpr
):
    """Return the scores ``[tokens, lines]`` of half the channels of packed keys.

    Args:
        q: ``[lines, PAD]``: the low half of the channels if PART is 0, else the high half.
        content, halves: the group, as bytes and as float16.
    """
    PAD: tl.constexpr = q.shape[1]
    dim = tl.arange(0, PAD)
    real = dim < DIM // 2
    at = 28 * DIM + PART * (DIM // 2) + dim  # in halves
    scale = tl.load(halves + in_row(at, s_row // 2, ROW // 2), mask=real, other=0.0)
    minimum = tl.load(halves + in_row(at + DIM, s_row // 2, ROW // 2), mask=real, other=0.0)
    at = in_row(token * (DIM // 2), s_row, ROW)[:, None] + dim[None, :]
    code = tl.load(content + at, mask=real[None, :], other=0)
    code = ((code >> 4 if PART else code & 15).to(tl.float32) - 7.5).to(q.dtype)
    scale = scale.to(tl.float32)
    scaled = (q.to(tl.float32) * scale[None, :]).to(q.dtype)
    middle = minimum.to(tl.float32) + 7.5 * scale
    base = tl.sum(q.to(tl.float32) * middle[None, :], 1)
    return tl.dot(code, tl.trans(scaled), input_precision="ieee") + base[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _value_codes(  # type: ignore[no-untyped-def]
    content, token, s_row, DIM: tl.constexpr, ROW: tl.constexpr, PAD: tl.constexpr
):
    """Return the codes of packed values less 3.5, ``[tokens, 4 * PAD]`` float32.

    Args:
        PAD: a quarter of the channels, padded.
    """
    column = tl.arange(0, 4 * PAD)
    part, dim = column // PAD, column % PAD
    real = (dim < DIM // 4)[None, :]
    at = in_row(32 * DIM + token * (DIM // 4), s_row, ROW)[:, None] + dim[None, :]
    low = tl.load(content + at, mask=real, other=0).to(tl.int32)
    at = in_row(48 * DIM + token * (DIM // 8), s_row, ROW)[:, None] + (dim % (DIM // 8))[None, :]
    high = tl.load(content + at, mask=real, other=0).to(tl.int32)
    # The second half of a quarter has the next bit of the same byte.
    bit = 2 * part + (dim >= DIM // 8).to(tl.int32)
    low = (low >> (2 * part)[None, :]) & 3
    high = (high >> bit[None, :]) & 1
    return (low | high << 2).to(tl.float32) - 3.5


@triton.jit  # type: ignore[untyped-decorator]
def _key_rows(q, rows, live, PART: tl.constexpr, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scores ``[tokens, lines]`` of half the channels of ordinary keys."""
    dim = tl.arange(0, q.shape[1])
    real = live[:, None] & (dim < DIM // 2)[None, :]
    k = tl.load(rows[:, None] + (PART * (DIM // 2) + dim)[None, :], mask=real, other=0.0)
    return _product(widened(k, q.dtype, live[:, None]), tl.trans(q))


@triton.jit  # type: ignore[untyped-decorator]
def _channels(DIM: tl.constexpr, PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the channel of each column of quarters that are padded to PAD, and which exist."""
    column = tl.arange(0, 4 * PAD)
    if DIM == 4 * PAD:
        return column, column < DIM
    return column // PAD * (DIM // 4) + column % PAD, column % PAD < DIM // 4


@triton.jit  # type: ignore[untyped-decorator]
def _joined(  # type: ignore[no-untyped-def]
    shares, size, used, lines, real, tops, DIM: tl.constexpr, PAD: tl.constexpr,
    JOINED: tl.constexpr,
):  # fmt: skip
    """Return the sums ``[4 * PAD, lines]`` of all shares, relative to the lines' tops.

    Args:
        lines: the place of each line in a share.
        real: which lines exist.
    """
    channel, known = _channels(DIM, PAD)
    result = tl.zeros([4 * PAD, tops.shape[0]], tl.float32)
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
    content,  # the same memory as bytes
    halves,  # the same memory as float16
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
    GROUP_TOKENS: tl.constexpr,  # 64
    CHUNK: tl.constexpr,  # tokens that are read at once, a part of a group
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
    ROW: tl.constexpr = 2 * DIM * ITEMSIZE
    GROUP_ROWS: tl.constexpr = 32 // ITEMSIZE
    PAGE_GROUPS: tl.constexpr = BLOCK // GROUP_ROWS
    split = tl.program_id(0)
    head, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    start = tl.load(query_start + row)
    queries = tl.load(query_start + row + 1) - start
    if tile * TILE >= queries:
        return
    length = tl.load(lengths + row)
    packed_chunks = tl.cdiv(count, GROUP_TOKENS) * (GROUP_TOKENS // CHUNK)  # in chunks
    # Ordinary tokens that the tile's last query attends to.
    seen = length - queries + tl.minimum(tile * TILE + TILE, queries)
    chunks = packed_chunks + tl.cdiv(seen, CHUNK)
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
    dim = tl.arange(0, HALF)
    inside = real[:, None] & (dim < DIM // 2)[None, :]
    q_low = tl.load(from_query[:, None] + dim[None, :], mask=inside, other=0.0)
    q_high = tl.load(from_query[:, None] + (DIM // 2 + dim)[None, :], mask=inside, other=0.0)

    top = tl.full([LINES], LOWEST, tl.float32)
    total = tl.zeros([LINES], tl.float32)
    sums = tl.zeros([4 * QUARTER, LINES], tl.float32)
    each = tl.arange(0, CHUNK)
    channel, known = _channels(DIM, QUARTER)
    s_bytes = s_row * ITEMSIZE
    for chunk in range(tl.minimum(first, packed_chunks), tl.minimum(stop, packed_chunks)):
        group = chunk // (GROUP_TOKENS // CHUNK)
        number = chunk % (GROUP_TOKENS // CHUNK) * CHUNK + each
        page = tl.load(packed + slot * s_packed + group // PAGE_GROUPS).to(tl.int64)
        at = page * s_page + head.to(tl.int64) * s_head + group % PAGE_GROUPS * GROUP_ROWS * s_row
        at = at * ITEMSIZE
        half = halves + at // 2
        s = _key_codes(q_low, content + at, half, number, s_bytes, 0, DIM, ROW)
        s += _key_codes(q_high, content + at, half, number, s_bytes, 1, DIM, ROW)
        filled = number < count - group * GROUP_TOKENS
        p, top, total, rise = _weights(s * factor, filled[:, None], top, total)
        # Memory after the last token may hold NaN.
        place = half + in_row(30 * DIM + number, s_bytes // 2, ROW // 2)
        scale = tl.load(place, mask=filled, other=0.0).to(tl.float32)
        place = half + in_row(30 * DIM + 64 + number, s_bytes // 2, ROW // 2)
        minimum = tl.load(place, mask=filled, other=0.0).to(tl.float32)
        base = tl.sum(p * (minimum + 3.5 * scale)[:, None], 0)
        w = (p * scale[:, None]).to(q_low.dtype)
        code = _value_codes(content + at, number, s_bytes, DIM, ROW, QUARTER).to(w.dtype)
        sums = sums * rise[None, :] + base[None, :]
        sums = tl.dot(tl.trans(code), w, sums, input_precision="ieee")

    for chunk in range(tl.maximum(first, packed_chunks), tl.maximum(stop, packed_chunks)):
        place = (chunk - packed_chunks) * CHUNK + each
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
            sums = _joined(shares, size, used, lines, real, top, DIM, QUARTER, JOINED)

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
        pages.view(torch.uint8),
        pages.view(torch.float16),
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


def _config(dim: int, group: int, max_query_tokens: int, itemsize: int) -> dict[str, int]:
    """Return the configuration and launch options.

    Args:
        dim: head dim.
        group: query heads per KV head.
        max_query_tokens: upper bound of a row's query tokens.
        itemsize: bytes of a number of the query. Float32 is multiplied without tensor cores.
    """
    lines = min(16 if itemsize == 4 else 32, triton.next_power_of_2(group * max_query_tokens))
    lines = max(16, lines, triton.next_power_of_2(group))
    quarter = triton.next_power_of_2(dim // 4)
    return {
        "DIM": dim,
        "GROUP": group,
        "LINES": lines,
        "HALF": triton.next_power_of_2(dim // 2),
        "QUARTER": quarter,
        "GROUP_TOKENS": GROUP,
        "CHUNK": 32 if dim > 128 or itemsize == 4 else 64,
        "JOINED": max(1, 1024 // (quarter * lines)),
        "num_warps": 4 if lines == 16 and dim in (64, 128) else 8,
        "num_stages": 3,
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
    integers: Sequence[str] = (
        "packed", "packed_tokens", "tables", "lengths", "query_start", "slots", "live", "counters",
    )  # fmt: skip
    types = {
        **dict.fromkeys(("query", "output"), "*fp32" if float32 else "*bf16"),
        **dict.fromkeys(integers, "*i32"),
        **dict.fromkeys(("factor", "key_factor", "value_scale"), "fp32"),
        "elements": kind,
        "content": "*u8",
        "halves": "*fp16",
        "partials": "*fp32",
    }
    suffix = " float32" if float32 else float8_suffix(kind)
    suffix += f" q{queries}" if queries > 1 else ""
    return Build(
        name=f"packed_attention D{dim} G{group}{suffix}",
        kernel=_packed_attention_kernel,
        config={
            "sinks": None,
            "BLOCK": 2 * 32 // itemsize,
            "ITEMSIZE": itemsize,
            **_config(dim, group, queries, 4 if float32 else 2),
        },
        types=types,
        tensor_cores=not float32,
    )
