"""Reference of `gather_kept` and `scatter_kept`: plain indexing, K and V each moved once."""

import torch


def gather(
    key_pages: torch.Tensor, value_pages: torch.Tensor, pages: torch.Tensor, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, block = key_pages.shape[1], key_pages.shape[3]
    page, slot = pages[kept // block], kept % block  # [Hkv, n]
    head = torch.arange(heads, device=kept.device)[:, None].expand_as(kept)
    keys = key_pages[page, head, :, slot]  # [Hkv, n, D]
    values = value_pages[page, head, slot]
    packed = (heads, -1, block, keys.shape[-1])
    return (
        keys.view(packed).permute(1, 0, 3, 2),
        values.view(*packed[:3], values.shape[-1]).permute(1, 0, 2, 3),
    )


def scatter(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    destination: torch.Tensor,
) -> None:
    key_pages[destination] = keys
    value_pages[destination] = values
