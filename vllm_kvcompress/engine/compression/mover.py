"""How kept tokens reach their pages, where ops read and write the cache itself."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kvcompress_kernels.move_kept import move_kept
from vllm_kvcompress.engine.compression.merging import Merging, merged
from vllm_kvcompress.engine.pages.layouts import Opened, PageViews, Strided
from vllm_kvcompress.engine.pages.pool import PagePool
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.planning.memory import layers_at_once


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePages:
    """Where the layers of some requests lie: N rows, those of a request one after the other.

    Args:
        pages: ``[N, W]`` int64 flat pages; those behind a row's length are not read.
        lengths: ``[N]`` int32 tokens; None where all have `most`, of which nothing was dropped.
        most: tokens that no row exceeds.
    """

    pages: torch.Tensor
    lengths: torch.Tensor | None
    most: int

    @property
    def tokens(self) -> int | torch.Tensor:
        """Tokens of every row, or of each."""
        return self.most if self.lengths is None else self.lengths

    def some(self, part: slice) -> "SourcePages":
        """Some of these rows."""
        lengths = None if self.lengths is None else self.lengths[part]
        return replace(self, pages=self.pages[part], lengths=lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What N rows keep, and where it goes.

    Args:
        held: where they lie.
        kept: ``[N, Hkv, n]`` int32 slots, the tail's not among them.
        counts: ``[N]`` int32 pages, without the tail.
        targets: ``[N, n // bs]`` int32 flat pages.
        total: sum of `counts`.
        in_place: rows may be written to pages that rows are read from.
        merging: what tokens that are dropped are folded into kept ones by; None where they go.
    """

    source: SourcePages
    kept: torch.Tensor
    counts: torch.Tensor
    targets: torch.Tensor
    total: int
    in_place: bool
    merging: Merging | None


class Mover(Protocol):
    """Reads and writes the pages of one worker's layers."""

    pool: PagePool

    def read(self, pages: torch.Tensor) -> PageViews:
        """A copy of the keys ``[n, Hkv, D, bs]`` and values ``[n, Hkv, bs, D]`` in flat pages."""
        ...

    def open(self, pages: torch.Tensor, reads: Reads) -> Opened:
        """Flat pages of any shape, int64, where ops may read of them what a method `reads`."""
        ...

    def move(self, move: Move) -> torch.Tensor | None:
        """Write the tokens that rows keep; returns thresholds ``[N, Hkv]`` if tokens merge."""
        ...


class StridedMover:
    """Moves tokens by the ops on paged caches.

    Args:
        pool: the page pool of this worker's layers.
        layout: how keys and values lie in its pages.
    """

    def __init__(self, pool: PagePool, layout: Strided) -> None:
        self.pool = pool
        self.keys, self.values = layout.views(pool.elements)

    def read(self, pages: torch.Tensor) -> PageViews:
        return self.keys[pages], self.values[pages]

    def open(self, pages: torch.Tensor, reads: Reads) -> Opened:
        return Opened(self.keys, self.values, pages)

    def move(self, move: Move) -> torch.Tensor | None:
        """Write what rows keep; returns thresholds ``[N, Hkv]`` if tokens merge.

        In place all rows are read before any is written, through a staging buffer: one's target may
        be another's source. KV heads do not meet, so they take turns in a buffer of one head's
        pages; merged tokens are staged together.
        """
        cache, counts, targets = (self.keys, self.values), move.counts, move.targets
        if not move.in_place:
            if move.merging is not None:
                return self._merge(move, move.merging, targets, cache)
            move_kept(*cache, move.source.pages, move.kept, counts, targets, into=cache)
            return None
        staging_pages, thresholds = _staging(counts, targets.shape[1]), None
        heads = [slice(head, head + 1) for head in range(self.keys.shape[1])]
        for head in heads if move.merging is None else [slice(None)]:
            part = self.keys[:, head], self.values[:, head]
            staged = _like(part[0].mT, move.total).mT, _like(part[1], move.total)
            if move.merging is None:
                kept = move.kept[:, head]
                move_kept(*part, move.source.pages, kept, counts, staging_pages, into=staged)
            else:
                thresholds = self._merge(move, move.merging, staging_pages, staged)
            move_kept(*staged, staging_pages, None, counts, targets, into=part)
        return thresholds

    def _merge(
        self, move: Move, merging: Merging, targets: torch.Tensor, into: PageViews
    ) -> torch.Tensor:
        """Write kept tokens, merged, to pages `targets` of `into`; a tail's where they are.

        A few rows at a time: merged tokens are float32, and every dropped one leaves some figures.
        Returns thresholds ``[N, Hkv]``.
        """
        thresholds, size = [], self.pool.block_size
        count = layers_at_once(self.pool.longest, move.source.most)
        for start in range(0, len(move.kept), count):
            some = slice(start, start + count)
            source, counts, own = move.source.some(some), move.counts[some], merging.some(some)
            opened = Opened(self.keys, self.values, source.pages)
            (keys, values), tails, near = merged(
                opened, source.most, source.lengths, move.kept[some], counts, own, size
            )
            for part, tokens in zip((self.keys.mT, self.values), tails, strict=True):
                # a tail's block is the request's own: no hash, no other reader
                part[:, :, : merging.tail][own.tail_pages] = tokens
            each = torch.arange(len(keys), device=counts.device).view(len(near), -1)
            move_kept(keys.mT, values, each, None, counts, targets[some], into=into)
            thresholds.append(near)
        return torch.cat(thresholds)


def _staging(counts: torch.Tensor, most: int) -> torch.Tensor:
    """``[N, most]``: pages of a buffer that rows fill one after the other."""
    column = torch.arange(most, device=counts.device)
    return (counts.cumsum(0) - counts)[:, None] + column


def _like(pages: torch.Tensor, count: int) -> torch.Tensor:
    """`count` pages like these, contiguous."""
    return pages.new_empty(count, *pages.shape[1:])
