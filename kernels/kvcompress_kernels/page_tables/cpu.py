"""Torch code of `page_tables` for a CPU: one gather and one select over [L, R, W]."""

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
    rows = int(live)
    slot = slots[:rows].long()
    longest = int(seq_lens[:rows].max()) if rows else 0
    blocks = min(max(-(-longest // block_size), 1), block_table.shape[1])
    width = min(blocks, out_tables.shape[2])
    pages, count, first = packed[slot, :, :width], num_packed[slot].T, first_block[slot]
    column = torch.arange(width, dtype=torch.int32, device=block_table.device)
    source = (column - count[..., None] + first[:, None]).clamp_(0, blocks - 1)  # [L, rows, width]
    ordinary = block_table[:rows, :blocks].expand(len(layer_offset), -1, -1)
    tables = ordinary.gather(2, source.long()) * block_stride + layer_offset[:, None, None]
    capacity = min(width, packed.shape[2])
    head, is_packed = tables[:, :, :capacity], column[:capacity] < count[..., None]
    torch.where(is_packed, pages.transpose(0, 1)[:, :, :capacity], head, out=head)
    out_tables[:, :rows, :width] = tables
    out_tables[:, rows:, :1] = layer_offset[:, None, None]
    lengths = seq_lens[:rows] + (count - first) * block_size
    out_lengths[:, :rows] = lengths.clamp(max=out_tables.shape[2] * block_size)
    out_lengths[:, rows:] = 0
