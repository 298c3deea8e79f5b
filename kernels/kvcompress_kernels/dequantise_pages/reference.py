"""Reference for `dequantise_pages` in float64: one packed page at a time."""

import torch

from kvcompress_kernels import k4v3
from kvcompress_kernels.packed_attention.offsets import Offsets


def run(
    pages: torch.Tensor,
    offsets: Offsets | None,
    packed: torch.Tensor,
    destinations: torch.Tensor,
) -> None:
    block, dim = pages.shape[2], pages.shape[3] // 2
    limit = torch.finfo(pages.dtype).max
    column = 0
    for page in packed.tolist():
        group = k4v3.read_pages(pages.view(torch.uint8), torch.tensor([page]), pages.itemsize)
        keys, values = (
            x[0].flatten(1, 2).clamp(-limit, limit).to(pages.dtype)  # [Hkv, tokens, D]
            for x in k4v3.dequantise(group, torch.float64)
        )
        for first in range(0, keys.shape[1], block):
            into = pages[destinations[column]]
            tokens = slice(first, first + block)
            if offsets is None:
                into[..., :dim], into[..., dim:] = keys[:, tokens], values[:, tokens]
            else:
                elements = into.flatten(1)
                elements[:, offsets.key_tokens[:, None] + offsets.key_dims] = keys[:, tokens]
                elements[:, offsets.value_tokens[:, None] + offsets.value_dims] = values[:, tokens]
                into.copy_(elements.view_as(into))
            column += 1
