"""KV cache dtypes: which ones we know, their size, and which one a checkpoint declares."""

from collections.abc import Mapping
from typing import Any

_MODELOPT_CACHES = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}
PLAIN_CACHES = frozenset({"auto", "float16", "bfloat16", "float32"})
FLOAT8_CACHES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""FP8 caches with one scale per layer: vLLM's name -> torch dtype."""
_PER_HEAD = "attn_head"
_HEAD_DIM, _LAYERS = 128, 32
"""Shapes that `share_of_bytes` assumes: those of an 8B Llama."""
_SCALES = 8
"""Bytes of the two float32 scales that a per-token-head format stores per token and KV head."""
_TURBOQUANT_BYTES: Mapping[str, int] = {
    "turboquant_k8v4": 196,
    "turboquant_4bit_nc": 134,
    "turboquant_k3v4_nc": 118,
    "turboquant_3bit_nc": 102,
}
"""Bytes of one token and KV head at a head dimension of 128. Four layers stay at 16 bits."""

LOW_BIT_CACHES = frozenset(
    {*FLOAT8_CACHES, *_TURBOQUANT_BYTES}
    | {"int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"}
)
"""KV caches in fewer bits whose size `share_of_bytes` knows."""
ALTERNATIVES = ("fp8", "int8_per_token_head", "int4_per_token_head")
"""Values of ``--kv-cache-dtype`` that reports name as alternatives."""


def declared_cache(config: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    """Return the quantised KV cache that a checkpoint declares, or None.

    ModelOpt declares it in its own fields or in a scheme. compressed-tensors declares a scheme,
    which is always fp8. Other formats (Quark, fp8) contain only scales.

    Args:
        config: the checkpoint's config.json.
        text: the part of it that describes the language model.

    Returns:
        A value of vLLM's --kv-cache-dtype, or "fp8 per head".
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        quantization = config.get("compression_config")
    if not isinstance(quantization, Mapping):
        quantization = text.get("quantization_config") or text.get("compression_config")
    if not isinstance(quantization, Mapping):
        return None
    inner = quantization.get("quantization")
    inner = inner if isinstance(inner, Mapping) else quantization
    method = str(quantization.get("quant_method") or "").lower().replace("_", "-")
    producer = quantization.get("producer")
    by_modelopt = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    if (by_modelopt or "modelopt_quant_config" in inner) and inner.get("quant_algo"):
        method = "modelopt"
    if method == "compressed-tensors":
        scheme = quantization.get("kv_cache_scheme")
        per_head = isinstance(scheme, Mapping) and scheme.get("strategy") == _PER_HEAD
        return ("fp8 per head" if per_head else "fp8") if scheme else None
    if not method.startswith("modelopt"):
        return None
    scheme = (
        inner.get("kv_cache_scheme")
        or quantization.get("kv_cache_scheme")
        or inner.get("kv_cache_quant_algo")
        or quantization.get("kv_cache_quant_algo")
    )
    if isinstance(scheme, Mapping):
        is_float = scheme.get("type") == "float"
        if is_float and scheme.get("num_bits") == 8 and scheme.get("dynamic") is False:
            return "fp8_e4m3"
        return "nvfp4" if is_float and scheme.get("num_bits") == 4 else None
    return _MODELOPT_CACHES.get(str(scheme).lower())


def share_of_bytes(cache_dtype: str) -> float | None:
    """Return the bytes of a token in a KV cache, relative to a model in 16 bits.

    The result includes scales. Their share depends on the model: this assumes 32 layers and a head
    dimension of 128.

    Args:
        cache_dtype: value of ``--kv-cache-dtype``.

    Returns:
        None for a format that is not known here.
    """
    if cache_dtype in PLAIN_CACHES:
        return 1.0
    if cache_dtype in FLOAT8_CACHES:
        return 0.5
    if cache_dtype in ("int8_per_token_head", "fp8_per_token_head"):
        return (2 * _HEAD_DIM + _SCALES) / (4 * _HEAD_DIM)
    if cache_dtype == "int4_per_token_head":
        return (_HEAD_DIM + _SCALES) / (4 * _HEAD_DIM)
    if cache_dtype in _TURBOQUANT_BYTES:
        low_bit = _TURBOQUANT_BYTES[cache_dtype] / (4 * _HEAD_DIM)
        return (4 + (_LAYERS - 4) * low_bit) / _LAYERS
    return None
