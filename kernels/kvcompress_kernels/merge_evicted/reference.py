"""Reference of `merge_evicted`: float32 or wider, cosines tiled over evicted and kept tokens.

The nearest kept token of every evicted one comes first, since the threshold is a mean over all of
them; then the merged ones are added up. Where nothing is merged, weight and divisor are exactly 1.
"""

import math

import torch

from kvcompress_kernels.merge_evicted.result import Merged

KEPT = 4096
"""Kept tokens in a tile."""
COSINES = 8 << 20
"""Bytes of one tile's cosines."""
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
    for row, (count, held) in enumerate(zip(counts.tolist(), lengths.tolist(), strict=True)):
        own = kept[row, :, :count].long()
        keys[row, :, :count], values[row, :, :count], after[row] = _merge(
            *(key_pages, value_pages, pages[row], held, own, values_only, threshold[row], beta)
        )
    return Merged(keys, values, after)


def _merge(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    kept: torch.Tensor,
    values_only: bool,
    threshold: torch.Tensor,
    beta: float,
) -> Merged:
    heads, count = kept.shape
    block = key_pages.shape[3]
    head = torch.arange(heads, device=kept.device)[:, None]
    wide = torch.promote_types(key_pages.dtype, torch.float32)

    def key(head: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return key_pages[pages[token // block], head, :, token % block].to(wide)

    def value(head: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return value_pages[pages[token // block], head, token % block].to(wide)

    keys, values = key(head, kept), value(head, kept)
    evicted = torch.ones(heads, tokens, dtype=torch.bool, device=kept.device)
    evicted = evicted.scatter_(1, kept, False).nonzero()[:, 1].view(heads, tokens - count)
    if evicted.shape[1] == 0:
        return Merged(keys, values, threshold)

    u = keys.new_full(evicted.shape, -torch.inf)
    near = torch.zeros_like(evicted)
    rows = max(COSINES // (wide.itemsize * heads * max(min(count, KEPT), key_pages.shape[2])), 1)
    for first in range(0, count, KEPT):
        near_keys = _unit(keys[:, first : first + KEPT]).mT
        for row in range(0, evicted.shape[1], rows):
            tile = slice(row, row + rows)
            top, at = (_unit(key(head, evicted[:, tile])) @ near_keys).max(-1)
            # A later token must be nearer to win, so that ties go to the earlier one.
            better = top > u[:, tile]
            u[:, tile] = torch.where(better, top, u[:, tile])
            near[:, tile] = torch.where(better, at + first, near[:, tile])

    mean, before = u.mean(1, dtype=torch.float64), threshold.double()
    after = mean.where(before.isnan(), beta * mean + (1 - beta) * before)
    # cosines that are equal but for rounding are all merged
    merged = u >= after[:, None] - ROUNDING
    near += count * head
    weight = u.exp() * merged
    total = weight.new_zeros(heads * count).index_add_(0, near.flatten(), weight.flatten())
    total = total.view(heads, count, 1)
    touched = total > 0
    folded = ((values, value),) if values_only else ((keys, key), (values, value))
    for x, _ in folded:
        x *= torch.full_like(total, math.e).where(touched, 1.0)
    for row in range(0, evicted.shape[1], KEPT):
        tile = slice(row, row + KEPT)
        of, column = merged[:, tile].nonzero(as_tuple=True)
        token, into = evicted[:, tile][of, column], near[:, tile][of, column]
        w = weight[:, tile][of, column, None]
        for x, cached in folded:
            x.view(-1, x.shape[-1]).index_add_(0, into, cached(of, token).mul_(w))
    for x, _ in folded:
        x /= (math.e + total).where(touched, 1.0)
    return Merged(keys, values, after.float())


def _unit(x: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.clamp_min(1e-12)
