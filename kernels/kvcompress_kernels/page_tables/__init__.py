"""Where each layer finds each request's tokens, in every step.

With ``s = slots[r]``, layer l of row ``r < live`` reads its packed pages, then the ordinary blocks
from `first_block` on: ``table[l, r, c] = packed[s, l, c]`` for ``c < num_packed[s, l]``, else the
flat page
``layer_offset[l] + block_stride * block_table[r, c - num_packed[s, l] + first_block[s]]``.
A request that was not compressed has ``num_packed == first_block == 0``.
"""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import require


def page_tables(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    packed: torch.Tensor,
    num_packed: torch.Tensor,
    first_block: torch.Tensor,
    layer_offset: torch.Tensor,
    block_stride: int,
    block_size: int,
    slots: torch.Tensor,
    live: torch.Tensor,
    out_tables: torch.Tensor,
    out_lengths: torch.Tensor,
) -> None:
    """Every layer's block table and sequence length for one batch, compressed or not.

    They are written into buffers that outlive the step, and may be captured in a CUDA graph. On a
    GPU this is one launch, no allocation, no copy and no sync: its grid depends on the shape of
    the buffers, all else is read on the device.

    Args:
        block_table: ``[>= live, W']`` int32: vLLM's block ids.
        seq_lens: ``[>= live]`` int32: vLLM's sequence lengths, in tokens.
        packed: ``[slots, L, C]`` int32: flat pages that hold each layer's kept prompt tokens, not
            by row but by slot.
        num_packed: ``[slots, L]`` int32, at most C and at most `first_block`.
        first_block: ``[slots]`` int32: index of the first ordinary block that is still read.
        layer_offset: ``[L]`` int32: flat page of block 0 in each layer.
        block_stride: flat pages between block b and b + 1 of one layer.
        block_size: tokens in a block.
        slots: ``[>= live]`` int32, the slot of each row.
        live: ``[]`` int32 on the device: rows of this step, at most R.
        out_tables: ``[L, R, W]`` int32. Of a row's layer the columns that its length covers are
            written; entries beyond name pages that the row owns, the null block, or what they
            held, so the buffer must be zeroed once. A row from `live` on reads the null block.
        out_lengths: ``[L, R]`` int32, all written; 0 from `live` on. At most what W columns hold:
            a dummy batch may claim the longest sequence there is, in a pool that cannot hold it.

    Raises:
        ValueError: shapes or dtypes disagree, or a last axis is strided.
    """
    buffers = out_tables, out_lengths
    pool = packed, num_packed, first_block
    _check(block_table, *pool, layer_offset, live, *buffers, others=(seq_lens, slots))
    if contract.triton_takes(out_tables):
        from kvcompress_kernels.page_tables.triton import run
    else:
        from kvcompress_kernels.page_tables.cpu import run

    where = block_table, seq_lens, *pool, layer_offset, block_stride, block_size
    run(*where, slots, live, *buffers)


def _check(
    block_table: torch.Tensor,
    packed: torch.Tensor,
    num_packed: torch.Tensor,
    first_block: torch.Tensor,
    layer_offset: torch.Tensor,
    live: torch.Tensor,
    out_tables: torch.Tensor,
    out_lengths: torch.Tensor,
    *,
    others: tuple[torch.Tensor, ...],
) -> None:
    """Check the shapes of all tensors; of the `others` check only dtype and strides."""
    name, (layers, rows) = "page_tables", out_tables.shape[:2]
    pool = packed, num_packed, first_block
    for tensor in (block_table, *pool, layer_offset, live, *others, out_tables, out_lengths):
        ok = tensor.dtype == torch.int32 and (tensor.dim() == 0 or tensor.stride(-1) == 1)
        got = tensor.dtype, tensor.stride()
        require(ok, name, "all tensors must be int32 with a dense last axis", got)
    require(block_table.shape[1] > 0, name, "block_table must have columns", block_table.shape)
    require(live.dim() == 0, name, "live must be a scalar tensor", tuple(live.shape))
    require(
        packed.shape[:2] == num_packed.shape == (len(first_block), layers),
        name,
        f"packed and num_packed must start with [{len(first_block)}, {layers}]",
        (tuple(packed.shape), tuple(num_packed.shape)),
    )
    require(layer_offset.shape == (layers,), name, f"layer_offset [{layers}]", layer_offset.shape)
    require(
        out_lengths.shape == (layers, rows),
        name,
        f"out_lengths must be [{layers}, {rows}]",
        tuple(out_lengths.shape),
    )
