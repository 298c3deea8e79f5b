"""Packing in pages that no strided view can name: unpacked to be read, packed to be written."""

import torch

from vllm_kvcompress.engine.compression.merging import Merging, merged
from vllm_kvcompress.engine.compression.mover import Move
from vllm_kvcompress.engine.pages.layouts import Opened, PageViews, Tiled
from vllm_kvcompress.engine.pages.pool import PagePool
from vllm_kvcompress.methods.base import Reads


class TiledMover:
    """Moves tokens layer by layer, by copies.

    Beside the cache as many tokens are copied at once as are scored or merged together, and those
    that a layer keeps while they are moved; in place, those that all of them keep. The host reads
    how much a layer keeps, which on a CPU waits for nothing.

    Args:
        pool: the page pool of this worker's layers.
        layout: how keys and values lie in its pages.
    """

    def __init__(self, pool: PagePool, layout: Tiled) -> None:
        self.pool, self._layout = pool, layout

    def read(self, pages: torch.Tensor) -> PageViews:
        return (
            self._layout.unpack_keys(self.pool.elements, pages),
            self._layout.unpack_values(self.pool.elements, pages),
        )

    def open(self, pages: torch.Tensor, reads: Reads) -> Opened:
        """Copies of the keys and values that are read, in the order of `pages`."""
        flat = pages.flatten()
        with_keys = reads & (Reads.WINDOW | Reads.COLUMN_SUMS | Reads.KEYS)
        keys = self._layout.unpack_keys(self.pool.elements, flat if with_keys else flat[:0])
        with_values = Reads.VALUES in reads
        values = self._layout.unpack_values(self.pool.elements, flat if with_values else flat[:0])
        return Opened(keys, values, torch.arange(len(flat)).view_as(pages))

    def move(self, move: Move) -> torch.Tensor | None:
        """In place all rows are read before any is written: one's target is another's source."""
        waiting = list[tuple[torch.Tensor, PageViews]]()
        thresholds = []
        for row, count in enumerate(move.counts.tolist()):
            if move.merging is None:
                kept = self._kept(move, row, count)
            else:
                kept, near = self._merged(move, move.merging, row, count)
                thresholds.append(near)
            waiting.append((move.targets[row, :count].long(), kept))
            if not move.in_place:
                self._write(waiting)
        self._write(waiting)
        return torch.cat(thresholds) if thresholds else None

    def _kept(self, move: Move, row: int, count: int) -> PageViews:
        """Keys and values of the pages that one row keeps."""
        size = self.pool.block_size
        slot = move.kept[row, :, : count * size].long()
        pages = move.source.pages[row][slot // size]
        tokens = self._layout.tokens(self.pool.elements, pages, slot % size)
        keys, values = (part.unflatten(1, (count, size)).transpose(0, 1) for part in tokens)
        return keys.mT, values

    def _merged(
        self, move: Move, merging: Merging, row: int, count: int
    ) -> tuple[PageViews, torch.Tensor]:
        """The pages that one row keeps, merged, and its threshold; its tail is written at once."""
        one = slice(row, row + 1)
        source, own = move.source.some(one), merging.some(one)
        cache = self.open(source.pages, Reads.KEYS | Reads.VALUES)
        (keys, values), tails, near = merged(
            cache,
            source.most,
            source.lengths,
            move.kept[one],
            move.counts[one],
            own,
            self.pool.block_size,
        )
        if merging.tail:
            last = self.read(own.tail_pages)
            for part, tokens in zip((last[0].mT, last[1]), tails, strict=True):
                # a tail's block is the request's own: no hash, no other reader
                part[:, :, : merging.tail] = tokens
            self._layout.pack(self.pool.elements, own.tail_pages, *last)
        return (keys[:count].mT, values[:count]), near

    def _write(self, waiting: list[tuple[torch.Tensor, PageViews]]) -> None:
        while waiting:
            pages, kept = waiting.pop()
            self._layout.pack(self.pool.elements, pages, *kept)
