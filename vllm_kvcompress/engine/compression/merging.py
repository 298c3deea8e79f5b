"""Merges dropped tokens into kept tokens, in the cache's dtype (D2O)."""

from dataclasses import dataclass, replace

import torch

from kvcompress_kernels.merge_evicted import merge_evicted
from vllm_kvcompress.engine.pages.layouts import PageViews, ReadablePages
from vllm_kvcompress.methods.kept_slots import append_tail, prepend_leading
from vllm_kvcompress.methods.protected import indices_in_kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Merging:
    """How N rows merge the tokens that they drop into tokens that they keep.

    A row is one layer of one request.

    Args:
        values_only: merge values and leave keys unchanged.
        leading: number of first tokens in each row that keep their slots. They are protected.
        tail: number of last tokens in each row that keep their slots; dropped tokens may be merged
            into them.
        tail_pages: ``[N]`` int64, the flat page of each row's tail.
        thresholds: ``[N, Hkv]`` float32, the similarity that a dropped token has needed so far; NaN
            where a row has dropped no token; None if no row has.
        min_tokens: lower bound on the tokens that a row keeps, leading tokens and tail included.
        protected: ``[N, Hkv, G]`` int32, ascending slots that no token is merged into; None to
            allow all.
    """

    values_only: bool
    tail: int
    tail_pages: torch.Tensor
    thresholds: torch.Tensor | None
    min_tokens: int
    leading: int = 0
    protected: torch.Tensor | None = None

    def slice_rows(self, rows: slice) -> "Merging":
        """Return the same settings for a slice of the rows."""
        thresholds, protected = self.thresholds, self.protected
        return replace(
            self,
            tail_pages=self.tail_pages[rows],
            thresholds=None if thresholds is None else thresholds[rows],
            protected=None if protected is None else protected[rows],
        )


def merge_dropped_tokens(
    cache: ReadablePages,
    max_tokens: int,
    lengths: torch.Tensor | None,
    kept: torch.Tensor,
    kept_in_pages: torch.Tensor,
    merging: Merging,
    block_size: int,
) -> tuple[PageViews, PageViews, torch.Tensor]:
    """Return the kept tokens of n rows after merging the dropped tokens that are similar enough.

    Args:
        cache: the cache, with the rows' pages ``[n, W]``.
        max_tokens: upper bound on a row's tokens.
        lengths: ``[n]`` int32, tokens of each row; None if all have `max_tokens`.
        kept: ``[n, Hkv, P * bs]`` int32, slots of the kept tokens, without leading tokens and tail.
        kept_in_pages: ``[n]`` int32, number of kept tokens of each row, counted in the same way.

    Returns:
        * Keys and values in pages ``[n * P, Hkv, bs, D]``, P consecutive pages per row, of which
          the first tokens are the kept ones.
        * Keys and values of the tails ``[n, Hkv, tail, D]``.
        * The similarity threshold ``[n, Hkv]`` of each row and head (`merge_evicted`).
    """
    leading = merging.leading
    ends = kept_in_pages
    if leading:
        kept, ends = prepend_leading(kept, leading), kept_in_pages + leading
    width = kept.shape[2]
    num_tokens = max_tokens if lengths is None else lengths
    kept_and_tail = append_tail(kept, num_tokens, ends, merging.tail)
    protected = merging.protected
    places = None if protected is None else indices_in_kept(kept_and_tail, protected)
    result = merge_evicted(
        cache.keys,
        cache.values,
        cache.pages,
        max_tokens,
        kept_and_tail.clamp_(min=0),
        ends + merging.tail,
        merging.min_tokens,
        merging.values_only,
        lengths=lengths,
        threshold=merging.thresholds,
    )
    shape = *kept.shape[:2], merging.tail
    column = torch.arange(merging.tail, device=kept.device)
    tail_index = (ends[:, None].long() + column)[:, None].expand(shape)
    pages, tails = [], []
    for part, merged in zip((cache.keys.mT, cache.values), result[:2], strict=True):
        tokens = merged.to(part.dtype)  # [n, Hkv, P * bs + tail, D]
        if places is not None and protected is not None:
            slot = protected.long()
            page = cache.pages[:, None].expand(*slot.shape[:2], -1).gather(2, slot // block_size)
            head = torch.arange(slot.shape[1], device=slot.device)[None, :, None]
            unmerged = part[page, head, slot % block_size]  # [n, Hkv, G, D]
            index = places.long()[..., None].expand_as(unmerged)
            tokens = tokens.scatter(2, index, unmerged)
        full_pages = tokens[:, :, leading:width].unflatten(2, (-1, block_size))
        pages.append(full_pages.transpose(1, 2).flatten(0, 1))
        tails.append(tokens.gather(2, tail_index[..., None].expand(*shape, tokens.shape[3])))
    return (pages[0], pages[1]), (tails[0], tails[1]), result.threshold
