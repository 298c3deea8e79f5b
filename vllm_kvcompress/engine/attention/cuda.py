"""FLASH_ATTN and TRITON_ATTN over the flat page pool.

A CUDA graph of a decode step keeps the tensors that its attention kernels were captured with, so
every batch reads the page pool's persistent tables and lengths, compressed or not, and `build`
only refreshes what they hold. A replayed graph never asks for a layer's metadata.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
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
    CompressedBuilder,
    CompressedImpl,
    attach_layers,
    layers_of,
)
from vllm_kvcompress.engine.pages import layouts as kv_layouts


class _PerLayer:
    """Metadata for each layer: the batch's, with the layer's own table and lengths.

    Args:
        batch: vLLM's metadata of the batch.
        tables: per layer ``[R, W]`` int32.
        lengths: per layer ``[R]`` int32.
    """

    def __init__(
        self, batch: Any, tables: Sequence[torch.Tensor], lengths: Sequence[torch.Tensor]
    ) -> None:
        # A copy, since `batch` itself will hold this object.
        self.batch = copy.copy(batch)
        self.tables, self.lengths = tables, lengths

    def __getitem__(self, layer: int) -> Any:
        own = copy.copy(self.batch)
        own.block_table, own.seq_lens = self.tables[layer], self.lengths[layer]
        return own


class _PersistentBuilder(CompressedBuilder):
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Build vLLM's metadata of the batch, with every layer's own (see `_PerLayer`).

        FlashAttention 3 can be given a work plan that was made ahead for one vector of lengths.
        Layers differ in theirs, so none is made (``fast_build``): each call plans for the lengths
        it reads, inside the graph too.
        """
        compressor, common = self._compressor, common_attn_metadata
        build = super().build  # type: ignore[misc]
        if compressor is None:
            return build(common_prefix_len, common, fast_build)
        metadata = build(common_prefix_len, common, fast_build=True)
        # a dummy batch, of a capture or an idle data-parallel rank, has no requests of ours
        slots = self._slots(compressor, common) if compressor.running else [0] * common.num_reqs
        tables, lengths = self._layers(compressor.pool, common, slots, common.num_reqs)
        attach_layers(metadata, _PerLayer(metadata, tables, lengths))
        return metadata


class CompressedFlashBuilder(_PersistentBuilder, FlashAttentionMetadataBuilder):
    """Builder of FLASH_ATTN's metadata, over the page pool."""

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """Answer for the FlashAttention version configured now; vLLM asks when it is imported."""
        if get_flash_attn_version() == 3:
            return AttentionCGSupport.ALWAYS
        return AttentionCGSupport.UNIFORM_BATCH


class CompressedTritonBuilder(_PersistentBuilder, TritonAttentionMetadataBuilder):
    """Builder of TRITON_ATTN's metadata, over the page pool."""

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Capture with lengths of 1, as vLLM does: the longest lengths would take very long."""
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        if isinstance(own := layers_of(metadata), _PerLayer):
            for lengths in own.lengths:
                lengths.fill_(1)
        return metadata


class CompressedFlashImpl(CompressedImpl, FlashAttentionImpl):
    """Attention of FLASH_ATTN, over the page pool."""

    def layout(self, layer: Any, dtype: torch.dtype) -> kv_layouts.Layout:
        return kv_layouts.INTERLEAVED


class CompressedTritonImpl(CompressedImpl, TritonAttentionImpl):
    """Attention of TRITON_ATTN, over the page pool."""

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
