"""Triton kernels of `select` and `select_chunks`: radix search for a threshold, then compaction.

Scores become unsigned integers of the same order. The search finds the threshold, which is the
smallest kept score, one 8-bit digit at a time from the top. Each step makes a histogram of the
digit over the columns that match the digits so far, then picks the bin in which the count reaches
the number of kept columns. It stops early if it keeps all of a bin. The compaction keeps all
columns above the threshold, and the first of the columns that equal it. Prefix sums give each
column its output position. Counts are integers, so the result does not depend on the order of
additions.

One program handles one row. 256 rows are two programs on each of the 132 multiprocessors of an
H200, with up to 16 warps each for long rows. That keeps enough loads in flight without partial
histograms in memory or further launches. Passes after the first read from L2 if the scores fit into
its 50 MB.
"""

import torch
import triton
import triton.language as tl

from kvcompress_kernels.builds import Build
from kvcompress_kernels.radix_triton import BINS, BITS, digit_at, matches_prefix, sortable_bits32

PART = 16
"""Maximum number of tokens of a chunk that are read or written at once."""
TOKENS = 1024
"""Tokens per program of `_chunk_keys_kernel`."""


@triton.jit
def _in_order64(score):  # type: ignore[no-untyped-def]
    """Return float64 scores, not NaN, as int64 with the bits of a uint64 of the same order.

    -0.0 equals 0.0.
    """
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int64, bitcast=True)
    lowest = tl.full(bits.shape, -(2**63), tl.int64)
    return bits ^ ((bits >> 63) | lowest)


@triton.jit
def _narrow(held, prefix, room, searching, shift):  # type: ignore[no-untyped-def]
    """Find the next digit of the threshold from the histogram: (prefix, room, searching).

    `held` is the histogram, and `room` the number of positions left for the matching columns.
    """
    above = tl.cumsum(held, 0, reverse=True) - held
    here = (above < room) & (above + held >= room)  # true in one bin while searching, else in none
    digit = tl.sum(tl.where(here, tl.arange(0, BINS), 0), 0)
    room -= tl.sum(tl.where(here, above, 0), 0)
    whole = searching & (tl.sum(tl.where(here, held, 0), 0) == room)
    prefix |= digit.to(prefix.dtype) << shift
    # If all of the bin is kept, the threshold is ``prefix - 1``, because no float has key 0.
    prefix = tl.where(whole, tl.maximum(prefix, 1) - 1, prefix)
    return prefix, tl.where(whole, 0, room), searching & (whole == 0)


@triton.jit(do_not_specialize=["most"])  # type: ignore[untyped-decorator]
def _select_kernel(  # type: ignore[no-untyped-def]
    scores, columns, keep, first, last, out, most, width, s_row, TILE: tl.constexpr
):
    """Write the positions of one row, ``out [R, most]``."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * s_row
    out += row * most
    n = tl.load(columns + row)
    count = tl.maximum(tl.minimum(tl.minimum(tl.load(keep + row), n), most), 0)
    head = tl.minimum(tl.maximum(tl.load(first + row), 0), count)
    tail = tl.minimum(tl.maximum(tl.load(last + row), 0), count - head)
    end = n - tail
    room = count - head - tail  # after the search: number of columns at the threshold to keep
    searching = room > 0
    # Without a search the threshold is above all floats, so that none is kept.
    prefix = tl.where(searching, 0, 0xFFFFFFFF).to(tl.uint32)
    lane = tl.arange(0, TILE)

    shift = tl.full([], 32, tl.uint32)
    for _ in range(0, 32 // BITS):
        shift -= BITS
        held = tl.zeros([BINS], tl.int32)
        for start in range(0, tl.where(searching, end, 0), TILE):
            column = start + lane
            live = (column >= head) & (column < end)
            # Bound by the width: a multiple of 16 allows loads of four scores.
            key = sortable_bits32(tl.load(scores + column, mask=column < width, other=0.0))
            live &= matches_prefix(key, prefix, shift)
            held += tl.histogram(digit_at(key, shift), BINS, mask=live)
        prefix, room, searching = _narrow(held, prefix, room, searching, shift)

    kept, level = 0, 0  # columns above and at the threshold in the tiles so far
    for start in range(0, tl.where(count > 0, n, 0), TILE):
        column = start + lane
        live = (column >= head) & (column < end)
        key = sortable_bits32(tl.load(scores + column, mask=column < width, other=0.0))
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
    """Write the sort key of each chunk: its token scores, summed over heads, then averaged."""
    row = tl.program_id(1).to(tl.int64)
    scores += row * heads * s_row
    n = tl.load(columns + row)
    chunk = tl.program_id(0) * TILE + tl.arange(0, TILE)
    length = tl.minimum(tl.maximum(n - chunk * size, 0), size)
    worth = tl.zeros([TILE], tl.float64)
    lost = tl.zeros([TILE], tl.int32)  # number of scores that are NaN or -inf
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
    # One such score makes the sum -inf, or NaN together with +inf, and NaN ranks as -inf.
    worth = tl.where(lost > 0, float("-inf"), worth / tl.maximum(length, 1).to(tl.float64))
    tl.store(keys + row * number + chunk, _in_order64(worth), mask=chunk < number)


@triton.jit(do_not_specialize=["most", "number"])  # type: ignore[untyped-decorator]
def _select_chunks_kernel(  # type: ignore[no-untyped-def]
    keys, columns, keep, out, most, size, number, TILE: tl.constexpr, PART: tl.constexpr
):
    """Select chunks as `_select_kernel` selects columns, counting the tokens of each chunk."""
    row = tl.program_id(0).to(tl.int64)
    keys += row * number
    out += row * most
    n = tl.load(columns + row)
    count = tl.maximum(tl.minimum(tl.minimum(tl.load(keep + row), n), most), 0)
    chunks = tl.where(count > 0, tl.cdiv(n, size), 0)
    missing = chunks * size - n  # tokens by which the last chunk is shorter
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
            live &= matches_prefix(key, prefix, shift)
            held += tl.histogram(digit_at(key, shift), BINS, mask=live)
        short = (
            searching & matches_prefix(ending, prefix, shift) & (bins == digit_at(ending, shift))
        )
        held = held * size - tl.where(short, missing, 0)
        prefix, room, searching = _narrow(held, prefix, room, searching, shift)

    # Tokens above and at the threshold in the tiles so far. The last chunk may be shorter, but no
    # chunk follows it.
    kept, level = 0, 0
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


def _config(width: int) -> dict[str, int]:
    """Return the configuration and launch options for rows of `width` columns.

    A tile has at most 2**14 columns, because two counts of a tile share an int32.
    """
    if width <= 2048:
        return {"TILE": 1024, "num_warps": 4}
    if width <= 32768:
        return {"TILE": 4096, "num_warps": 8}
    return {"TILE": 8192, "num_warps": 16}


def _chunks_tile(part: int) -> int:
    """Return the chunks per tile of `_select_chunks_kernel`, which writes `part` tokens of each."""
    return min(1024, 4096 // part)


def run(
    scores: torch.Tensor,
    columns: torch.Tensor,
    keep: torch.Tensor,
    max_kept: int,
    num_first: torch.Tensor,
    num_last: torch.Tensor,
) -> torch.Tensor:
    rows, width = scores.shape
    out = torch.empty(rows, max_kept, dtype=torch.int32, device=scores.device)
    if rows and max_kept:
        _select_kernel[(rows,)](
            scores,
            columns,
            keep,
            num_first,
            num_last,
            out,
            max_kept,
            width,
            scores.stride(0),
            **_config(width),
        )
    return out


def chunks(
    scores: torch.Tensor,
    columns: torch.Tensor,
    keep: torch.Tensor,
    max_kept: int,
    size: int,
    heads: int,
) -> torch.Tensor:
    # A chunk is at most as long as the row.
    size = min(size, max(scores.shape[1], 1))
    rows, number = len(scores) // heads, -(-scores.shape[1] // size)
    out = torch.empty(rows, max_kept, dtype=torch.int32, device=scores.device)
    if rows and max_kept:
        part = min(triton.next_power_of_2(size), PART)
        keys = torch.empty(rows, number, dtype=torch.int64, device=scores.device)
        if number:
            tile = TOKENS // part
            _chunk_keys_kernel[(triton.cdiv(number, tile), rows)](
                scores, columns, keys, size, heads, number, scores.stride(0), tile, part
            )
        _select_chunks_kernel[(rows,)](
            keys, columns, keep, out, max_kept, size, number, _chunks_tile(part), part, num_warps=4
        )
    return out


def builds(sm: int) -> list[Build]:
    """Return builds for rows of several widths, and for chunks of 1 and of at least 16 tokens."""
    types = dict.fromkeys(("columns", "keep", "out", "first", "last"), "*i32")
    types |= dict(scores="*fp32", keys="*i64")
    all_builds = [
        Build(
            name=f"select tile={config['TILE']}", kernel=_select_kernel, config=config, types=types
        )
        for config in (_config(2048), _config(32768), _config(131072))
    ]
    for part in (1, PART):
        all_builds += [
            Build(
                name=f"select chunk_keys part={part}",
                kernel=_chunk_keys_kernel,
                config=dict(TILE=TOKENS // part, PART=part),
                types=types,
                unaligned=("size", "heads"),
                # A chunk may start at any column, so its scores are not aligned.
                wide_loads=False,
            ),
            Build(
                name=f"select chunks part={part}",
                kernel=_select_chunks_kernel,
                config=dict(TILE=_chunks_tile(part), PART=part),
                types=types,
                unaligned=("size",),
                # A row may have an odd number of keys, so the next row is not aligned.
                wide_loads=False,
            ),
        ]
    return all_builds
