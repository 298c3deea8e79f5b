"""Torch code of `move_kept` for a CPU: plain indexing, one row at a time."""

import torch


def run(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    kept: torch.Tensor | None,
    counts: torch.Tensor,
    destinations: torch.Tensor,
    to_keys: torch.Tensor,
    to_values: torch.Tensor,
) -> None:
    heads, block = key_pages.shape[1], key_pages.shape[3]
    for row, count in enumerate(counts.tolist()):
        to = destinations[row, :count].long()
        if kept is None:
            source = pages[row, :count].long()
            to_keys[to], to_values[to] = key_pages[source], value_pages[source]
            continue
        position = kept[row, :, : count * block].long().view(heads, count, block)
        page, slot = pages[row][position // block].long(), position % block
        head = torch.arange(heads, device=kept.device)[:, None, None].expand_as(page)
        # The indexing reads [Hkv, pages, block_size, D].
        to_keys[to] = key_pages[page, head, :, slot].permute(1, 0, 3, 2)
        to_values[to] = value_pages[page, head, slot].transpose(0, 1)
