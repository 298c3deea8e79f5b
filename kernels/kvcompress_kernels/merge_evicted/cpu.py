"""Torch code of `merge_evicted` for a CPU, in float32 or float64.

Cosines are tiled over evicted and kept tokens. The threshold is a mean over all evicted tokens, so
the nearest kept tokens are all found before anything is merged. A kept token that nothing is merged
into is multiplied and divided by exactly 1.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kvcompress_kernels.merge_evicted.reference import ROUNDING
from kvcompress_kernels.merge_evicted.result import Merged

KEPT = 4096
"""Kept tokens in a tile."""
COSINES = 8 << 20
"""Bytes of one tile's cosines."""

_Read = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function that reads the keys or values of the given heads and tokens."""


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
    head = torch.arange(kept.shape[1], device=kept.device)[:, None]
    for row, (count, length) in enumerate(zip(counts.tolist(), lengths.tolist(), strict=True)):
        kept_tokens = kept[row, :, :count].long()
        cache = _Cache(key_pages, value_pages, pages[row])
        row_keys, row_values = cache.key(head, kept_tokens), cache.value(head, kept_tokens)
        evicted = torch.ones(len(head), length, dtype=torch.bool, device=kept.device)
        evicted = evicted.scatter_(1, kept_tokens, False).nonzero()[:, 1]
        evicted = evicted.view(len(head), length - count)
        if evicted.shape[1]:
            u, near = _nearest(cache, row_keys, evicted)
            mean, before = u.mean(1, dtype=torch.float64), threshold[row].double()
            tau = mean.where(before.isnan(), beta * mean + (1 - beta) * before)
            # The tolerance treats cosines that differ only by rounding the same.
            merged, after[row] = u >= tau[:, None] - ROUNDING, tau.float()
            folded = [(row_values, cache.value)]
            if not values_only:
                folded.append((row_keys, cache.key))
            _fold(folded, evicted, merged, near + count * head, u.exp() * merged)
        keys[row, :, :count], values[row, :, :count] = row_keys, row_values
    return Merged(keys, values, after)


class _Cache(NamedTuple):
    """Key and value pages of one prompt."""

    key_pages: torch.Tensor
    value_pages: torch.Tensor
    pages: torch.Tensor

    def key(self, head: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        block = self.key_pages.shape[3]
        found = self.key_pages[self.pages[token // block], head, :, token % block]
        return found.to(self._wide())

    def value(self, head: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        block = self.key_pages.shape[3]
        found = self.value_pages[self.pages[token // block], head, token % block]
        return found.to(self._wide())

    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.key_pages.dtype, torch.float32)


def _nearest(
    cache: _Cache, keys: torch.Tensor, evicted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosine of each evicted token with its nearest kept key, and that key's index.

    Args:
        cache: pages of the prompt.
        keys: kept keys ``[Hkv, n, D]``.
        evicted: evicted tokens ``[Hkv, m]``.

    Returns:
        Cosines ``[Hkv, m]`` and indices ``[Hkv, m]`` into `keys`.
    """
    heads, count, dim = keys.shape
    head = torch.arange(heads, device=keys.device)[:, None]
    u = keys.new_full(evicted.shape, -torch.inf)
    near = torch.zeros_like(evicted)
    rows = max(COSINES // (keys.itemsize * heads * max(min(count, KEPT), dim)), 1)
    for first in range(0, count, KEPT):
        near_keys = _unit(keys[:, first : first + KEPT]).mT
        for row in range(0, evicted.shape[1], rows):
            tile = slice(row, row + rows)
            top, at = (_unit(cache.key(head, evicted[:, tile])) @ near_keys).max(-1)
            # Strictly greater, so that ties go to the earlier token.
            better = top > u[:, tile]
            u[:, tile] = torch.where(better, top, u[:, tile])
            near[:, tile] = torch.where(better, at + first, near[:, tile])
    return u, near


def _fold(
    folded: Sequence[tuple[torch.Tensor, _Read]],
    evicted: torch.Tensor,
    merged: torch.Tensor,
    near: torch.Tensor,
    weight: torch.Tensor,
) -> None:
    """Merge evicted tokens into kept tokens, in place.

    Args:
        folded: pairs of kept keys or values ``[Hkv, n, D]`` and the function that reads those of
            other tokens.
        evicted: evicted tokens ``[Hkv, m]``.
        merged: ``[Hkv, m]`` bool, whether an evicted token is merged.
        near: ``[Hkv, m]``, row of its kept token among the ``Hkv * n``.
        weight: ``[Hkv, m]``, its weight, 0 if it is not merged.
    """
    heads, count = folded[0][0].shape[:2]
    total = weight.new_zeros(heads * count).index_add_(0, near.flatten(), weight.flatten())
    total = total.view(heads, count, 1)
    touched = total > 0
    for x, _ in folded:
        x *= torch.full_like(total, math.e).where(touched, 1.0)
    for row in range(0, evicted.shape[1], KEPT):
        tile = slice(row, row + KEPT)
        head, column = merged[:, tile].nonzero(as_tuple=True)
        token, target = evicted[:, tile][head, column], near[:, tile][head, column]
        w = weight[:, tile][head, column, None]
        for x, read in folded:
            x.view(-1, x.shape[-1]).index_add_(0, target, read(head, token).mul_(w))
    for x, _ in folded:
        x /= (math.e + total).where(touched, 1.0)


def _unit(x: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.clamp_min(1e-12)
