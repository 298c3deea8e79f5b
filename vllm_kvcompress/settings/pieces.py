"""Settings that bound the memory of a prompt while it is computed; off unless a length is given."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.settings.parsing import whole_tokens

USUAL_PIECE = 4096
USUAL_PROBE = 32
MAX_PROBE = 1024


class PieceSettings(BaseModel):
    """The settings of `CompressionConfig` that concern prompts in pieces."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_whole: int | None = Field(default=None, ge=1)
    """Prompts of more tokens are packed piece by piece; with None every prompt stands whole."""
    piece: int = Field(default=USUAL_PIECE, ge=1)
    """Tokens of a prompt after which it is packed; a multiple of the KV block."""
    probe: int = Field(default=USUAL_PROBE, ge=0, le=MAX_PROBE)
    """The prompt's last tokens that judge every piece; with 0 a piece's own last tokens do."""
    probe_first: int = Field(default=0, ge=0, le=MAX_PROBE)
    """The prompt's first tokens that judge every piece beside its last ones."""

    @field_validator("max_whole", mode="before")
    @classmethod
    def _no_limit(cls, value: Any) -> Any:
        # a manifest's arguments are always the same ones
        return None if value == "none" else value

    @field_validator("max_whole", "piece", "probe", "probe_first", mode="before")
    @classmethod
    def _tokens_of_a_prompt(cls, value: Any) -> Any:
        return whole_tokens(value)

    def first_of_probe(self, rows: int) -> int:
        """Of a probe of so many rows, those that are the prompt's first tokens, not its last.

        Where the prompt's end leaves fewer rows than the settings say, both parts shrink alike.
        """
        return rows * self.probe_first // max(self.probe_first + self.probe, 1)

    def refuse_piece_nonsense(self, window: int, min_prompt: int) -> None:
        """Check the settings against each other.

        Args:
            window: observation window in tokens.
            min_prompt: prompts of fewer tokens are left whole.

        Raises:
            ConfigError: with what must hold, what was given, and what to do.
        """
        if self.max_whole is None:
            for name in ("piece", "probe", "probe_first"):
                if name in self.model_fields_set:
                    flag = f"--kv-{name.replace('_', '-')}"
                    raise ConfigError(f"{flag} needs --kv-max-whole; set it, or remove {flag}")
            return
        if self.probe_first and not self.probe:
            raise ConfigError(
                f"with --kv-probe 0 each piece's own tokens judge it, got --kv-probe-first"
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
                f" piece to {USUAL_PIECE}"
            )
        if self.probe + self.probe_first > self.piece:
            raise ConfigError(
                f"probe and probe_first are computed behind every piece and must be at most piece"
                f" together, got {self.probe} and {self.probe_first} with piece {self.piece}; raise"
                " piece, or lower one of them"
            )
        if self.max_whole < min_prompt:
            raise ConfigError(
                f"max_whole must be at least min_prompt={min_prompt}, under which prompts are left"
                f" whole, got {self.max_whole}; raise max_whole, or lower min_prompt"
            )
