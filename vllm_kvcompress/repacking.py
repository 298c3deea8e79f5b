"""What a request holds, scored and chosen anew: statistics -> counts -> kept slots. No vLLM.

Once tokens were dropped, a layer is no longer a run of positions but of slots: its kept tokens in
the order of their positions, then what was generated since. Layers hold different numbers of
them, which only the device knows. So they come as rows, each with a length, of one request or of
several: all are scored in the same launches.

Everything is as for a prompt (`pipeline`) where a position reads slot: scores are pooled and cut
into chunks by slot, sinks are the first slots, ties go to the lower one. Attention is over what is
held, not over what was dropped.
"""

from dataclasses import dataclass, replace

import torch

from kvcompress_kernels.window_scores import WindowScores, window_scores_of_rows
from vllm_kvcompress.methods.base import Reads, Selector
from vllm_kvcompress.methods.prompt import Columns, PagedValues
from vllm_kvcompress.pipeline import Method, Observed, method_of
from vllm_kvcompress.settings.config import CompressionConfig

LATEST = 128
"""Queries whose attention is added up together: as many as the largest window has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What N layers hold, of one request or of several.

    Args:
        key_pages: ``[pages, Hkv, D, block_size]``, any float dtype and strides.
        value_pages: ``[pages, Hkv, block_size, D]``, likewise.
        pages: ``[N, W]`` int64, each row's pages in order; those behind its length are not read.
        lengths: ``[N]`` int32, tokens of each row: more than the window.
        most: tokens that no row exceeds, at most ``W * block_size``.
        scale: factor on the attention logits, or ``[N]`` float32, each row's own.
        sinks: ``[N, Hq]`` float32, the logits of each row's sinks; None without.
    """

    key_pages: torch.Tensor
    value_pages: torch.Tensor
    pages: torch.Tensor
    lengths: torch.Tensor
    most: int
    scale: float | torch.Tensor
    sinks: torch.Tensor | None = None

    def some(self, part: slice) -> "Rows":
        """Some of these rows."""
        scale = self.scale if isinstance(self.scale, float) else self.scale[part]
        return replace(
            self,
            pages=self.pages[part],
            lengths=self.lengths[part],
            scale=scale,
            sinks=None if self.sinks is None else self.sinks[part],
        )


def adds_up(settings: CompressionConfig) -> bool:
    """Whether what bounds an answer ranks by the attention of all its rows, which is added up."""
    bounded = settings.decode_budget is not None
    return bounded and Reads.COLUMN_SUMS in method_of(settings).reads


def keeps_sums(settings: CompressionConfig) -> bool:
    """Whether what is packed more than once, answer or prompt, needs its attention added up."""
    again = settings.decode_budget is not None or settings.max_whole is not None
    return again and Reads.COLUMN_SUMS in method_of(settings).reads


def merges(settings: CompressionConfig) -> bool:
    """Whether what is packed more than once merges what it drops, and so has a threshold."""
    again = settings.decode_budget is not None or settings.max_whole is not None
    return again and bool(method_of(settings).merge)


def ring_window(settings: CompressionConfig) -> int:
    """The most last queries that an engine keeps of each growing answer; 0 where none is read."""
    if settings.decode_budget is None:
        return 0
    windows = [variant.resolved_decode_window for variant in settings.variants]
    if any(adds_up(variant) for variant in settings.variants):
        windows.append(settings.decode_interval)
    return max(windows)


def observe_rows(
    method: Method,
    rows: Rows,
    query: torch.Tensor | None,
    window: int,
    at_once: int,
    sums: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[Observed]]:
    """Score every row by the window's queries, or by the attention that was added up.

    Args:
        query: ``[N, w, Hq, D]``, the last w of each row in the order of positions; None where the
            method reads none.
        window: w.
        at_once: rows that are scored together: what their attention is reduced to is held then.
        sums: ``[N, Hkv, most]`` float32, attention that every slot was paid so far, the mean over a
            KV head's query heads; None where the method reads none.

    Returns:
        Scores ``[N, Hkv, most - w]`` float32, of which the first ``lengths[r] - w`` count, and
        what an allocator may read of each row.
    """
    parts, observed = [], []
    for start in range(0, len(rows.pages), at_once):
        some = slice(start, start + at_once)
        own = rows.some(some)
        asked, paid = (None if part is None else part[some] for part in (query, sums))
        scores, figures = _observe(method, own, asked, paid, window)
        parts.append(scores)
        observed += figures
    return torch.cat(parts), observed


def _observe(
    method: Method,
    rows: Rows,
    query: torch.Tensor | None,
    sums: torch.Tensor | None,
    window: int,
) -> tuple[torch.Tensor, list[Observed]]:
    count, heads = len(rows.pages), rows.key_pages.shape[1]
    found: WindowScores | None = None
    if query is not None:
        found = window_scores_of_rows(
            *(query, rows.key_pages, rows.pages, rows.most, rows.scale),
            lengths=rows.lengths,
            variance=Reads.VARIANCE in method.reads,
            maximum=Reads.MAXIMUM in method.reads,
            sinks=rows.sinks,
        )
    maximum = None if found is None else found.maximum
    if maximum is not None:
        # Behind a shorter row's past stand its window's own, which pooling must not reach.
        past = (rows.lengths - window)[:, None]
        column = torch.arange(rows.most, device=maximum.device)
        at = (past + column[:window]).long().clamp(min=0)[:, None].expand(-1, maximum.shape[1], -1)
        own = maximum.gather(2, at)
        maximum = maximum.masked_fill((column >= past)[:, None], 0)
        maximum[..., rows.most - window :] = own
    values = None
    if Reads.VALUES in method.reads:
        values = PagedValues(value_pages=rows.value_pages, pages=rows.pages, tokens=rows.most)
    columns = Columns(
        num_kv_heads=count * heads,
        layers=count,
        lengths=rows.lengths,
        past=rows.most - window,
        device=rows.key_pages.device,
        rows=window if found is not None else 0,
        total=_folded(found and found.total),
        variance=_folded(found and found.variance),
        recent=_folded(found and found.recent),
        last=_folded(found and found.last),
        maximum=_folded(maximum),
        sums=_folded(sums),
        values=values,
    )
    scores = method.scorer.score(columns).reshape(count, heads, columns.past)
    if sums is not None and Reads.COLUMN_SUMS in method.allocator.reads:
        variances = _variance(sums, rows.lengths)
        return scores, [Observed(scores=None, column_variance=own) for own in variances]
    if found is None or Reads.VARIANCE not in method.allocator.reads:
        return scores, [Observed(scores=None) for _ in range(count)]
    return scores, [
        Observed(scores=None, entropy=entropy, shift=shift)
        for entropy, shift in zip(found.entropy, found.shift, strict=True)
    ]


def _variance(sums: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """``[N, Hkv]``: the sample variance of each row's first ``lengths[r]`` of ``[N, Hkv, W]``."""
    count = lengths[:, None, None]
    held = torch.arange(sums.shape[2], device=sums.device) < count
    mean = sums.where(held, 0).sum(-1, keepdim=True) / count
    return (sums - mean).where(held, 0).square().sum(-1) / (count[..., 0] - 1)


def attention_paid(rows: Rows, query: torch.Tensor, at_once: int) -> torch.Tensor:
    """Attention that the last r queries paid to every slot, the mean over a KV head's query heads.

    Nothing was dropped since the first of them: each saw the slots up to its own.

    Args:
        query: ``[N, r, Hq, D]``, the last r of each row in the order of positions; a row holds
            more than r tokens.
        at_once: rows that are read together.

    Returns:
        ``[N, Hkv, most]`` float32; 0 behind a row's length.
    """
    found = []
    for start in range(0, len(rows.pages), at_once):
        some = slice(start, start + at_once)
        own = rows.some(some)
        found.append(_paid(own, query[some]))
    return torch.cat(found)


def _paid(rows: Rows, query: torch.Tensor) -> torch.Tensor:
    kv_heads, latest = rows.key_pages.shape[1], query.shape[1]
    paid = query.new_zeros(len(query), kv_heads, rows.most, dtype=torch.float32)
    for start in range(0, latest, LATEST):
        part = query[:, start : start + LATEST]
        count = part.shape[1]
        # to these, slots behind the last of them are not there yet
        lengths = rows.lengths - (latest - start - count)
        scores = window_scores_of_rows(
            *(part, rows.key_pages, rows.pages, rows.most, rows.scale),
            lengths=lengths,
            variance=False,
            sinks=rows.sinks,
        )
        past, recent = (
            # in float64 as `group_mean`, so that equal columns stay equal
            of.view(len(of), kv_heads, -1, of.shape[2]).mean(2, dtype=torch.float64).float()
            for of in (scores.total, scores.recent)
        )
        paid[..., : rows.most - count] += past
        at = (lengths - count)[:, None] + torch.arange(count, device=lengths.device)
        paid.scatter_add_(2, at.long()[:, None].expand(-1, kv_heads, -1), recent)
    return paid


def _folded(part: torch.Tensor | None) -> torch.Tensor | None:
    """``[N, Hq, n]`` to ``[N * Hq, n]``."""
    return None if part is None else part.flatten(0, 1)


def kept_slots(
    scores: torch.Tensor,
    rows: Rows,
    counts: torch.Tensor,
    window: int,
    block_size: int,
    most_pages: int,
    selector: Selector,
    tail: int = 0,
) -> torch.Tensor:
    """Slots that each row keeps where it has `counts` pages: the window's, and the best before.

    Args:
        scores: ``[N, Hkv, W]`` float32 (`observe_rows`).
        counts: ``[N]`` int64 or int32 pages, on the device of the scores.
        most_pages: pages that no row exceeds.
        tail: last tokens of each row that stay where they are, in no page of `counts`: they do
            not compete, whether the window's or not.

    Returns:
        ``[N, Hkv, most_pages * block_size]`` int32, ascending; -1 behind the kept ones.
    """
    own_window = max(window - tail, 0)
    past = rows.lengths - max(window, tail)
    keep = counts.to(torch.int32) * block_size - own_window
    best = selector.select(scores, past, keep, max(window, tail), most_pages * block_size)
    own = torch.arange(own_window, dtype=torch.int32, device=scores.device)
    shape = *scores.shape[:2], own_window
    at = (keep[:, None, None] + own).long().expand(shape)
    return best.scatter(2, at, (past[:, None, None] + own).expand(shape))
