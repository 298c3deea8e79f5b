"""Launch the Triton passes of `value_scores` for N rows."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import triton

from kvcompress_kernels.builds import DIMS, Build, architecture, check_cache, float8, float8_suffix
from kvcompress_kernels.paged_triton import known_block, tile_of
from kvcompress_kernels.value_scores.passes_triton import (
    heaviest_kernel,
    join_kernel,
    score_kernel,
    sum_kernel,
)

SPLIT = 1024
"""Tokens of one partial sum."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes that determine the kernel configurations.

    Args:
        group: query heads per KV head.
        dim: head dimension.
        block: tokens per page.
        fast: whether o is the unweighted mean of the values.
        bytes: bytes of an element of V.
        sm: architecture, such as 90.
    """

    group: int
    dim: int
    block: int
    fast: bool
    bytes: int
    sm: int

    def sums(self) -> dict[str, Any]:
        heads = 4 if self.fast else max(triton.next_power_of_2(self.group), 4)
        pad = max(triton.next_power_of_2(self.dim), 16)
        tile = max(16, min(64, 16384 // (pad * self.bytes)))
        config = dict(self._common(), HEADS=heads, PAD=pad, TILE=tile, SPLIT=SPLIT)
        config["GROUP"] = 1 if self.fast else self.group
        # From Blackwell on, a thread holds less of the product.
        warps = 4 if heads * pad <= (2048 if self.sm >= 100 else 1024) else 8
        # Loads from the page table take half of the stages.
        return dict(config, num_warps=warps, num_stages=6)

    def join(self) -> dict[str, Any]:
        pad = triton.next_power_of_2(self.dim)
        return dict(self._common(), PAD=pad, TILE=16, SPLIT=SPLIT, num_warps=4)

    def scores(self) -> dict[str, Any]:
        return dict(self._common(), TILE=tile_of(self.dim), num_warps=8)

    def _common(self) -> dict[str, Any]:
        block = known_block(self.block)
        return dict(GROUP=self.group, DIM=self.dim, BLOCK=block, FAST=self.fast)


def run_rows(
    weights: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    lengths: torch.Tensor | None,
    fast: bool,
    reduce: str,
) -> torch.Tensor:
    """Score N rows with four launches."""
    check_cache("value_scores", value_pages)
    rows, heads, width = weights.shape
    _, kv_heads, block, dim = value_pages.shape
    sm = architecture(weights.device)
    shape = _Shape(heads // kv_heads, dim, block, fast, value_pages.element_size(), sm)
    splits = triton.cdiv(width, SPLIT)
    sums = weights.new_empty(rows, kv_heads if fast else heads, splits, dim)
    rests = weights.new_empty(rows, heads, splits)
    heaviest = torch.empty_like(rests, dtype=torch.int32)
    outputs = weights.new_empty(rows, heads, dim)
    alone_score = weights.new_empty(rows, heads)
    alone = torch.empty_like(alone_score, dtype=torch.int32)
    scores = weights.new_empty(rows, kv_heads, width)
    weights, pages = weights.contiguous(), pages.contiguous()
    if lengths is None:
        # Fill on the device, because a copy from the host would sync.
        count = torch.full((rows,), tokens, dtype=torch.int32, device=pages.device)
    else:
        count = lengths.contiguous()
    inputs = weights, value_pages, pages, count
    sizes = block, width, pages.shape[1], *value_pages.stride()
    heaviest_kernel[splits, heads, rows](weights, count, heaviest, rests, width, SPLIT)
    sum_kernel[splits, kv_heads, rows](*inputs, heaviest, sums, *sizes, **shape.sums())
    joined = outputs, alone, alone_score
    join_kernel[heads, rows](*inputs, heaviest, rests, sums, *joined, *sizes, **shape.join())
    config = dict(shape.scores(), L2=reduce == "l2")
    grid = triton.cdiv(width, config["TILE"]), kv_heads, rows
    score_kernel[grid](*inputs, *joined, scores, *sizes, **config)
    return scores


def builds(sm: int) -> list[Build]:
    """Return builds for blocks of 16, contiguous head dims and 4 or 16 query heads per KV head.

    Values are bf16, and for one configuration float8.
    """
    types = {"pages": "*i64", **dict.fromkeys(("tokens", "heaviest", "alone"), "*i32")}
    floats = ("weights", "sums", "rests", "outputs", "alone_score", "scores")
    types |= dict.fromkeys(floats, "*fp32")
    all_builds = []

    def add(step: str, kernel: Any, config: dict[str, Any], kind: str = "*bf16") -> None:
        all_builds.append(
            Build(
                name=f"value_scores {step}",
                kernel=kernel,
                config=dict(config, s_dim=1) if "s_dim" in kernel.arg_names else config,
                types=dict(types, values=kind),
                wide_loads=kernel in (sum_kernel, score_kernel),
                tensor_cores=kernel is sum_kernel,
            )
        )

    add("heaviest", heaviest_kernel, dict(SPLIT=SPLIT))
    sizes = [*product((128,), (4,), float8(sm).values()), (128, 16, "*bf16")]
    sizes += product(DIMS, (4,), ["*bf16"])
    for (dim, group, kind), fast in product(sizes, (False, True)):
        shape = _Shape(group, dim, 16, fast, 2 if kind == "*bf16" else 1, sm)
        suffix = f"D{dim} G{group}{' fast' if fast else ''}{float8_suffix(kind)}"
        add(f"sums {suffix}", sum_kernel, shape.sums(), kind)
        add(f"join {suffix}", join_kernel, shape.join(), kind)
        for l2 in (False, True):
            name = f"scores {suffix} {'l2' if l2 else 'mean'}"
            add(name, score_kernel, dict(shape.scores(), L2=l2), kind)
    return all_builds
