"""Settings of the look-ahead: compression waits for output tokens, whose queries score the prompt.

This is the look-ahead of arXiv:2505.20334, not vLLM's speculative `num_lookahead_tokens`.
"""

from vllm_kvcompress.methods.preset import MAX_LOOKAHEAD
from vllm_kvcompress.settings.declared import SettingsGroup, declare
from vllm_kvcompress.settings.parsing import TokensOrUnset


class LookaheadSettings(SettingsGroup):
    """`CompressionConfig.lookahead`: the output tokens that compression waits for."""

    tokens: TokensOrUnset = declare(
        None, "TOKENS", key="lookahead", unit="output tokens", ge=0, le=MAX_LOOKAHEAD
    )
    """Compression waits for this many output tokens, whose queries then score the prompt. 0
    compresses when the prefill ends."""
    slots: int | None = declare(None, key="lookahead_slots", unit="requests", ge=1, strict=True)
    """Requests that may be in their look-ahead at once. None is as many as run, within 1 GiB of
    queries per GPU."""
