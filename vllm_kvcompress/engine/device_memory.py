"""Device memory that compression needs outside the KV cache, computed from vLLM's config."""

from vllm.config import VllmConfig
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

from vllm_kvcompress.engine.layers import (
    draft_layers_of,
    draft_slots_of,
    groups_of,
    layers_per_stage,
)
from vllm_kvcompress.planning.memory import Sizes, reserved_bytes
from vllm_kvcompress.settings.config import CompressionConfig


def sizes_of(config: VllmConfig) -> Sizes:
    """Return the sizes that determine the memory of one rank."""
    model, parallel = config.model_config, config.parallel_config
    groups, (max_drafts, draft_model_slots) = groups_of(config), draft_slots_of(config)
    return Sizes(
        layers=layers_per_stage(config),
        groups=groups if groups.num_uncompressed else None,
        heads=int(model.get_num_attention_heads(parallel)),
        kv_heads=int(model.get_num_kv_heads(parallel)),
        head_dim=int(model.get_head_size()),
        itemsize=int(model.dtype.itemsize),
        longest=int(model.max_model_len),
        block_size=int(config.cache_config.block_size),
        max_requests=int(config.scheduler_config.max_num_seqs),
        cache_itemsize=kv_cache_dtype_str_to_dtype(config.cache_config.cache_dtype, model).itemsize,
        max_drafts=max_drafts,
        draft_layers=draft_layers_of(config),
        draft_model_slots=draft_model_slots,
        max_graph_rows=int(config.compilation_config.max_cudagraph_capture_size or 0),
    )


def device_bytes(config: VllmConfig, settings: CompressionConfig, available: int = 0) -> int:
    """Return an upper bound on the bytes that compression needs on one rank.

    Includes the page pool's tables, the scores of one longest prompt, and the per-token state.

    Args:
        config: vLLM's configuration.
        settings: the compression settings.
        available: bytes available for compression and the KV cache together.
    """
    return reserved_bytes(sizes_of(config), settings, available)
