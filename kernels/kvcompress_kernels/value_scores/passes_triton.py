"""Four Triton kernels of `value_scores`, which `triton.py` launches.

They read V twice. Float8 is converted exactly to bfloat16 or float32 when it is loaded.

1. `heaviest_kernel`, per split of the tokens and query head: the heaviest token and the weight of
   the other tokens. The heaviest token must not be subtracted from a sum that includes it, because
   that would cancel (`cpu.py`).
2. `sum_kernel`, per split and KV head: ``sum_j h_j v_j`` for the G query heads, without the
   heaviest token of the split. The product runs on the tensor cores with full float32 precision: h
   is split into three parts of 8 bits, whose products with 16-bit values are exact. The parts of
   all heads are rows of one operand.
3. `join_kernel`, per query head: the sum over all splits, including their heaviest tokens except
   the heaviest token of the prompt.
4. `score_kernel`, per tile of tokens and KV head: the scores. A thread holds contiguous dims of a
   token, ``[tokens, 32]`` at a time, so that a norm takes 2 shuffles instead of 4.

All splits have the same size and each sum has a fixed order, so results are the same in every run.
"""

import triton
import triton.language as tl

from kvcompress_kernels.float8_triton import widened

PARTS = tl.constexpr(4)
"""Rows of the left operand per query head: three parts of h and a row of zeros."""
CHUNK = tl.constexpr(32)
"""Head dims per register tile. Four threads load 16 bytes each."""
VARY = ["width", "s_pages"]
"""Integers that differ by prompt. Triton would specialise for 1 and for multiples of 16."""


@triton.jit  # type: ignore[untyped-decorator]
def _rows(values, pages, token, dim, live, block, s_page, s_slot, s_dim, DIM, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load values ``[tokens, dims]`` of one KV head, 0 outside `live` and past the head dim."""
    if BLOCK:  # dividing by a constant is cheaper
        index, slot = token // BLOCK, token % BLOCK
    else:
        index, slot = token // block, token % block
    page = tl.load(pages + index, mask=live, other=0).to(tl.int64)
    at = (page * s_page + slot.to(tl.int64) * s_slot)[:, None] + dim[None, :].to(tl.int64) * s_dim
    return tl.load(values + at, mask=live[:, None] & (dim < DIM)[None, :], other=0.0)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=VARY,
    do_not_specialize_on_alignment=["tokens"],
)
def heaviest_kernel(  # type: ignore[no-untyped-def]
    weights, tokens, heaviest, rests, width, SPLIT: tl.constexpr
):
    """Write each split's heaviest token and the weight of its other tokens, ``[N, Hq, splits]``.

    Ties go to the earlier token.
    """
    split, head, n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = split * SPLIT
    count = tl.load(tokens + n).to(tl.int32)
    if start >= count:
        return
    row = n * tl.num_programs(1) + head
    lane = tl.arange(0, SPLIT)
    h = tl.load(weights + row * width + start + lane, mask=start + lane < count, other=-1.0)
    top = tl.argmax(h, 0)
    rest = tl.sum(tl.where((lane != top) & (h >= 0.0), h, 0.0), 0)
    out = row * tl.num_programs(0) + split
    tl.store(heaviest + out, start + top)
    tl.store(rests + out, rest)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=VARY,
    do_not_specialize_on_alignment=["pages", "tokens"],
)
def sum_kernel(  # type: ignore[no-untyped-def]
    weights,
    values,
    pages,
    tokens,
    heaviest,
    sums,
    block,
    width,
    s_pages,
    s_page,
    s_head,
    s_slot,
    s_dim,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the weighted sums ``[N, heads, splits, D]`` without each split's heaviest token.

    With FAST, sum all values with weight 1, for one head per KV head.
    """
    split, kv_head, n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = split * SPLIT
    end = tl.minimum(tl.load(tokens + n).to(tl.int32), start + SPLIT)
    if start >= end:
        return
    pages += n * s_pages
    values += kv_head.to(tl.int64) * s_head
    head = tl.arange(0, HEADS)
    splits = tl.cdiv(width, SPLIT)
    first_head = (n * tl.num_programs(1) + kv_head) * GROUP
    row = tl.arange(0, HEADS * PARTS)
    part = row % PARTS
    skip = tl.full([HEADS * PARTS], -1, tl.int32)
    if not FAST:
        at = heaviest + first_head * splits + split
        skip = tl.load(at + row // PARTS * splits, mask=row // PARTS < GROUP, other=-1)
    dim = tl.arange(0, PAD)
    total = tl.zeros([HEADS * PARTS, PAD], tl.float32)
    for first in range(start, end, TILE):
        token = first + tl.arange(0, TILE)
        live = token < end
        v = _rows(values, pages, token, dim, live, block, s_page, s_slot, s_dim, DIM, BLOCK)
        v = widened(v, tl.bfloat16, live[:, None])
        if FAST:
            h = tl.where((row == 0)[:, None] & live[None, :], 1.0, 0.0)
        else:
            weigh = (row // PARTS < GROUP)[:, None] & live[None, :]
            h = tl.load(
                weights + ((first_head + row // PARTS) * width)[:, None] + token[None, :],
                mask=weigh & (token[None, :] != skip[:, None]),
                other=0.0,
            )
            if v.dtype == tl.float32:
                h = tl.where((part == 0)[:, None], h, 0.0)
            else:
                high = h.to(tl.bfloat16).to(tl.float32)
                mid = (h - high).to(tl.bfloat16).to(tl.float32)
                rest_of_h = tl.where((part == 2)[:, None], h - high - mid, 0.0)
                h = tl.where((part == 1)[:, None], mid, rest_of_h)
                h = tl.where((part == 0)[:, None], high, h)
        if v.dtype == tl.bfloat16:
            total = tl.dot(h.to(tl.bfloat16), v, total)
        elif v.dtype == tl.float16:  # Weights exceed its range. tf32 holds both operands exactly.
            total = tl.dot(h, v.to(tl.float32), total, input_precision="tf32")
        else:
            total = tl.dot(h, v, total, input_precision="ieee")
    of_head = tl.sum(tl.reshape(total, [HEADS, PARTS, PAD]), 1)
    tl.store(
        sums + (((first_head + head) * splits + split) * DIM)[:, None] + dim[None, :],
        of_head,
        mask=(head < GROUP)[:, None] & (dim < DIM)[None, :],
    )


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=VARY,
    do_not_specialize_on_alignment=["pages", "tokens"],
)
def join_kernel(  # type: ignore[no-untyped-def]
    weights,
    values,
    pages,
    tokens,
    heaviest,
    rests,
    sums,
    outputs,
    alone,
    alone_score,
    block,
    width,
    s_pages,
    s_page,
    s_head,
    s_slot,
    s_dim,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write outputs o ``[N, Hq, D]``, the token with over half of the weight, and its score.

    The token is -1 if no token has more than half of the weight.
    """
    head, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.load(tokens + n).to(tl.int32)
    splits, used = tl.cdiv(width, SPLIT), tl.cdiv(count, SPLIT)
    out = n * tl.num_programs(0) + head
    dim = tl.arange(0, PAD)
    pages += n * s_pages
    values += (head // GROUP).to(tl.int64) * s_head
    weights += out * width
    heaviest += out * splits
    rests += out * splits
    sums += (out // GROUP if FAST else out) * splits * DIM
    top, best = -1.0, 0
    for first in range(0, used, TILE):
        split = first + tl.arange(0, TILE)
        token = tl.load(heaviest + split, mask=split < used, other=0)
        h = tl.load(weights + token, mask=split < used, other=-1.0)
        most = tl.max(h, 0)
        earliest = tl.min(tl.where(h == most, token, 2147483647), 0)
        best = tl.where(most > top, earliest, best)
        top = tl.maximum(most, top)
    total = tl.zeros([TILE, PAD], tl.float32)
    left = tl.zeros([TILE], tl.float32)
    for first in range(0, used, TILE):
        split = first + tl.arange(0, TILE)
        live = split < used
        total += tl.load(
            sums + split[:, None] * DIM + dim[None, :],
            mask=live[:, None] & (dim < DIM)[None, :],
            other=0.0,
        )
        token = tl.load(heaviest + split, mask=live, other=0)
        live &= token != best
        h = tl.load(weights + token, mask=live, other=0.0)
        left += tl.load(rests + split, mask=split < used, other=0.0) + h
        if not FAST:
            v = _rows(values, pages, token, dim, live, block, s_page, s_slot, s_dim, DIM, BLOCK)
            total += h[:, None] * v.to(tl.float32)
    o = tl.sum(total, 0)
    rest = tl.sum(left, 0)
    token = best + tl.arange(0, 1)
    live = token < count
    v = _rows(values, pages, token, dim, live, block, s_page, s_slot, s_dim, DIM, BLOCK)
    v = tl.sum(v.to(tl.float32), 0)
    if FAST:
        o /= count.to(tl.float32)
        apart = o - v
        share = top / tl.maximum(rest, 1e-6)
    else:
        apart = o / tl.where(rest > 0.0, rest, 1.0) - v
        share = top
        o += top * v
    tl.store(alone + out, tl.where((rest > 0.0) & (top > 0.5), best, -1))
    tl.store(alone_score + out, share * tl.sqrt(tl.sum(apart * apart, 0)))
    tl.store(outputs + out * DIM + dim, o, mask=dim < DIM)


@triton.jit  # type: ignore[untyped-decorator]
def _distance(v, output, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return ``||o - v_j||`` of each token ``[tokens]``, for a tuple v of ``[tokens, CHUNK]``."""
    e = tl.arange(0, CHUNK)
    squares = tl.zeros(v[0].shape, tl.float32)
    for c in tl.static_range(len(v)):
        o = tl.load(output + c * CHUNK + e, mask=c * CHUNK + e < DIM, other=0.0)
        apart = o[None, :] - v[c]
        squares += apart * apart
    return tl.sqrt(tl.sum(squares, 1))


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=VARY,
    do_not_specialize_on_alignment=["pages", "tokens"],
)
def score_kernel(  # type: ignore[no-untyped-def]
    weights,
    values,
    pages,
    tokens,
    outputs,
    alone,
    alone_score,
    scores,
    block,
    width,
    s_pages,
    s_page,
    s_head,
    s_slot,
    s_dim,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
    L2: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the scores ``[N, Hkv, width]``, 0 past a prompt."""
    kv_head, n = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = token < tl.load(tokens + n).to(tl.int32)
    pages += n * s_pages
    values += kv_head.to(tl.int64) * s_head
    v = ()
    for c in tl.static_range(0, DIM, CHUNK):
        dim = c + tl.arange(0, CHUNK)
        part = _rows(values, pages, token, dim, live, block, s_page, s_slot, s_dim, DIM, BLOCK)
        v = v + (part.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    here = n * tl.num_programs(1) + kv_head
    if FAST:
        distance = _distance(v, outputs + here * GROUP * DIM, DIM)
    total = tl.zeros([TILE], tl.float32)
    for g in range(GROUP):
        head = here * GROUP + g
        h = tl.load(weights + head * width + token, mask=live, other=0.0)
        if not FAST:
            distance = _distance(v, outputs + head * DIM, DIM)
        change = h / tl.maximum(1.0 - h, 1e-6) * distance
        most = token == tl.load(alone + head)
        change = tl.where(most, tl.load(alone_score + head), change)
        total += change * change if L2 else change
    total = tl.sqrt(total) if L2 else total / GROUP
    tl.store(scores + here * width + token, total, mask=token < width)
