"""How large a layer's state is, and the KV block that vLLM makes of it, by config.json alone.

A block of the pool is one group's pages, so a page of full attention must hold a state: vLLM makes
the block as many tokens as that takes (``Platform._align_hybrid_block_size``).
"""

from collections.abc import Mapping
from typing import Any

from vllm_kvcompress.errors import ConfigError

_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def block_of(
    text: Mapping[str, Any],
    ranks: int,
    itemsize: int,
    token: int,
    asked: int,
    *,
    state_dtype: str,
    on_cpu: bool,
) -> int:
    """Tokens in a KV block of a model whose layers keep a state.

    Args:
        text: config.json's part about the language model.
        ranks: tensor-parallel size.
        itemsize: bytes of an element of what the model computes.
        token: bytes of a token's keys and values in one layer, on one rank.
        asked: tokens of the block that was asked for, or vLLM's own: the block is a multiple.
        state_dtype: what the layers sum in, as ``--mamba-ssm-cache-dtype`` takes it.
        on_cpu: where vLLM sums in float32, if the processor has instructions for bfloat16, unless
            16 bits are asked for.
    """
    state = state_bytes(text, ranks, itemsize, state_dtype=state_dtype, on_cpu=on_cpu)
    return asked * -(-state // (asked * token))


def state_bytes(
    text: Mapping[str, Any], ranks: int, itemsize: int, *, state_dtype: str, on_cpu: bool
) -> int:
    """Bytes that one layer keeps of a request on one rank: a convolution's last inputs, and a sum.

    Raises:
        ConfigError: the config lacks a figure.
    """
    if "linear_num_value_heads" in text:
        keys, values = (_of(text, f"linear_num_{part}_heads") for part in ("key", "value"))
        of_key, of_value = (_of(text, f"linear_{part}_head_dim") for part in ("key", "value"))
        inputs, kernel = 2 * keys * of_key + values * of_value, _of(text, "linear_conv_kernel_dim")
        summed, dtype = values * of_value * of_key, None
        if text.get("model_type") != "qwen3_next":
            dtype = text.get("mamba_ssm_dtype")
    else:
        heads = _of(text, "mamba_n_heads", "mamba_num_heads")
        of_head, size = _head_dim(text, heads), _of(text, "mamba_d_state", "ssm_state_size")
        groups = _of(text, "mamba_n_groups", "n_groups")
        # ranks that groups do not divide among keep copies
        groups += 0 if groups % ranks == 0 else ranks - groups
        inputs = heads * of_head + 2 * groups * size
        kernel, summed = _of(text, "mamba_d_conv", "conv_kernel"), heads * of_head * size
        dtype = None
        if text.get("model_type") == "nemotron_h":
            dtype = text.get("mamba_ssm_cache_dtype", "float32")
    if state_dtype != "auto":
        dtype = state_dtype
    wide = _ITEMSIZE.get(str(dtype), itemsize)
    if on_cpu and dtype not in ("float16", "bfloat16"):
        wide = 4
    return inputs // ranks * (kernel - 1) * itemsize + summed // ranks * wide


def _head_dim(text: Mapping[str, Any], heads: int) -> int:
    given = text.get("mamba_d_head", text.get("mamba_head_dim"))
    if isinstance(given, int):
        return given
    return _of(text, "mamba_expand", "expand") * _of(text, "hidden_size") // heads


def _of(text: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(text.get(name), int):
            return int(text[name])
    raise ConfigError(f"the model's config.json has no {names[0]}, so its KV block is not known")
