"""What layers hold, as rows that are scored together.

Once tokens were dropped, a layer is no longer a run of positions but of slots: its kept tokens in
the order of their positions, then those that came since. Layers hold different numbers of them,
which only the device knows. So they come as rows, each with a length, of one request or of several.
A prompt of which nothing was dropped is rows of one length, and a slot there is a position.

Scores are pooled and cut into chunks by slot, sinks are the first slots, ties go to the lower one.
Attention is over the tokens that are held, not over those that were dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvcompress_kernels.window_scores import window_scores_of_rows

LATEST = 128
"""Queries whose attention is added up together: as many as the largest window has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLayers:
    """What N layers hold, of one request or of several.

    Args:
        key_pages: ``[pages, Hkv, D, block_size]``, any float dtype and strides.
        value_pages: ``[pages, Hkv, block_size, D]``, likewise.
        pages: ``[N, W]`` int64, each row's pages in order; those behind its length are not read.
        lengths: ``[N]`` int32, tokens of each row: more than the window. None: all have `most`, and
            nothing of them was dropped.
        most: tokens that no row exceeds, at most ``W * block_size``.
        scale: factor on the attention logits, that of a quantised key included, or ``[N]`` float32,
            each row's own.
        layers: index of each row's layer; needed where there are no `lengths`.
        value_scales: of each row, the factor on its cached values; likewise.
        sinks: ``[N, Hq]`` float32, the logits of each row's sinks; None without.
    """

    key_pages: torch.Tensor
    value_pages: torch.Tensor
    pages: torch.Tensor
    lengths: torch.Tensor | None
    most: int
    scale: float | torch.Tensor
    layers: Sequence[int] = ()
    value_scales: Sequence[float] = ()
    sinks: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.pages)

    def some(self, part: slice) -> "PagedLayers":
        """Some of these rows."""
        return replace(
            self,
            pages=self.pages[part],
            lengths=None if self.lengths is None else self.lengths[part],
            scale=self.scale if isinstance(self.scale, float) else self.scale[part],
            layers=self.layers[part],
            value_scales=self.value_scales[part],
            sinks=None if self.sinks is None else self.sinks[part],
        )


def attention_paid(rows: PagedLayers, query: torch.Tensor, at_once: int) -> torch.Tensor:
    """Attention that the last r queries paid to every slot, the mean over a KV head's query heads.

    Nothing was dropped since the first of them: each saw the slots up to its own.

    Args:
        query: ``[N, r, Hq, D]``, the last r of each row in the order of positions; a row holds
            more than r tokens.
        at_once: rows that are read together.

    Returns:
        ``[N, Hkv, most]`` float32; 0 behind a row's length.
    """
    parts = [slice(start, start + at_once) for start in range(0, len(rows), at_once)]
    return torch.cat([_paid(rows.some(part), query[part]) for part in parts])


def _paid(rows: PagedLayers, query: torch.Tensor) -> torch.Tensor:
    kv_heads, latest = rows.key_pages.shape[1], query.shape[1]
    assert rows.lengths is not None
    paid = query.new_zeros(len(query), kv_heads, rows.most, dtype=torch.float32)
    for start in range(0, latest, LATEST):
        part = query[:, start : start + LATEST]
        count = part.shape[1]
        # to these, slots behind the last of them are not there yet
        lengths = rows.lengths - (latest - start - count)
        scores = window_scores_of_rows(
            part,
            rows.key_pages,
            rows.pages,
            rows.most,
            rows.scale,
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
