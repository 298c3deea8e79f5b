"""Launches the passes of `value_scores`: for one prompt, or every layer and request of a step."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import triton

from kvcompress_kernels.builds import Build
from kvcompress_kernels.ops import require
from kvcompress_kernels.value_scores_passes_triton import (
    VARY,
    join_kernel,
    score_kernel,
    sum_kernel,
)

SPLIT = 1024
"""Tokens of one partial sum. Fixed, so that a prompt's scores do not depend on its batch."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the configurations follow from."""

    group: int
    dim: int
    block: int
    fast: bool
    bytes: int  # of an element of V

    def sums(self) -> dict[str, Any]:
        heads = 4 if self.fast else max(triton.next_power_of_2(self.group), 4)
        pad = max(triton.next_power_of_2(self.dim), 16)
        tile = max(16, min(64, 16384 // (pad * self.bytes)))
        how = dict(self._sums(), HEADS=heads, PAD=pad, TILE=tile)
        # half of the stages are the page table's
        return dict(how, num_warps=4 if heads * pad <= 1024 else 8, num_stages=6)

    def join(self) -> dict[str, Any]:
        return dict(self._sums(), PAD=triton.next_power_of_2(self.dim), TILE=16, num_warps=4)

    def scores(self) -> dict[str, Any]:
        tile = 128 if self.dim <= 128 else 64
        return dict(self._common(), GROUP=self.group, TILE=tile, num_warps=8)

    def _sums(self) -> dict[str, Any]:
        return dict(self._common(), GROUP=1 if self.fast else self.group, SPLIT=SPLIT)

    def _common(self) -> dict[str, Any]:
        known = self.block if self.block & (self.block - 1) == 0 and self.block <= 1024 else 0
        return dict(DIM=self.dim, BLOCK=known, FAST=self.fast)


def run(
    weights: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    fast: bool,
    reduce: str,
) -> torch.Tensor:
    count = torch.full((1,), tokens, dtype=torch.int32, device=pages.device)
    return run_batch(weights[None], value_pages, pages[None], count, fast, reduce)[0]


def run_batch(
    weights: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: torch.Tensor,
    fast: bool,
    reduce: str,
) -> torch.Tensor:
    """`value_scores` of N prompts: three launches.

    Args:
        weights: ``[N, Hq, S]`` float32, S at least the longest prompt.
        value_pages: ``[pages, Hkv, block_size, D]`` 16-bit or float32, any strides.
        pages: ``[N, W]`` int: each prompt's pages in order, then anything.
        tokens: ``[N]`` int on the device: prompt lengths, all positive (unchecked).
        fast: as in `value_scores`.
        reduce: as in `value_scores`.

    Returns:
        ``[N, Hkv, S]`` float32, 0 from a prompt's end on.

    Raises:
        ValueError: a dtype without a kernel.
    """
    require(value_pages.dtype in DTYPES, "value_scores", f"one of {DTYPES}", value_pages.dtype)
    rows, heads, width = weights.shape
    _, kv_heads, block, dim = value_pages.shape
    shape = _Shape(heads // kv_heads, dim, block, fast, value_pages.element_size())
    splits, summed = triton.cdiv(width, SPLIT), kv_heads if fast else heads
    sums = weights.new_empty(rows, summed, splits, dim)
    rests = weights.new_empty(rows, summed, splits)
    heaviest = torch.empty_like(rests, dtype=torch.int32)
    outputs = weights.new_empty(rows, summed, dim)
    alone_score = weights.new_empty(rows, summed)
    alone = torch.empty_like(alone_score, dtype=torch.int32)
    scores = weights.new_empty(rows, kv_heads, width)
    inputs = weights.contiguous(), value_pages, pages, tokens
    sizes = block, width, pages.stride(0), *value_pages.stride()
    sum_kernel[splits, kv_heads, rows](*inputs, sums, rests, heaviest, *sizes, **shape.sums())
    joined = outputs, alone, alone_score
    join_kernel[summed, rows](*inputs, sums, rests, heaviest, *joined, *sizes, **shape.join())
    how = dict(shape.scores(), L2=reduce == "l2")
    grid = triton.cdiv(width, how["TILE"]), kv_heads, rows
    score_kernel[grid](*inputs, *joined, scores, *sizes, **how)
    return scores


def builds() -> list[Build]:
    """Blocks of 16, dims side by side in memory, 4 or 16 query heads per KV head."""
    made = []
    for dim, group, fast in product((64, 128), (4, 16), (False, True)):
        shape = _Shape(group, dim, 16, fast, 2)
        of = f"D{dim} G{group}{' fast' if fast else ''}"
        made.append(_build(f"value_scores sums {of}", sum_kernel, shape.sums()))
        made.append(_build(f"value_scores join {of}", join_kernel, shape.join(), wide_loads=False))
        for l2 in (False, True):
            name = f"value_scores scores {of} {'l2' if l2 else 'mean'}"
            made.append(_build(name, score_kernel, dict(shape.scores(), L2=l2)))
    return made


def _build(name: str, kernel: Any, how: dict[str, Any], *, wide_loads: bool = True) -> Build:
    how = dict(how, s_dim=1)
    warps, stages = how.pop("num_warps"), how.pop("num_stages", 3)
    kinds = {"values": "*bf16", "pages": "*i64"}
    kinds |= dict.fromkeys(("tokens", "heaviest", "alone"), "*i32")
    floats = ("weights", "sums", "rests", "outputs", "alone_score", "scores")
    kinds |= dict.fromkeys(floats, "*fp32")
    signature = {arg: kinds.get(arg, "i32") for arg in kernel.arg_names if arg not in how}
    aligned = tuple(arg for arg in signature if arg not in VARY)
    form: dict[str, Any] = dict(constexprs=how, warps=warps, stages=stages, aligned=aligned)
    return Build(name=name, kernel=kernel, signature=signature, wide_loads=wide_loads, **form)
