"""Reference for `merge_evicted` in float64, one kept token at a time."""

import math

import torch

from kvcompress_kernels.cached_prompt import cached_keys, cached_values
from kvcompress_kernels.merge_evicted.result import Merged

ROUNDING = 2.0**-21
"""Tolerance for the rounding of a float32 cosine: four units in the last place."""


def run(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    kept: torch.Tensor,
    counts: torch.Tensor,
    min_kept: int,
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
            kept_tokens = kept[row, head, :count].long()
            weights, near, after[row, head] = _nearest(k, kept_tokens, after[row, head], beta)
            for n, token in enumerate(kept_tokens):
                members = near == n
                values[row, head, n] = _merged(v, token, members, weights)
                merged_key = k[token] if values_only else _merged(k, token, members, weights)
                keys[row, head, n] = merged_key
    return Merged(keys, values, after)


def _nearest(
    k: torch.Tensor, kept: torch.Tensor, tau: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each token's weight ``[S]``, the index of its kept token ``[S]`` and the new tau.

    The index refers to `kept`. It is -1 for kept and dropped tokens.
    """
    no_index = torch.full((len(k),), -1, device=k.device)
    evicted = torch.ones(len(k), dtype=torch.bool, device=k.device)
    evicted[kept] = False
    if not evicted.any():
        return k.new_zeros(len(k)), no_index, tau
    unit = k / torch.linalg.vector_norm(k, dim=-1, keepdim=True).clamp_min(1e-12)
    u, near = (unit @ unit[kept].T).max(1)  # the first of equal maxima
    mean = u[evicted].mean()
    tau = mean if tau.isnan() else beta * mean + (1 - beta) * tau.double()
    merged = evicted & (u >= tau - ROUNDING)
    return u.exp(), near.where(merged, no_index), tau


def _merged(
    x: torch.Tensor, token: torch.Tensor, members: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return a kept token's key or value with those of the `members` merged into it."""
    if not members.any():
        return x[token]
    w = weights[members, None]
    return (math.e * x[token] + (w * x[members]).sum(0)) / (math.e + w.sum())
