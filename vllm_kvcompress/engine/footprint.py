"""Device memory that compression takes beside the KV cache, from the configuration alone."""

from vllm.config import VllmConfig

from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.pipeline import method_of
from vllm_kvcompress.plan import page_plan
from vllm_kvcompress.policies.base import Reads

_INT = _FLOAT = 4
_ALIGNED = 16  # int32 rows that start at 64 bytes, whatever the layer
_PREFILLS = 16  # prompts at once that keep window queries; more of them live off the activations


def max_rows(config: VllmConfig) -> int:
    """Rows of the largest batch, those that pad a CUDA graph included."""
    captured = config.compilation_config.max_cudagraph_capture_size or 0
    rows = int(max(config.scheduler_config.max_num_seqs, captured))
    return -(-rows // _ALIGNED) * _ALIGNED


def max_blocks(config: VllmConfig) -> int:
    """Columns of a block table of the longest sequence."""
    longest, block = int(config.model_config.max_model_len), int(config.cache_config.block_size)
    blocks = -(-longest // block)
    return -(-blocks // _ALIGNED) * _ALIGNED


def device_bytes(config: VllmConfig, settings: CompressionConfig) -> int:
    """Bytes on one rank, at most: the page pool's tables, and one longest prompt's compression.

    Tables: packed pages per request slot and tables per row, ``[L, longest / block_size]`` int32
    each. One prompt of the longest length, since prompts are packed one after the other: float32
    scores ``[L, Hkv, S]``, once per layer and once stacked, int32 positions of the same size, what
    one layer's attention is reduced to (four maps ``[Hq, S]``), column sums ``[L, Hq, S]`` where
    the method reads them, and the staging buffer of a prompt that is packed in place (one KV
    head's kept pages; where it is merged all heads', and a layer's merged tokens). Window queries
    ``[L, w, Hq, D]`` of several prompts.
    """
    model, parallel = config.model_config, config.parallel_config
    layers = model.get_num_layers(parallel)
    kv_heads, heads = model.get_num_kv_heads(parallel), model.get_num_attention_heads(parallel)
    longest, block = model.max_model_len, config.cache_config.block_size
    slots = config.scheduler_config.max_num_seqs + 1 + max_rows(config)
    tables = slots * layers * max_blocks(config) * _INT
    scores = layers * kv_heads * longest * (2 * _FLOAT + _INT)
    maps = 4 * heads * longest * _FLOAT
    window = layers * settings.resolved_window * heads * model.get_head_size()
    queries = _PREFILLS * window * model.dtype.itemsize
    sums = layers * heads * longest * _FLOAT
    if Reads.COLUMN_SUMS not in method_of(settings).reads:
        sums = 0
    plan = page_plan(settings.prompt(layers, longest), block)
    page = block * 2 * model.get_head_size() * model.dtype.itemsize  # of one head
    staged = 0 if plan is None else plan.pages * page
    if settings.names.merge:  # float32 keys and values of one layer, as they are and as pages
        staged = staged * kv_heads + 2 * kv_heads * longest * 2 * model.get_head_size() * _FLOAT
    return int(tables + scores + maps + queries + sums + staged)
