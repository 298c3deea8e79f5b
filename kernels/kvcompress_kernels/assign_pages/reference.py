"""Reference for `assign_pages`: writes one entry at a time."""

import torch


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
    pages_per_block = len(layer_offset)
    for request, (slot, first, begin) in enumerate(requests.tolist()):
        first_block[slot] = first
        pages = 0
        for layer, count in enumerate(counts[request].tolist()):
            num_packed[slot, layer] = count if group_tokens is None else 0
            if out_group_tokens is not None:
                tokens = 0 if group_tokens is None else int(group_tokens[request, layer])
                out_group_tokens[slot, layer] = tokens
            packed[slot, layer] = 0
            for column in range(group_tokens is not None, count + (group_tokens is not None)):
                index, part = divmod(pages, pages_per_block)
                block = int(blocks[begin + index])
                packed[slot, layer, column] = block * block_stride + int(layer_offset[part])
                pages += 1
