"""Device memory that compression takes beside the KV cache, from vLLM's configuration."""

from vllm.config import VllmConfig
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

from vllm_kvcompress.engine.layers import groups_of, layers_together
from vllm_kvcompress.planning.memory import Sizes, bytes_beside, table_columns
from vllm_kvcompress.settings.config import CompressionConfig


def sizes_of(config: VllmConfig) -> Sizes:
    """The figures that the memory of one rank depends on."""
    model, parallel = config.model_config, config.parallel_config
    groups, speculative = groups_of(config), config.speculative_config
    return Sizes(
        layers=layers_together(config),
        groups=groups if groups.others else None,
        heads=int(model.get_num_attention_heads(parallel)),
        kv_heads=int(model.get_num_kv_heads(parallel)),
        head_dim=int(model.get_head_size()),
        itemsize=int(model.dtype.itemsize),
        longest=int(model.max_model_len),
        block_size=int(config.cache_config.block_size),
        max_requests=int(config.scheduler_config.max_num_seqs),
        stored=kv_cache_dtype_str_to_dtype(config.cache_config.cache_dtype, model).itemsize,
        drafts=0 if speculative is None else int(speculative.num_speculative_tokens),
        captured=int(config.compilation_config.max_cudagraph_capture_size or 0),
    )


def max_rows(config: VllmConfig) -> int:
    """Rows of the largest batch, those that pad a CUDA graph included."""
    return sizes_of(config).rows


def max_blocks(config: VllmConfig, settings: CompressionConfig, blocks: int) -> int:
    """AttentionStats of a layer's table, in a pool of so many blocks."""
    return table_columns(sizes_of(config), settings, blocks)


def device_bytes(config: VllmConfig, settings: CompressionConfig, available: int = 0) -> int:
    """Bytes on one rank, at most, of those that are `available` for it and the KV cache.

    The page pool's tables, one longest prompt's compression, and what is kept beside every token.
    """
    return bytes_beside(sizes_of(config), settings, available)
