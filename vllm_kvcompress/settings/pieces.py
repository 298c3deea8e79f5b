"""Settings that compress a long prompt piece by piece during its prefill."""

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.settings.declared import DEPLOY_DEFAULT, SettingsGroup, declare
from vllm_kvcompress.settings.parsing import Tokens, TokensOrNone

DEFAULT_PIECE = 4096
MAX_PROBE = 1024


class PieceSettings(SettingsGroup):
    """`CompressionConfig.pieces`: compression piece by piece during the prefill."""

    max_whole: TokensOrNone = declare(
        None, "TOKENS", unit="prompt tokens", ge=1, deployed=DEPLOY_DEFAULT
    )
    """Prompts with more tokens are compressed piece by piece during prefill, and may be longer than
    the KV pool. With none, every prompt is compressed after its prefill."""
    length: Tokens = declare(DEFAULT_PIECE, "TOKENS", key="piece", unit="prompt tokens", ge=1)
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

    def check(self, window: int, min_prompt: int) -> None:
        """Check that the piece settings work together.

        Args:
            window: observation window in tokens.
            min_prompt: prompts with fewer tokens stay uncompressed.
        """
        if self.max_whole is None:
            for declared in self.declared():
                if declared.name in self.model_fields_set - {"max_whole"}:
                    raise ConfigError(
                        f"{declared.flag} needs --kv-max-whole; set it, or remove {declared.flag}"
                    )
            return
        if self.probe_first and not self.probe:
            raise ConfigError(
                "--kv-probe-first needs --kv-probe above 0, got --kv-probe 0 and --kv-probe-first"
                f" {self.probe_first}; set --kv-probe above 0, or remove --kv-probe-first"
            )
        if self.probe + self.probe_first > MAX_PROBE:
            raise ConfigError(
                f"probe and probe_first must be at most {MAX_PROBE} tokens together, got"
                f" {self.probe} and {self.probe_first}; lower one of them"
            )
        if self.length <= window:
            raise ConfigError(
                f"piece must be above the observation window of {window}, got {self.length}; set"
                f" piece to {DEFAULT_PIECE}"
            )
        if self.probe + self.probe_first > self.length:
            raise ConfigError(
                f"probe and probe_first are computed after every piece and must be at most piece"
                f" together, got {self.probe} and {self.probe_first} with piece {self.length};"
                " raise piece, or lower one of them"
            )
        if self.max_whole < min_prompt:
            raise ConfigError(
                f"max_whole must be at least min_prompt={min_prompt}, because shorter prompts stay"
                f" uncompressed, got {self.max_whole}; raise max_whole, or lower min_prompt"
            )
