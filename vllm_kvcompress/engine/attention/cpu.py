"""CPU_ATTN over the flat page pool.

Batches without a compressed request use vLLM's metadata unchanged. In a batch with a compressed
request, each layer gets its own block table and lengths.
"""

import copy
from types import SimpleNamespace
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_kvcompress.engine.attention.backend import (
    Backends,
    CompressedBatch,
    CompressedBuilder,
    CompressedImpl,
    GroupedBatch,
    attach_batch,
)
from vllm_kvcompress.engine.compression.compressor import PromptCompressor
from vllm_kvcompress.engine.pages import layouts as kv_layouts
from vllm_kvcompress.engine.pages.pool import PagePool
from vllm_kvcompress.planning.cache_dtypes import FLOAT8_CACHES


class CompressedCPUBuilder(CompressedBuilder, CPUAttentionMetadataBuilder):
    """Builds per-layer tables and lengths for batches with compressed requests."""

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
        if self._for_drafts:
            return self._build_for_drafts(compressor, common)
        slots = self._slots(compressor, common)
        if not any(slots):
            return super().build(common_prefix_len, common, fast_build)
        if compressor.pool.none_packed(slots) and not compressor.needs_tables:
            batch = super().build(common_prefix_len, common, fast_build)
            self._lay_out_ring(compressor.pool, common, slots, batch)
            return batch
        return self._build_per_layer(compressor.pool, common, slots)

    def _build_per_layer(
        self, pool: PagePool, common: CommonAttentionMetadata, slots: list[int]
    ) -> CPUAttentionMetadata:
        rows, read = len(slots), self._read_rows(pool, common, slots)
        tables, lengths = self._layers(pool, common, slots, read.slots, rows)
        starts = common.query_start_loc[: rows + 1]
        grouped = None
        if pool.have_groups(read.slots):
            has_all_rows = pool.have_only_groups(read.slots)
            grouped = GroupedBatch(tables, lengths, starts, read.max_query_tokens, has_all_rows)
            lengths = pool.short_lengths(read.slots, starts, rows)
        # Layers with equal lengths share a work plan; with uniform budgets nearly all are equal.
        unique, plan_index = torch.unique(torch.stack([*lengths]), dim=0, return_inverse=True)
        plans = [self._work_plan(rows, row, starts, common) for row in unique]
        layers = []
        for table, length, index in zip(tables, lengths, plan_index.tolist(), strict=True):
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
        batch, drafts = copy.copy(layers[0]), None
        if pool.drafts is not None:
            # Model Runner V2 computes the first draft with the target's metadata.
            drafts = self._draft_layers(pool, common, slots)
        attach_batch(
            batch, CompressedBatch(layers, pool.stores_queries, read.copies, grouped, drafts)
        )
        return batch

    def _build_for_drafts(
        self, compressor: PromptCompressor, common: CommonAttentionMetadata
    ) -> CPUAttentionMetadata:
        """Build the metadata of a batch of draft tokens."""
        batch: CPUAttentionMetadata = super().build(0, common)
        pool, slots = compressor.pool, compressor.batch_slots
        if not pool.none_packed(slots):
            attach_batch(batch, CompressedBatch(drafts=self._draft_layers(pool, common, slots)))
        return batch

    def _draft_layers(
        self, pool: PagePool, common: CommonAttentionMetadata, slots: list[int]
    ) -> list[CPUAttentionMetadata]:
        """Return the metadata of draft layers, of which each reads its own packed pages."""
        tables, lengths = pool.draft_tables(
            slots, common.block_table_tensor, common.seq_lens, len(slots)
        )
        # Draft layers keep every token, so vLLM's work plan is theirs too.
        batch, layers = super().build(0, common), []
        for table, length in zip(tables, lengths, strict=True):
            layer = copy.copy(batch)
            layer.block_table, layer.seq_lens = table, length
            layers.append(layer)
        return layers

    def _work_plan(
        self,
        rows: int,
        lengths: torch.Tensor,
        starts: torch.Tensor,
        common: CommonAttentionMetadata,
    ) -> torch.Tensor:
        """Return the kernel's work plan for one vector of lengths ``[R]``."""
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


class CompressedCPUImpl(CompressedImpl, CPUAttentionBackendImpl):
    """CPU_ATTN's attention, reading from the page pool."""

    def layout(self, layer: Any, dtype: torch.dtype) -> kv_layouts.Layout:
        """Determine the layout of the kernels that vLLM chose for this processor and dtype.

        Raises:
            ConfigError: `find_layout` does not recognise the layout.
        """
        _, heads, block, width = layer.kv_cache.shape

        # Probe a quantised cache with a scale of 1, so small integers are stored exactly.
        plain = SimpleNamespace(isa=layer.isa, _k_scale_float=1.0, _v_scale_float=1.0)
        float8 = FLOAT8_CACHES.get(self.kv_cache_dtype)

        def write(keys: torch.Tensor, values: torch.Tensor, page: torch.Tensor) -> None:
            self.do_kv_cache_update(plain, keys, values, page, torch.arange(block))

        return kv_layouts.find_layout(
            write,
            block_size=block,
            kv_heads=heads,
            head_dim=width // 2,
            dtype=dtype,
            name=layer.isa,
            stored=None if float8 is None else getattr(torch, float8),
        )


class CompressedCPUBackend(CPUAttentionBackend):
    """CPU_ATTN with a compressing builder and implementation."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return CompressedCPUImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return CompressedCPUBuilder


BACKENDS: Backends = {
    AttentionBackendEnum.CPU_ATTN: f"{__name__}.{CompressedCPUBackend.__qualname__}"
}
