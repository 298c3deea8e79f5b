"""What bounds the memory of a prompt while it is computed: opt-in, off unless a length is given."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_kvcompress.errors import ConfigError

USUAL_PIECE = 4096


class PieceSettings(BaseModel):
    """Part of an engine's settings (`CompressionConfig`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_whole: int | None = Field(default=None, ge=1)
    """Prompts longer than this, in tokens, are packed piece by piece; None: all stand whole."""
    piece: int = Field(default=USUAL_PIECE, ge=1)
    """Tokens of a prompt between two packings; a multiple of the block."""

    @field_validator("max_whole", mode="before")
    @classmethod
    def _no_limit(cls, value: Any) -> Any:
        # a manifest's arguments are always the same ones
        return None if value == "none" else value

    @field_validator("max_whole", "piece", mode="before")
    @classmethod
    def _tokens_of_a_prompt(cls, value: Any) -> Any:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ConfigError(f"must be a whole number of tokens, got {value!r}")
        return value

    def refuse_piece_nonsense(self, window: int, min_prompt: int) -> None:
        """Check the settings against each other.

        Args:
            window: the method's queries that judge.
            min_prompt: shorter prompts are left whole.

        Raises:
            ConfigError: one sentence with what must hold.
        """
        if self.max_whole is None:
            if "piece" in self.model_fields_set:
                raise ConfigError(
                    "piece is of prompts that are packed piece by piece, and none is; add"
                    " --kv-max-whole, or remove piece"
                )
            return
        if self.piece <= window:
            raise ConfigError(
                f"piece must be above the window of {window}, got {self.piece}; set piece to"
                f" {USUAL_PIECE}"
            )
        if self.max_whole < min_prompt:
            raise ConfigError(
                f"max_whole must be at least min_prompt={min_prompt}, under which prompts are left"
                f" whole, got {self.max_whole}; raise max_whole, or lower min_prompt"
            )
