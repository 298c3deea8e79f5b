"""What a layer keeps with what it drops folded in, in the cache's dtype."""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from kvcompress_kernels.merge_evicted import merge_evicted
from vllm_kvcompress.engine.pages.layouts import Opened, PageViews
from vllm_kvcompress.methods.page_plan import PagePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """N rows that were packed before, of a method that merges what it drops now.

    Args:
        lengths: ``[N]`` int32, tokens of each row.
        most: tokens that no row exceeds.
        thresholds: ``[N, Hkv]`` float32, how near a dropped token had to be so far; NaN where none
            was dropped.
        values_only: keys stay as they are.
        tail: last tokens of each row that stay where they are, and take in what is near them.
        tail_pages: ``[N]`` int64, the flat pages that they lie in.
    """

    lengths: torch.Tensor
    most: int
    thresholds: torch.Tensor
    values_only: bool
    tail: int
    tail_pages: torch.Tensor


def merged_pages(
    plan: PagePlan,
    keys: torch.Tensor,
    values: torch.Tensor,
    prompt: torch.Tensor,
    kept: torch.Tensor,
    counts: torch.Tensor,
    values_only: bool,
) -> tuple[PageViews, PageViews, torch.Tensor]:
    """What one layer keeps, with the evicted tokens folded in, in the cache's dtype.

    Args:
        keys, values: pages ``[N, Hkv, D, bs]`` and ``[N, Hkv, bs, D]``.
        prompt: ``[1, ceil(S / bs)]`` int64, the prompt's pages among them.
        kept: ``[1, Hkv, n]`` int32, the tail's positions among them.
        counts: ``[1]`` int32, pages without the tail.
        values_only: keys stay as they are.

    Returns:
        Keys and values in ``n // bs`` pages ``[n // bs, Hkv, bs, D]``, of which the first
        ``counts[0]`` are filled; keys and values of the tail ``[Hkv, tail, D]``; and how near a
        dropped token had to be ``[1, Hkv]`` (`merge_evicted`).
    """
    size, tail, max_pages = plan.block_size, plan.tail, kept.shape[2] // plan.block_size
    # The tail lies behind the packed pages.
    tail_start = counts * size
    lengths, least = tail_start + tail, plan.floor_pages * size + tail
    slots = tail_start + torch.arange(tail, device=tail_start.device)
    pages, tails = [], []
    merged = merge_evicted(keys, values, prompt, plan.tokens, kept, lengths, least, values_only)
    for cache, wide in zip((keys, values), merged[:2], strict=True):
        tokens = wide[0].to(cache.dtype)  # [Hkv, n, D]
        whole = tokens[:, : max_pages * size].unflatten(1, (max_pages, size))
        pages.append(whole.transpose(0, 1))
        tails.append(tokens[:, slots])
    return (pages[0], pages[1]), (tails[0], tails[1]), merged.threshold


def merged_rows(
    cache: Opened,
    some: slice,
    held: Held,
    kept: torch.Tensor,
    counts: torch.Tensor,
    block_size: int,
) -> tuple[PageViews, PageViews, torch.Tensor]:
    """What some of N rows keep, with what they drop folded in where it is near enough.

    Args:
        kept: ``[N, Hkv, W * bs]`` int32 slots, the tail's not among them.
        counts: ``[N]`` int32 pages, without the tail.

    Returns:
        Keys and values in pages ``[n * W, Hkv, bs, D]``, each row's W one after the other; those of
        the tails ``[n, Hkv, tail, D]``; and thresholds ``[n, Hkv]``.
    """
    lengths, width = held.lengths[some], kept.shape[2]
    tail = torch.arange(held.tail, dtype=torch.int32, device=kept.device)
    shape = len(lengths), kept.shape[1], held.tail
    behind = ((counts[some] * block_size)[:, None] + tail)[:, None].expand(shape).long()
    own = ((lengths - held.tail)[:, None] + tail)[:, None].expand(shape)
    merged = merge_evicted(
        *(cache.keys, cache.values, cache.pages[some], held.most),
        pad(kept[some], (0, held.tail)).scatter(2, behind, own),
        counts[some] * block_size + held.tail,
        values_only=held.values_only,
        lengths=lengths,
        threshold=held.thresholds[some],
    )
    pages, tails = [], []
    for part, wide in zip((cache.keys, cache.values), merged[:2], strict=True):
        tokens = wide.to(part.dtype)  # [n, Hkv, W * bs + tail, D]
        whole = tokens[:, :, :width].unflatten(2, (-1, block_size))
        pages.append(whole.transpose(1, 2).flatten(0, 1))
        tails.append(tokens.gather(2, behind[..., None].expand(*shape, tokens.shape[3])))
    return (pages[0], pages[1]), (tails[0], tails[1]), merged.threshold
