"""Launches the passes of `merge_evicted`, for several layers of a prompt."""

from typing import Any, NamedTuple

import torch
import triton

from kvcompress_kernels.builds import DIMS, Build, architecture
from kvcompress_kernels.merge_evicted.passes_triton import (
    count_kernel,
    fold_kernel,
    nearest_kernel,
    pack_kernel,
    place_kernel,
)
from kvcompress_kernels.merge_evicted.result import Merged

RANKED = 128
"""Evicted tokens that `count_kernel` ranks at a time."""
COUNTING = 8
"""Warps of `count_kernel`; with 4 it spills under Triton 3.7."""
TABLES = ("pages", "kept", "counts", "tokens", "before")
"""Arguments of which each layer reads its own row, so that no alignment is known."""
SEGMENT = 4096
"""Evicted tokens of one program of `count_kernel`, at least."""
COPIED = 64
"""Kept tokens of one program of `pack_kernel`."""
MEMBERS = 32
"""Merged tokens that `fold_kernel` reads at a time."""


class Shape(NamedTuple):
    evicted: int
    kept: int
    warps: int
    stages: int


def _shape(pad: int, itemsize: int, sm: int) -> Shape:
    """For keys of `pad` padded dimensions.

    With 4 warps a thread has 64 logits, their maxima and where they are: 254 registers on Hopper
    at 64 dimensions, and two programs on a processor, but spills at 128 by Triton 3.6 and
    everywhere before and after Hopper. 8 warps hold them in 218.
    """
    if itemsize > 2:
        # Float32 is multiplied without tensor cores.
        return Shape(32, 32, 4, 2)
    if pad > 128:
        return Shape(64, 64, 4, 2)
    return Shape(128, 64, 4 if sm == 90 and pad <= 64 else 8, 3)


def _copying(pad: int) -> int:
    """Warps of `pack_kernel`: 32 elements a thread, since 64 of them spill."""
    return max(4, pad // 16)


def _folding(pad: int) -> int:
    """Warps of `fold_kernel`: likewise, at 32 members and the wider of K and V."""
    return max(2, pad // 32) * (2 if pad >= 256 else 1)


def _pad(dim: int) -> int:
    pad: int = triton.next_power_of_2(dim)
    # `tl.dot` multiplies no fewer than 16.
    return max(16, pad)


def run(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    kept: torch.Tensor,
    counts: torch.Tensor,
    least: int,
    values_only: bool,
    lengths: torch.Tensor,
    threshold: torch.Tensor,
    beta: float,
) -> Merged:
    _refuse_float64(key_pages, value_pages)
    layers, heads, max_kept = kept.shape
    evicted = max(tokens - least, 1)
    lengths, threshold = lengths.contiguous(), threshold.contiguous()
    _, _, dim, block = key_pages.shape
    value_dim, device = value_pages.shape[3], kept.device
    pad, value_pad = _pad(dim), _pad(value_dim)
    shape = _shape(pad, key_pages.dtype.itemsize, architecture(device))
    rooms = triton.cdiv(max_kept, COPIED) * COPIED
    pages, kept = pages.contiguous(), kept.to(torch.int32).contiguous()
    tiles, width = triton.cdiv(evicted, shape.evicted), pages.shape[1]
    segments, segment = _segments(evicted, max_kept)

    def new(dtype: torch.dtype, *size: int) -> torch.Tensor:
        return torch.empty(layers, heads, *size, dtype=dtype, device=device)

    cosines, sums = new(torch.float32, evicted), new(torch.float64, tiles)
    near, places, ranks = (new(torch.int32, evicted) for _ in range(3))
    members, weights = new(torch.int32, evicted), new(torch.float32, evicted)
    keys, values = new(torch.float32, max_kept, dim), new(torch.float32, max_kept, value_dim)
    counters = new(torch.int32, max_kept * segments).zero_()
    after = new(torch.float32)
    many = (heads, layers)

    packed, scales = _packed(key_pages, pages, kept, counts, rooms)
    nearest_kernel[(tiles, *many)](
        key_pages, pages, kept, counts, lengths, packed, scales, cosines, near, places, sums,
        width, max_kept, rooms, evicted, block, max_kept.bit_length(), *key_pages.stride(),
        dim, pad, shape.evicted, shape.kept, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    count_kernel[(segments, *many)](
        cosines, near, sums, counts, lengths, threshold, after, ranks, counters, beta,
        max_kept, evicted, tiles, segment, RANKED, 128, num_warps=COUNTING,
    )  # fmt: skip
    ends = counters.cumsum(2, dtype=torch.int32)
    place_kernel[(triton.cdiv(evicted, 512), *many)](
        cosines, near, places, ranks, ends, counts, lengths, members, weights,
        max_kept, evicted, segment, segments, 512,
    )  # fmt: skip
    fold_kernel[(max_kept, *many)](
        key_pages, value_pages, pages, kept, counts, ends, members, weights, keys, values,
        width, max_kept, evicted, segments, int(values_only), block,
        *key_pages.stride(), *value_pages.stride(),
        dim, pad, value_dim, value_pad, MEMBERS, num_warps=_folding(max(pad, value_pad)),
    )  # fmt: skip
    return Merged(keys, values, after)


def _packed(
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    kept: torch.Tensor,
    counts: torch.Tensor,
    rooms: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Kept keys side by side, ``[N, Hkv, rooms, padded D]``, and the inverses of their norms."""
    (layers, heads, max_kept), (_, _, dim, block) = kept.shape, key_pages.shape
    packed = key_pages.new_empty(layers, heads, rooms, _pad(dim))
    scales = key_pages.new_empty(layers, heads, rooms, dtype=torch.float32)
    pack_kernel[(rooms // COPIED, heads, layers)](
        key_pages, pages, kept, counts, packed, scales, pages.shape[1], max_kept, rooms, block,
        *key_pages.stride(), dim, _pad(dim), COPIED, num_warps=_copying(_pad(dim)),
    )  # fmt: skip
    return packed, scales


def _refuse_float64(*caches: torch.Tensor) -> None:
    if torch.float64 in {x.dtype for x in caches}:
        raise ValueError("merge_evicted: Triton takes no float64 cache; move it to the CPU")


def _segments(evicted: int, max_kept: int) -> tuple[int, int]:
    """Programs of `count_kernel` per head, and the evicted tokens of each.

    Their counters take no more room than the evicted tokens do, but for one segment.
    """
    segments = max(1, min(triton.cdiv(evicted, SEGMENT), evicted // max_kept))
    return segments, triton.cdiv(triton.cdiv(evicted, segments), RANKED) * RANKED


def builds(sm: int) -> list[Build]:
    """bfloat16, keys and values of a token side by side in the cache: strides of 1 along D."""
    table = dict(pages="*i64", kept="*i32", counts="*i32", tokens="*i32", packed="*bf16")
    pointers = table | dict(scales="*fp32", cosines="*fp32", near="*i32", places="*i32")
    pointers |= dict(sums="*fp64", ranks="*i32", counters="*i32", ends="*i32", members="*i32")
    pointers |= dict(weights="*fp32", keys="*fp32", values="*fp32")
    pointers |= dict(key_pages="*bf16", value_pages="*bf16", before="*fp32", after="*fp32")
    ones, numbers = {"s_dim": 1, "k_dim": 1, "v_dim": 1}, {"beta": "fp32"}
    all_builds = []

    def add(name: str, kernel: Any, warps: int, stages: int, wide: bool, **constexprs: int) -> None:
        fixed = {k: v for k, v in ones.items() if k in kernel.arg_names} | constexprs
        signature = {
            k: (pointers | numbers).get(k, "i64" if k.endswith("_page") else "i32")
            for k in kernel.arg_names
            if k not in fixed
        }
        known = {*pointers, "room"} - {*TABLES}
        aligned = tuple(k for k in signature if k in known or k[1:2] == "_")
        all_builds.append(
            Build(
                name=f"merge_evicted {name}",
                kernel=kernel,
                signature=signature,
                constexprs=fixed,
                warps=warps,
                stages=stages,
                aligned=aligned,
                wide_loads=wide,
                tensor_cores=kernel is nearest_kernel,
            )
        )

    for dim in DIMS:
        pad = _pad(dim)
        shape = _shape(pad, 2, sm)
        sized = dict(DIM=dim, PAD=pad)
        add(f"pack D={dim}", pack_kernel, _copying(pad), 3, True, **sized, ROWS=COPIED)
        add(f"nearest D={dim}", nearest_kernel, shape.warps, shape.stages, True, **sized,
            ROWS=shape.evicted, KEPT=shape.kept)  # fmt: skip
        both = dict(K=dim, K_PAD=pad, V=dim, V_PAD=pad)
        add(f"fold D={dim}", fold_kernel, _folding(pad), 3, True, **both, ROWS=MEMBERS)
    add("count", count_kernel, COUNTING, 3, False, ROWS=RANKED, SUMS=128)
    add("place", place_kernel, 4, 3, False, ROWS=512)
    return all_builds
