"""Moves kept tokens to their pages, with ops that read and write the cache in place."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kvcompress_kernels.move_kept import move_kept
from kvcompress_kernels.quantise_kept import quantise_kept
from vllm_kvcompress.engine.compression.merging import Merging, merge_dropped_tokens
from vllm_kvcompress.engine.pages.draft_pages import DraftMove
from vllm_kvcompress.engine.pages.layouts import PageViews, ReadablePages, Strided
from vllm_kvcompress.engine.pages.pool import PagePool
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.planning.memory import layers_per_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePages:
    """The pages that N rows read, where a row is one layer of one request.

    The layers of a request are consecutive rows.

    Args:
        pages: ``[N, W]`` int64, flat pages; entries past a row's length are never read.
        lengths: ``[N]`` int32, tokens of each row; None if all rows have `max_tokens` and none of
            them has dropped a token.
        max_tokens: upper bound on a row's tokens.
    """

    pages: torch.Tensor
    lengths: torch.Tensor | None
    max_tokens: int

    @property
    def tokens(self) -> int | torch.Tensor:
        """Tokens per row: one number if all rows are equally long, else ``[N]`` int32."""
        return self.max_tokens if self.lengths is None else self.lengths

    def slice_rows(self, rows: slice) -> "SourcePages":
        """Return a slice of the rows."""
        lengths = None if self.lengths is None else self.lengths[rows]
        return replace(self, pages=self.pages[rows], lengths=lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A copy of the kept tokens of N rows to their target pages.

    Args:
        source: the pages that the rows are read from.
        kept: ``[N, Hkv, n]`` int32, slots of the kept tokens, without leading tokens and tail.
        counts: ``[N]`` int32, pages that each row keeps, without those of leading tokens and tail.
        targets: ``[N, n // bs]`` int32, flat pages to write.
        total: sum of `counts`.
        in_place: whether a target page may also be a source page.
        merging: how to merge dropped tokens into kept tokens; None to discard them.
        group_tokens: ``[N]`` int32, tokens that each row keeps in its pages, if these hold groups
            in k4v3; None if they hold tokens in the cache's dtype.
        drafts: pages of draft layers to copy at the same time; None without a draft model.
    """

    source: SourcePages
    kept: torch.Tensor
    counts: torch.Tensor
    targets: torch.Tensor
    total: int
    in_place: bool
    merging: Merging | None
    group_tokens: torch.Tensor | None = None
    drafts: DraftMove | None = None

    def kept_in_pages(self, block_size: int) -> torch.Tensor:
        """Return ``[N]`` int32, the tokens that each row keeps in its pages."""
        return self.counts * block_size if self.group_tokens is None else self.group_tokens


class Mover(Protocol):
    """Reads and writes the pages of one worker's layers."""

    pool: PagePool

    def read(self, pages: torch.Tensor) -> PageViews:
        """Return copies of the keys ``[n, Hkv, D, bs]`` and values ``[n, Hkv, bs, D]`` of pages."""
        ...

    def open(self, pages: torch.Tensor, reads: Reads) -> ReadablePages:
        """Return tensors and page ids through which ops can read `pages`.

        Args:
            pages: flat pages, any shape, int64.
            reads: the parts that a method reads; the rest may be missing.
        """
        ...

    def move(self, move: Move) -> torch.Tensor | None:
        """Write the kept tokens to their pages; return thresholds ``[N, Hkv]`` if tokens merge."""
        ...


class StridedMover:
    """Moves tokens with ops on the paged cache.

    Args:
        pool: the page pool of this worker's layers.
        layout: the memory layout of keys and values in a page.
    """

    def __init__(self, pool: PagePool, layout: Strided) -> None:
        self.pool, self._layout = pool, layout
        self.keys, self.values = layout.views(pool.elements)

    def read(self, pages: torch.Tensor) -> PageViews:
        return self.keys[pages], self.values[pages]

    def open(self, pages: torch.Tensor, reads: Reads) -> ReadablePages:
        return ReadablePages(self.keys, self.values, pages)

    def move(self, move: Move) -> torch.Tensor | None:
        """Write the kept tokens to their pages; return thresholds ``[N, Hkv]`` if tokens merge.

        Groups are quantised as they are written. An in-place move reads all rows into a staging
        buffer before it writes any, because the target of one row may be the source of another. KV
        heads are independent, so the buffer has the size of one head and is reused for each; merged
        tokens need all heads at once.
        """
        cache, targets, drafts = self.pool.elements, move.targets, move.drafts
        if not move.in_place:
            if drafts is not None:
                move_kept(self.keys, self.values, drafts.pages, None, drafts.counts, drafts.targets)
            if move.merging is not None:
                return self._merge(move, move.merging, targets, cache)
            self._write(move, (self.keys, self.values), move.kept, targets, cache)
            return None
        staging_pages, thresholds = _staging(move.counts, targets), None
        heads = [slice(head, head + 1) for head in range(self.keys.shape[1])]
        for head in heads if move.merging is None else [slice(None)]:
            part = self.keys[:, head], self.values[:, head]
            staged = cache.new_empty(move.total, *cache[:, head].shape[1:])
            if move.merging is None:
                self._write(move, part, move.kept[:, head], staging_pages, staged)
            else:
                thresholds = self._merge(move, move.merging, staging_pages, staged)
            staged_views = self._layout.views(staged)
            if drafts is not None:
                copy = cache.new_empty(drafts.total, *cache[:, head].shape[1:])
                copied, pages = self._layout.views(copy), _staging(*drafts[1:3])
                move_kept(*part, drafts.pages, None, drafts.counts, pages, into=copied)
                move_kept(*copied, pages, None, drafts.counts, drafts.targets, into=part)
            move_kept(*staged_views, staging_pages, None, move.counts, targets, into=part)
        return thresholds

    def _write(
        self,
        move: Move,
        source: PageViews,
        kept: torch.Tensor,
        targets: torch.Tensor,
        into: torch.Tensor,
    ) -> None:
        """Write kept tokens ``[N, h, n]`` of some heads to pages `targets` of `into`."""
        pages = move.source.pages
        if move.group_tokens is None:
            move_kept(*source, pages, kept, move.counts, targets, into=self._layout.views(into))
        else:
            byte_pages = into.view(torch.uint8)
            quantise_kept(*source, pages, kept, move.group_tokens, targets, into=byte_pages)

    def _merge(
        self, move: Move, merging: Merging, targets: torch.Tensor, into: torch.Tensor
    ) -> torch.Tensor:
        """Write merged tokens to pages `targets` of `into`, and merged tails where they are.

        Works on a few rows at a time: merged tokens are float32, and each dropped token needs
        temporary memory.

        Returns:
            Thresholds ``[N, Hkv]``.
        """
        thresholds, size = [], self.pool.block_size
        launch_size = layers_per_batch(self.pool.max_layer_tokens, move.source.max_tokens)
        for start in range(0, len(move.kept), launch_size):
            rows = slice(start, start + launch_size)
            source, kept_in_pages = move.source.slice_rows(rows), move.kept_in_pages(size)[rows]
            part_merging = merging.slice_rows(rows)
            (keys, values), tails, threshold = merge_dropped_tokens(
                ReadablePages(self.keys, self.values, source.pages),
                source.max_tokens,
                source.lengths,
                move.kept[rows],
                kept_in_pages,
                part_merging,
                size,
            )
            for part, tokens in zip((self.keys.mT, self.values), tails, strict=True):
                # The tail's block is not shared: it has no hash, so no other request reads it.
                part[:, :, : merging.tail][part_merging.tail_pages] = tokens
            pages = torch.arange(len(keys), device=keys.device).view(len(threshold), -1)
            if move.group_tokens is None:
                views = self._layout.views(into)
                counts = move.counts[rows]
                move_kept(keys.mT, values, pages, None, counts, targets[rows], into=views)
            else:
                byte_pages = into.view(torch.uint8)
                quantise_kept(
                    keys.mT, values, pages, None, kept_in_pages, targets[rows], into=byte_pages
                )
            thresholds.append(threshold)
        return torch.cat(thresholds)


def _staging(counts: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the pages of a buffer in which the rows follow each other, shaped like `targets`."""
    column = torch.arange(targets.shape[1], device=counts.device)
    return (counts.cumsum(0) - counts)[:, None] + column
