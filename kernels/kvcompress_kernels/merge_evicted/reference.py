"""Definition of `merge_evicted`, in float64, one kept token after the other."""

import math

import torch

from kvcompress_kernels.merge_evicted.result import Merged
from kvcompress_kernels.prompt import cached_keys, cached_values

ROUNDING = 2.0**-21
"""Rounding of a float32 cosine that is allowed for: four units in its last place."""


def run(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    kept: torch.Tensor,
    counts: torch.Tensor,
    least: int,
    values_only: bool,
    lengths: torch.Tensor,
    threshold: torch.Tensor,
    beta: float,
) -> Merged:
    wide = torch.promote_types(key_pages.dtype, torch.float32)
    keys = torch.zeros(*kept.shape, key_pages.shape[2], dtype=wide, device=kept.device)
    values = keys.new_zeros(*kept.shape, value_pages.shape[3])
    after = threshold.clone()
    for row, (count, length) in enumerate(zip(counts.tolist(), lengths.tolist(), strict=True)):
        cached = (
            cached_keys(key_pages, pages[row], length),
            cached_values(value_pages, pages[row], length),
        )
        for head, (k, v) in enumerate(zip(*cached, strict=True)):
            stay = kept[row, head, :count].long()
            weights, into, after[row, head] = _merged(k, stay, after[row, head], beta)
            for n, token in enumerate(stay):
                own = into == n
                values[row, head, n] = _folded(v, token, own, weights)
                keys[row, head, n] = k[token] if values_only else _folded(k, token, own, weights)
    return Merged(keys, values, after)


def _merged(
    k: torch.Tensor, stay: torch.Tensor, tau: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is merged into what: weights ``[S]``, the index in `stay` ``[S]``, the new threshold.

    A token that is kept or dropped has the index -1.
    """
    nowhere = torch.full((len(k),), -1, device=k.device)
    evicted = torch.ones(len(k), dtype=torch.bool, device=k.device)
    evicted[stay] = False
    if not evicted.any():
        return k.new_zeros(len(k)), nowhere, tau
    unit = k / torch.linalg.vector_norm(k, dim=-1, keepdim=True).clamp_min(1e-12)
    u, near = (unit @ unit[stay].T).max(1)  # the first of equal ones
    mean = u[evicted].mean()
    tau = mean if tau.isnan() else beta * mean + (1 - beta) * tau.double()
    merged = evicted & (u >= tau - ROUNDING)
    return u.exp(), near.where(merged, nowhere), tau


def _folded(
    x: torch.Tensor, token: torch.Tensor, members: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """A kept token's key or value, with those of the `members` folded in."""
    if not members.any():
        return x[token]
    w = weights[members, None]
    return (math.e * x[token] + (w * x[members]).sum(0)) / (math.e + w.sum())
