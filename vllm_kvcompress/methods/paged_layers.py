"""Cached layers of one or several requests, to be scored together.

Once tokens are dropped, a layer holds slots instead of consecutive positions: its kept tokens in
order of their positions, then the tokens added since. Layers hold different numbers of slots, which
only the device knows, so each layer has its own length. In a prompt that has lost no tokens, all
layers have the same length, and a slot is a position.

Scores are pooled and cut into chunks by slot. Sinks are the first slots. Ties go to the lower slot.
Attention covers only the tokens still held.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvcompress_kernels.packed_attention import Offsets
from kvcompress_kernels.window_scores import window_scores_of_rows

QUERIES_PER_SUM = 128
"""Queries whose attention is summed together: as many as the largest window has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLayers:
    """The cached tokens of N layers, of one request or of several.

    Args:
        key_pages: ``[pages, Hkv, D, block_size]``, any float dtype and strides.
        value_pages: ``[pages, Hkv, block_size, D]``, likewise.
        pages: ``[N, W]`` int64, each layer's pages in order. Pages after its length are not read.
        lengths: ``[N]`` int32, tokens of each layer, more than the window. None if all have
            `max_tokens` and no token was dropped.
        max_tokens: tokens that no layer exceeds, at most ``W * block_size``.
        scale: factor on the attention logits, including that of a quantised key; or ``[N]``
            float32, one per layer.
        layers: index of each layer; needed if `lengths` is None.
        value_scale: factor on the cached values: one number, or ``[N]`` float32, one per layer.
        sinks: ``[N, Hq]`` float32, logits of each layer's attention sinks; None without sinks.
        offsets: where a page stores K, if `key_pages` is not a strided view of it; only window
            attention reads such keys.
    """

    key_pages: torch.Tensor
    value_pages: torch.Tensor
    pages: torch.Tensor
    lengths: torch.Tensor | None
    max_tokens: int
    scale: float | torch.Tensor
    layers: Sequence[int] = ()
    value_scale: float | torch.Tensor = 1.0
    sinks: torch.Tensor | None = None
    offsets: Offsets | None = None

    def __len__(self) -> int:
        return len(self.pages)

    def subset(self, part: slice) -> "PagedLayers":
        """Return the layers in `part`."""
        return replace(
            self,
            pages=self.pages[part],
            lengths=None if self.lengths is None else self.lengths[part],
            scale=_part_of(self.scale, part),
            layers=self.layers[part],
            value_scale=_part_of(self.value_scale, part),
            sinks=None if self.sinks is None else self.sinks[part],
        )


def _part_of(scale: float | torch.Tensor, part: slice) -> float | torch.Tensor:
    return scale if isinstance(scale, float) else scale[part]


def attention_to_slots(
    layers: PagedLayers, query: torch.Tensor, layers_per_batch: int
) -> torch.Tensor:
    """Return the attention that the last r queries paid to every slot, averaged over query heads.

    The mean is over the query heads of each KV head. No token may have been dropped since the first
    of these queries, so that each query saw all slots up to its own.

    Args:
        query: ``[N, r, Hq, D]``, the last r queries of each layer in order of position. A layer
            holds more than r tokens.
        layers_per_batch: layers that are computed together.

    Returns:
        ``[N, Hkv, max_tokens]`` float32; 0 after a layer's length.
    """
    parts = [
        slice(start, start + layers_per_batch) for start in range(0, len(layers), layers_per_batch)
    ]
    return torch.cat([_attention(layers.subset(part), query[part]) for part in parts])


def _attention(layers: PagedLayers, query: torch.Tensor) -> torch.Tensor:
    kv_heads, num_queries = layers.key_pages.shape[1], query.shape[1]
    assert layers.lengths is not None
    attention = query.new_zeros(len(query), kv_heads, layers.max_tokens, dtype=torch.float32)
    for start in range(0, num_queries, QUERIES_PER_SUM):
        part = query[:, start : start + QUERIES_PER_SUM]
        count = part.shape[1]
        # Slots after the part's last query did not exist when it was computed.
        lengths = layers.lengths - (num_queries - start - count)
        scores = window_scores_of_rows(
            part,
            layers.key_pages,
            layers.pages,
            layers.max_tokens,
            layers.scale,
            lengths=lengths,
            variance=False,
            last=False,
            grouped=True,
            sinks=layers.sinks,
            offsets=layers.offsets,
        )
        attention[..., : layers.max_tokens - count] += scores.total
        slots = (lengths - count)[:, None] + torch.arange(count, device=lengths.device)
        attention.scatter_add_(2, slots.long()[:, None].expand(-1, kv_heads, -1), scores.recent)
    return attention
