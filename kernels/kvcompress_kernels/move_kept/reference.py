"""Reference for `move_kept`: copies one token of one head at a time."""

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
    _, heads, _, block = key_pages.shape
    for row, count in enumerate(counts.tolist()):
        for head in range(heads):
            for n in range(count * block):
                position = n if kept is None else int(kept[row, head, n])
                page, slot = int(pages[row, position // block]), position % block
                to, to_slot = int(destinations[row, n // block]), n % block
                to_keys[to, head, :, to_slot] = key_pages[page, head, :, slot]
                to_values[to, head, to_slot] = value_pages[page, head, slot]
