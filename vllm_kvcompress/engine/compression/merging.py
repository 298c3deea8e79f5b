"""Kept tokens with those that are dropped folded in, in the cache's dtype."""

from dataclasses import dataclass, replace

import torch

from kvcompress_kernels.merge_evicted import merge_evicted
from vllm_kvcompress.engine.pages.layouts import Opened, PageViews
from vllm_kvcompress.methods.kept_slots import with_tail
from vllm_kvcompress.methods.protected import places_among


@dataclass(frozen=True, slots=True, kw_only=True)
class Merging:
    """How the tokens that N rows drop are folded into those that they keep.

    Args:
        values_only: keys stay as they are.
        tail: last tokens of each row that stay where they are, and take in those near them.
        tail_pages: ``[N]`` int64, the flat pages that they lie in.
        thresholds: ``[N, Hkv]`` float32, how near a dropped token had to be so far, NaN where none
            was dropped; None where no row ever dropped any.
        least: tokens that every row keeps at least, the tail's among them.
        protected: ``[N, Hkv, G]`` int32 slots that take none in, ascending; None where all may.
    """

    values_only: bool
    tail: int
    tail_pages: torch.Tensor
    thresholds: torch.Tensor | None
    least: int
    protected: torch.Tensor | None = None

    def some(self, part: slice) -> "Merging":
        """Of some of these rows."""
        thresholds, own = self.thresholds, self.protected
        return replace(
            self,
            tail_pages=self.tail_pages[part],
            thresholds=None if thresholds is None else thresholds[part],
            protected=None if own is None else own[part],
        )


def merged(
    cache: Opened,
    most: int,
    lengths: torch.Tensor | None,
    kept: torch.Tensor,
    counts: torch.Tensor,
    merging: Merging,
    block_size: int,
) -> tuple[PageViews, PageViews, torch.Tensor]:
    """Kept tokens of n rows, with the dropped ones folded in where they are near enough.

    Args:
        cache: with the rows' pages ``[n, W]``.
        most: tokens that no row exceeds.
        lengths: ``[n]`` int32, of each; None where all have `most`.
        kept: ``[n, Hkv, P * bs]`` int32 slots, the tail's not among them.
        counts: ``[n]`` int32 pages, without the tail.

    Returns:
        Keys and values in pages ``[n * P, Hkv, bs, D]``, each row's P one after the other, of which
        the first ``counts[r]`` are filled; those of the tails ``[n, Hkv, tail, D]``; and how near a
        dropped token had to be ``[n, Hkv]`` (`merge_evicted`).
    """
    width, ends = kept.shape[2], counts * block_size
    tokens_held = most if lengths is None else lengths
    every = with_tail(kept, tokens_held, ends, merging.tail)
    places = None if merging.protected is None else places_among(every, merging.protected)
    found = merge_evicted(
        cache.keys,
        cache.values,
        cache.pages,
        most,
        every.clamp_(min=0),
        ends + merging.tail,
        merging.least,
        merging.values_only,
        lengths=lengths,
        threshold=merging.thresholds,
    )
    shape = *kept.shape[:2], merging.tail
    column = torch.arange(merging.tail, device=kept.device)
    behind = (ends[:, None].long() + column)[:, None].expand(shape)
    pages, tails = [], []
    for part, wide in zip((cache.keys.mT, cache.values), found[:2], strict=True):
        tokens = wide.to(part.dtype)  # [n, Hkv, P * bs + tail, D]
        if places is not None and merging.protected is not None:
            as_they_were = _tokens_in(part, cache.pages, merging.protected, block_size)
            at = places.long()[..., None].expand_as(as_they_were)
            tokens = tokens.scatter(2, at, as_they_were)
        whole = tokens[:, :, :width].unflatten(2, (-1, block_size))
        pages.append(whole.transpose(1, 2).flatten(0, 1))
        tails.append(tokens.gather(2, behind[..., None].expand(*shape, tokens.shape[3])))
    return (pages[0], pages[1]), (tails[0], tails[1]), found.threshold


def _tokens_in(
    part: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, block_size: int
) -> torch.Tensor:
    """``[n, Hkv, G, D]``: what rows hold in some of their slots.

    Args:
        part: keys or values ``[pages, Hkv, bs, D]``.
        pages: ``[n, W]`` of each row.
        slots: ``[n, Hkv, G]``.
    """
    at = slots.long()
    page = pages[:, None].expand(*at.shape[:2], -1).gather(2, at // block_size)
    head = torch.arange(at.shape[1], device=at.device)[None, :, None]
    return part[page, head, at % block_size]
