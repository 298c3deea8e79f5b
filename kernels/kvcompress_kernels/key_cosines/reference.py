"""Reference for `key_cosines` in float64."""

import torch

from kvcompress_kernels.cached_prompt import cached_keys


def run(key_pages: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    unit = _unit(cached_keys(key_pages, pages, tokens))
    anchor = _unit(unit.mean(1, keepdim=True))
    return (unit * anchor).sum(-1).float()


def _unit(x: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.clamp_min(1e-12)
