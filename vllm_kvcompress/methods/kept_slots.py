"""From the scores of rows and their pages to the slots that they keep."""

import torch
from torch.nn.functional import pad

from vllm_kvcompress.methods.base import Selector
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.protected import Guarded


def most_pages(plan: PagePlan, pages: torch.Tensor) -> int:
    """A number of pages that no layer exceeds: the largest one where it costs nothing to ask."""
    return int(pages.max()) if pages.device.type == "cpu" else plan.most_pages


def kept_slots(
    scores: torch.Tensor,
    lengths: int | torch.Tensor,
    counts: torch.Tensor,
    *,
    window: int,
    tail: int,
    block_size: int,
    most_pages: int,
    selector: Selector,
    guarded: Guarded | None = None,
) -> torch.Tensor:
    """Slots that each row keeps in its pages: the window's, and the best before.

    The engine leaves the tail where it is, so tokens that lie in it do not compete.

    Args:
        scores: ``[N, Hkv, W]`` float32, those before the window first.
        lengths: tokens that every row holds, or ``[N]`` int32 of each.
        counts: ``[N]`` int32 pages, on the device of the scores.
        window: last tokens of each row that are kept in any case.
        tail: last tokens of each row that are in no page of `counts`, the window's or not.
        most_pages: pages that no row exceeds.
        guarded: what is kept whatever its score, before the window and the tail.

    Returns:
        ``[N, Hkv, most_pages * block_size]`` int32, ascending; -1 behind the
        ``counts[r] * block_size`` kept ones.
    """
    after, own_window = max(window, tail), max(window - tail, 0)
    past = lengths - after
    keep = counts.to(torch.int32) * block_size - own_window
    most = most_pages * block_size
    if guarded is None:
        best = selector.select(scores, past, keep, after, most)
    else:
        best = guarded.select(selector, scores, past, keep, after, most)
    own = torch.arange(own_window, dtype=torch.int32, device=scores.device)
    shape = *scores.shape[:2], own_window
    at = (keep[:, None, None] + own).long().expand(shape)
    first = past if isinstance(past, int) else past[:, None, None]
    return best.scatter(2, at, (first + own).expand(shape))


def with_tail(
    kept: torch.Tensor, lengths: int | torch.Tensor, ends: torch.Tensor, tail: int
) -> torch.Tensor:
    """``[N, Hkv, n + tail]`` int32: slots that rows keep in pages, and behind them the tail's.

    Args:
        kept: ``[N, Hkv, n]`` int32.
        lengths: tokens that every row holds, or ``[N]`` int32 of each.
        ends: ``[N]`` int32, kept slots of each row.
    """
    column = torch.arange(tail, dtype=torch.int32, device=kept.device)
    shape = *kept.shape[:2], tail
    first = lengths - tail if isinstance(lengths, int) else (lengths - tail)[:, None, None]
    own, at = (first + column).expand(shape), (ends[:, None, None] + column).expand(shape)
    return pad(kept, (0, tail), value=-1).scatter(2, at.long(), own)
