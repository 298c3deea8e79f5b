"""Reference for `value_norms` in float64."""

import torch

from kvcompress_kernels.cached_prompt import cached_values


def run(value_pages: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    return cached_values(value_pages, pages, tokens).abs().sum(-1).float()
