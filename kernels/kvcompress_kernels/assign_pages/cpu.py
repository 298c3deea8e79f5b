"""Torch code of `assign_pages` for a CPU. It reads no tensor values on the host."""

import torch
from torch.nn.functional import pad


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
    slots, first, begin = requests.unbind(1)
    flat = (blocks[:, None] * block_stride + layer_offset).flatten()
    pages = packed if group_tokens is None else packed[:, :, 1:]
    column = torch.arange(pages.shape[2], device=packed.device)
    start = begin[:, None] * len(layer_offset) + counts.cumsum(1) - counts
    indices = start[:, :, None] + column
    # Columns after a layer's pages read the 0 that follows the last page.
    indices = indices.where(column < counts[:, :, None], len(flat))
    if group_tokens is not None:
        packed[slots, :, 0] = 0
    pages[slots] = pad(flat, (0, 1))[indices].to(torch.int32)
    num_packed[slots] = counts if group_tokens is None else torch.zeros_like(counts)
    first_block[slots] = first.to(torch.int32)
    if out_group_tokens is not None:
        tokens = torch.zeros_like(counts) if group_tokens is None else group_tokens
        out_group_tokens[slots] = tokens
