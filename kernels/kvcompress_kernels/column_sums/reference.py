"""Reference for `column_sums` in float64: sums the columns of the full attention matrix."""

import torch

from kvcompress_kernels.cached_prompt import attention, cached_keys


def run(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    keys = cached_keys(key_pages, pages, tokens)
    return attention(query, keys, scale, sinks).sum(1).float()
