"""Size of a layer's state, and the KV block size that vLLM derives from it, from config.json.

A block of the pool is one group's pages, so a full-attention page must be at least as large as a
state. vLLM makes the block that many tokens long (``Platform._align_hybrid_block_size``).
"""

from collections.abc import Mapping
from typing import Any

from vllm_kvcompress.errors import ConfigError

_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def hybrid_block_size(
    text: Mapping[str, Any],
    ranks: int,
    itemsize: int,
    token_bytes: int,
    block_size: int,
    *,
    state_dtype: str,
    on_cpu: bool,
) -> int:
    """Return the tokens in a KV block of a model with stateful layers.

    Args:
        text: the part of config.json that describes the language model.
        ranks: tensor-parallel size.
        itemsize: bytes per element of the model's dtype.
        token_bytes: bytes of a token's keys and values in one layer, on one rank.
        block_size: the requested block size, or vLLM's default. The result is a multiple of it.
        state_dtype: dtype of the state's sum, as in ``--mamba-ssm-cache-dtype``.
        on_cpu: vLLM runs on the CPU. There it sums in float32 if the processor has bfloat16
            instructions, unless a 16-bit dtype is requested.
    """
    state = state_bytes(text, ranks, itemsize, state_dtype=state_dtype, on_cpu=on_cpu)
    return block_size * -(-state // (block_size * token_bytes))


def state_bytes(
    text: Mapping[str, Any], ranks: int, itemsize: int, *, state_dtype: str, on_cpu: bool
) -> int:
    """Return the bytes that one layer keeps per request on one rank: convolution inputs and a sum.

    Raises:
        ConfigError: config.json lacks a number.
    """
    if "linear_num_value_heads" in text:
        keys = _config_int(text, "linear_num_key_heads")
        values = _config_int(text, "linear_num_value_heads")
        key_dim = _config_int(text, "linear_key_head_dim")
        value_dim = _config_int(text, "linear_value_head_dim")
        inputs, kernel = (
            2 * keys * key_dim + values * value_dim,
            _config_int(text, "linear_conv_kernel_dim"),
        )
        state_size, dtype = values * value_dim * key_dim, None
        if text.get("model_type") != "qwen3_next":
            dtype = text.get("mamba_ssm_dtype")
    else:
        heads = _config_int(text, "mamba_n_heads", "mamba_num_heads")
        head_dim, size = (
            _head_dim(text, heads),
            _config_int(text, "mamba_d_state", "ssm_state_size"),
        )
        groups = _config_int(text, "mamba_n_groups", "n_groups")
        # If the groups cannot be divided among the ranks, the ranks keep copies.
        groups += 0 if groups % ranks == 0 else ranks - groups
        inputs = heads * head_dim + 2 * groups * size
        kernel, state_size = (
            _config_int(text, "mamba_d_conv", "conv_kernel"),
            heads * head_dim * size,
        )
        dtype = None
        if text.get("model_type") == "nemotron_h":
            dtype = text.get("mamba_ssm_cache_dtype", "float32")
    if state_dtype != "auto":
        dtype = state_dtype
    sum_itemsize = _ITEMSIZE.get(str(dtype), itemsize)
    if on_cpu and dtype not in ("float16", "bfloat16"):
        sum_itemsize = 4
    return inputs // ranks * (kernel - 1) * itemsize + state_size // ranks * sum_itemsize


def _head_dim(text: Mapping[str, Any], heads: int) -> int:
    head_dim = text.get("mamba_d_head", text.get("mamba_head_dim"))
    if isinstance(head_dim, int):
        return head_dim
    return _config_int(text, "mamba_expand", "expand") * _config_int(text, "hidden_size") // heads


def _config_int(text: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(text.get(name), int):
            return int(text[name])
    raise ConfigError(f"the model's config.json has no {names[0]}, so the KV block size is unknown")
