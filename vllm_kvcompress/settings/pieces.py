"""Settings that compress a long prompt piece by piece during its prefill."""

from vllm_kvcompress.refusals.settings import MAX_PROBE
from vllm_kvcompress.settings.declared import DEPLOY_DEFAULT, SettingsGroup, declare
from vllm_kvcompress.settings.parsing import Tokens, TokensOrNone


class PieceSettings(SettingsGroup):
    """`CompressionConfig.pieces`: compression piece by piece during the prefill."""

    max_whole: TokensOrNone = declare(
        None, "TOKENS", unit="prompt tokens", ge=1, deployed=DEPLOY_DEFAULT
    )
    """Prompts with more tokens are compressed piece by piece during prefill, and may be longer than
    the KV pool. With none, every prompt is compressed after its prefill."""
    length: Tokens = declare(4096, "TOKENS", key="piece", unit="prompt tokens", ge=1)
    """Tokens of a prompt longer than --kv-max-whole between two compressions: a multiple of the KV
    block."""
    probe: Tokens = declare(32, "TOKENS", unit="prompt tokens", ge=0, le=MAX_PROBE)
    """The last tokens of a prompt longer than --kv-max-whole, whose queries score each of its
    pieces. With 0, each piece's last tokens score it."""
    probe_first: Tokens = declare(0, "TOKENS", unit="prompt tokens", ge=0, le=MAX_PROBE)
    """The first tokens of a prompt longer than --kv-max-whole, whose queries also score each piece.
    Set it high enough to include an instruction that comes before the text.

    Together with `--kv-probe` at most `--kv-piece`."""

    def num_first_probe_tokens(self, probe_tokens: int) -> int:
        """Return how many of a probe's tokens are the prompt's first ones; the rest are its last.

        Near the prompt's end a probe can be shorter than the settings say. Both parts then shrink
        in proportion.

        Args:
            probe_tokens: length of the probe in tokens.
        """
        return probe_tokens * self.probe_first // max(self.probe_first + self.probe, 1)
