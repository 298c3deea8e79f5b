"""Settings that compress a long prompt piece by piece during its prefill."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.settings.parsing import whole_tokens

DEFAULT_PIECE = 4096
DEFAULT_PROBE = 32
MAX_PROBE = 1024


class PieceSettings(BaseModel):
    """Piece-by-piece fields of `CompressionConfig`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_whole: int | None = Field(default=None, ge=1)
    """Prompts with more tokens are compressed piece by piece. None compresses every prompt after
    its prefill."""
    piece: int = Field(default=DEFAULT_PIECE, ge=1)
    """Prompt tokens between two compressions during prefill: a multiple of the KV block."""
    probe: int = Field(default=DEFAULT_PROBE, ge=0, le=MAX_PROBE)
    """Last prompt tokens, whose queries score every piece. 0 scores each piece with its own last
    tokens."""
    probe_first: int = Field(default=0, ge=0, le=MAX_PROBE)
    """First prompt tokens, whose queries also score every piece."""

    @field_validator("max_whole", mode="before")
    @classmethod
    def _parse_max_whole_none(cls, value: Any) -> Any:
        # Manifests always pass the flag, so "none" must mean unset.
        return None if value == "none" else value

    @field_validator("max_whole", "piece", "probe", "probe_first", mode="before")
    @classmethod
    def _parse_piece_tokens(cls, value: Any) -> Any:
        return whole_tokens(value)

    def num_first_probe_tokens(self, probe_tokens: int) -> int:
        """Return how many of a probe's tokens are the prompt's first ones; the rest are its last.

        Near the prompt's end a probe can be shorter than the settings say. Both parts then shrink
        in proportion.

        Args:
            probe_tokens: length of the probe in tokens.
        """
        return probe_tokens * self.probe_first // max(self.probe_first + self.probe, 1)

    def check_pieces(self, window: int, min_prompt: int) -> None:
        """Check that the piece settings work together.

        Args:
            window: observation window in tokens.
            min_prompt: prompts with fewer tokens stay uncompressed.

        Raises:
            ConfigError: the message states the rule, the value and the fix.
        """
        if self.max_whole is None:
            for name in ("piece", "probe", "probe_first"):
                if name in self.model_fields_set:
                    flag = f"--kv-{name.replace('_', '-')}"
                    raise ConfigError(f"{flag} needs --kv-max-whole; set it, or remove {flag}")
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
        if self.piece <= window:
            raise ConfigError(
                f"piece must be above the observation window of {window}, got {self.piece}; set"
                f" piece to {DEFAULT_PIECE}"
            )
        if self.probe + self.probe_first > self.piece:
            raise ConfigError(
                f"probe and probe_first are computed after every piece and must be at most piece"
                f" together, got {self.probe} and {self.probe_first} with piece {self.piece}; raise"
                " piece, or lower one of them"
            )
        if self.max_whole < min_prompt:
            raise ConfigError(
                f"max_whole must be at least min_prompt={min_prompt}, because shorter prompts stay"
                f" uncompressed, got {self.max_whole}; raise max_whole, or lower min_prompt"
            )
