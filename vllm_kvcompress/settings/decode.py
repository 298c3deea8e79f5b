"""Settings that bound the memory of an answer while it grows; off unless a budget is given."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.settings.parsing import whole_tokens

USUAL_WINDOW = 8
"""Longest decode window in tokens, unless one is given: a method with a smaller observation window
takes that."""


LEAST_CHUNKS = 2
"""Whole chunks that a decode budget must hold beside its window, where tokens are kept in chunks.
With room for one chunk, the output of `cake-chunk` repeated one word for ever."""


class DecodeSettings(BaseModel):
    """The settings of `CompressionConfig` that concern answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    decode_budget: int | None = Field(default=None, ge=1)
    """Mean tokens per layer that a request holds while it answers; None lets its answer grow."""
    decode_interval: int = Field(default=128, ge=1)
    """Tokens of an answer after which its request is packed again; a multiple of the KV block."""
    decode_window: int | None = Field(default=None, ge=0, le=128)
    """Last tokens of an answer, always kept, whose queries judge the tokens that are held. None
    takes the method's observation window, at most 8."""

    @field_validator("decode_budget", mode="before")
    @classmethod
    def _no_budget(cls, value: Any) -> Any:
        # a manifest's arguments are always the same ones
        return None if value == "none" else value

    @field_validator("decode_budget", "decode_interval", "decode_window", mode="before")
    @classmethod
    def _tokens(cls, value: Any) -> Any:
        return whole_tokens(value)

    def refuse_decode_nonsense(self, window: int, least: int, chunk: int) -> None:
        """Check the settings against each other.

        Args:
            window: the decode window in tokens.
            least: smallest decode window that the method can judge by.
            chunk: tokens of the chunks that the method keeps; 0 where it keeps single tokens.

        Raises:
            ConfigError: with what must hold, what was given, and what to do.
        """
        if self.decode_budget is None:
            names = {"decode_interval": "--kv-decode-interval", "decode_window": "decode_window"}
            for key, name in names.items():
                if key in self.model_fields_set:
                    raise ConfigError(f"{name} needs --kv-decode-budget; set it, or remove {name}")
            return
        if window < least:
            raise ConfigError(
                f"decode_window must be at least {least} for this method, got {window}; set"
                f" decode_window to {max(least, USUAL_WINDOW)}"
            )
        if window > self.decode_interval:
            raise ConfigError(
                f"decode_window must be at most decode_interval={self.decode_interval}, got"
                f" {window}; set decode_window to {self.decode_interval} or less, since only the"
                " queries of one interval are kept"
            )
        if self.decode_budget <= window:
            raise ConfigError(
                f"decode_budget={self.decode_budget} tokens per layer cannot hold the decode"
                f" window of {window} tokens and one more; set decode_budget above {window}"
            )
        if self.decode_budget < (least_budget := least_decode_budget(window, chunk)):
            raise ConfigError(
                f"decode_budget={self.decode_budget} tokens per layer cannot hold the decode"
                f" window of {window} tokens and {LEAST_CHUNKS} chunks of {chunk} tokens; set"
                f" decode_budget to at least {least_budget}, or choose a method that keeps single"
                " tokens, such as streamingllm"
            )


def least_decode_budget(window: int, chunk: int) -> int:
    """Smallest decode budget in tokens that a method can answer with.

    Args:
        window: its decode window in tokens.
        chunk: tokens of the chunks that it keeps; 0 where it keeps single tokens.
    """
    return window + max(LEAST_CHUNKS * chunk, 1)
