"""`merge_evicted` in Triton: five launches and a prefix sum for any number of prompts.

1. `_pack`: kept keys, side by side in the dtype of the cache, and the inverses of their norms.
   They are read once for every tile of evicted keys; the pages only once.
2. `_nearest`: cosines of a tile of evicted keys with all kept ones on the tensor cores. Raw keys
   are multiplied and the product scaled, so nothing is rounded but by the sum in float32. Maximum
   and its tile are held per column of the product, four operations an element, and reduced once.
3. `_count`: the threshold is known; each merged token's rank among those of its kept token. One
   program walks a segment of the evicted tokens in order and alone owns its counters, so ranks
   are those of the positions: no atomics, the same sums in every run.
4. A prefix sum of the counters, kept token by kept token, and `_place`: the merged tokens in
   buckets, each in the order of the positions.
5. `_fold`: each kept token adds up its bucket and reads nothing else.

The second is the work: ``2 * D * evicted * kept`` operations per KV head. The others read each
merged key and value once, and some ten bytes per evicted token.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvcompress_kernels.builds import Build
from kvcompress_kernels.merge_ref import ROUNDING

E = tl.constexpr(math.e)
SLACK = tl.constexpr(ROUNDING)
RANKED = 128  # evicted tokens that `_count` ranks at a time
SEGMENT = 4096  # evicted tokens of one program of `_count`, at least
COPIED = 64  # kept tokens of one program of `_pack`
MEMBERS = 32  # merged tokens that `_fold` reads at a time


class Shape(NamedTuple):
    evicted: int
    kept: int
    warps: int
    stages: int


@triton.jit
def _slots(pages, token, block, live):  # type: ignore[no-untyped-def]
    """Page and slot, int64, of each token."""
    page = tl.load(pages + token // block, mask=live, other=0).to(tl.int64)
    return page, (token % block).to(tl.int64)


@triton.jit
def _inverse_norm(x):  # type: ignore[no-untyped-def]
    return 1.0 / tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-12)


@triton.jit  # type: ignore[untyped-decorator]
def _pack(  # type: ignore[no-untyped-def]
    key_pages, pages, kept, counts, packed, scales, width, most, room, block,
    s_page, s_head, s_dim, s_slot, DIM: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``packed [N, H, room, PAD]`` with zeros and ``scales [N, H, room]`` with NaN behind."""
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
    # a NaN is greater than nothing: no key is nearest to what is not there
    scale = tl.where(live, _inverse_norm(key.to(tl.float32)), float("nan"))
    tl.store(scales + row * room + j, scale)


@triton.jit  # type: ignore[untyped-decorator]
def _nearest(  # type: ignore[no-untyped-def]
    key_pages, pages, kept, counts, tokens, packed, scales, cosines, near, places, sums,
    width, most, room, evicted, block, steps, s_page, s_head, s_dim, s_slot,
    DIM: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """``cosines, near, places [N, H, evicted]``; ``sums [N, H, tiles]`` of cosines, float64."""
    prompt, head, heads = tl.program_id(2), tl.program_id(1), tl.num_programs(1)
    row = (prompt * heads + head).to(tl.int64)
    count = tl.load(counts + prompt)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = i < tl.load(tokens + prompt) - count

    # the i-th evicted token lies behind the kept ones that have at most i evicted before them
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
        better = product > best  # an equal earlier one stays
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


@triton.jit  # type: ignore[untyped-decorator]
def _count(  # type: ignore[no-untyped-def]
    cosines, near, sums, counts, tokens, ranks, counters, most, evicted, tiles, segment,
    ROWS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """``ranks [N, H, evicted]``, -1 if dropped; ``counters [N, H, most, segments]``, from zeros."""
    prompt, head, heads = tl.program_id(2), tl.program_id(1), tl.num_programs(1)
    row = (prompt * heads + head).to(tl.int64)
    segments = tl.num_programs(0)
    count = tl.load(tokens + prompt) - tl.load(counts + prompt)
    partial = tl.zeros([SUMS], tl.float64)
    for start in range(0, tiles, SUMS):
        tile = start + tl.arange(0, SUMS)
        partial += tl.load(sums + row * tiles + tile, mask=tile < tiles, other=0.0)
    mean = tl.sum(partial, 0) / tl.maximum(count, 1).to(tl.float64)

    counters += row * most * segments + tl.program_id(0)
    lane = tl.arange(0, ROWS)
    first = tl.program_id(0) * segment
    for start in range(first, tl.minimum(first + segment, count), ROWS):
        i = start + lane
        live = i < tl.minimum(first + segment, count)
        cosine = tl.load(cosines + row * evicted + i, mask=live, other=0.0)
        merged = live & (cosine.to(tl.float64) >= mean - SLACK)
        into = tl.load(near + row * evicted + i, mask=merged, other=0)
        into = tl.where(merged, into, -1)
        same = into[:, None] == into[None, :]
        rank = tl.sum((same & (lane[None, :] < lane[:, None])).to(tl.int32), 1)
        total = tl.sum(same.to(tl.int32), 1)
        at = counters + into.to(tl.int64) * segments
        so_far = tl.load(at, mask=merged, other=0)
        tl.store(ranks + row * evicted + i, tl.where(merged, so_far + rank, -1), mask=live)
        tl.debug_barrier()  # all have read before the last of each bucket writes
        tl.store(at, so_far + total, mask=merged & (rank == total - 1))
        tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
    cosines, near, places, ranks, ends, counts, tokens, members, weights,
    most, evicted, segment, segments, ROWS: tl.constexpr,
):  # fmt: skip
    """``members, weights [N, H, evicted]``: merged tokens and their weights, in buckets."""
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


@triton.jit  # type: ignore[untyped-decorator]
def _fold(  # type: ignore[no-untyped-def]
    key_pages, value_pages, pages, kept, counts, ends, members, weights, keys, values,
    width, most, evicted, segments, block, k_page, k_head, k_dim, k_slot,
    v_page, v_head, v_slot, v_dim,
    K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``keys [N, H, most, K]`` and ``values [N, H, most, V]``; zeros beyond a prompt's count."""
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
        begin, end, own, j, count, block, k_page, k_slot, k_dim, K, K_PAD, ROWS,
    )  # fmt: skip
    _add_up(
        value_pages + head.to(tl.int64) * v_head, values + out * V, pages, members, weights,
        begin, end, own, j, count, block, v_page, v_slot, v_dim, V, V_PAD, ROWS,
    )  # fmt: skip


def _shape(pad: int, itemsize: int) -> Shape:
    """For keys of `pad` padded dimensions; two programs fit a processor up to 128."""
    if itemsize > 2:
        return Shape(32, 32, 4, 2)  # float32 has no tensor cores
    return Shape(128, 64, 4, 3) if pad <= 128 else Shape(64, 64, 4, 2)


def _copying(pad: int) -> int:
    """Warps of `_pack`: 32 elements a thread, since 64 of them spill."""
    return max(4, pad // 16)


def _pad(dim: int) -> int:
    pad: int = triton.next_power_of_2(dim)
    return max(16, pad)  # the least that `tl.dot` multiplies


def run_batch(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: torch.Tensor,
    kept: torch.Tensor,
    counts: torch.Tensor,
    evicted: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_evicted` of N prompts; in the page pool, a layer is a prompt with its own pages.

    Args:
        key_pages: ``[P, Hkv, D, block_size]``, bfloat16, float16 or float32, any strides.
        value_pages: ``[P, Hkv, block_size, Dv]`` likewise.
        pages: ``[N, W]`` int64; only those of a prompt's tokens are read.
        tokens: ``[N]`` int32, on the device.
        kept: ``[N, Hkv, most]`` int32, ascending; the first ``counts`` of each row are read.
        counts: ``[N]`` int32, on the device: kept tokens of each KV head, at least 1.
        evicted: at least ``(tokens - counts).max()``, known to the host.

    Returns:
        Keys ``[N, Hkv, most, D]`` and values ``[N, Hkv, most, Dv]``, float32, zeros from
        ``counts`` on.

    Raises:
        ValueError: the cache is float64.
    """
    for x in (key_pages, value_pages):
        if x.dtype == torch.float64:
            raise ValueError("merge_evicted: Triton takes no float64 cache; move it to the CPU")
    prompts, heads, most = kept.shape
    _, _, dim, block = key_pages.shape
    value_dim, device = value_pages.shape[3], kept.device
    pad, evicted = _pad(dim), max(evicted, 1)
    shape = _shape(pad, key_pages.dtype.itemsize)
    rooms = triton.cdiv(most, COPIED) * COPIED
    pages, kept = pages.contiguous(), kept.to(torch.int32).contiguous()
    tiles, width = triton.cdiv(evicted, shape.evicted), pages.shape[1]
    # counters take no more room than the evicted tokens do, but for one segment
    segments = max(1, min(triton.cdiv(evicted, SEGMENT), evicted // most))
    segment = triton.cdiv(triton.cdiv(evicted, segments), RANKED) * RANKED

    def new(dtype: torch.dtype, *size: int) -> torch.Tensor:
        return torch.empty(prompts, heads, *size, dtype=dtype, device=device)

    packed, scales = new(key_pages.dtype, rooms, pad), new(torch.float32, rooms)
    cosines, sums = new(torch.float32, evicted), new(torch.float64, tiles)
    near, places, ranks = (new(torch.int32, evicted) for _ in range(3))
    members, weights = new(torch.int32, evicted), new(torch.float32, evicted)
    keys, values = new(torch.float32, most, dim), new(torch.float32, most, value_dim)
    counters = new(torch.int32, most * segments).zero_()
    many = (heads, prompts)

    _pack[(rooms // COPIED, *many)](
        key_pages, pages, kept, counts, packed, scales, width, most, rooms, block,
        *key_pages.stride(), dim, pad, COPIED, num_warps=_copying(pad),
    )  # fmt: skip
    _nearest[(tiles, *many)](
        key_pages, pages, kept, counts, tokens, packed, scales, cosines, near, places, sums,
        width, most, rooms, evicted, block, most.bit_length(), *key_pages.stride(),
        dim, pad, shape.evicted, shape.kept, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    _count[(segments, *many)](
        cosines, near, sums, counts, tokens, ranks, counters, most, evicted, tiles, segment,
        RANKED, 128,
    )  # fmt: skip
    ends = counters.cumsum(2, dtype=torch.int32)
    _place[(triton.cdiv(evicted, 512), *many)](
        cosines, near, places, ranks, ends, counts, tokens, members, weights,
        most, evicted, segment, segments, 512,
    )  # fmt: skip
    _fold[(most, *many)](
        key_pages, value_pages, pages, kept, counts, ends, members, weights, keys, values,
        width, most, evicted, segments, block, *key_pages.stride(), *value_pages.stride(),
        dim, pad, value_dim, _pad(value_dim), MEMBERS, num_warps=2,
    )  # fmt: skip
    return keys, values


def run(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    kept: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    count = kept.shape[1]
    known = [torch.full((1,), x, dtype=torch.int32, device=kept.device) for x in (tokens, count)]
    keys, values = run_batch(
        key_pages, value_pages, pages[None], known[0], kept[None], known[1], tokens - count
    )
    return keys[0], values[0]


def builds() -> list[Build]:
    """bfloat16, keys and values of a token side by side in the cache: strides of 1 along D."""
    table = dict(pages="*i64", kept="*i32", counts="*i32", tokens="*i32", packed="*bf16")
    pointers = table | dict(scales="*fp32", cosines="*fp32", near="*i32", places="*i32")
    pointers |= dict(sums="*fp64", ranks="*i32", counters="*i32", ends="*i32", members="*i32")
    pointers |= dict(weights="*fp32", keys="*fp32", values="*fp32")
    pointers |= dict(key_pages="*bf16", value_pages="*bf16")
    ones = {"s_dim": 1, "k_dim": 1, "v_dim": 1}
    made = []

    def add(name: str, kernel: Any, warps: int, stages: int, wide: bool, **constexprs: int) -> None:
        fixed = {k: v for k, v in ones.items() if k in kernel.arg_names} | constexprs
        signature = {
            k: pointers.get(k, "i64" if k.endswith("_page") else "i32")
            for k in kernel.arg_names
            if k not in fixed
        }
        aligned = tuple(k for k in signature if k in pointers or k[1:2] == "_" or k == "room")
        made.append(
            Build(
                name=f"merge {name}",
                kernel=kernel,
                signature=signature,
                constexprs=fixed,
                warps=warps,
                stages=stages,
                aligned=aligned,
                wide_loads=wide,
            )
        )

    for dim in (64, 128):
        shape = _shape(dim, 2)
        sized = dict(DIM=dim, PAD=dim)
        add(f"pack D={dim}", _pack, _copying(dim), 3, True, **sized, ROWS=COPIED)
        add(f"nearest D={dim}", _nearest, shape.warps, shape.stages, True, **sized,
            ROWS=shape.evicted, KEPT=shape.kept)  # fmt: skip
        add(f"fold D={dim}", _fold, 2, 3, True, K=dim, K_PAD=dim, V=dim, V_PAD=dim, ROWS=MEMBERS)
    add("count", _count, 4, 3, False, ROWS=RANKED, SUMS=128)
    add("place", _place, 4, 3, False, ROWS=512)
    return made
