"""`select` and `select_chunks` in Triton: a radix search for the threshold, then a compaction.

Floats become unsigned integers of the same order. The smallest kept one is found digit by digit
from the top: a histogram of the digit over the columns that agree with the digits so far, then
the bin in which the count reaches what is to be kept. It stops early where a bin is taken whole.
What lies above the threshold is kept, and of what is level with it the first ones; prefix sums
give each its place. Counts are integers, so the result does not depend on any order.

One program does all of a row. At 256 rows that is two on each of the 132 processors of an H200,
with 16 warps each when rows are long: enough loads in flight without partial histograms in memory
or further launches. Passes after the first read from L2 as long as the scores fit (50 MB).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcompress_kernels.builds import Build

BITS = tl.constexpr(8)
BINS = tl.constexpr(256)
PART = 16
"""Tokens of a chunk that are read or written at once."""
TOKENS = 1024
"""Tokens that a program of `_chunk_keys_kernel` holds."""


class Shape(NamedTuple):
    tile: int
    """AttentionStats, or chunks, at a time; at most 2**14: two counts of a tile share an int32."""
    warps: int


@triton.jit
def _in_order32(score):  # type: ignore[no-untyped-def]
    """float32 as uint32 of the same order; NaN as -inf, -0.0 as 0.0."""
    bits = score.to(tl.uint32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0xFF800000, bits)
    bits = tl.where(bits == 0x80000000, 0, bits)
    return bits ^ tl.where((bits >> 31) == 0, 0x80000000, 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _in_order64(score):  # type: ignore[no-untyped-def]
    """float64, not NaN, as int64 whose bits are a uint64 of the same order; -0.0 as 0.0."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int64, bitcast=True)
    lowest = tl.full(bits.shape, -(2**63), tl.int64)
    return bits ^ ((bits >> 63) | lowest)


@triton.jit
def _agrees(key, prefix, shift):  # type: ignore[no-untyped-def]
    """Whether `key` has the digits of `prefix` above the one at `shift`."""
    return ((key ^ prefix) >> shift) >> BITS == 0


@triton.jit
def _digit(key, shift):  # type: ignore[no-untyped-def]
    return ((key >> shift) & (BINS - 1)).to(tl.int32)


@triton.jit
def _narrow(held, prefix, room, searching, shift):  # type: ignore[no-untyped-def]
    """The next digit of the threshold from what each bin holds: (prefix, room, searching)."""
    above = tl.cumsum(held, 0, reverse=True) - held
    here = (above < room) & (above + held >= room)  # one bin while searching, else none
    digit = tl.sum(tl.where(here, tl.arange(0, BINS), 0), 0)
    room -= tl.sum(tl.where(here, above, 0), 0)
    whole = searching & (tl.sum(tl.where(here, held, 0), 0) == room)
    prefix |= digit.to(prefix.dtype) << shift
    # all of the bin: everything above ``prefix - 1``; no float has key 0
    prefix = tl.where(whole, tl.maximum(prefix, 1) - 1, prefix)
    return prefix, tl.where(whole, 0, room), searching & (whole == 0)


@triton.jit(do_not_specialize=["most"])  # type: ignore[untyped-decorator]
def _select_kernel(  # type: ignore[no-untyped-def]
    scores, columns, keep, first, last, out, most, width, s_row, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    scores += row * s_row
    out += row * most
    n = tl.load(columns + row)
    count = tl.maximum(tl.minimum(tl.minimum(tl.load(keep + row), n), most), 0)
    head = tl.minimum(tl.maximum(tl.load(first + row), 0), count)
    tail = tl.minimum(tl.maximum(tl.load(last + row), 0), count - head)
    end = n - tail
    room = count - head - tail  # of what is level with the threshold, in the end
    searching = room > 0
    prefix = tl.where(searching, 0, 0xFFFFFFFF).to(tl.uint32)  # above all floats: none is kept
    lane = tl.arange(0, TILE)

    shift = tl.full([], 32, tl.uint32)
    for _ in range(0, 32 // BITS):
        shift -= BITS
        held = tl.zeros([BINS], tl.int32)
        for start in range(0, tl.where(searching, end, 0), TILE):
            column = start + lane
            live = (column >= head) & (column < end)
            # of the whole row: a bound that is a multiple of 16 lets four scores be one load
            key = _in_order32(tl.load(scores + column, mask=column < width, other=0.0))
            live &= _agrees(key, prefix, shift)
            held += tl.histogram(_digit(key, shift), BINS, mask=live)
        prefix, room, searching = _narrow(held, prefix, room, searching, shift)

    kept, level = 0, 0  # so far
    for start in range(0, tl.where(count > 0, n, 0), TILE):
        column = start + lane
        live = (column >= head) & (column < end)
        key = _in_order32(tl.load(scores + column, mask=column < width, other=0.0))
        above = (live & (key > prefix)) | ((live == 0) & (column < n))
        equal = live & (key == prefix)
        both = above.to(tl.int32) + (equal.to(tl.int32) << 16)
        before = tl.cumsum(both, 0) - both
        ties = level + (before >> 16)
        slot = kept + (before & 0xFFFF) + tl.minimum(ties, room)
        tl.store(out + slot, column, mask=above | (equal & (ties < room)))
        total = tl.sum(both, 0)
        kept += total & 0xFFFF
        level += total >> 16
    for start in range(count, most, TILE):
        tl.store(out + start + lane, -1, mask=start + lane < most)


@triton.jit(do_not_specialize=["number"])  # type: ignore[untyped-decorator]
def _chunk_keys_kernel(  # type: ignore[no-untyped-def]
    scores, columns, keys, size, heads, number, s_row, TILE: tl.constexpr, PART: tl.constexpr
):
    """Worth of each chunk: scores of a token summed over heads, averaged over the chunk."""
    row = tl.program_id(1).to(tl.int64)
    scores += row * heads * s_row
    n = tl.load(columns + row)
    chunk = tl.program_id(0) * TILE + tl.arange(0, TILE)
    length = tl.minimum(tl.maximum(n - chunk * size, 0), size)
    worth = tl.zeros([TILE], tl.float64)
    lost = tl.zeros([TILE], tl.int32)  # of its scores, those that are NaN or -inf
    for part in range(0, size, PART):
        inside = part + tl.arange(0, PART)
        live = inside[None, :] < length[:, None]
        at = scores + (chunk * size)[:, None] + inside[None, :]
        token = tl.zeros([TILE, PART], tl.float64)
        bad = tl.zeros([TILE, PART], tl.int32)
        for head in range(0, heads):
            score = tl.load(at + head * s_row, mask=live, other=0.0).to(tl.float64)
            token += tl.where(score > float("-inf"), score, 0.0)
            bad += (score > float("-inf")) == 0
        worth += tl.sum(token, 1)
        lost += tl.sum(bad, 1)
    # one of them makes the sum -inf, or NaN beside +inf, which ranks as -inf
    worth = tl.where(lost > 0, float("-inf"), worth / tl.maximum(length, 1).to(tl.float64))
    tl.store(keys + row * number + chunk, _in_order64(worth), mask=chunk < number)


@triton.jit(do_not_specialize=["most", "number"])  # type: ignore[untyped-decorator]
def _select_chunks_kernel(  # type: ignore[no-untyped-def]
    keys, columns, keep, out, most, size, number, TILE: tl.constexpr, PART: tl.constexpr
):
    """As `_select_kernel`, of chunks that weigh as much as they have tokens."""
    row = tl.program_id(0).to(tl.int64)
    keys += row * number
    out += row * most
    n = tl.load(columns + row)
    count = tl.maximum(tl.minimum(tl.minimum(tl.load(keep + row), n), most), 0)
    chunks = tl.where(count > 0, tl.cdiv(n, size), 0)
    missing = chunks * size - n  # tokens that the last chunk lacks
    ending = tl.load(keys + chunks - 1, mask=chunks > 0, other=0).to(tl.uint64, bitcast=True)
    room = count  # tokens
    searching = room > 0
    prefix = tl.zeros([], tl.uint64)
    lane = tl.arange(0, TILE)
    bins = tl.arange(0, BINS)

    shift = tl.full([], 64, tl.uint64)
    for _ in range(0, 64 // BITS):
        shift -= BITS
        held = tl.zeros([BINS], tl.int32)
        for start in range(0, tl.where(searching, chunks, 0), TILE):
            live = start + lane < chunks
            key = tl.load(keys + start + lane, mask=live, other=0).to(tl.uint64, bitcast=True)
            live &= _agrees(key, prefix, shift)
            held += tl.histogram(_digit(key, shift), BINS, mask=live)
        short = searching & _agrees(ending, prefix, shift) & (bins == _digit(ending, shift))
        held = held * size - tl.where(short, missing, 0)
        prefix, room, searching = _narrow(held, prefix, room, searching, shift)

    kept, level = 0, 0  # so far, in tokens; only the last chunk is short, and none follows it
    for start in range(0, chunks, TILE):
        chunk = start + lane
        live = chunk < chunks
        key = tl.load(keys + chunk, mask=live, other=0).to(tl.uint64, bitcast=True)
        above = (live & (key > prefix)).to(tl.int32)
        equal = (live & (key == prefix)).to(tl.int32)
        ties = level + (tl.cumsum(equal, 0) - equal) * size
        slot = kept + (tl.cumsum(above, 0) - above) * size + tl.minimum(ties, room)
        length = tl.minimum(n - chunk * size, size)
        length = above * length + equal * tl.minimum(tl.maximum(room - ties, 0), length)
        for part in range(0, size, PART):
            inside = part + tl.arange(0, PART)
            token = (chunk * size)[:, None] + inside[None, :]
            live2 = inside[None, :] < length[:, None]
            tl.store(out + slot[:, None] + inside[None, :], token, mask=live2)
        kept += tl.sum(above, 0) * size
        level += tl.sum(equal, 0) * size
    for start in range(count, most, TILE):
        tl.store(out + start + lane, -1, mask=start + lane < most)


def _shape(width: int) -> Shape:
    """For rows of `width` columns."""
    if width <= 2048:
        return Shape(1024, 4)
    return Shape(4096, 8) if width <= 32768 else Shape(8192, 16)


def _chunks_tile(part: int) -> int:
    """Chunks at a time in `_select_chunks_kernel`, each with the places of `part` tokens."""
    return min(1024, 4096 // part)


def run(
    scores: torch.Tensor,
    columns: torch.Tensor,
    keep: torch.Tensor,
    most: int,
    first: torch.Tensor,
    last: torch.Tensor,
) -> torch.Tensor:
    rows, width = scores.shape
    out = torch.empty(rows, most, dtype=torch.int32, device=scores.device)
    if rows and most:
        tile, warps = _shape(width)
        stride = scores.stride(0)
        _select_kernel[(rows,)](
            scores, columns, keep, first, last, out, most, width, stride, tile, num_warps=warps
        )
    return out


def chunks(
    scores: torch.Tensor,
    columns: torch.Tensor,
    keep: torch.Tensor,
    most: int,
    size: int,
    heads: int,
) -> torch.Tensor:
    # A chunk that is longer than the row is the whole row too.
    size = min(size, max(scores.shape[1], 1))
    rows, number = len(scores) // heads, -(-scores.shape[1] // size)
    out = torch.empty(rows, most, dtype=torch.int32, device=scores.device)
    if rows and most:
        part = min(triton.next_power_of_2(size), PART)
        keys = torch.empty(rows, number, dtype=torch.int64, device=scores.device)
        if number:
            tile = TOKENS // part
            _chunk_keys_kernel[(triton.cdiv(number, tile), rows)](
                scores, columns, keys, size, heads, number, scores.stride(0), tile, part
            )
        _select_chunks_kernel[(rows,)](
            keys, columns, keep, out, most, size, number, _chunks_tile(part), part, num_warps=4
        )
    return out


def builds(sm: int) -> list[Build]:
    rows = dict(columns="*i32", keep="*i32", out="*i32", most="i32")
    scored = dict(scores="*fp32", first="*i32", last="*i32", width="i32", s_row="i32")
    keyed = dict(scores="*fp32", columns="*i32", keys="*i64", size="i32", heads="i32")
    all_builds = [
        Build(
            name=f"select tile={shape.tile}",
            kernel=_select_kernel,
            signature=rows | scored,
            constexprs=dict(TILE=shape.tile),
            warps=shape.warps,
            aligned=(*(rows.keys() - {"most"}), *scored),
        )
        for shape in (_shape(2048), _shape(32768), _shape(131072))
    ]
    for part in (1, PART):
        all_builds += [
            Build(
                name=f"select chunk_keys part={part}",
                kernel=_chunk_keys_kernel,
                signature=keyed | dict(number="i32", s_row="i32"),
                constexprs=dict(TILE=TOKENS // part, PART=part),
                aligned=("scores", "columns", "keys", "s_row"),
                # A chunk may start anywhere, so its scores are not aligned.
                wide_loads=False,
            ),
            Build(
                name=f"select chunks part={part}",
                kernel=_select_chunks_kernel,
                signature=rows | dict(keys="*i64", size="i32", number="i32"),
                constexprs=dict(TILE=_chunks_tile(part), PART=part),
                aligned=("keys", "columns", "keep", "out"),
                # A row may have an odd number of keys, so the next one is not aligned.
                wide_loads=False,
            ),
        ]
    return all_builds
