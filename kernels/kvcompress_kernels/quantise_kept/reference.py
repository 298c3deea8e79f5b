"""Reference for `quantise_kept`: quantises one group at a time in float64."""

import torch

from kvcompress_kernels import k4v3


def run(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    kept: torch.Tensor | None,
    tokens: torch.Tensor,
    destinations: torch.Tensor,
    into: torch.Tensor,
    key_scale: float | torch.Tensor = 1.0,
    value_scale: float | torch.Tensor = 1.0,
) -> None:
    _, heads, dim, block = key_pages.shape
    width = into.shape[3]
    rows_per_group = k4v3.rows_per_group(width // (2 * dim))
    groups_per_page = into.shape[2] // rows_per_group
    factors = [
        torch.as_tensor(scale, dtype=torch.float32).double().expand(len(pages))
        for scale in (key_scale, value_scale)
    ]
    for row, count in enumerate(tokens.tolist()):
        for head in range(heads):
            for group, first in enumerate(range(0, count, k4v3.GROUP)):
                valid = min(k4v3.GROUP, count - first)
                keys, values = torch.zeros(2, k4v3.GROUP, dim, dtype=torch.float64)
                for n in range(valid):
                    position = first + n if kept is None else int(kept[row, head, first + n])
                    page, slot = int(pages[row, position // block]), position % block
                    keys[n] = key_pages[page, head, :, slot].double() * factors[0][row]
                    values[n] = value_pages[page, head, slot].double() * factors[1][row]
                content = k4v3.to_bytes(k4v3.quantise(keys, values, valid))
                to = into[int(destinations[row, group // groups_per_page]), head]
                first_row = group % groups_per_page * rows_per_group
                to[first_row : first_row + rows_per_group] = content.view(-1, width)
