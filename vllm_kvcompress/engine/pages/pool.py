"""The flat page pool: every layer can read every page, and every layer has its own table.

A vLLM block id is L pages, one per layer, inside one backing allocation. One strided view over
that allocation makes the whole cache an array of pages, whatever ``VLLM_KV_CACHE_LAYOUT`` says:

    flat page of (layer l, block b) = layer_offset[l] + block_stride * b
        LBHNC, LBNHC:  l * num_blocks + b
        BLHNC, BLNHC:  b * L + l
        LHBNC:         l * Hkv * num_blocks + b     (a page's heads lie num_blocks pages apart)
        BHLNC:         b * Hkv * L + l              (and here L pages)

In the last two, ids between these name no page and are never used.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn.functional import pad
from vllm.utils.torch_utils import async_tensor_h2d

from kvcompress_kernels.page_tables import page_tables
from vllm_kvcompress.engine.pages.query_ring import QueryRing
from vllm_kvcompress.engine.pages.remembered import AttentionSums, Protected, Thresholds
from vllm_kvcompress.errors import VllmHookError


def flat_pages(layers: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """One view over the caches of all layers.

    Args:
        layers: each layer's cache ``[num_blocks, ...]``, equal shapes and strides, views of one
            storage.

    Returns:
        The flat view ``[pages, ...]``, `layer_offset` ``[L]`` int32 and `block_stride`.

    Raises:
        VllmHookError: the layers do not lie in one allocation at equal distances.
    """
    first = layers[0]
    blocks = first.shape[0]
    starts = [layer.storage_offset() for layer in layers]
    order = sorted(range(len(layers)), key=starts.__getitem__)
    one_storage = {layer.untyped_storage().data_ptr() for layer in layers}
    alike = {(layer.shape, layer.stride()) for layer in layers}
    gaps = {int(starts[b]) - int(starts[a]) for a, b in pairwise(order)}
    if len(one_storage) != 1 or len(alike) != 1 or len(gaps) > 1:
        raise VllmHookError(
            "compression needs all layers' KV caches in one allocation at equal distances; got"
            f" {len(one_storage)} allocations, {len(alike)} shapes, distances {sorted(gaps)}"
        )
    block_step = int(first.stride(0))
    layer_step = gaps.pop() if gaps else block_step * blocks
    page_step = min(layer_step, block_step)
    if max(layer_step, block_step) % page_step:
        raise VllmHookError(
            "compression needs pages at multiples of one distance; got layer stride"
            f" {layer_step} and block stride {block_step} for {len(layers)} layers of {blocks}"
        )
    between_layers, block_stride = layer_step // page_step, block_step // page_step
    flat = first.as_strided(
        ((len(layers) - 1) * between_layers + (blocks - 1) * block_stride + 1, *first.shape[1:]),
        (page_step, *first.stride()[1:]),
        starts[order[0]],
    )
    layer_offset = torch.empty(len(layers), dtype=torch.int32)
    for rank, layer in enumerate(order):
        layer_offset[layer] = rank * between_layers
    return flat, layer_offset.to(first.device), block_stride


class LayerTables(NamedTuple):
    """What each layer reads for the rows of a batch."""

    tables: Sequence[torch.Tensor]
    """Per layer ``[R, W]`` int32: flat pages."""
    lengths: Sequence[torch.Tensor]
    """Per layer ``[R]`` int32: tokens."""


class PagePool:
    """Where each compressed request's kept tokens lie, per layer.

    Slot 0 belongs to every request that was not compressed: no packed pages.

    Args:
        layers: the layers' caches, in layer order (see `flat_pages`).
        max_requests: requests that may be compressed at once.
        max_rows: rows of the largest batch, padding included.
        max_blocks: pages that a layer of a request has at most, packed and ordinary ones.
        stored: the float8 that a quantised cache holds; None for the layers' own dtype.
    """

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        *,
        max_requests: int,
        max_rows: int,
        max_blocks: int,
        block_size: int,
        stored: torch.dtype | None = None,
    ) -> None:
        self.pages, self.layer_offset, self.block_stride = flat_pages(layers)
        # The same in the dtype of what they hold: vLLM's own are bytes where that is a float8.
        self.elements = self.pages if stored is None else self.pages.view(stored)
        self.block_size = block_size
        count, device = len(layers), self.pages.device
        self._packed = torch.zeros(
            max_requests + 1, count, max_blocks, dtype=torch.int32, device=device
        )
        self._num_packed = torch.zeros(max_requests + 1, count, dtype=torch.int32, device=device)
        self._first_block = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)
        # What attention reads, at addresses that never change: CUDA graphs keep them.
        self._tables = torch.zeros(count, max_rows, max_blocks, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(count, max_rows, dtype=torch.int32, device=device)
        self._row_slots = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._live = torch.zeros((), dtype=torch.int32, device=device)
        # What `_row_slots` holds.
        self._uploaded: list[int] = []
        self._views: dict[int, LayerTables] = {}
        # Told of each step's rows: where the queries of requests go.
        self.ring: QueryRing | None = None
        # What methods that add up attention, and that merge, remember of growing answers.
        self.sums: AttentionSums | None = None
        self.thresholds: Thresholds | None = None
        # Where protected tokens lie in what was packed of requests that may be packed again.
        self.protected: dict[str, Protected] = {}
        self._num_blocks = int(layers[0].shape[0])
        self._slots: dict[str, int] = {}
        # Those of requests that read packed pages.
        self._reading: set[int] = set()
        self._free = list(range(max_requests, 0, -1))

    @property
    def longest(self) -> int:
        """Tokens that a layer of a request holds at most: what the tables have room for."""
        return self.columns * self.block_size

    @property
    def columns(self) -> int:
        """Pages that a layer of a request has at most."""
        return self._packed.shape[2]

    @property
    def busy(self) -> bool:
        """Whether any request is compressed."""
        return bool(self._slots)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slots

    def remember(self, kv_heads: int, *, sums: bool, thresholds: bool) -> None:
        """Make room for what methods remember of answers that grow."""
        device, layers = self.pages.device, len(self.layer_offset)
        if sums:
            every = self.every_layer(torch.arange(self._num_blocks, device=device))
            self.sums = AttentionSums(every, len(self.pages), kv_heads, self.block_size)
        if thresholds:
            slots = len(self._first_block)
            self.thresholds = Thresholds(slots, layers, kv_heads, device)

    def flat_ids(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Flat pages, int64, of vLLM block ids in one layer."""
        return blocks.long() * self.block_stride + self.layer_offset[layer]

    def every_layer(self, blocks: torch.Tensor) -> torch.Tensor:
        """Flat pages ``[L, n]``, int64, of n vLLM block ids in all layers."""
        return blocks.long() * self.block_stride + self.layer_offset[:, None]

    def destination(self, blocks: Sequence[int]) -> torch.Tensor:
        """All ``len(blocks) * L`` flat pages of some blocks, int64, block by block."""
        ids = async_tensor_h2d(list(blocks), device=self.pages.device, dtype=torch.int64)
        return self.every_layer(ids).T.flatten()

    def admit(self, request_id: str) -> None:
        """Give a request a slot before anything of it is packed; one that has a slot keeps it."""
        if request_id in self._slots:
            return
        slot = self._slots[request_id] = self._free.pop()
        self._first_block[slot].fill_(0)  # a number put there would be copied, and waited for
        self._num_packed[slot] = 0
        if self.thresholds is not None:
            self.thresholds.reset(slot)

    def keep_queries(self, request_id: str) -> None:
        """From now on the request has a slot, and its last queries are kept if any are."""
        self.admit(request_id)
        if self.ring is not None:
            self.ring.admit(self._slots[request_id])

    def drop_queries(self, request_id: str) -> None:
        """Its last queries are no longer needed."""
        if self.ring is not None:
            self.ring.release(self._slots[request_id])

    def held(self, rows: Sequence[int], columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What some rows of this step's batch hold, as `tables` found it.

        Returns:
            Flat pages ``[R, L, W]`` int64, W at most `columns`, and tokens ``[R, L]`` int32.
        """
        at = async_tensor_h2d(list(rows), device=self.pages.device, dtype=torch.int64)
        tables = self._tables[:, :, :columns].index_select(1, at)
        lengths = self._lengths.index_select(1, at)
        return tables.transpose(0, 1).long(), lengths.T.contiguous()

    def held_in(self, layer: int, row: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `held`, of one layer and row: flat pages ``[1, 1, W]`` and tokens ``[1, 1]``."""
        table, length = self._tables[layer, row, :columns], self._lengths[layer, row]
        return table.long()[None, None], length.view(1, 1)

    def put_null_block_in_row(self, tokens: int) -> None:
        """From now on row 0 of the batch holds `tokens` of the null block in every layer."""
        self._tables[:, 0] = 0
        self._lengths[:, 0] = tokens

    def packed(self, request_id: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A request's packed pages ``[L, max_blocks]`` and how many each layer has ``[L]``, int32.

        Views of the pool's own.
        """
        slot = self._slots[request_id]
        return self._packed[slot], self._num_packed[slot]

    def advance(self, request_id: str, first_block: int) -> None:
        """From now on the request reads its packed pages, then its blocks from `first_block` on."""
        self._first_block[self._slots[request_id]].fill_(first_block)

    def assign(
        self, request_id: str, pages: torch.Tensor, counts: torch.Tensor, first_block: int
    ) -> torch.Tensor:
        """From now on the request reads packed pages, then its blocks from `first_block` on.

        Args:
            pages: flat pages int64; the first ``counts[0]`` are layer 0's, and so on.
            counts: ``[L]`` int32, with sum ``len(pages)``.

        Returns:
            ``[L, max_blocks]`` int32, each layer's pages, 0 behind them: a view of the pool's own.
        """
        self.admit(request_id)
        slot = self._slots[request_id]
        self._reading.add(slot)
        self._first_block[slot].fill_(first_block)
        self._num_packed[slot] = counts
        column = torch.arange(self._packed.shape[2], device=pages.device)
        start = counts.cumsum(0) - counts
        at = (start[:, None] + column).where(column < counts[:, None], len(pages))
        self._packed[slot] = pad(pages, (0, 1))[at]
        return self._packed[slot]

    def forget(self, request_id: str) -> None:
        """Drop a request that finished or was preempted; nothing happens if it is unknown."""
        slot = self._slots.pop(request_id, None)
        self.protected.pop(request_id, None)
        if slot is not None:
            self._reading.discard(slot)
            if self.ring is not None:
                self.ring.release(slot)
            self._free.append(slot)

    def none_packed(self, slots: Sequence[int]) -> bool:
        """Whether all of these requests read nothing but vLLM's own blocks."""
        return self._reading.isdisjoint(slots)

    def slots(self, request_ids: Sequence[str]) -> list[int]:
        """The slot of each request of a batch; 0 where it was not compressed."""
        if not self._slots:
            return [0] * len(request_ids)
        find = self._slots.get
        return [find(request_id, 0) for request_id in request_ids]

    def tables(
        self, slots: list[int], block_table: torch.Tensor, seq_lens: torch.Tensor, rows: int
    ) -> LayerTables:
        """Refresh what every layer reads in this step (`page_tables`); no sync.

        Args:
            slots: of the batch's requests, in row order.
            block_table: ``[>= len(slots), W]`` int32: vLLM's block ids.
            seq_lens: ``[>= len(slots)]`` int32, in tokens.
            rows: rows of the batch, padding included; padded ones have length 0.
        """
        self.follow(slots, seq_lens, rows)
        page_tables(
            block_table,
            seq_lens,
            self._packed,
            self._num_packed,
            self._first_block,
            self.layer_offset,
            self.block_stride,
            self.block_size,
            self._row_slots,
            self._live,
            self._tables,
            self._lengths,
        )
        if rows not in self._views:
            tables, lengths = self._tables[:, :rows], self._lengths[:, :rows]
            self._views[rows] = LayerTables(tables.unbind(), lengths.unbind())
        return self._views[rows]

    def follow(self, slots: list[int], seq_lens: torch.Tensor, rows: int) -> None:
        """Tell the device whose rows these are, and the ring where their queries go; no sync.

        Args:
            slots, seq_lens, rows: as in `tables`.
        """
        if slots != self._uploaded:
            if len(slots) != len(self._uploaded):
                self._live.fill_(len(slots))
            self._uploaded = slots
            async_tensor_h2d(slots, out=self._row_slots[: len(slots)])
        if self.ring is not None:
            self.ring.follow(self._row_slots, seq_lens, self._live, rows)
