"""FLASH_ATTN and TRITON_ATTN over the flat page pool.

A CUDA graph records the addresses of the tensors that its attention kernels read. Every batch,
compressed or not, therefore reads the page pool's persistent tables and lengths, and `build`
refreshes their contents in place. A replayed graph runs no Python, so it never looks up a layer's
metadata.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_kvcompress.engine.attention.backend import (
    Backends,
    CompressedBatch,
    CompressedBuilder,
    CompressedImpl,
    GroupedBatch,
    attach_batch,
    batch_of,
)
from vllm_kvcompress.engine.compression.compressor import PromptCompressor
from vllm_kvcompress.engine.pages import layouts as kv_layouts
from vllm_kvcompress.engine.pages.pool import PagePool

# FlashAttention versions whose log-sum-exp is float32 ``[Hq, tokens]``, the natural logarithm of
# each query's softmax sum over the scaled logits.
_VERSIONS_WITH_LOG_SUMS = (2, 3)


class _PerLayer:
    """The batch's metadata with each layer's own table and lengths, by layer.

    Args:
        batch: vLLM's metadata of the batch.
        tables: by layer, ``[R, W]`` int32.
        lengths: by layer, ``[R]`` int32.
    """

    def __init__(
        self, batch: Any, tables: Sequence[torch.Tensor], lengths: Sequence[torch.Tensor]
    ) -> None:
        # Copy, because `batch` will hold a reference to this object.
        self.batch = copy.copy(batch)
        self.tables, self.lengths = tables, lengths

    def __getitem__(self, layer: int) -> Any:
        metadata = copy.copy(self.batch)
        metadata.block_table, metadata.seq_lens = self.tables[layer], self.lengths[layer]
        return metadata


class _PersistentBuilder(CompressedBuilder):
    """Builds metadata that reads the page pool's persistent tables and lengths."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM would refresh its own lengths inside the draft model's graph, but not our tables.
        self.supports_draft_decode_metadata_update = False

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Build vLLM's metadata of the batch and attach that of every layer (`_PerLayer`).

        FlashAttention 3 accepts a precomputed work plan for one vector of lengths. Layers have
        different lengths, so ``fast_build`` skips the plan; each call plans for the lengths that it
        reads, also inside a CUDA graph.
        """
        compressor, common = self._compressor, common_attn_metadata
        build = super().build  # type: ignore[misc]
        if compressor is None:
            return build(common_prefix_len, common, fast_build)
        metadata = build(common_prefix_len, common, fast_build=True)
        # Outside a step the batch is a dummy, from graph capture or an idle data-parallel rank.
        pool, slots = compressor.pool, [0] * common.num_reqs
        if self._for_drafts:
            slots = compressor.batch_slots if compressor.running else slots
            of_drafts = self._draft_layers(metadata, pool, common, slots)
            attach_batch(metadata, CompressedBatch(drafts=of_drafts))
            return metadata
        if compressor.running:
            slots = self._slots(compressor, common)
        read = self._read_rows(pool, common, slots)
        tables, lengths = self._layers(pool, common, slots, read.slots, common.num_reqs)
        vllm_lengths, grouped = lengths, None
        if pool.packs_groups:
            query_start = common.query_start_loc
            vllm_lengths = pool.short_lengths(read.slots, query_start, common.num_reqs)
            # A graph that is captured now may be replayed for rows with packed groups.
            if not compressor.running or pool.have_groups(read.slots):
                grouped = GroupedBatch(tables, lengths, query_start, read.max_query_tokens)
        layers = _PerLayer(metadata, tables, vllm_lengths)
        drafts: _PerLayer | None = None
        if pool.drafts is not None:
            # vLLM computes the first draft with the target's metadata.
            drafts = self._draft_layers(metadata, pool, common, slots)
        attach_batch(
            metadata, CompressedBatch(layers, pool.stores_queries, read.copies, grouped, drafts)
        )
        return metadata

    @staticmethod
    def _draft_layers(
        metadata: Any, pool: PagePool, common: CommonAttentionMetadata, slots: list[int]
    ) -> "_PerLayer":
        """Refresh the draft layers' tables and lengths, and return their metadata."""
        tables, lengths = pool.draft_tables(
            slots, common.block_table_tensor, common.seq_lens, common.num_reqs
        )
        return _PerLayer(metadata, tables, lengths)


class CompressedFlashBuilder(_PersistentBuilder, FlashAttentionMetadataBuilder):
    """Builds FLASH_ATTN's metadata over the page pool."""

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """Return the support of the configured FlashAttention version.

        vLLM decides this at import time, before the version is configured.
        """
        if get_flash_attn_version() == 3:
            return AttentionCGSupport.ALWAYS
        return AttentionCGSupport.UNIFORM_BATCH


class CompressedTritonBuilder(_PersistentBuilder, TritonAttentionMetadataBuilder):
    """Builds TRITON_ATTN's metadata over the page pool."""

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Capture with lengths of 1, as vLLM does, because maximum lengths make capture slow."""
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        batch = batch_of(metadata)
        for layers in (batch.layers, batch.drafts):
            for lengths in layers.lengths if isinstance(layers, _PerLayer) else ():
                lengths.fill_(1)
        return metadata


@contextmanager
def _keeping_log_sums(compressor: PromptCompressor) -> Iterator[None]:
    """Pass the log-sum-exp of FLASH_ATTN's next call to the compressor.

    FlashAttention computes it for its softmax, and vLLM discards it. If vLLM requests it, vLLM
    merges several calls (cascade attention). Each call's value then covers only some keys, so skip
    it.
    """
    attend = flash_attn.flash_attn_varlen_func

    def attend_and_keep(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("return_softmax_lse"):
            return attend(*args, **kwargs)
        output, log_sums = attend(*args, return_softmax_lse=True, **kwargs)
        if log_sums.shape == kwargs["q"].shape[1::-1] and log_sums.dtype == torch.float32:
            compressor.note_log_sums(log_sums)
        return output

    flash_attn.flash_attn_varlen_func = attend_and_keep
    try:
        yield
    finally:
        flash_attn.flash_attn_varlen_func = attend


class CompressedFlashImpl(CompressedImpl, FlashAttentionImpl):
    """FLASH_ATTN's attention, reading from the page pool."""

    def forward(self, layer: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        compressor = self._compressor
        if compressor is None or self._is_draft or not compressor.keeps_log_sums:
            return super().forward(layer, query, *args, **kwargs)
        if self.vllm_flash_attn_version not in _VERSIONS_WITH_LOG_SUMS:
            return super().forward(layer, query, *args, **kwargs)
        with _keeping_log_sums(compressor):
            return super().forward(layer, query, *args, **kwargs)

    def layout(self, layer: Any, dtype: torch.dtype) -> kv_layouts.Layout:
        return kv_layouts.INTERLEAVED


class CompressedTritonImpl(CompressedImpl, TritonAttentionImpl):
    """TRITON_ATTN's attention, reading from the page pool."""

    def layout(self, layer: Any, dtype: torch.dtype) -> kv_layouts.Layout:
        return kv_layouts.INTERLEAVED


class CompressedFlashBackend(FlashAttentionBackend):
    """FLASH_ATTN with a compressing builder and implementation."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return CompressedFlashImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return CompressedFlashBuilder


class CompressedTritonBackend(TritonAttentionBackend):
    """TRITON_ATTN with a compressing builder and implementation."""

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return CompressedTritonImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        return CompressedTritonBuilder


BACKENDS: Backends = {
    AttentionBackendEnum.FLASH_ATTN: f"{__name__}.{CompressedFlashBackend.__qualname__}",
    AttentionBackendEnum.TRITON_ATTN: f"{__name__}.{CompressedTritonBackend.__qualname__}",
}
