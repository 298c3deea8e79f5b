"""Triton kernel of `assign_pages`: one program per request, layer and tile of columns.

Each layer has up to 8,192 table columns, and all are written, so a program stores 1,024 columns.
Every program sums the counts of the layers before its own, which are at most a few hundred numbers.
"""

import torch
import triton
import triton.language as tl

from kvcompress_kernels.builds import Build

COLUMNS = 1024
WARPS = 4


# These tensors are slices of one upload, so their alignment varies. Triton would compile a variant
# for each alignment while the engine serves.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["per_block", "block_stride"],
    do_not_specialize_on_alignment=["requests", "blocks", "counts", "group_tokens"],
)
def _assign_pages_kernel(  # type: ignore[no-untyped-def]
    requests,  # [R, 3]
    blocks,  # [B]
    layer_offset,  # [per_block]
    counts,  # [R, L]
    packed,  # [slots, L, width]
    num_packed,  # [slots, L]
    first_block,  # [slots]
    group_tokens,  # [R, L] or None
    out_group_tokens,  # [slots, L] or None
    layers,
    width,
    per_block,
    block_stride,
    LAYERS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write a tile of the pages of one layer, and with the first tile the layer's lengths."""
    tile, layer = tl.program_id(0), tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    slot = tl.load(requests + 3 * request)
    begin = tl.load(requests + 3 * request + 2)
    lane = tl.arange(0, LAYERS)
    owned = tl.load(counts + request * layers + lane, mask=lane < layers, other=0)
    before = tl.sum(tl.where(lane < layer, owned, 0), 0)
    count = tl.sum(tl.where(lane == layer, owned, 0), 0)

    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    if group_tokens is not None:
        column -= 1
    held = (column >= 0) & (column < count)
    index = before + column
    block = tl.load(blocks + begin + index // per_block, mask=held, other=0)
    offset = tl.load(layer_offset + index % per_block, mask=held, other=0)
    page = tl.where(held, block * block_stride + offset, 0).to(tl.int32)
    out = slot * layers + layer
    if group_tokens is not None:
        column += 1
    tl.store(packed + out * width + column, page, mask=column < width)
    if tile == 0:
        if group_tokens is None:
            tl.store(num_packed + out, count)
            if out_group_tokens is not None:
                tl.store(out_group_tokens + out, 0)
        else:
            tl.store(num_packed + out, 0)
            tl.store(out_group_tokens + out, tl.load(group_tokens + request * layers + layer))
        if layer == 0:
            first = tl.load(requests + 3 * request + 1)
            tl.store(first_block + slot, first.to(tl.int32))


def run(
    requests: torch.Tensor,
    blocks: torch.Tensor,
    layer_offset: torch.Tensor,
    block_stride: int,
    counts: torch.Tensor,
    packed: torch.Tensor,
    num_packed: torch.Tensor,
    first_block: torch.Tensor,
    group_tokens: torch.Tensor | None,
    out_group_tokens: torch.Tensor | None,
) -> None:
    layers, width = packed.shape[1:]
    # A table without columns still has lengths.
    grid = max(triton.cdiv(width, COLUMNS), 1), layers, len(requests)
    if not layers * len(requests):
        return
    _assign_pages_kernel[grid](
        requests,
        blocks,
        layer_offset,
        counts,
        packed,
        num_packed,
        first_block,
        group_tokens,
        out_group_tokens,
        layers,
        width,
        len(layer_offset),
        block_stride,
        LAYERS=triton.next_power_of_2(layers),
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )


def builds(sm: int) -> list[Build]:
    """Return the builds for 32 layers, with pages of tokens and with pages of groups."""
    groups = ("group_tokens", "out_group_tokens")
    pointers = "layer_offset", "packed", "num_packed", "first_block", "counts", *groups
    return [
        Build(
            name=f"assign_pages{name}",
            kernel=_assign_pages_kernel,
            config={"LAYERS": 32, "COLUMNS": COLUMNS, "num_warps": WARPS, **absent},
            types={"requests": "*i64", "blocks": "*i64", **dict.fromkeys(pointers, "*i32")},
            wide_loads=False,
        )
        for name, absent in (("", dict.fromkeys(groups)), (" groups", {}))
    ]
