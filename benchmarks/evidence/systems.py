"""The systems that operators choose between, at equal bytes.

* Eviction by the recommended preset, from a cache in 16 bits, in fp8, and with k4v3.
* k4v3 without eviction.
* vLLM's low-bit caches alone, without this plugin.
* Random eviction in 16 bits, the baseline that shows what choosing tokens is worth.
* The 16-bit cache again: its KL is the rounding of decoding in a batch.

The bytes of a prompt are relative to its 16-bit cache, scales and partly filled pages included. An
evicting system keeps as many tokens as fit in the bytes.
"""

import json
from collections.abc import Mapping
from typing import Any

from vllm_kvcompress.methods.registry import RECOMMENDED

BYTES = (0.5, 0.25, 0.2, 0.125, 0.1)
"""Bytes that evicting systems may take. A format without eviction takes its own bytes."""
SIXTEEN_BITS, FP8_EVICTING, K4V3, K4V3_ALL = (
    "16 bits, evicting",
    "fp8, evicting",
    "k4v3, evicting",
    "k4v3, all tokens",
)
RANDOM, SIXTEEN_BITS_ALL = "16 bits, random", "16 bits, all tokens"
LOW_BIT_CACHES = (
    "fp8",
    "int8_per_token_head",
    "int4_per_token_head",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
)
"""vLLM's caches to compare with: fp8 per token and head rounds about as int8 does."""
WITHOUT_LOOKAHEAD = f"{RECOMMENDED}, lookahead 0"
"""Name of the recommended preset without its look-ahead, as all other presets run."""


def systems(*, lookahead: bool) -> dict[str, str]:
    """Return settings by name, as `compressed_cache.method_settings` reads them.

    Args:
        lookahead: whether evicting systems use the preset's look-ahead. Without it they compress
            when the prefill ends, as k4v3 does that drops nothing.
    """
    preset: Mapping[str, Any] = {"compress": RECOMMENDED, **({} if lookahead else {"lookahead": 0})}
    alone = {"compress": "off", "budget": 1.0}
    found: dict[str, Mapping[str, Any]] = {
        SIXTEEN_BITS: {**preset, "bytes": BYTES},
        # fp8 alone takes half of the bytes, and k4v3 of all tokens takes a little over a quarter.
        FP8_EVICTING: {**preset, "cache": "fp8", "bytes": BYTES[1:]},
        K4V3: {**preset, "packed_dtype": "k4v3", "bytes": BYTES[1:]},
        K4V3_ALL: {
            "compress": RECOMMENDED,
            "lookahead": 0,
            "packed_dtype": "k4v3",
            "budget": 1.0,
        },
        RANDOM: {"compress": "random", "bytes": (0.2, 0.1)},
        **{name: {**alone, "cache": name} for name in LOW_BIT_CACHES},
        SIXTEEN_BITS_ALL: alone,
    }
    return {name: json.dumps(settings) for name, settings in found.items()}
