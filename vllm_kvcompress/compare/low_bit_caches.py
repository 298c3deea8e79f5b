"""vLLM's KV caches with fewer bits per number: an alternative to dropping tokens."""

from collections.abc import Mapping

from vllm_kvcompress.planning.cache_dtypes import FLOAT8_CACHES, PLAIN_CACHES

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

ALTERNATIVES = ("fp8", "int8_per_token_head", "int4_per_token_head")
"""Values of ``--kv-cache-dtype`` that reports name as alternatives."""


def share_of_bytes(cache_dtype: str) -> float | None:
    """Return the bytes of a token in a KV cache, relative to a model in 16 bits.

    Scales count. They depend on the model's shapes; this assumes 32 layers with a head dimension of
    128.

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
