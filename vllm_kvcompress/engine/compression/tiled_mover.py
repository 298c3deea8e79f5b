"""Moves kept tokens in tiled pages, which have no strided view and are read and written by copy."""

import torch

from vllm_kvcompress.engine.compression.merging import Merging, merge_dropped_tokens
from vllm_kvcompress.engine.compression.mover import Move
from vllm_kvcompress.engine.pages.layouts import PageViews, ReadablePages, Tiled
from vllm_kvcompress.engine.pages.pool import PagePool
from vllm_kvcompress.methods.base import Reads


class TiledMover:
    """Moves tokens layer by layer through copies.

    The temporary memory holds the tokens that one launch scores or merges, plus the kept tokens of
    one layer during a move, or of all layers if the move is in place. The host reads the number of
    pages of each layer, which needs no sync on a CPU.

    Args:
        pool: the page pool of this worker's layers.
        layout: the memory layout of keys and values in a page.
    """

    def __init__(self, pool: PagePool, layout: Tiled) -> None:
        self.pool, self._layout = pool, layout

    def read(self, pages: torch.Tensor) -> PageViews:
        return (
            self._layout.unpack_keys(self.pool.elements, pages),
            self._layout.unpack_values(self.pool.elements, pages),
        )

    def open(self, pages: torch.Tensor, reads: Reads) -> ReadablePages:
        """Return copies of the keys and values that are read, in the order of `pages`."""
        flat = pages.flatten()
        with_keys = reads & (Reads.WINDOW | Reads.COLUMN_SUMS | Reads.KEYS)
        keys = self._layout.unpack_keys(self.pool.elements, flat if with_keys else flat[:0])
        with_values = Reads.VALUES in reads
        values = self._layout.unpack_values(self.pool.elements, flat if with_values else flat[:0])
        return ReadablePages(keys, values, torch.arange(len(flat)).view_as(pages))

    def move(self, move: Move) -> torch.Tensor | None:
        """Write the kept tokens to their pages; return thresholds ``[N, Hkv]`` if tokens merge.

        An in-place move reads all rows before it writes any, because the target of one row may be
        the source of another.
        """
        pending_writes = list[tuple[torch.Tensor, PageViews]]()
        thresholds = []
        for row, count in enumerate(move.counts.tolist()):
            if move.merging is None:
                kept = self._kept(move, row, count)
            else:
                kept, threshold = self._merged(move, move.merging, row, count)
                thresholds.append(threshold)
            pending_writes.append((move.targets[row, :count].long(), kept))
            if not move.in_place:
                self._write(pending_writes)
        self._write(pending_writes)
        return torch.cat(thresholds) if thresholds else None

    def _kept(self, move: Move, row: int, count: int) -> PageViews:
        """Return the keys and values of the pages that one row keeps."""
        size = self.pool.block_size
        slot = move.kept[row, :, : count * size].long()
        pages = move.source.pages[row][slot // size]
        tokens = self._layout.tokens(self.pool.elements, pages, slot % size)
        keys, values = (part.unflatten(1, (count, size)).transpose(0, 1) for part in tokens)
        return keys.mT, values

    def _merged(
        self, move: Move, merging: Merging, row: int, count: int
    ) -> tuple[PageViews, torch.Tensor]:
        """Return the merged pages that one row keeps and its threshold; write its merged tail."""
        rows = slice(row, row + 1)
        source, row_merging = move.source.slice_rows(rows), merging.slice_rows(rows)
        cache = self.open(source.pages, Reads.KEYS | Reads.VALUES)
        (keys, values), tails, threshold = merge_dropped_tokens(
            cache,
            source.max_tokens,
            source.lengths,
            move.kept[rows],
            move.counts[rows],
            row_merging,
            self.pool.block_size,
        )
        if merging.tail:
            tail_keys, tail_values = self.read(row_merging.tail_pages)
            for part, tokens in zip((tail_keys.mT, tail_values), tails, strict=True):
                # The tail's block is not shared: it has no hash, so no other request reads it.
                part[:, :, : merging.tail] = tokens
            self._layout.pack(self.pool.elements, row_merging.tail_pages, tail_keys, tail_values)
        return (keys[:count].mT, values[:count]), threshold

    def _write(self, pending_writes: list[tuple[torch.Tensor, PageViews]]) -> None:
        """Write the pending pages and empty the list."""
        while pending_writes:
            pages, kept = pending_writes.pop()
            self._layout.pack(self.pool.elements, pages, *kept)
