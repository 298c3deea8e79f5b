"""Packing in pages that no strided view can name: unpacked to be read, packed to be written."""

from functools import partial

import torch

from vllm_kvcompress.engine.compression.merging import Held, merged_pages, merged_rows
from vllm_kvcompress.engine.compression.packer import Finished, Move, Packer
from vllm_kvcompress.engine.pages.layouts import Opened, PageViews, Tiled
from vllm_kvcompress.engine.pages.pool import PagePool
from vllm_kvcompress.engine.pages.scales import Scales
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.pipeline import PagedLayer


class TiledPacker(Packer):
    """Packs prompts layer by layer, by copies.

    What is held at once beside the cache is one layer's prompt while it is scored or merged, and
    what a layer keeps while that is moved; in place, what all of them keep. The host reads how much
    a layer keeps, which on a CPU waits for nothing.

    Args:
        pool: the page pool of this worker's layers.
        layout: how keys and values lie in its pages.
        scales: of each layer.
        num_layers: layers on this worker, L.
    """

    def __init__(self, pool: PagePool, layout: Tiled, *, scales: Scales, num_layers: int) -> None:
        self.pool, self.num_layers = pool, num_layers
        self._layout, self.scales = layout, scales
        # Layers are never scored together, since each is unpacked to be read.
        self._longest = 0

    def read(self, pages: torch.Tensor) -> PageViews:
        return (
            self._layout.unpack_keys(self.pool.elements, pages),
            self._layout.unpack_values(self.pool.elements, pages),
        )

    def where(self, layer: int, blocks: torch.Tensor, reads: Reads) -> PagedLayer:
        pages = self.pool.flat_ids(layer, blocks)
        none = pages[:0]
        of_keys = Reads.WINDOW | Reads.COLUMN_SUMS | Reads.KEYS
        with_keys = pages if reads & of_keys else none
        with_values = pages if Reads.VALUES in reads else none
        return PagedLayer(
            layer=layer,
            key_pages=self._layout.unpack_keys(self.pool.elements, with_keys),
            value_pages=self._layout.unpack_values(self.pool.elements, with_values),
            pages=torch.arange(len(pages)),
            scale=self.scales.logits[layer],
            value_scale=self.scales.values[layer],
            sinks=self.scales.sinks_of(layer),
        )

    def opened(self, pages: torch.Tensor) -> Opened:
        """Copies: what all rows hold, once more."""
        flat = pages.flatten()
        return Opened(*self.read(flat), torch.arange(len(flat)).view_as(pages))

    def move_in_place(
        self,
        cache: Opened,
        kept: torch.Tensor,
        counts: torch.Tensor,
        targets: torch.Tensor,
        total: int,
    ) -> None:
        """`cache` is a copy, so nothing that is written is read."""
        size = self.pool.block_size
        for row, count in enumerate(counts.tolist()):
            position = kept[row, :, : count * size].long()
            page, slot = cache.pages[row][position // size], position % size
            head = torch.arange(len(position))[:, None]
            keys = cache.keys[page, head, :, slot].unflatten(1, (count, size)).transpose(0, 1)
            values = cache.values[page, head, slot].unflatten(1, (count, size)).transpose(0, 1)
            self._layout.pack(self.pool.elements, targets[row, :count].long(), keys.mT, values)

    def merge_in_place(
        self,
        cache: Opened,
        held: Held,
        kept: torch.Tensor,
        counts: torch.Tensor,
        targets: torch.Tensor,
        total: int,
    ) -> torch.Tensor:
        thresholds = []
        for row, count in enumerate(counts.tolist()):
            one = slice(row, row + 1)
            (keys, values), tails, near = merged_rows(
                cache, one, held, kept, counts, self.pool.block_size
            )
            if held.tail:
                page = held.tail_pages[one]
                last = self.read(page)
                for part, tokens in zip((last[0].mT, last[1]), tails, strict=True):
                    part[:, :, : held.tail] = tokens
                self._layout.pack(self.pool.elements, page, *last)
            pages = targets[row, :count].long()
            self._layout.pack(self.pool.elements, pages, keys[:count].mT, values[:count])
            thresholds.append(near)
        return torch.cat(thresholds)

    def _move(self, finished: Finished, move: Move) -> torch.Tensor | None:
        """In place all layers are read before any is written: one's target is another's source."""
        plan, waiting = finished.todo.plan, []
        stage, thresholds = self._kept, list[torch.Tensor]()
        if finished.method.merge:
            stage = partial(self._merged, values_only=move.values_only, thresholds=thresholds)
        for layer, count in enumerate(move.counts.tolist()):
            row = slice(layer, layer + 1)
            kept = stage(plan, move.prompt[layer], move.kept[row], move.counts[row])
            waiting.append((move.targets[layer, :count].long(), kept))
            if not finished.todo.in_place:
                self._write(waiting)
        self._write(waiting)
        return torch.cat(thresholds) if thresholds else None

    def _kept(
        self, plan: PagePlan, prompt: torch.Tensor, kept: torch.Tensor, counts: torch.Tensor
    ) -> PageViews:
        """Keys and values of the pages that one layer keeps."""
        count, size = int(counts), plan.block_size
        position = kept[0, :, : count * size].long()
        tokens = self._layout.tokens(self.pool.elements, prompt[position // size], position % size)
        keys, values = (part.unflatten(1, (count, size)).transpose(0, 1) for part in tokens)
        return keys.mT, values

    def _merged(
        self,
        plan: PagePlan,
        prompt: torch.Tensor,
        kept: torch.Tensor,
        counts: torch.Tensor,
        values_only: bool,
        thresholds: list[torch.Tensor],
    ) -> PageViews:
        """The same with the evicted tokens folded in; those of the tail are written at once.

        Adds to `thresholds` how near a token had to be ``[1, Hkv]``.
        """
        cache, own = self.read(prompt), torch.arange(len(prompt))[None]
        (keys, values), tail, near = merged_pages(plan, *cache, own, kept, counts, values_only)
        thresholds.append(near)
        if plan.tail:
            last = tuple(part[-1:].clone() for part in (cache[0].mT, cache[1]))
            for part, tokens in zip(last, tail, strict=True):
                # the tail's block is the request's own: no hash, no other reader
                part[0, :, : plan.tail] = tokens
            self._layout.pack(self.pool.elements, prompt[-1:], last[0].mT, last[1])
        return keys[: int(counts)].mT, values[: int(counts)]

    def _write(self, waiting: list[tuple[torch.Tensor, PageViews]]) -> None:
        while waiting:
            pages, kept = waiting.pop()
            self._layout.pack(self.pool.elements, pages, *kept)
