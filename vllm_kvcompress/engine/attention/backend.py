"""VllmHook `attention`: the platform's attention backends, reading from the flat page pool.

Each backend class inherits from a mixin below and then from vLLM's class. The builder adds each
layer's table and lengths to the batch's metadata; the implementation runs vLLM's attention on them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend

from kvcompress_kernels.dequantise_pages import dequantise_pages
from kvcompress_kernels.packed_attention import LayerAttention, Offsets
from vllm_kvcompress.engine.compression.compressor import PromptCompressor
from vllm_kvcompress.engine.pages.layouts import Layout
from vllm_kvcompress.engine.pages.pool import LayerTables, PagePool
from vllm_kvcompress.engine.pages.scratch_pages import MIN_QUERIES, ScratchCopies
from vllm_kvcompress.errors import VllmHookError
from vllm_kvcompress.planning.cache_dtypes import PLAIN_CACHES
from vllm_kvcompress.planning.model_traits import Traits
from vllm_kvcompress.refusals.model import MODEL
from vllm_kvcompress.refusals.rule import refuse

Backends = Mapping[AttentionBackendEnum, str]


BatchOrder = Callable[[CommonAttentionMetadata], Sequence[str]]
"""A function of the model runner that returns the batch's request ids in row order."""


class LayerMetadata(Protocol):
    """Attention metadata of a batch by layer, indexed by the layer's index on this worker."""

    def __getitem__(self, layer: int, /) -> Any: ...


class GroupedBatch(NamedTuple):
    """The ordinary pages and the queries of a batch whose rows may have packed groups.

    `packed_attention` reads these, and the groups in the page pool (`LayerGroups`).
    """

    tables: Sequence[torch.Tensor]
    """Per layer ``[R, W]`` int32: flat pages that hold no groups."""
    lengths: Sequence[torch.Tensor]
    """Per layer ``[R]`` int32: tokens in these pages."""
    query_start: torch.Tensor
    """``[R + 1]`` int32: offset of each row's first query."""
    max_query_tokens: int
    """Upper bound on a row's queries."""
    has_all_rows: bool = False
    """Whether every row has groups in every layer, so that vLLM's attention is not needed."""


class CompressedBatch(NamedTuple):
    """What every layer needs of a batch besides vLLM's metadata."""

    layers: LayerMetadata | None = None
    """Each layer's metadata; None if all layers share the batch's metadata."""
    stores_queries: bool = False
    """Whether the batch's queries are stored in the page pool's ring."""
    copies: ScratchCopies | None = None
    """The packed pages that each layer dequantises before its attention; None if no row needs
    copies."""
    grouped: GroupedBatch | None = None
    """None if no row has packed groups."""
    drafts: LayerMetadata | None = None
    """Metadata of each draft layer; None if they share the batch's metadata."""


_UNCOMPRESSED = CompressedBatch()


def attach_batch(batch_metadata: Any, batch: CompressedBatch) -> None:
    """Attach `batch` to vLLM's metadata of the batch, which vLLM passes to every layer."""
    batch_metadata.kvcompress = batch


def batch_of(batch_metadata: Any) -> CompressedBatch:
    """Return what `attach_batch` has attached, or a batch that nothing was attached to."""
    batch: CompressedBatch = getattr(batch_metadata, "kvcompress", _UNCOMPRESSED)
    return batch


class ReadRows(NamedTuple):
    """What the rows of a batch read."""

    slots: list[int]
    """The page pool's slot that each row reads."""
    copies: ScratchCopies | None
    """The packed pages that each layer dequantises first; None if no row needs copies."""
    max_query_tokens: int
    """Upper bound on the queries of a row without copies."""


class CompressedBuilder:
    """Mixin for a metadata builder that passes each batch to the compressor."""

    _compressor: PromptCompressor | None = None
    _batch_order: BatchOrder
    _for_drafts = False

    def bind(self, compressor: PromptCompressor, batch_order: BatchOrder) -> None:
        """Connect the builder to its worker's compressor; an unbound builder acts as vLLM's."""
        self._compressor, self._batch_order = compressor, batch_order

    def bind_drafts(self, compressor: PromptCompressor) -> None:
        """Connect the builder of a draft model's layers, which have tables of their own.

        Drafts follow the target's layers in a step, in the same batch.
        """
        self._compressor, self._for_drafts = compressor, True

    def _slots(self, compressor: PromptCompressor, common: CommonAttentionMetadata) -> list[int]:
        """Pass the batch to the compressor and return the page pool's slot of each request."""
        if not (compressor.planned or compressor.pool.has_requests):
            compressor.batch_slots = [0] * common.num_reqs
            return compressor.batch_slots
        request_ids = self._batch_order(common)
        compressor.begin_batch(
            request_ids, common.query_start_loc_cpu.tolist(), common.block_table_tensor
        )
        compressor.batch_slots = compressor.pool.slots(request_ids)
        return compressor.batch_slots

    @staticmethod
    def _read_rows(pool: PagePool, common: CommonAttentionMetadata, slots: list[int]) -> ReadRows:
        """Give scratch pages to rows with many queries behind packed pages (`use_scratch`)."""
        longest = common.max_query_len
        if pool.scratch is None or longest < MIN_QUERIES or not pool.have_groups(slots):
            return ReadRows(slots, None, longest)
        queries = [stop - start for start, stop in pairwise(common.query_start_loc_cpu.tolist())]
        read_slots, copies = pool.use_scratch(slots, queries, common.max_seq_len)
        own = (n for n, slot, read in zip(queries, slots, read_slots, strict=False) if slot == read)
        return ReadRows(read_slots, copies, max(own, default=1))

    def _layers(
        self,
        pool: PagePool,
        common: CommonAttentionMetadata,
        slots: list[int],
        read_slots: list[int],
        rows: int,
    ) -> LayerTables:
        """Refresh and return each layer's tables and lengths; lay out the query ring."""
        self._begin_ring(pool, slots)
        block_table, seq_lens = common.block_table_tensor, common.seq_lens
        layer_tables = pool.tables(slots, block_table, seq_lens, rows, read_slots)
        self._lay_out(pool, common)
        return layer_tables

    def _lay_out_ring(
        self,
        pool: PagePool,
        common: CommonAttentionMetadata,
        slots: list[int],
        batch_metadata: Any,
    ) -> None:
        """Lay out the query ring for a batch in which all layers read vLLM's blocks."""
        self._begin_ring(pool, slots)
        pool.set_batch_rows(slots, common.seq_lens, len(slots))
        self._lay_out(pool, common)
        attach_batch(batch_metadata, CompressedBatch(stores_queries=pool.stores_queries))

    def _begin_ring(self, pool: PagePool, slots: list[int]) -> None:
        if pool.ring is not None:
            # Outside a step, a graph may be captured for steps that store queries.
            running = self._compressor is not None and self._compressor.running
            pool.ring.begin_batch(slots, recorded=not running)

    @staticmethod
    def _lay_out(pool: PagePool, common: CommonAttentionMetadata) -> None:
        if pool.ring is not None:
            tokens, max_query_len = common.num_actual_tokens, common.max_query_len
            pool.ring.lay_out(common.query_start_loc, tokens, max_query_len)


class CompressedImpl(ABC):
    """Mixin for an attention implementation that reads the page pool.

    Layers with a sliding window use this class too, but are never bound to a compressor.

    Raises:
        ConfigError: the layer uses a feature that a compressed cache does not support. It is raised
            while the model is built, before its weights are loaded.
    """

    _compressor: PromptCompressor | None = None
    _layer: int
    _offsets: Offsets | None
    _attend: LayerAttention | None = None
    _is_draft = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        attributes = vars(self)
        # The checkpoint's quantisation config may set the cache dtype of a single layer.
        stored = attributes.get("kv_cache_dtype", "auto")
        stored = "auto" if stored in PLAIN_CACHES else stored
        lookback = attributes.get("chunk_lookback", -1)
        layer = Traits(
            alibi=attributes.get("alibi_slopes") is not None,
            soft_cap=attributes.get("logits_soft_cap"),
            shared=int(attributes.get("kv_sharing_target_layer_name") is not None),
            chunk=None if lookback == -1 else max(lookback, 1),
            bidirectional=attributes["attn_type"] != AttentionType.DECODER,
            dtype=_default_dtype(),
            declared_cache=stored,
            cache=stored,
        )
        refuse(MODEL, layer, "--kv-compress: ")

    @abstractmethod
    def layout(self, layer: Any, dtype: torch.dtype) -> Layout:
        """Return the memory layout of K and V in the pages of this layer's cache.

        Args:
            layer: vLLM's attention layer, with its cache allocated.
            dtype: dtype of the keys and values that the layer computes.
        """

    def bind(self, compressor: PromptCompressor, layer: int) -> None:
        """Connect the layer to its worker's compressor; an unbound layer runs as vLLM's."""
        self._compressor, self._layer = compressor, layer
        pool, scales = compressor.pool, compressor.packer.scales
        self._offsets, groups = compressor.layout.offsets, pool.groups(layer)
        if groups is not None:
            self._attend = LayerAttention(
                pool.elements,
                self._offsets,
                groups.pages,
                groups.tokens,
                groups.slots,
                groups.live,
                query_heads=vars(self)["num_heads"],
                scale=scales.logits[layer],
                sinks=scales.sinks_of(layer),
                workspace=pool.workspace,
            )

    def bind_draft(self, compressor: PromptCompressor, layer: int) -> None:
        """Connect a draft model's layer, which keeps every token and is not scored.

        Args:
            layer: its index among the draft layers.
        """
        self._compressor, self._layer, self._is_draft = compressor, layer, True

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        compressor, batch, queries = self._compressor, batch_of(attn_metadata), query
        if self._is_draft:
            assert compressor is not None, self._layer
            if batch.drafts is not None:
                kv_cache, attn_metadata = compressor.pool.pages, batch.drafts[self._layer]
            result: torch.Tensor = super().forward(  # type: ignore[misc]
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
            return result
        if compressor is not None:
            if (copies := batch.copies) is not None:
                packed, destinations = copies.packed[self._layer], copies.destinations
                dequantise_pages(compressor.pool.elements, self._offsets, packed, destinations)
            if batch.layers is not None:
                kv_cache, attn_metadata = compressor.pool.pages, batch.layers[self._layer]
            if query.itemsize == 1:
                # vLLM quantised the queries; `Scales` includes their scale.
                queries = query.to(compressor.queries_dtype)
            if batch.stores_queries:
                assert compressor.pool.ring is not None, self._layer
                compressor.pool.ring.store(self._layer, queries)
        result = output
        if batch.grouped is None or not batch.grouped.has_all_rows:
            result = super().forward(  # type: ignore[misc]
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
        if compressor is not None:
            if batch.grouped is not None:
                self._attend_to_groups(query, output, batch.grouped)
            if compressor.watching:
                compressor.after_attention(self._layer, queries)
        return result

    def _attend_to_groups(
        self, query: torch.Tensor, output: torch.Tensor, batch: GroupedBatch
    ) -> None:
        """Replace the output of rows with packed groups, whose groups vLLM's attention skipped."""
        layer = self._layer
        assert self._attend is not None, layer
        self._attend(
            query,
            output.view(query.shape),
            batch.tables[layer],
            batch.lengths[layer],
            batch.query_start,
            batch.max_query_tokens,
        )


def _default_dtype() -> str:
    """Return torch's default dtype, which is the model's dtype while vLLM builds the model."""
    return str(torch.get_default_dtype()).removeprefix("torch.")


@contextmanager
def override_backends(backends: Backends) -> Iterator[None]:
    """Register our backends for attention layers that are built in this context.

    The override ends with the context, so other engines in this process keep vLLM's backends.

    Raises:
        VllmHookError: another plugin has overridden one of these backends.
    """
    for backend in backends:
        if backend.is_overridden():
            raise VllmHookError(
                f"compression replaces vLLM's {backend.name} backend, but another plugin already"
                f" replaced it with {backend.get_path()}; remove that plugin or serve without"
                " --kv-compress"
            )
    _cached_get_attn_backend.cache_clear()
    try:
        for backend, path in backends.items():
            register_backend(backend, path)
        yield
    finally:
        for backend in backends:
            backend.clear_override()
        _cached_get_attn_backend.cache_clear()
