"""Settings of the look-ahead: compression waits for output tokens, whose queries score the prompt.

This is the look-ahead of arXiv:2505.20334, not vLLM's speculative `num_lookahead_tokens`.
"""

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.preset import MAX_LOOKAHEAD, scores_by_window
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

    def check(self, compress: str, reads: Reads, min_window: int, *, bounded: bool) -> None:
        """Check that the look-ahead works with the method.

        Args:
            compress: name of the method.
            reads: statistics that the method reads.
            min_window: smallest observation window of the method, in tokens.
            bounded: whether a decode budget is set.
        """
        if bounded and self.slots is not None:
            raise ConfigError(
                f"lookahead_slots={self.slots} cannot be combined with"
                " --kv-decode-budget, which stores the last queries of every request; remove"
                " lookahead_slots"
            )
        if not self.tokens:
            return
        if not scores_by_window(reads):
            raise ConfigError(
                f"lookahead={self.tokens} needs a method that scores a prompt with its latest"
                f" queries, and {compress!r} does not; set lookahead to 0, or choose another method"
            )
        if self.tokens < min_window:
            raise ConfigError(
                f"lookahead must be at least {min_window} for {compress!r}, got {self.tokens};"
                f" set lookahead to {min_window} or more, or to 0"
            )
