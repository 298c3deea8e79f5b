"""Seam `worker`: vLLM's worker, which packs prompts after the step that ends their prefill."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.engine.attention import (
    BatchOrder,
    CompressedCPUBuilder,
    CompressedCPUImpl,
    override_backend,
)
from vllm_kvcompress.engine.compressor import PromptCompressor
from vllm_kvcompress.engine.kv_cache import compressed_specs
from vllm_kvcompress.engine.kv_layouts import LAYOUTS
from vllm_kvcompress.engine.page_pool import PagePool
from vllm_kvcompress.errors import SeamError


class CompressingCPUWorker(CPUWorker):
    """vLLM's CPU worker with compression, for both of vLLM's model runners."""

    compressor: PromptCompressor | None = None

    @property
    def settings(self) -> CompressionConfig:
        return CompressionConfig.parse(self.vllm_config.additional_config["kvcompress"])

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with override_backend():
            super().load_model(*args, **kwargs)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return compressed_specs(super().get_kv_cache_spec(), self.settings)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        self.compressor = bind_compressor(
            self.vllm_config, self.settings, self.model_runner, kv_cache_config
        )

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        assert self.compressor is not None
        self.compressor.begin_step(scheduler_output)
        try:
            result = super().execute_model(scheduler_output)
        except BaseException:
            self.compressor.running = False
            raise
        self.compressor.end_step()
        return result


def bind_compressor(
    config: VllmConfig, settings: CompressionConfig, runner: Any, kv_cache_config: KVCacheConfig
) -> PromptCompressor:
    """Build the page pool over the runner's KV cache and connect layers and builders to it.

    Raises:
        SeamError: the runner has more than one group of attention layers, or a layer or a
            builder that is not ours.
    """
    group = kv_cache_config.kv_cache_groups[0]
    names = sorted(group.layer_names, key=_layer_index)
    context = config.compilation_config.static_forward_context
    layers: list[Attention] = [context[name] for name in names]
    builders = [b for groups in runner.attn_groups for g in groups for b in g.metadata_builders]
    wrong = [type(layer.impl) for layer in layers if not isinstance(layer.impl, CompressedCPUImpl)]
    wrong += [type(b) for b in builders if not isinstance(b, CompressedCPUBuilder)]
    if wrong or len(builders) != 1 or len(kv_cache_config.kv_cache_groups) != 1:
        raise SeamError(
            "compression needs one group of attention layers, all on its own backend; got"
            f" {len(kv_cache_config.kv_cache_groups)} KV cache groups, {len(builders)} builders"
            f" and foreign classes {sorted({cls.__name__ for cls in wrong})}"
        )
    scales = {layer.impl.scale for layer in layers}
    if len(scales) != 1:
        raise SeamError(
            f"compression needs one factor on the logits in all layers, got {sorted(scales)};"
            " serve this model without --kv-compress"
        )
    block_size = group.kv_cache_spec.block_size
    caches: list[torch.Tensor] = [layer.kv_cache for layer in layers]
    if caches[0].shape[0] != kv_cache_config.num_blocks:
        raise SeamError(
            f"compression needs kernel blocks of {block_size} tokens, one per KV cache block; got"
            f" {caches[0].shape[0]} for {kv_cache_config.num_blocks} blocks"
        )
    pool = PagePool(
        caches,
        max_requests=config.scheduler_config.max_num_seqs,
        max_blocks=-(-config.model_config.max_model_len // block_size),
        block_size=block_size,
    )
    compressor = PromptCompressor(
        settings,
        pool,
        LAYOUTS["CPU_ATTN"],
        scale=scales.pop(),
        num_layers=len(layers),
    )
    for index, layer in enumerate(layers):
        layer.impl.bind(compressor, index)
    builders[0].bind(compressor, batch_order(runner))
    return compressor


def _layer_index(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())


def batch_order(runner: Any) -> BatchOrder:
    """How this model runner orders its batch: V1 keeps ids, V2 numbers its request table."""
    if hasattr(runner, "req_states"):

        def from_table(metadata: CommonAttentionMetadata) -> Sequence[str]:
            table = runner.req_states.index_to_req_id
            return [table[index] for index in metadata.req_idx.tolist()]

        return from_table

    def from_batch(metadata: CommonAttentionMetadata) -> Sequence[str]:
        ids: list[str] = runner.input_batch.req_ids
        return ids[: metadata.num_reqs]

    return from_batch
