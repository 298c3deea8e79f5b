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
    """Each layer's metadata: the batch's, with the layer's own table and lengths.

    Args:
        batch: vLLM's metadata.
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
        """vLLM's metadata of the batch, and every layer's own (see `_PerLayer`).

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
    """FLASH_ATTN's builder."""

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """As vLLM's, of the version that is configured: vLLM looks when its module is imported."""
        if get_flash_attn_version() == 3:
            return AttentionCGSupport.ALWAYS
        return AttentionCGSupport.UNIFORM_BATCH


class CompressedTritonBuilder(_PersistentBuilder, TritonAttentionMetadataBuilder):
    """TRITON_ATTN's builder."""

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """As vLLM does: a capture over the longest lengths would take very long."""
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        if isinstance(own := layers_of(metadata), _PerLayer):
            for lengths in own.lengths:
                lengths.fill_(1)
        return metadata


class CompressedFlashImpl(CompressedImpl, FlashAttentionImpl):
    """FLASH_ATTN's attention."""

    def layout(self, layer: Any, dtype: torch.dtype) -> kv_layouts.Layout:
        return kv_layouts.INTERLEAVED


class CompressedTritonImpl(CompressedImpl, TritonAttentionImpl):
    """TRITON_ATTN's attention."""

    def layout(self, layer: Any, dtype: torch.dtype) -> kv_layouts.Layout:
        return kv_layouts.INTERLEAVED


class CompressedFlashBackend(FlashAttentionBackend):
    """FLASH_ATTN with the classes above."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return CompressedFlashImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return CompressedFlashBuilder


class CompressedTritonBackend(TritonAttentionBackend):
    """TRITON_ATTN with the classes above."""

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
