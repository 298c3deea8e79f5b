"""Definition of `column_sums`, in float64: the whole attention matrix, summed by columns."""

import torch

from kvcompress_kernels.prompt import attention, cached_keys


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
