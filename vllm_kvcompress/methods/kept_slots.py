"""Select the slots that each layer keeps, given its scores and its number of pages."""

import torch
from torch.nn.functional import pad

from vllm_kvcompress.methods.base import Selector
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.protected import ProtectedTokens


def max_layer_pages(plan: PagePlan, pages: torch.Tensor) -> int:
    """Return a number of pages that no layer exceeds.

    On the CPU, where reading `pages` is free, it is the largest of them. On other devices, it is
    the plan's upper bound.
    """
    return int(pages.max()) if pages.device.type == "cpu" else plan.max_layer_pages


def kept_slots(
    scores: torch.Tensor,
    lengths: int | torch.Tensor,
    counts: torch.Tensor,
    *,
    window: int,
    tail: int,
    page_tokens: int,
    max_layer_pages: int,
    selector: Selector,
    protected: ProtectedTokens | None = None,
) -> torch.Tensor:
    """Return the slots that each layer keeps in its pages: the window's and the best before it.

    The engine leaves the tail where it is, so tail tokens do not compete.

    Args:
        scores: ``[N, Hkv, W]`` float32; the scores before the window come first.
        lengths: tokens of every layer, or ``[N]`` int32 of each layer.
        counts: ``[N]`` int32 pages, on the device of the scores.
        window: last tokens of each layer, always kept.
        tail: last tokens of each layer that lie in no page of `counts`. Window and tail may
            overlap.
        page_tokens: tokens in a packed page. A page that holds more tokens than a block may be
            partly filled.
        max_layer_pages: pages that no layer exceeds.
        protected: slots before the window and the tail that are kept whatever their score.

    Returns:
        ``[N, Hkv, n]`` int32, ascending, with -1 after the ``counts[l] * page_tokens`` kept slots,
        at most all slots before the tail. n is their upper bound for `max_layer_pages`.
    """
    kept_after, window_in_pages = max(window, tail), max(window - tail, 0)
    past = lengths - kept_after
    in_pages, width = counts.to(torch.int32) * page_tokens, max_layer_pages * page_tokens
    if isinstance(lengths, int) and width > lengths - tail:
        width = lengths - tail
        in_pages = in_pages.clamp(max=width)
    keep = in_pages - window_in_pages
    if protected is None:
        best = selector.select(scores, past, keep, kept_after, width)
    else:
        best = protected.select(selector, scores, past, keep, kept_after, width)
    offset = torch.arange(window_in_pages, dtype=torch.int32, device=scores.device)
    shape = *scores.shape[:2], window_in_pages
    index = (keep[:, None, None] + offset).long().expand(shape)
    first_slot = past if isinstance(past, int) else past[:, None, None]
    return best.scatter(2, index, (first_slot + offset).expand(shape))


def append_tail(
    kept: torch.Tensor, lengths: int | torch.Tensor, num_kept: torch.Tensor, tail: int
) -> torch.Tensor:
    """Return the kept slots of each layer, followed by its tail slots.

    Args:
        kept: ``[N, Hkv, n]`` int32.
        lengths: tokens of every layer, or ``[N]`` int32 of each layer.
        num_kept: ``[N]`` int32, kept slots of each layer.

    Returns:
        ``[N, Hkv, n + tail]`` int32.
    """
    offset = torch.arange(tail, dtype=torch.int32, device=kept.device)
    shape = *kept.shape[:2], tail
    first_slot = lengths - tail if isinstance(lengths, int) else (lengths - tail)[:, None, None]
    tail_slots = (first_slot + offset).expand(shape)
    index = (num_kept[:, None, None] + offset).expand(shape)
    return pad(kept, (0, tail), value=-1).scatter(2, index.long(), tail_slots)
