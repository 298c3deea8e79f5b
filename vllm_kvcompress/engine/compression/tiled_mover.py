"""Moves kept tokens in tiled pages, which have no strided view and are read and written by copy."""

import torch

from kvcompress_kernels.quantise_kept import quantise_kept
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
        """Return copies of the keys and values that are read, in the order of `pages`.

        Window attention reads the pages themselves.
        """
        flat, cache, layout = pages.flatten(), self.pool.elements, self._layout
        values = layout.unpack_values(cache, flat if Reads.VALUES in reads else flat[:0])
        if not reads & (Reads.COLUMN_SUMS | Reads.KEYS | Reads.VALUES):
            return ReadablePages(layout.heads_of_keys(cache), values, pages, layout.offsets)
        with_keys = reads & (Reads.WINDOW | Reads.COLUMN_SUMS | Reads.KEYS)
        keys = layout.unpack_keys(cache, flat if with_keys else flat[:0])
        return ReadablePages(keys, values, torch.arange(len(flat)).view_as(pages))

    def move(self, move: Move) -> torch.Tensor | None:
        """Write the kept tokens to their pages; return thresholds ``[N, Hkv]`` if tokens merge.

        An in-place move reads all rows before it writes any, because the target of one row may be
        the source of another.
        """
        pending_writes = list[tuple[torch.Tensor, PageViews | torch.Tensor]]()
        thresholds = []
        if (drafts := move.drafts) is not None:
            for pages, targets, count in zip(
                drafts.pages, drafts.targets, drafts.counts.tolist(), strict=True
            ):
                copy = self.pool.byte_pages[pages[:count]]
                pending_writes.append((targets[:count].long(), copy))
        tokens = move.kept_in_pages(self.pool.block_size).tolist()
        for row, count in enumerate(move.counts.tolist()):
            if move.merging is None:
                keys, values = self._kept(move, row, tokens[row])
            else:
                (keys, values), threshold = self._merged(move, move.merging, row, tokens[row])
                thresholds.append(threshold)
            kept = (
                self._in_pages(keys, values)
                if move.group_tokens is None
                else self._quantised(keys, values, count)
            )
            pending_writes.append((move.targets[row, :count].long(), kept))
            if not move.in_place:
                self._write(pending_writes)
        self._write(pending_writes)
        return torch.cat(thresholds) if thresholds else None

    def _kept(self, move: Move, row: int, tokens: int) -> PageViews:
        """Return the keys and values ``[Hkv, tokens, D]`` that one row keeps."""
        size = self.pool.block_size
        slot = move.kept[row, :, :tokens].long()
        pages = move.source.pages[row][slot // size]
        return self._layout.tokens(self.pool.elements, pages, slot % size)

    def _in_pages(self, keys: torch.Tensor, values: torch.Tensor) -> PageViews:
        """Return keys ``[n, Hkv, D, bs]`` and values ``[n, Hkv, bs, D]`` of full pages."""
        pages = (-1, self.pool.block_size)
        keys, values = (part.unflatten(1, pages).transpose(0, 1) for part in (keys, values))
        return keys.mT, values

    def _quantised(self, keys: torch.Tensor, values: torch.Tensor, count: int) -> torch.Tensor:
        """Return `count` pages of groups, as bytes, that hold keys and values ``[Hkv, n, D]``."""
        byte_pages = self.pool.byte_pages
        into = byte_pages.new_zeros(count, *byte_pages.shape[1:])
        quantise_kept(
            keys.mT[None],
            values[None],
            torch.zeros(1, 1, dtype=torch.int64),
            None,
            torch.tensor([keys.shape[1]], dtype=torch.int32),
            torch.arange(count)[None],
            into=into,
        )
        return into

    def _merged(
        self, move: Move, merging: Merging, row: int, tokens: int
    ) -> tuple[PageViews, torch.Tensor]:
        """Return the merged tokens ``[Hkv, tokens, D]`` that one row keeps, and its threshold.

        Writes the row's merged tail.
        """
        rows = slice(row, row + 1)
        source, row_merging = move.source.slice_rows(rows), merging.slice_rows(rows)
        cache = self.open(source.pages, Reads.KEYS | Reads.VALUES)
        (keys, values), tails, threshold = merge_dropped_tokens(
            cache,
            source.max_tokens,
            source.lengths,
            move.kept[rows],
            move.kept_in_pages(self.pool.block_size)[rows],
            row_merging,
            self.pool.block_size,
        )
        if merging.tail:
            tail_keys, tail_values = self.read(row_merging.tail_pages)
            for part, tail in zip((tail_keys.mT, tail_values), tails, strict=True):
                # The tail's block is not shared: it has no hash, so no other request reads it.
                part[:, :, : merging.tail] = tail
            self._layout.pack(self.pool.elements, row_merging.tail_pages, tail_keys, tail_values)
        keys, values = (part.transpose(0, 1).flatten(1, 2)[:, :tokens] for part in (keys, values))
        return (keys, values), threshold

    def _write(self, pending_writes: list[tuple[torch.Tensor, PageViews | torch.Tensor]]) -> None:
        """Write the pending pages and empty the list."""
        while pending_writes:
            pages, kept = pending_writes.pop()
            if isinstance(kept, torch.Tensor):
                self.pool.byte_pages[pages] = kept
            else:
                self._layout.pack(self.pool.elements, pages, *kept)
