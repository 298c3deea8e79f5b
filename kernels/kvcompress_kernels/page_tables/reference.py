"""Reference for `page_tables`: writes one entry at a time."""

import torch


def run(
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
    layers, rows, width = out_tables.shape
    for layer in range(layers):
        offset = int(layer_offset[layer])
        for row in range(int(live), rows):
            out_lengths[layer, row], out_tables[layer, row, 0] = 0, offset
        for row in range(int(live)):
            slot = int(slots[row])
            count, first = int(num_packed[slot, layer]), int(first_block[slot])
            length = int(seq_lens[row]) + (count - first) * block_size
            length = min(length, width * block_size)
            out_lengths[layer, row] = length
            for column in range(-(-length // block_size)):
                if column < count:
                    page = int(packed[slot, layer, column])
                else:
                    block = int(block_table[row, column - count + first])
                    page = offset + block_stride * block
                out_tables[layer, row, column] = page
