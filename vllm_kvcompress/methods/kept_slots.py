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


def max_kept_in_pages(plan: PagePlan, pages: torch.Tensor) -> int:
    """Return an upper bound on the tokens that any layer keeps in its pages.

    Args:
        pages: ``[L]``, pages of each layer.
    """
    return min(max_layer_pages(plan, pages) * plan.page_tokens, plan.max_tokens_in_pages)


def kept_in_pages(plan: PagePlan, counts: torch.Tensor) -> torch.Tensor:
    """Return ``[L]`` int32, the tokens that each layer keeps in its pages.

    Args:
        counts: ``[L]`` int32, pages of each layer.
    """
    in_pages = counts * plan.page_tokens
    if plan.packed_page_tokens is None:
        return in_pages
    # The last page may be partly filled.
    return in_pages.clamp(max=plan.max_tokens_in_pages)


def kept_slots(
    scores: torch.Tensor,
    lengths: int | torch.Tensor,
    in_pages: torch.Tensor,
    *,
    window: int,
    tail: int | torch.Tensor,
    width: int,
    selector: Selector,
    protected: ProtectedTokens | None = None,
    leading: int = 0,
) -> torch.Tensor:
    """Return the slots that each layer keeps in its pages: the window's and the best before it.

    The engine leaves leading tokens and the tail where they are, so they do not compete.

    Args:
        scores: ``[N, Hkv, W]`` float32; the scores before the window come first.
        lengths: tokens of every layer, or ``[N]`` int32 of each layer.
        in_pages: ``[N]`` int32, tokens that each layer keeps in its pages (`kept_in_pages`), on the
            device of the scores.
        window: last tokens of each layer, always kept.
        tail: last tokens of each layer that lie in no page. One number, or ``[N]`` int32 of each
            layer, none larger than the window.
        width: maximum tokens that any layer keeps in its pages, n.
        selector: chooses the slots before the window.
        protected: slots before the window and the tail that are kept whatever their score, none of
            them a leading token's.
        leading: first tokens of each layer that lie in no page.

    Returns:
        ``[N, Hkv, n]`` int32, ascending, with -1 after the last kept slot.
    """
    if isinstance(tail, int):
        kept_after, padding, num_window = max(window, tail), 0, max(window - tail, 0)
        in_window: int | torch.Tensor = num_window
    else:
        # Layers with a longer tail have fewer window tokens in pages. Their unused entries may lie
        # past column n, so select with padding and cut it off.
        kept_after, padding, num_window, in_window = window, window, window, window - tail
    # From here on, slots are counted behind the leading tokens.
    past, keep = lengths - leading - kept_after, in_pages - in_window
    columns, scores = width + padding, scores[..., leading:]
    if protected is not None:
        protected = protected.behind(leading)
    if protected is None:
        best = selector.select(scores, past, keep, kept_after, columns)
    else:
        best = protected.select(selector, scores, past, keep, kept_after, columns)
    offset = torch.arange(num_window, dtype=torch.int32, device=scores.device)
    shape = *scores.shape[:2], num_window
    index = (keep[:, None, None] + offset).long().expand(shape)
    slots = (past if isinstance(past, int) else past[:, None, None]) + offset
    if isinstance(in_window, torch.Tensor):
        slots = slots.where(offset < in_window[:, None, None], -1)
    kept = best.scatter(2, index, slots.expand(shape))[..., :width]
    return (kept + leading).where(kept >= 0, -1) if leading else kept


def prepend_leading(kept: torch.Tensor, leading: int) -> torch.Tensor:
    """Return the slots of the leading tokens, followed by the kept slots of each layer.

    Args:
        kept: ``[N, Hkv, n]`` int32.

    Returns:
        ``[N, Hkv, leading + n]`` int32.
    """
    if not leading:
        return kept
    slots = torch.arange(leading, dtype=torch.int32, device=kept.device)
    return torch.cat([slots.expand(*kept.shape[:2], -1), kept], dim=2)


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
