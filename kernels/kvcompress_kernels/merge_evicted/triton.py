"""Launch the Triton passes of `merge_evicted` for N rows."""

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
COUNT_WARPS = 8
"""Warps of `count_kernel`. With 4 it spills under Triton 3.7."""
SEGMENT = 4096
"""Minimum number of evicted tokens per program of `count_kernel`."""
PACKED = 64
"""Kept tokens per program of `pack_kernel`."""
MEMBERS = 32
"""Merged tokens that `fold_kernel` reads at a time."""


class Shape(NamedTuple):
    """Configuration of `nearest_kernel`.

    Args:
        evicted: evicted tokens per tile.
        kept: kept tokens per tile.
        warps: warps per program.
        stages: stages of the pipelined loop.
    """

    evicted: int
    kept: int
    warps: int
    stages: int


def _shape(pad: int, itemsize: int, sm: int) -> Shape:
    """Return the configuration of `nearest_kernel` for keys of `pad` padded dimensions.

    With 4 warps, a thread holds 64 logits, their maxima and the positions of these. On Hopper at 64
    dimensions this takes 254 registers, and two programs fit on a multiprocessor. At 128 dimensions
    it spills under Triton 3.6, and on other architectures it always spills. 8 warps take 218.
    """
    if itemsize > 2:
        # Float32 is multiplied without tensor cores.
        return Shape(32, 32, 4, 2)
    if pad > 128:
        return Shape(64, 64, 4, 2)
    return Shape(128, 64, 4 if sm == 90 and pad <= 64 else 8, 3)


def _pack_warps(pad: int) -> int:
    """Return the warps of `pack_kernel`, for 32 elements per thread. 64 elements spill."""
    return max(4, pad // 16)


def _fold_warps(pad: int) -> int:
    """Return the warps of `fold_kernel`, for at most 32 elements per thread.

    Args:
        pad: the larger padded head dimension of K and V.
    """
    return max(2, pad // 32) * (2 if pad >= 256 else 1)


def _pad(dim: int) -> int:
    pad: int = triton.next_power_of_2(dim)
    # `tl.dot` needs at least 16.
    return max(16, pad)


def run(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    kept: torch.Tensor,
    counts: torch.Tensor,
    min_kept: int,
    values_only: bool,
    lengths: torch.Tensor,
    threshold: torch.Tensor,
    beta: float,
) -> Merged:
    _reject_float64(key_pages, value_pages)
    layers, heads, max_kept = kept.shape
    evicted = max(tokens - min_kept, 1)
    lengths, threshold = lengths.contiguous(), threshold.contiguous()
    _, _, dim, block = key_pages.shape
    value_dim, device = value_pages.shape[3], kept.device
    pad, value_pad = _pad(dim), _pad(value_dim)
    shape = _shape(pad, key_pages.dtype.itemsize, architecture(device))
    packed_width = triton.cdiv(max_kept, PACKED) * PACKED
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
    heads_and_layers = (heads, layers)

    packed, scales = _packed(key_pages, pages, kept, counts, packed_width)
    nearest_kernel[(tiles, *heads_and_layers)](
        key_pages, pages, kept, counts, lengths, packed, scales, cosines, near, places, sums,
        width, max_kept, packed_width, evicted, block, max_kept.bit_length(), *key_pages.stride(),
        dim, pad, shape.evicted, shape.kept, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    count_kernel[(segments, *heads_and_layers)](
        cosines, near, sums, counts, lengths, threshold, after, ranks, counters, beta,
        max_kept, evicted, tiles, segment, RANKED, 128, num_warps=COUNT_WARPS,
    )  # fmt: skip
    ends = counters.cumsum(2, dtype=torch.int32)
    place_kernel[(triton.cdiv(evicted, 512), *heads_and_layers)](
        cosines, near, places, ranks, ends, counts, lengths, members, weights,
        max_kept, evicted, segment, segments, 512,
    )  # fmt: skip
    fold_kernel[(max_kept, *heads_and_layers)](
        key_pages, value_pages, pages, kept, counts, ends, members, weights, keys, values,
        width, max_kept, evicted, segments, int(values_only), block,
        *key_pages.stride(), *value_pages.stride(),
        dim, pad, value_dim, value_pad, MEMBERS, num_warps=_fold_warps(max(pad, value_pad)),
    )  # fmt: skip
    return Merged(keys, values, after)


def _packed(
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    kept: torch.Tensor,
    counts: torch.Tensor,
    packed_width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return contiguous kept keys ``[N, Hkv, packed_width, padded D]`` and their inverse norms."""
    (layers, heads, max_kept), (_, _, dim, block) = kept.shape, key_pages.shape
    packed = key_pages.new_empty(layers, heads, packed_width, _pad(dim))
    scales = key_pages.new_empty(layers, heads, packed_width, dtype=torch.float32)
    pack_kernel[(packed_width // PACKED, heads, layers)](
        key_pages, pages, kept, counts, packed, scales, pages.shape[1], max_kept, packed_width,
        block, *key_pages.stride(), dim, _pad(dim), PACKED, num_warps=_pack_warps(_pad(dim)),
    )  # fmt: skip
    return packed, scales


def _reject_float64(*caches: torch.Tensor) -> None:
    if torch.float64 in {x.dtype for x in caches}:
        raise ValueError(
            "merge_evicted: the Triton kernels do not support a float64 cache; move it to the CPU"
        )


def _segments(evicted: int, max_kept: int) -> tuple[int, int]:
    """Return the programs of `count_kernel` per head, and the evicted tokens of each program.

    With more than one program, there are at most as many counters as evicted tokens.
    """
    segments = max(1, min(triton.cdiv(evicted, SEGMENT), evicted // max_kept))
    return segments, triton.cdiv(triton.cdiv(evicted, segments), RANKED) * RANKED


def builds(sm: int) -> list[Build]:
    """Return builds for a bfloat16 cache with contiguous head dims."""
    types = dict(pages="*i64", key_pages="*bf16", value_pages="*bf16", packed="*bf16")
    integers = "kept", "counts", "tokens", "near", "places", "ranks", "counters", "ends", "members"
    types |= dict.fromkeys(integers, "*i32")
    floats = "scales", "cosines", "weights", "keys", "values", "before", "after"
    types |= dict.fromkeys(floats, "*fp32") | dict(sums="*fp64", beta="fp32")
    types |= dict.fromkeys(("s_page", "k_page", "v_page"), "i64")
    all_builds = []

    def add(name: str, kernel: Any, wide: bool, **config: int) -> None:
        contiguous = (x for x in ("s_dim", "k_dim", "v_dim") if x in kernel.arg_names)
        all_builds.append(
            Build(
                name=f"merge_evicted {name}",
                kernel=kernel,
                config=dict.fromkeys(contiguous, 1) | config,
                types=types,
                unaligned=("block",),
                wide_loads=wide,
                tensor_cores=kernel is nearest_kernel,
            )
        )

    for dim in DIMS:
        pad = _pad(dim)
        shape = _shape(pad, 2, sm)
        sized = dict(DIM=dim, PAD=pad)
        add(f"pack D={dim}", pack_kernel, True, **sized, ROWS=PACKED, num_warps=_pack_warps(pad))
        add(
            f"nearest D={dim}", nearest_kernel, True, **sized, ROWS=shape.evicted, KEPT=shape.kept,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
        both = dict(K=dim, K_PAD=pad, V=dim, V_PAD=pad)
        add(f"fold D={dim}", fold_kernel, True, **both, ROWS=MEMBERS, num_warps=_fold_warps(pad))
    add("count", count_kernel, False, ROWS=RANKED, SUMS=128, num_warps=COUNT_WARPS)
    add("place", place_kernel, False, ROWS=512)
    return all_builds
