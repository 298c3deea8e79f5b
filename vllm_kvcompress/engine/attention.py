"""Seam `attention`: the platform's attention backend, reading the flat page pool.

Prefills and uncompressed batches run the platform's own code on its own arguments. A batch with a
compressed request runs it once per layer with that layer's block table and lengths.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend

from vllm_kvcompress.engine.compressor import PromptCompressor
from vllm_kvcompress.errors import ConfigError, SeamError


class BatchOrder(Protocol):
    """The model runner's answer to: which request is in which row of the batch?"""

    def __call__(self, metadata: CommonAttentionMetadata) -> Sequence[str]: ...


@dataclass
class CompressedMetadata(CPUAttentionMetadata):
    """The batch's metadata, and each layer's own where a request is compressed."""

    layers: Sequence[CPUAttentionMetadata] | None = None


class CompressedCPUBuilder(CPUAttentionMetadataBuilder):
    """Builds per-layer tables and lengths for batches with compressed requests."""

    isa: str
    _compressor: PromptCompressor | None = None
    _batch_order: BatchOrder

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.isa == "amx":
            # AMX stores K in tiles; the vector kernels read the layout of `kv_layouts.cpu_attn`
            self.isa = "vec"
            self._set_isa_to_layers(self.layer_names)
        if self.isa not in ("vec", "vec16"):
            raise ConfigError(
                f"--kv-compress knows the cache layout of the kernels 'vec' and 'vec16', not of"
                f" {self.isa!r}; serve without --kv-compress on this machine"
            )

    def bind(self, compressor: PromptCompressor, batch_order: BatchOrder) -> None:
        """Connect the builder to its worker; until then it builds as vLLM does."""
        self._compressor, self._batch_order = compressor, batch_order

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        common = common_attn_metadata
        compressor = self._compressor
        if compressor is None or not compressor.running:
            return super().build(common_prefix_len, common, fast_build)
        request_ids = self._batch_order(common)
        compressor.begin_batch(
            request_ids, common.query_start_loc_cpu.tolist(), common.block_table_tensor
        )
        slots = compressor.pool.slots(request_ids)
        if not any(slots):
            return super().build(common_prefix_len, common, fast_build)
        return self._build_per_layer(common, slots)

    def _build_per_layer(
        self, common: CommonAttentionMetadata, slots: list[int]
    ) -> CompressedMetadata:
        assert self._compressor is not None
        rows, pool = len(slots), self._compressor.pool
        width = -(-common.max_seq_len // pool.block_size)
        tables, lengths = pool.tables(
            slots, common.block_table_tensor[:rows, :width], common.seq_lens[:rows]
        )
        starts = common.query_start_loc[: rows + 1]
        # Layers with equal lengths share the kernel's work plan: with uniform budgets, nearly all.
        unique, which = torch.unique(lengths, dim=0, return_inverse=True)
        plans = [self._work_plan(rows, row, starts, common) for row in unique]
        layers = []
        for table, length, index in zip(tables, lengths, which.tolist(), strict=True):
            layers.append(
                CPUAttentionMetadata(
                    num_actual_tokens=common.num_actual_tokens,
                    max_query_len=common.max_query_len,
                    query_start_loc=starts,
                    max_seq_len=common.max_seq_len,
                    seq_lens=length,
                    block_table=table,
                    slot_mapping=common.slot_mapping,
                    scheduler_metadata=plans[index],
                    causal=bool(common.causal),
                )
            )
        first = layers[0]
        return CompressedMetadata(**{**first.__dict__, "layers": layers})

    def _work_plan(
        self,
        rows: int,
        lengths: torch.Tensor,
        starts: torch.Tensor,
        common: CommonAttentionMetadata,
    ) -> torch.Tensor:
        plan: torch.Tensor = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=rows,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            seq_lens=lengths,
            dtype=self.dtype,
            query_start_loc=starts,
            causal=bool(common.causal),
            sliding_window_size=self.window_size,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            dynamic_causal=None,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        return plan


class CompressedCPUImpl(CPUAttentionBackendImpl):
    """CPU attention over the flat page pool.

    Raises:
        ConfigError: the layer uses something that compressed caches cannot serve; raised while
            the model is built, before its weights are read.
    """

    _compressor: PromptCompressor | None = None
    _layer: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refused = {
            "ALiBi (biases need true positions)": self.alibi_slopes is not None,
            "a sliding window": self.sliding_window != -1,
            "a logits soft cap": bool(self.logits_soft_cap),
            "attention sinks": self.sinks is not None,
            "KV sharing between layers": self.kv_sharing_target_layer_name is not None,
            f"{AttentionType(self.attn_type).value} attention": self.attn_type
            != AttentionType.DECODER,
        }
        if found := [what for what, is_so in refused.items() if is_so]:
            raise ConfigError(
                f"--kv-compress cannot serve a model with {' and '.join(found)};"
                " serve this model without --kv-compress"
            )

    def bind(self, compressor: PromptCompressor, layer: int) -> None:
        """Connect the layer to its worker; until then it runs as vLLM's."""
        self._compressor, self._layer = compressor, layer

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        compressor = self._compressor
        if compressor is not None and isinstance(attn_metadata, CompressedMetadata):
            assert attn_metadata.layers is not None
            kv_cache, attn_metadata = compressor.pool.pages, attn_metadata.layers[self._layer]
        result: torch.Tensor = super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
        )
        if compressor is not None and compressor.watching:
            compressor.after_attention(self._layer, query)
        return result


class CompressedCPUBackend(CPUAttentionBackend):
    """CPU_ATTN with the two classes above."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return CompressedCPUImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return CompressedCPUBuilder


@contextmanager
def override_backend() -> Iterator[None]:
    """While a compressing worker builds its model, its attention layers get our backend.

    The override ends with the block, so that another engine in the same process is not touched.

    Raises:
        SeamError: another plugin has put its own backend in that place.
    """
    backend = AttentionBackendEnum.CPU_ATTN
    if backend.is_overridden():
        raise SeamError(
            f"compression replaces vLLM's own {backend.name} backend, and another plugin already"
            f" put {backend.get_path()} there; remove that plugin or serve without --kv-compress"
        )
    _cached_get_attn_backend.cache_clear()
    register_backend(backend, f"{__name__}.{CompressedCPUBackend.__qualname__}")
    try:
        yield
    finally:
        backend.clear_override()
        _cached_get_attn_backend.cache_clear()
