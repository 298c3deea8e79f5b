"""Packed pages of each layer, written into the slots of newly packed requests.

Layers take pages from the request's blocks in order: the first ``counts[r, 0]`` pages belong to
layer 0, the next ``counts[r, 1]`` to layer 1, and so on. With D pages per block, page k is
``block_stride * blocks[begin + k // D] + layer_offset[k % D]``, with ``begin = requests[r, 2]``.
"""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import check_tensor, require

_NAME = "assign_pages"


def assign_pages(
    requests: torch.Tensor,
    blocks: torch.Tensor,
    layer_offset: torch.Tensor,
    block_stride: int,
    counts: torch.Tensor,
    packed: torch.Tensor,
    num_packed: torch.Tensor,
    first_block: torch.Tensor,
    *,
    group_tokens: torch.Tensor | None = None,
    out_group_tokens: torch.Tensor | None = None,
) -> None:
    """Write the packed pages and lengths of R requests into their slots.

    On a GPU this is one launch without allocation, copy or sync. Indices are not range-checked,
    because a check would sync.

    Args:
        requests: ``[R, 3]`` int64 rows of slot, index of the first block that is not packed, and
            index of the request's first entry in `blocks`.
        blocks: ``[B]`` int64: block ids of all requests.
        layer_offset: ``[D]`` int32: flat page of block 0 for each page of a block.
        block_stride: distance between the same page of blocks b and b + 1, in flat pages.
        counts: ``[R, L]`` int32: pages of each layer, at most W, or W - 1 if they hold groups.
        packed: ``[slots, L, W]`` int32: receives the pages of each layer, padded with 0. Pages of
            groups start in column 1, because column 0 is for an ordinary page before them.
        num_packed: ``[slots, L]`` int32: receives `counts`, or 0 if the pages hold groups.
        first_block: ``[slots]`` int32: receives the second column of `requests`.
        group_tokens: ``[R, L]`` int32: tokens of each layer, if the pages hold groups.
        out_group_tokens: ``[slots, L]`` int32: receives `group_tokens`, or 0 without them.

    Raises:
        ValueError: Shapes or dtypes disagree, an output is strided, or `group_tokens` have no
            output.
    """
    outputs = {
        "packed": packed,
        "num_packed": num_packed,
        "first_block": first_block,
        "out_group_tokens": out_group_tokens,
    }
    for name, x in outputs.items():
        if x is not None:
            require(x.is_contiguous(), _NAME, f"{name} must be contiguous", x.stride())
    slots, layers, width = packed.shape
    shapes = {
        "layer_offset": (layer_offset, (len(layer_offset),)),
        "counts": (counts, (len(requests), layers)),
        "group_tokens": (group_tokens, (len(requests), layers)),
        "packed": (packed, (slots, layers, width)),
        "num_packed": (num_packed, (slots, layers)),
        "out_group_tokens": (out_group_tokens, (slots, layers)),
        "first_block": (first_block, (slots,)),
    }
    for name, (x, shape) in shapes.items():
        if x is not None:
            check_tensor(_NAME, name, x, shape, torch.int32)
    check_tensor(_NAME, "requests", requests, (len(requests), 3), torch.int64)
    check_tensor(_NAME, "blocks", blocks, (len(blocks),), torch.int64)
    missing = group_tokens is not None and out_group_tokens is None
    require(not missing, _NAME, "group_tokens need out_group_tokens", None)
    if contract.runs_triton(packed):
        from kvcompress_kernels.assign_pages.triton import run
    else:
        from kvcompress_kernels.assign_pages.cpu import run

    run(
        requests.contiguous(),
        blocks.contiguous(),
        layer_offset.contiguous(),
        block_stride,
        counts.contiguous(),
        packed,
        num_packed,
        first_block,
        None if group_tokens is None else group_tokens.contiguous(),
        out_group_tokens,
    )
