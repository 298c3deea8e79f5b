"""Torch code of `page_tables` for a CPU: one gather and one select over [L, R, W]."""

import torch


def tables_of_rows(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    packed: torch.Tensor,
    num_packed: torch.Tensor,
    first_block: torch.Tensor,
    layer_offset: torch.Tensor,
    block_stride: int,
    block_size: int,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tables ``[L, R, width]`` and lengths ``[L, R]``.

    `packed`, `num_packed` and `first_block` are indexed by row, not by slot.
    """
    rows, blocks = block_table.shape
    layers = layer_offset.shape[0]
    count = num_packed.T.unsqueeze(2)  # [L, R, 1]
    column = torch.arange(width, dtype=torch.int32, device=block_table.device)
    source = (column - count + first_block[None, :, None]).clamp_(0, blocks - 1)
    ordinary = block_table.expand(layers, rows, blocks).gather(2, source.long())
    table = ordinary * block_stride + layer_offset[:, None, None]
    capacity = min(width, packed.shape[2])
    head = table[:, :, :capacity]
    is_packed = column[:capacity] < count
    torch.where(is_packed, packed.transpose(0, 1)[:, :, :capacity], head, out=head)
    lengths = seq_lens + (num_packed.T - first_block) * block_size
    # Attention kernels read a layer's lengths through a raw pointer, so rows must be dense.
    return table.contiguous(), lengths.to(torch.int32).contiguous()


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
    rows = int(live)
    slot = slots[:rows].long()
    longest = int(seq_lens[:rows].max()) if rows else 0
    blocks = min(max(-(-longest // block_size), 1), block_table.shape[1])
    width = min(blocks, out_tables.shape[2])
    tables, lengths = tables_of_rows(
        block_table[:rows, :blocks],
        seq_lens[:rows],
        packed[slot, :, :width],
        num_packed[slot],
        first_block[slot],
        layer_offset,
        block_stride,
        block_size,
        width,
    )
    out_tables[:, :rows, :width] = tables
    out_tables[:, rows:, :1] = layer_offset[:, None, None]
    capacity = out_tables.shape[2] * block_size
    out_lengths[:, :rows], out_lengths[:, rows:] = lengths.clamp(max=capacity), 0
