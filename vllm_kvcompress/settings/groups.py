"""Settings of the look-ahead, of the decode budget and of pieces: when a request is compressed."""

from vllm_kvcompress.methods.preset import MAX_LOOKAHEAD
from vllm_kvcompress.refusals.settings import MAX_PROBE
from vllm_kvcompress.settings.declared import DEPLOY_DEFAULT, SettingsGroup, declare
from vllm_kvcompress.settings.parsing import Tokens, TokensOrNone, TokensOrUnset


class LookaheadSettings(SettingsGroup):
    """`CompressionConfig.lookahead`: the output tokens that compression waits for.

    Their queries score the prompt. This is the look-ahead of arXiv:2505.20334, not vLLM's
    speculative `num_lookahead_tokens`.
    """

    tokens: TokensOrUnset = declare(None, "TOKENS", key="lookahead", ge=0, le=MAX_LOOKAHEAD)
    """Compression waits for this many output tokens, whose queries then score the prompt. 0
    compresses when the prefill ends."""
    slots: int | None = declare(None, key="lookahead_slots", ge=1, strict=True)
    """Requests that may be in their look-ahead at once. None is as many as run, within 1 GiB of
    queries per GPU."""


class DecodeSettings(SettingsGroup):
    """`CompressionConfig.decode`: the decode budget. Without one, outputs grow as in vLLM."""

    budget: TokensOrNone = declare(
        None, "TOKENS", key="decode_budget", ge=1, deployed=DEPLOY_DEFAULT
    )
    """Tokens per layer that a request may hold while it generates. With none, the KV cache of the
    output grows."""
    interval: Tokens = declare(128, "TOKENS", key="decode_interval", ge=1)
    """Output tokens between two compressions to --kv-decode-budget: a multiple of the KV block.
    With --kv-packed-dtype k4v3 and no decode budget: output tokens between two packings of the
    output in k4v3. No token is dropped, and the number is rounded up to whole packed pages."""
    window: TokensOrUnset = declare(None, key="decode_window", ge=0, le=128)
    """With a decode budget: the last output tokens, which are always kept and whose queries score
    the others. None is the observation window, at most 8."""


class PieceSettings(SettingsGroup):
    """`CompressionConfig.pieces`: compression piece by piece during the prefill."""

    max_whole: TokensOrNone = declare(None, "TOKENS", ge=1, deployed=DEPLOY_DEFAULT)
    """Prompts with more tokens are compressed piece by piece during prefill, and may be longer than
    the KV pool. With none, every prompt is compressed after its prefill."""
    length: Tokens = declare(4096, "TOKENS", key="piece", ge=1)
    """Tokens of a prompt longer than --kv-max-whole between two compressions: a multiple of the KV
    block."""
    probe: Tokens = declare(32, "TOKENS", ge=0, le=MAX_PROBE)
    """The last tokens of a prompt longer than --kv-max-whole, whose queries score each of its
    pieces. With 0, each piece's last tokens score it."""
    probe_first: Tokens = declare(0, "TOKENS", ge=0, le=MAX_PROBE)
    """The first tokens of a prompt longer than --kv-max-whole, whose queries also score each piece.
    Set it high enough to include an instruction that comes before the text.

    Together, this and `--kv-probe` may have at most 1,024 tokens, and at most `--kv-piece`."""

    def num_first_probe_tokens(self, probe_tokens: int) -> int:
        """Return how many of a probe's tokens are the prompt's first ones; the rest are its last.

        Near the prompt's end a probe can be shorter than the settings say. Both parts then shrink
        in proportion.

        Args:
            probe_tokens: length of the probe in tokens.
        """
        return probe_tokens * self.probe_first // max(self.probe_first + self.probe, 1)
