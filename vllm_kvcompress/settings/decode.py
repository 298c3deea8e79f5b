"""Settings of the decode budget, which bounds the KV cache of a request while it generates."""

from vllm_kvcompress.refusals.settings import MIN_CHUNKS
from vllm_kvcompress.settings.declared import DEPLOY_DEFAULT, SettingsGroup, declare
from vllm_kvcompress.settings.parsing import Tokens, TokensOrNone, TokensOrUnset

MAX_DEFAULT_WINDOW = 8
"""Largest default decode window in tokens. A method with a smaller observation window uses that."""


class DecodeSettings(SettingsGroup):
    """`CompressionConfig.decode`: the decode budget. Without one, outputs grow as in vLLM."""

    budget: TokensOrNone = declare(
        None, "TOKENS", key="decode_budget", unit="tokens per layer", ge=1, deployed=DEPLOY_DEFAULT
    )
    """Tokens per layer that a request may hold while it generates. With none, the KV cache of the
    output grows."""
    interval: Tokens = declare(128, "TOKENS", key="decode_interval", unit="output tokens", ge=1)
    """Output tokens between two compressions to --kv-decode-budget: a multiple of the KV block.
    With --kv-packed-dtype k4v3 and no decode budget: output tokens between two packings of the
    output in k4v3. No token is dropped, and the number is rounded up to whole packed pages."""
    window: TokensOrUnset = declare(None, key="decode_window", unit="output tokens", ge=0, le=128)
    """With a decode budget: the last output tokens, which are always kept and whose queries score
    the others. None is the observation window, at most 8."""


def min_decode_budget(window: int, chunk_size: int) -> int:
    """Return the smallest decode budget in tokens per layer.

    Args:
        window: decode window in tokens.
        chunk_size: tokens per chunk that the method keeps; 0 if it keeps single tokens.
    """
    return window + max(MIN_CHUNKS * chunk_size, 1)
