"""Block table and sequence length of each layer, for compressed and uncompressed requests.

Row r is a request of the batch, with slot ``s = slots[r]``. Each layer l of a row ``r < live``
reads its packed pages first, then the ordinary blocks from `first_block` on:

* ``table[l, r, c] = packed[s, l, c]`` for ``c < num_packed[s, l]``,
* ``table[l, r, c] = layer_offset[l] + block_stride * block_table[r, b]`` from there on, with
  ``b = c - num_packed[s, l] + first_block[s]``.

An uncompressed request has ``num_packed == first_block == 0``.
"""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import check_tensor, require


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
    """Write every layer's block table and sequence length of one batch.

    The outputs are persistent buffers that a CUDA graph may have captured. On a GPU this is one
    launch without allocation, copy or sync. The grid depends only on the shape of the buffers.

    Args:
        block_table: ``[>= live, W']`` int32: vLLM's block ids.
        seq_lens: ``[>= live]`` int32: vLLM's sequence lengths, in tokens.
        packed: ``[slots, L, C]`` int32: flat pages of each layer's kept prompt tokens, indexed by
            slot instead of row.
        num_packed: ``[slots, L]`` int32, at most C and at most `first_block`.
        first_block: ``[slots]`` int32: index of the first ordinary block that is still read.
        layer_offset: ``[L]`` int32: flat page of block 0 in each layer.
        block_stride: flat pages between block b and b + 1 of one layer.
        block_size: tokens in a block.
        slots: ``[>= live]`` int32, the slot of each row.
        live: ``[]`` int32 on the device: rows of this step, at most R.
        out_tables: ``[L, R, W]`` int32. Only the columns that a layer's length covers are written.
            Later columns may hold other pages of the request, the null block or their old content,
            so the buffer must be zeroed once. Rows from `live` on read the null block.
        out_lengths: ``[L, R]`` int32, all written. It is 0 from `live` on and at most
            ``W * block_size``, because a dummy batch may use the maximum sequence length with a
            pool that cannot hold it.

    Raises:
        ValueError: Shapes or dtypes disagree, or a last axis is strided.
    """
    name, (layers, rows) = "page_tables", out_tables.shape[:2]
    pool, buffers = (packed, num_packed, first_block), (out_tables, out_lengths)
    for tensor in (block_table, seq_lens, *pool, layer_offset, slots, live, *buffers):
        ok = tensor.dtype == torch.int32 and (tensor.dim() == 0 or tensor.stride(-1) == 1)
        got = tensor.dtype, tensor.stride()
        require(ok, name, "all tensors must be int32 with a dense last axis", got)
    require(block_table.shape[1] > 0, name, "block_table must have columns", block_table.shape)
    check_tensor(name, "live", live, (), torch.int32)
    require(
        packed.shape[:2] == num_packed.shape == (len(first_block), layers),
        name,
        f"packed and num_packed must start with [{len(first_block)}, {layers}]",
        (tuple(packed.shape), tuple(num_packed.shape)),
    )
    check_tensor(name, "layer_offset", layer_offset, (layers,), torch.int32)
    check_tensor(name, "out_lengths", out_lengths, (layers, rows), torch.int32)
    if contract.runs_triton(out_tables):
        from kvcompress_kernels.page_tables.triton import run
    else:
        from kvcompress_kernels.page_tables.cpu import run

    layout = block_table, seq_lens, *pool, layer_offset, block_stride, block_size
    run(*layout, slots, live, *buffers)
