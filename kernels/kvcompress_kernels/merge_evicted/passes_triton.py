"""Triton kernels of `merge_evicted`, which `triton.py` launches.

There are five launches and a prefix sum for any number of rows.

1. `pack_kernel` copies the kept keys to contiguous memory, in the dtype of the cache, and computes
   their inverse norms. Every tile of evicted keys reads this copy; the pages are read once.
2. `nearest_kernel` computes the cosines of a tile of evicted keys with all kept keys on the tensor
   cores. It multiplies raw keys and scales the product, so only the float32 sum rounds. The maximum
   and its position are kept per column of the product and reduced once at the end.
3. `count_kernel` computes the threshold, and the rank of each merged token among the tokens that
   are merged into the same kept token. One program walks a segment of the evicted tokens in order
   and has counters of its own. So ranks follow positions, there are no atomics, and sums are the
   same in every run.
4. A prefix sum of the counters and `place_kernel` sort the merged tokens into one bucket per kept
   token, each in the order of positions.
5. `fold_kernel` adds each bucket to its kept token.

Pass 2 dominates with ``2 * D * evicted * kept`` operations per KV head. The other passes read each
merged key and value once, and about ten bytes per evicted token.
"""

import math

import triton
import triton.language as tl

from kvcompress_kernels.merge_evicted.reference import ROUNDING

E = tl.constexpr(math.e)
SLACK = tl.constexpr(ROUNDING)


@triton.jit
def _slots(pages, token, block, live):  # type: ignore[no-untyped-def]
    """Return the page and slot of each token, both int64."""
    page = tl.load(pages + token // block, mask=live, other=0).to(tl.int64)
    return page, (token % block).to(tl.int64)


@triton.jit
def _inverse_norm(x):  # type: ignore[no-untyped-def]
    """Return the inverse norm of each row of `x`."""
    return 1.0 / tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-12)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["width", "most"],
    do_not_specialize_on_alignment=["pages", "kept", "counts"],
)
def pack_kernel(  # type: ignore[no-untyped-def]
    key_pages, pages, kept, counts, packed, scales, width, most, room, block,
    s_page, s_head, s_dim, s_slot, DIM: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write ``packed [N, H, room, PAD]``, padded with 0, and ``scales [N, H, room]`` with NaN."""
    prompt, head, heads = tl.program_id(2), tl.program_id(1), tl.num_programs(1)
    row = (prompt * heads + head).to(tl.int64)
    j = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, PAD)
    live = j < tl.load(counts + prompt)
    token = tl.load(kept + row * most + j, mask=live, other=0)
    page, slot = _slots(pages + prompt.to(tl.int64) * width, token, block, live)
    at = (page * s_page + head.to(tl.int64) * s_head + slot * s_slot)[:, None]
    inside = live[:, None] & (dim < DIM)[None, :]
    key = tl.load(key_pages + at + dim.to(tl.int64)[None, :] * s_dim, mask=inside, other=0.0)
    tl.store(packed + (row * room + j)[:, None] * PAD + dim[None, :], key)
    # NaN compares false, so that no key is nearest to a padding row.
    scale = tl.where(live, _inverse_norm(key.to(tl.float32)), float("nan"))
    tl.store(scales + row * room + j, scale)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["width", "most", "evicted", "steps"],
    do_not_specialize_on_alignment=["pages", "kept", "counts", "tokens"],
)
def nearest_kernel(  # type: ignore[no-untyped-def]
    key_pages, pages, kept, counts, tokens, packed, scales, cosines, near, places, sums,
    width, most, room, evicted, block, steps, s_page, s_head, s_dim, s_slot,
    DIM: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Write ``cosines, near, places [N, H, evicted]`` and ``sums [N, H, tiles]`` float64.

    `near` is the index of the nearest kept token, `places` the position of the evicted token, and
    `sums` the sum of the cosines of each tile.
    """
    prompt, head, heads = tl.program_id(2), tl.program_id(1), tl.num_programs(1)
    row = (prompt * heads + head).to(tl.int64)
    count = tl.load(counts + prompt)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = i < tl.load(tokens + prompt) - count

    # Bisect for the position of the i-th evicted token: it follows exactly those kept tokens that
    # have at most i evicted tokens before them.
    low = tl.zeros([ROWS], tl.int32)
    high = low + count
    for _ in range(0, steps):
        middle = (low + high) // 2
        open = low < high
        before = tl.load(kept + row * most + middle, mask=open & live, other=0) - middle
        low = tl.where(open & (before <= i), middle + 1, low)
        high = tl.where(open & (before > i), middle, high)
    token = i + low

    dim = tl.arange(0, PAD)
    page, slot = _slots(pages + prompt.to(tl.int64) * width, token, block, live)
    at = (page * s_page + head.to(tl.int64) * s_head + slot * s_slot)[:, None]
    inside = live[:, None] & (dim < DIM)[None, :]
    key = tl.load(key_pages + at + dim.to(tl.int64)[None, :] * s_dim, mask=inside, other=0.0)

    packed += row * room * PAD
    scales += row * room
    lane = tl.arange(0, KEPT)
    best = tl.full([ROWS, KEPT], float("-inf"), tl.float32)
    where = tl.zeros([ROWS, KEPT], tl.int32)
    for start in range(0, count, KEPT):
        others = tl.load(packed + (start + lane)[None, :] * PAD + dim[:, None])  # [PAD, KEPT]
        product = tl.dot(key, others, input_precision="ieee") * tl.load(scales + start + lane)
        better = product > best  # strictly, so that ties go to the earlier tile
        best = tl.where(better, product, best)
        where = tl.where(better, start, where)
    top = tl.max(best, 1)
    where = tl.where(best == top[:, None], where + lane[None, :], 0x7FFFFFFF)
    cosine = top * _inverse_norm(key.to(tl.float32))
    at = row * evicted + i
    tl.store(cosines + at, cosine, mask=live)
    tl.store(near + at, tl.minimum(tl.min(where, 1), count - 1), mask=live)
    tl.store(places + at, token, mask=live)
    total = tl.sum(tl.where(live, cosine, 0.0).to(tl.float64), 0)
    tl.store(sums + row * tl.num_programs(0) + tl.program_id(0), total)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["most", "evicted", "tiles", "segment"],
    do_not_specialize_on_alignment=["counts", "tokens", "before"],
)
def count_kernel(  # type: ignore[no-untyped-def]
    cosines, near, sums, counts, tokens, before, after, ranks, counters, beta,
    most, evicted, tiles, segment, ROWS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Write ``ranks [N, H, evicted]``, ``counters [N, H, most, segments]`` and ``after [N, H]``.

    The rank of a dropped token is -1. `counters` must be 0 at the start. `after` is the threshold:
    the mean cosine if `before` is NaN, else the mean weighted with `before`.
    """
    prompt, head, heads = tl.program_id(2), tl.program_id(1), tl.num_programs(1)
    row = (prompt * heads + head).to(tl.int64)
    segments = tl.num_programs(0)
    count = tl.load(tokens + prompt) - tl.load(counts + prompt)
    partial = tl.zeros([SUMS], tl.float64)
    for start in range(0, tiles, SUMS):
        tile = start + tl.arange(0, SUMS)
        partial += tl.load(sums + row * tiles + tile, mask=tile < tiles, other=0.0)
    mean = tl.sum(partial, 0) / tl.maximum(count, 1).to(tl.float64)
    old = tl.load(before + row).to(tl.float64)
    threshold = tl.where(old == old, mean * beta + old * (1.0 - beta), mean)
    if tl.program_id(0) == 0:
        tl.store(after + row, tl.where(count > 0, threshold, old).to(tl.float32))

    counters += row * most * segments + tl.program_id(0)
    lane = tl.arange(0, ROWS)
    first = tl.program_id(0) * segment
    for start in range(first, tl.minimum(first + segment, count), ROWS):
        i = start + lane
        live = i < tl.minimum(first + segment, count)
        cosine = tl.load(cosines + row * evicted + i, mask=live, other=0.0)
        merged = live & (cosine.to(tl.float64) >= threshold - SLACK)
        into = tl.load(near + row * evicted + i, mask=merged, other=0)
        into = tl.where(merged, into, -1)
        same = into[:, None] == into[None, :]
        rank = tl.sum((same & (lane[None, :] < lane[:, None])).to(tl.int32), 1)
        total = tl.sum(same.to(tl.int32), 1)
        at = counters + into.to(tl.int64) * segments
        so_far = tl.load(at, mask=merged, other=0)
        tl.store(ranks + row * evicted + i, tl.where(merged, so_far + rank, -1), mask=live)
        tl.debug_barrier()  # All threads read a counter before the last token of its bucket writes.
        tl.store(at, so_far + total, mask=merged & (rank == total - 1))
        tl.debug_barrier()


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["most", "evicted", "segment", "segments"],
    do_not_specialize_on_alignment=["counts", "tokens"],
)
def place_kernel(  # type: ignore[no-untyped-def]
    cosines, near, places, ranks, ends, counts, tokens, members, weights,
    most, evicted, segment, segments, ROWS: tl.constexpr,
):  # fmt: skip
    """Write merged tokens and their weights by bucket: ``members, weights [N, H, evicted]``."""
    prompt, head, heads = tl.program_id(2), tl.program_id(1), tl.num_programs(1)
    row = (prompt * heads + head).to(tl.int64)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = i < tl.load(tokens + prompt) - tl.load(counts + prompt)
    rank = tl.load(ranks + row * evicted + i, mask=live, other=-1)
    live = rank >= 0
    bucket = tl.load(near + row * evicted + i, mask=live, other=0).to(tl.int64) * segments
    bucket += i // segment
    ends += row * most * segments
    slot = rank + tl.load(ends + bucket - 1, mask=live & (bucket > 0), other=0)
    token = tl.load(places + row * evicted + i, mask=live, other=0)
    cosine = tl.load(cosines + row * evicted + i, mask=live, other=0.0)
    tl.store(members + row * evicted + slot, token, mask=live)
    tl.store(weights + row * evicted + slot, tl.exp(cosine), mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(  # type: ignore[no-untyped-def]
    x, out, pages, members, weights, begin, end, own, j, count, block, s_page, s_slot, s_dim,
    DIM: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write a kept token's key or value with its bucket of evicted tokens merged into it."""
    dim = tl.arange(0, PAD)
    across = dim.to(tl.int64) * s_dim
    home, place = _slots(pages, own, block, j < count)
    mask = dim < tl.where(j < count, DIM, 0)
    mine = tl.load(x + home * s_page + place * s_slot + across, mask=mask, other=0.0)
    mine = mine.to(tl.float32)
    added = tl.zeros([PAD], tl.float32)
    heavy = tl.zeros([ROWS], tl.float32)
    for start in range(begin, end, ROWS):
        k = start + tl.arange(0, ROWS)
        token = tl.load(members + k, mask=k < end, other=0)
        weight = tl.load(weights + k, mask=k < end, other=0.0)
        page, slot = _slots(pages, token, block, k < end)
        at = x + (page * s_page + slot * s_slot)[:, None] + across[None, :]
        inside = (k < end)[:, None] & (dim < DIM)[None, :]
        one = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        added += tl.sum(one * weight[:, None], 0)
        heavy += weight
    mean = (E * mine + added) / (E + tl.sum(heavy, 0))
    tl.store(out + dim, tl.where(end > begin, mean, mine), mask=dim < DIM)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["width", "most", "evicted", "segments", "values_only"],
    do_not_specialize_on_alignment=["pages", "kept", "counts"],
)
def fold_kernel(  # type: ignore[no-untyped-def]
    key_pages, value_pages, pages, kept, counts, ends, members, weights, keys, values,
    width, most, evicted, segments, values_only, block, k_page, k_head, k_dim, k_slot,
    v_page, v_head, v_slot, v_dim,
    K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write ``keys [N, H, most, K]`` and ``values [N, H, most, V]``, 0 past a prompt's count.

    If `values_only` is 1, a key skips its bucket and stays unchanged.
    """
    j, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    prompt = tl.program_id(2).to(tl.int64)
    row = prompt * heads + head
    count = tl.load(counts + prompt)
    live = j < count
    own = tl.load(kept + row * most + j, mask=live, other=0)
    ends += row * most * segments + j * segments
    begin = tl.load(ends - 1, mask=live & (j > 0), other=0)
    end = tl.load(ends + segments - 1, mask=live, other=0)
    pages += prompt * width
    members += row * evicted
    weights += row * evicted
    out = row * most + j
    _add_up(
        key_pages + head.to(tl.int64) * k_head, keys + out * K, pages, members, weights,
        begin, tl.where(values_only == 1, begin, end), own, j, count, block,
        k_page, k_slot, k_dim, K, K_PAD, ROWS,
    )  # fmt: skip
    _add_up(
        value_pages + head.to(tl.int64) * v_head, values + out * V, pages, members, weights,
        begin, end, own, j, count, block, v_page, v_slot, v_dim, V, V_PAD, ROWS,
    )  # fmt: skip
