"""The flat page pool: any layer can read any page through its own block table.

A vLLM block id stands for L pages, one per layer, in one allocation. A strided view over that
allocation turns the cache into one array of pages, for every ``VLLM_KV_CACHE_LAYOUT``:

    flat page of (layer l, block b) = layer_offset[l] + block_stride * b
        LBHNC, LBNHC:  l * num_blocks + b
        BLHNC, BLNHC:  b * L + l
        LHBNC:         l * Hkv * num_blocks + b     (the heads of a page are num_blocks pages apart)
        BHLNC:         b * Hkv * L + l              (the heads of a page are L pages apart)

In the last two layouts, the ids in between do not refer to pages and are never used.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from kvcompress_kernels import k4v3
from kvcompress_kernels.assign_pages import assign_pages
from kvcompress_kernels.page_tables import page_tables
from vllm_kvcompress.engine.pages.draft_pages import DraftPages
from vllm_kvcompress.engine.pages.method_state import AttentionSums, Thresholds
from vllm_kvcompress.engine.pages.query_ring import QueryRing
from vllm_kvcompress.engine.pages.scratch_pages import MIN_QUERIES, ScratchCopies, ScratchPages
from vllm_kvcompress.errors import VllmHookError
from vllm_kvcompress.planning.memory import SCRATCH_ROWS


def flat_pages(layers: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return one view over the caches of all layers.

    Args:
        layers: each layer's cache ``[num_blocks, ...]``; shapes, strides and storage must be equal.

    Returns:
        The flat view ``[pages, ...]``, `layer_offset` ``[L]`` int32 and `block_stride`.

    Raises:
        VllmHookError: the layers are not in one allocation at equal distances.
    """
    first = layers[0]
    blocks = first.shape[0]
    starts = [layer.storage_offset() for layer in layers]
    order = sorted(range(len(layers)), key=starts.__getitem__)
    storages = {layer.untyped_storage().data_ptr() for layer in layers}
    shapes = {(layer.shape, layer.stride()) for layer in layers}
    gaps = {int(starts[b]) - int(starts[a]) for a, b in pairwise(order)}
    if len(storages) != 1 or len(shapes) != 1 or len(gaps) > 1:
        raise VllmHookError(
            "compression needs all layers' KV caches in one allocation at equal distances; got"
            f" {len(storages)} allocations, {len(shapes)} shapes, distances {sorted(gaps)}"
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
    """Block tables and lengths of each layer for the rows of a batch."""

    tables: Sequence[torch.Tensor]
    """Per layer ``[R, W]`` int32: flat pages."""
    lengths: Sequence[torch.Tensor]
    """Per layer ``[R]`` int32: tokens."""


class LayerGroups(NamedTuple):
    """Packed groups of one layer, by slot, and the slots of the batch's rows."""

    pages: torch.Tensor
    """``[slots, W]`` int32: flat pages."""
    tokens: torch.Tensor
    """``[slots]`` int32: tokens in groups, 0 for slots without groups."""
    slots: torch.Tensor
    """``[R]`` int32: the slot that each row reads."""
    live: torch.Tensor
    """``[]`` int32: rows of this step."""


class PackedBlocks(NamedTuple):
    """The blocks that hold a request's packed pages."""

    request_id: str
    """The request."""
    blocks: Sequence[int]
    """vLLM's ids of the blocks, which layers fill in order, block by block."""
    first_block: int
    """Index of the request's first block that is not packed."""


class PagePool:
    """Tracks the packed pages of each compressed request in each layer.

    Every compressed request has a slot. All uncompressed requests share slot 0, which has no packed
    pages.

    Packed pages hold tokens in the cache's dtype, or groups of tokens in k4v3
    (`kvcompress_kernels.k4v3`). vLLM's attention reads the first kind through the block tables. It
    never sees the second kind: `packed_attention` reads it, from `groups`.

    Args:
        layers: the layers' caches, in layer order (see `flat_pages`).
        max_requests: maximum number of concurrent compressed requests.
        max_rows: rows of the largest batch, including padding.
        max_blocks: maximum pages per request and layer, packed pages plus vLLM's blocks.
        block_size: tokens in a page.
        stored: the float8 dtype of a quantised cache; None if the cache has the layers' dtype.
        packs_groups: whether any request may be packed in k4v3.
        scratch_blocks: how many of the last blocks are scratch pages, which vLLM's scheduler does
            not know (`ScratchPages`).
        draft_layers: how many of the last layers belong to a draft model (`DraftPages`). A block
            has their pages too, and kept tokens of any layer may lie in them.
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
        packs_groups: bool = False,
        scratch_blocks: int = 0,
        draft_layers: int = 0,
    ) -> None:
        self.pages, self._page_offset, self.block_stride = flat_pages(layers)
        count = len(layers) - draft_layers
        # Those of the layers that a method compresses.
        self.layer_offset = self._page_offset[:count]
        # vLLM allocates a float8 cache as uint8; `elements` views it in the stored dtype.
        self.elements = self.pages if stored is None else self.pages.view(stored)
        self.block_size = block_size
        device = self.pages.device
        columns = max_blocks + int(packs_groups)
        num_slots = max_requests + 1 + (SCRATCH_ROWS if scratch_blocks else 0)
        self._packed = torch.zeros(num_slots, count, columns, dtype=torch.int32, device=device)
        # Pages of groups start in column 1. Column 0 has the page of a leading ordinary block. If
        # `_num_packed` is 1, attention reads it like a packed page in the cache's dtype.
        self._group_pages = self._packed[:, :, 1:]
        self._num_packed = torch.zeros(num_slots, count, dtype=torch.int32, device=device)
        self._first_block = torch.zeros(num_slots, dtype=torch.int32, device=device)
        # Tokens in groups. A slot that has some has no packed pages in the cache's dtype.
        self._group_tokens = torch.zeros_like(self._num_packed) if packs_groups else None
        # Lengths for vLLM's attention, which need not read rows with groups.
        self._short_lengths = torch.zeros(
            count, max_rows if packs_groups else 0, dtype=torch.int32, device=device
        )
        # Attention reads these. Their addresses never change, because CUDA graphs record them.
        self._tables = torch.zeros(count, max_rows, max_blocks, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(count, max_rows, dtype=torch.int32, device=device)
        self._row_slots = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._live = torch.zeros((), dtype=torch.int32, device=device)
        # Host copy of `_row_slots`.
        self._uploaded_slots: list[int] = []
        # The slot that each row reads. It is the row's own, unless the row reads scratch pages.
        self._read_slots = torch.zeros_like(self._row_slots) if scratch_blocks else self._row_slots
        self._uploaded_read_slots: list[int] = []
        self._views: dict[int, LayerTables] = {}
        # Scratch memory of attention over packed groups, which all layers share.
        self.workspace: torch.Tensor | None = None
        # Stores the last queries of requests, if a method needs them later.
        self.ring: QueryRing | None = None
        # State of methods that accumulate attention, or that merge dropped tokens.
        self.sums: AttentionSums | None = None
        self.thresholds: Thresholds | None = None
        self._num_blocks = int(layers[0].shape[0])
        self.scratch: ScratchPages | None = None
        if scratch_blocks:
            blocks = torch.arange(self._num_blocks - scratch_blocks, self._num_blocks)
            self.scratch = ScratchPages(
                self.flat_ids_in_all_layers(blocks.to(device)).T.flatten().int(),
                range(max_requests + 1, num_slots),
                block_size=block_size,
                itemsize=self.pages.itemsize,
            )
        self._slots: dict[str, int] = {}
        # Slots of requests that read packed pages.
        self._slots_with_pages: set[int] = set()
        # Those whose packed pages hold groups.
        self._slots_with_groups: set[int] = set()
        # Tokens in groups of each layer, for slots whose layers have equally many.
        self._equal_group_tokens: dict[int, int] = {}
        self._free = list(range(max_requests, 0, -1))
        self.drafts: DraftPages | None = None
        if draft_layers:
            self.drafts = DraftPages(
                self._page_offset[count:],
                self.block_stride,
                slots=num_slots,
                max_rows=max_rows,
                max_blocks=max_blocks,
                block_size=block_size,
            )

    @property
    def max_layer_tokens(self) -> int:
        """Maximum tokens that a layer can hold of one request."""
        return self.max_layer_pages * self.block_size

    @property
    def max_layer_pages(self) -> int:
        """Maximum pages that a layer can hold of one request."""
        return self._tables.shape[2]

    @property
    def stores_queries(self) -> bool:
        """Return whether the queries of the batch are stored in the ring."""
        return self.ring is not None and self.ring.stores_queries

    @property
    def has_requests(self) -> bool:
        """Return whether any request has a slot."""
        return bool(self._slots)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slots

    def allocate_method_state(self, kv_heads: int, *, sums: bool, thresholds: bool) -> None:
        """Allocate the state of methods that pack requests again.

        Args:
            kv_heads: KV heads of a layer.
            sums: whether a method accumulates attention.
            thresholds: whether a method merges dropped tokens.
        """
        device, layers = self.pages.device, len(self.layer_offset)
        if sums:
            pages = self._pages_of(torch.arange(self._num_blocks, device=device))
            self.sums = AttentionSums(pages, len(self.pages), kv_heads, self.block_size)
        if thresholds:
            slots = len(self._first_block)
            self.thresholds = Thresholds(slots, layers, kv_heads, device)

    def flat_ids(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Return the flat pages, int64, of vLLM block ids in one layer."""
        return blocks.long() * self.block_stride + self.layer_offset[layer]

    def flat_ids_in_all_layers(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the flat pages ``[L, n]``, int64, of n vLLM block ids in all layers."""
        return blocks.long() * self.block_stride + self.layer_offset[:, None]

    def _pages_of(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the flat pages ``[L + D, n]``, int64, of n vLLM block ids, draft layers' last."""
        return blocks.long() * self.block_stride + self._page_offset[:, None]

    def destination(self, blocks: Sequence[int]) -> torch.Tensor:
        """Return the ``len(blocks) * (L + D)`` flat pages of the blocks, int64, block by block."""
        ids = async_tensor_h2d(list(blocks), device=self.pages.device, dtype=torch.int64)
        return self._pages_of(ids).T.flatten()

    def zero(self, blocks: Sequence[int]) -> None:
        """Fill the pages of vLLM blocks with zeros, in all layers."""
        self.pages.index_fill_(0, self.destination(blocks), 0)

    def admit(self, request_id: str) -> None:
        """Give a request a slot with no packed pages; do nothing if it has one already."""
        if request_id in self._slots:
            return
        slot = self._get_or_allocate_slot(request_id)
        self._first_block[slot].fill_(0)  # assigning a Python number would copy it with a sync
        self._num_packed[slot] = 0
        if self._group_tokens is not None:
            self._group_tokens[slot] = 0

    def _get_or_allocate_slot(self, request_id: str) -> int:
        """Return the request's slot, and allocate one if it has none.

        A new slot still has an earlier request's page counts, which the caller must overwrite.
        """
        if request_id not in self._slots:
            slot = self._slots[request_id] = self._free.pop()
            if self.drafts is not None:
                self.drafts.reset(slot)
            if self.thresholds is not None:
                self.thresholds.reset(slot)
        return self._slots[request_id]

    def keep_queries(self, request_id: str) -> None:
        """Give the request a slot and start storing its last queries, if there is a ring."""
        self.admit(request_id)
        if self.ring is not None:
            self.ring.admit(self._slots[request_id])

    def drop_queries(self, request_id: str) -> None:
        """Stop storing the request's last queries."""
        if self.ring is not None:
            self.ring.release(self._slots[request_id])

    def row_tables(self, rows: Sequence[int], max_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block tables and lengths of batch rows, as of the last `tables` call.

        Returns:
            Flat pages ``[R, L, W]`` int64, with W at most `max_pages`, and tokens ``[R, L]`` int32.
        """
        indices = async_tensor_h2d(list(rows), device=self.pages.device, dtype=torch.int64)
        tables = self._tables[:, :, :max_pages].index_select(1, indices)
        lengths = self._lengths.index_select(1, indices)
        return tables.transpose(0, 1).long(), lengths.T.contiguous()

    def lengths_at(self, request_ids: Sequence[str], tokens: Sequence[int]) -> torch.Tensor:
        """Return the tokens ``[R, L]`` int32 that each layer holds of R requests, without a sync.

        Args:
            request_ids: requests with packed pages in the cache's dtype.
            tokens: computed tokens of each request.
        """
        numbers = [*self.slots(request_ids), *tokens]
        uploaded = async_tensor_h2d(numbers, device=self.pages.device, dtype=torch.int64)
        slots, computed = uploaded.view(2, -1)
        dropped = self._first_block.index_select(0, slots)[:, None]
        dropped = dropped - self._num_packed.index_select(0, slots)
        lengths: torch.Tensor = computed[:, None] - dropped * self.block_size
        return lengths.int()

    def row_table(self, layer: int, row: int, max_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `row_tables` of one layer and row: pages ``[1, 1, W]`` and tokens ``[1, 1]``."""
        table, length = self._tables[layer, row, :max_pages], self._lengths[layer, row]
        return table.long()[None, None], length.view(1, 1)

    def put_null_block_in_row(self, tokens: int) -> None:
        """Fill batch row 0 with `tokens` tokens of the null block in every layer."""
        self._tables[:, 0] = 0
        self._lengths[:, 0] = tokens

    def packed(self, request_id: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a request's packed pages ``[L, max_blocks]`` and page counts ``[L]``.

        Both are int32.
        """
        slot = self._slots[request_id]
        return self._packed[slot], self._num_packed[slot]

    def layer_pages(
        self, request_id: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return a request's packed pages by layer, without an ordinary page before groups.

        Returns:
            Views of flat pages ``[L, W]`` int32 and page counts ``[L]`` int32, and a view of the
            tokens of each layer ``[L]`` int32 if the pages hold groups.
        """
        slot = self._slots[request_id]
        if self._group_tokens is None or slot not in self._slots_with_groups:
            return self._packed[slot], self._num_packed[slot], None
        tokens = self._group_tokens[slot]
        page_tokens = k4v3.page_tokens(self.block_size, self.pages.itemsize)
        return self._group_pages[slot], (tokens + page_tokens - 1) // page_tokens, tokens

    def set_first_block(self, request_id: str, first_block: int) -> None:
        """Make the request read its packed pages, then its blocks starting at `first_block`."""
        self._first_block[self._slots[request_id]].fill_(first_block)

    def assign(
        self,
        requests: Sequence[PackedBlocks],
        counts: torch.Tensor,
        group_tokens: torch.Tensor | None = None,
        leading: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Assign packed pages to R requests from their blocks, with one upload and one launch.

        Each request reads its packed pages, then its leading page if it has one, then its blocks
        starting at `first_block`. The pages of its blocks, block by block, go to the layers in
        order: the first ``counts[r, 0]`` to layer 0, and so on.

        Args:
            requests: the requests.
            counts: ``[R, L]`` int32, pages of each layer. A request's sum is at most the pages of
                its blocks.
            group_tokens: ``[R, L]`` int32, tokens of each layer, if the pages hold groups.
            leading: ``[R, L]`` int, flat pages of the requests' first blocks, if these stay
                ordinary blocks before pages of groups; None without such blocks.

        Returns:
            Per request a view ``[L, max_blocks]`` int32 of each layer's pages, padded with 0.
        """
        slots = [self._get_or_allocate_slot(request.request_id) for request in requests]
        starts = accumulate((len(request.blocks) for request in requests), initial=0)
        numbers = [
            number
            for slot, request, start in zip(slots, requests, starts, strict=False)
            for number in (slot, request.first_block, start)
        ]
        rows = len(numbers)
        numbers += chain.from_iterable(request.blocks for request in requests)
        uploaded = async_tensor_h2d(numbers, device=self.pages.device, dtype=torch.int64)
        assign_pages(
            uploaded[:rows].view(-1, 3),
            uploaded[rows:],
            self._page_offset,
            self.block_stride,
            counts,
            self._packed,
            self._num_packed,
            self._first_block,
            group_tokens=group_tokens,
            out_group_tokens=self._group_tokens,
        )
        if leading is not None:
            slot_indices = uploaded[:rows].view(-1, 3)[:, 0]
            self._packed[:, :, 0].index_copy_(0, slot_indices, leading.int())
            self._num_packed.index_fill_(0, slot_indices, 1)
        self._slots_with_pages.update(slots)
        if group_tokens is not None:
            self._slots_with_groups.update(slots)
        for slot in slots:
            self._equal_group_tokens.pop(slot, None)
        packed = self._packed if group_tokens is None else self._group_pages
        return [packed[slot] for slot in slots]

    def add_groups(
        self,
        request_id: str,
        pages: torch.Tensor,
        tokens: int,
        page_tokens: int,
        first_block: int,
        leading: torch.Tensor | None = None,
    ) -> None:
        """Add pages of groups to each layer of a request.

        They go before the layer's partly filled page, if it has one. The order does not matter,
        since keys carry their rotation.

        Args:
            pages: ``[L, n]`` int32, flat pages. The last one may be partly filled, if no layer has
                such a page already.
            tokens: tokens in a layer's pages.
            page_tokens: tokens in a page.
            first_block: index of the request's first block behind the packed tokens.
            leading: ``[L, 1]``, flat pages of an ordinary block before the packed tokens; None
                without one.
        """
        assert self._group_tokens is not None, request_id
        self.admit(request_id)
        slot = self._slots[request_id]
        packed, held = self._group_pages[slot], self._group_tokens[slot]
        if leading is not None:
            self._packed[slot, :, :1] = leading
            self._num_packed[slot].fill_(1)
        full_pages = (held // page_tokens).long()[:, None]
        column = torch.arange(pages.shape[1], device=pages.device)
        partial_page = packed.gather(1, full_pages)
        # Without a partly filled page, nothing reads this column. It may be one too many.
        end = (full_pages + pages.shape[1]).clamp(max=packed.shape[1] - 1)
        packed.scatter_(1, end, partial_page)
        packed.scatter_(1, full_pages + column, pages)
        held.add_(tokens)
        self._first_block[slot].fill_(first_block)
        if slot not in self._slots_with_groups and leading is not None:
            self._equal_group_tokens[slot] = tokens
        elif slot in self._equal_group_tokens:
            self._equal_group_tokens[slot] += tokens
        self._slots_with_pages.add(slot)
        self._slots_with_groups.add(slot)

    def forget(self, request_id: str) -> None:
        """Drop a request that finished or was preempted; do nothing if it has no slot."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._slots_with_pages.discard(slot)
            self._slots_with_groups.discard(slot)
            self._equal_group_tokens.pop(slot, None)
            if self.ring is not None:
                self.ring.release(slot)
            self._free.append(slot)

    def none_packed(self, slots: Sequence[int]) -> bool:
        """Return whether none of the slots has packed pages."""
        return self._slots_with_pages.isdisjoint(slots)

    def have_groups(self, slots: Sequence[int]) -> bool:
        """Return whether any of the slots has packed pages that hold groups."""
        return not self._slots_with_groups.isdisjoint(slots)

    def have_only_groups(self, slots: Sequence[int]) -> bool:
        """Return whether all slots have tokens in groups, in every layer. Waits for the device."""
        if self._group_tokens is None or not self._slots_with_groups.issuperset(slots):
            return False
        return bool(self._group_tokens[slots].all())

    def may_use_scratch(self, queries: Mapping[str, int]) -> bool:
        """Return whether a batch may have rows that read scratch pages.

        Args:
            queries: by request, its queries in the batch.
        """
        if self.scratch is None or not self._equal_group_tokens:
            return False
        tokens, slot_of = self._equal_group_tokens, self._slots.get
        return any(
            count >= MIN_QUERIES and tokens.get(slot_of(request_id, 0), 0) > 0
            for request_id, count in queries.items()
        )

    def use_scratch(
        self, slots: list[int], queries: Sequence[int], max_tokens: int
    ) -> tuple[list[int], ScratchCopies | None]:
        """Give scratch pages to rows with packed groups and many queries, without a sync.

        Such a row reads copies of its packed pages before its ordinary pages: it gets a slot whose
        packed pages are scratch pages and hold no groups. Call this before `tables`.

        Args:
            slots: slots of the batch's requests, in row order.
            queries: queries of each row.
            max_tokens: upper bound on a row's tokens.

        Returns:
            The slot that each row reads, and what the layers dequantise; None if that is nothing.
        """
        if self.scratch is None or -(-max_tokens // self.block_size) > self.max_layer_pages:
            return slots, None
        rows = list(self.scratch.rows(slots, queries, self._equal_group_tokens))
        if not rows:
            return slots, None
        read_slots = slots.copy()
        for row, slot, read_slot, packed_pages, pages in rows:
            read_slots[row] = read_slot
            count = packed_pages * self.scratch.ratio
            # Where its ordinary blocks begin stays the same. `packed_attention` skips the row,
            # because its read slot has no tokens in groups.
            self._packed[read_slot, :, :1] = self._packed[slot, :, :1]
            self._packed[read_slot, :, 1 : 1 + count] = self.scratch.pages[pages]
            self._num_packed[read_slot].fill_(1 + count)
            self._first_block[read_slot].copy_(self._first_block[slot])
        packed = torch.cat([self._group_pages[row.slot, :, : row.packed_pages] for row in rows], 1)
        destinations = self.scratch.pages[: rows[-1].pages.stop]
        return read_slots, ScratchCopies(packed.unbind(), destinations)

    def short_lengths(
        self, slots: Sequence[int], query_start: torch.Tensor, rows: int
    ) -> Sequence[torch.Tensor]:
        """Return the lengths for vLLM's attention, which are short for rows with groups.

        `packed_attention` replaces the output of such rows, so vLLM only reads as many tokens of
        them as they have queries. Call this after `tables`.

        Args:
            slots: the slots that the batch's rows read.
            query_start: ``[>= rows + 1]`` int32, offset of each row's first query.
            rows: rows of the batch, including padding.

        Returns:
            Per layer ``[rows]`` int32, views of a persistent buffer.
        """
        assert self._group_tokens is not None
        lengths, short = self._lengths[:, :rows], self._short_lengths[:, :rows]
        if self.have_groups(slots):
            tokens = self._group_tokens.index_select(0, self._read_slots[:rows])[:, 0]
            queries = query_start[1 : rows + 1] - query_start[:rows]
            short.copy_(lengths.where(tokens == 0, lengths.minimum(queries)))
        else:
            short.copy_(lengths)
        return short.unbind()

    def groups(self, layer: int) -> LayerGroups | None:
        """Return where `packed_attention` finds the groups of one layer's rows.

        The tensors are persistent: their addresses never change. None if no request may be packed
        in k4v3.
        """
        if self._group_tokens is None:
            return None
        return LayerGroups(
            pages=self._group_pages[:, layer],
            tokens=self._group_tokens[:, layer],
            slots=self._read_slots,
            live=self._live,
        )

    @property
    def packs_groups(self) -> bool:
        """Return whether any request may be packed in k4v3."""
        return self._group_tokens is not None

    @property
    def byte_pages(self) -> torch.Tensor:
        """Return the pages as bytes ``[N, Hkv, block_size, 2 * D * itemsize]``."""
        return self.pages.view(torch.uint8)

    @property
    def itemsize(self) -> int:
        """Return the bytes of a cached number."""
        return self.pages.itemsize

    def slots(self, request_ids: Sequence[str]) -> list[int]:
        """Return the slot of each request, 0 for requests without one."""
        if not self._slots:
            return [0] * len(request_ids)
        slot_of = self._slots.get
        return [slot_of(request_id, 0) for request_id in request_ids]

    def tables(
        self,
        slots: list[int],
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        rows: int,
        read_slots: list[int] | None = None,
    ) -> LayerTables:
        """Refresh every layer's tables and lengths for this step (`page_tables`), without a sync.

        Args:
            slots: slots of the batch's requests, in row order.
            block_table: ``[>= len(slots), W]`` int32, vLLM's block ids.
            seq_lens: ``[>= len(slots)]`` int32, in tokens.
            rows: rows of the batch, including padding, which gets length 0.
            read_slots: the slot that each row reads, from `use_scratch`; None for `slots`.
        """
        self.set_batch_rows(slots, seq_lens, rows)
        read_slots = slots if read_slots is None else read_slots
        if self.scratch is not None and read_slots != self._uploaded_read_slots:
            self._uploaded_read_slots = read_slots
            async_tensor_h2d(read_slots, out=self._read_slots[: len(read_slots)])
        page_tables(
            block_table,
            seq_lens,
            self._packed,
            self._num_packed,
            self._first_block,
            self.layer_offset,
            self.block_stride,
            self.block_size,
            self._read_slots,
            self._live,
            self._tables,
            self._lengths,
        )
        if rows not in self._views:
            tables, lengths = self._tables[:, :rows], self._lengths[:, :rows]
            self._views[rows] = LayerTables(tables.unbind(), lengths.unbind())
        return self._views[rows]

    def set_batch_rows(self, slots: list[int], seq_lens: torch.Tensor, rows: int) -> None:
        """Copy the slots of the batch's rows to the device and to the ring, without a sync.

        Args:
            slots, seq_lens, rows: as in `tables`.
        """
        self._upload_slots(slots)
        if self.ring is not None:
            self.ring.set_batch_rows(self._row_slots, seq_lens, self._live, rows)

    def _upload_slots(self, slots: list[int]) -> None:
        if slots != self._uploaded_slots:
            if len(slots) != len(self._uploaded_slots):
                self._live.fill_(len(slots))
            self._uploaded_slots = slots
            async_tensor_h2d(slots, out=self._row_slots[: len(slots)])

    def draft_tables(
        self, slots: list[int], block_table: torch.Tensor, seq_lens: torch.Tensor, rows: int
    ) -> LayerTables:
        """Refresh the draft layers' tables and lengths for a batch (`DraftPages.tables`).

        Args:
            slots, block_table, seq_lens, rows: as in `tables`.
        """
        assert self.drafts is not None
        self._upload_slots(slots)
        return LayerTables(
            *self.drafts.tables(self._row_slots, self._live, block_table, seq_lens, rows)
        )
