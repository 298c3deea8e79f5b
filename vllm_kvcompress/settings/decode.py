"""What bounds the memory of an answer while it grows: opt-in, and off unless a budget is given."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_kvcompress.errors import ConfigError

USUAL_WINDOW = 8
"""Queries of an answer that judge what is held; a method whose own window is smaller takes that."""


class DecodeSettings(BaseModel):
    """Part of an engine's settings (`CompressionConfig`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    decode_budget: int | None = Field(default=None, ge=1)
    """Mean tokens per layer that a request holds while its answer grows; None lets it grow."""
    decode_interval: int = Field(default=128, ge=1)
    """Tokens that are generated before what is held is packed again; a multiple of the block."""
    decode_window: int | None = Field(default=None, ge=0, le=128)
    """Last tokens whose queries judge what is held, always kept; None: the method's, at most 8."""

    @field_validator("decode_budget", mode="before")
    @classmethod
    def _no_budget(cls, value: Any) -> Any:
        # a manifest's arguments are always the same ones
        return None if value == "none" else value

    @field_validator("decode_budget", "decode_interval", "decode_window", mode="before")
    @classmethod
    def _tokens(cls, value: Any) -> Any:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ConfigError(f"must be a whole number of tokens, got {value!r}")
        return value

    def refuse_decode_nonsense(self, window: int, least: int) -> None:
        """Check the settings against each other.

        Args:
            window: the queries that judge.
            least: that the method needs.

        Raises:
            ConfigError: one sentence with what must hold.
        """
        if self.decode_budget is None:
            for key in ("decode_interval", "decode_window"):
                if key in self.model_fields_set:
                    raise ConfigError(
                        f"{key} is of a decode budget, and none is given; add --kv-decode-budget,"
                        f" or remove {key}"
                    )
            return
        if window < least:
            raise ConfigError(
                f"decode_window must be at least {least} for this method, got {window}; set"
                f" decode_window to {max(least, USUAL_WINDOW)}"
            )
        if window > self.decode_interval:
            raise ConfigError(
                f"decode_window must be at most decode_interval={self.decode_interval}, got"
                f" {window}; only queries of the answer since then are kept"
            )
        if self.decode_budget <= window:
            raise ConfigError(
                f"decode_budget={self.decode_budget} tokens per layer cannot hold the window of"
                f" {window} and a token more; set decode_budget above {window}"
            )
