"""Settings of the decode budget, which bounds the KV cache of a request while it generates."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.settings.parsing import whole_tokens

MAX_DEFAULT_WINDOW = 8
"""Largest default decode window in tokens. A method with a smaller observation window uses that."""

MIN_CHUNKS = 2
"""Chunks that a decode budget must hold in addition to its window, for methods that keep chunks.
With one chunk, `cake-chunk` repeated one word endlessly."""


class DecodeSettings(BaseModel):
    """Decode-budget fields of `CompressionConfig`. Without a budget, outputs grow as in vLLM."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    decode_budget: int | None = Field(default=None, ge=1)
    """Mean tokens per layer that a request may hold while it generates. None sets no limit."""
    decode_interval: int = Field(default=128, ge=1)
    """Output tokens between two compressions to the decode budget: a multiple of the KV block.
    Without a budget, but with packed_dtype k4v3: output tokens between two packings, which drop
    none."""
    decode_window: int | None = Field(default=None, ge=0, le=128)
    """Last output tokens, which are always kept and whose queries score the other tokens. None is
    the method's observation window, at most 8."""

    @field_validator("decode_budget", mode="before")
    @classmethod
    def _parse_decode_budget_none(cls, value: Any) -> Any:
        # Manifests always pass the flag, so "none" must mean unset.
        return None if value == "none" else value

    @field_validator("decode_budget", "decode_interval", "decode_window", mode="before")
    @classmethod
    def _parse_decode_tokens(cls, value: Any) -> Any:
        return whole_tokens(value)

    def check_decode(
        self, window: int, min_window: int, chunk_size: int, *, packs_groups: bool
    ) -> None:
        """Check that the decode settings work together and with the method.

        Args:
            window: decode window in tokens.
            min_window: smallest decode window of the method, in tokens.
            chunk_size: tokens per chunk that the method keeps; 0 if it keeps single tokens.
            packs_groups: whether kept tokens are packed in k4v3. Then an interval without a budget
                packs output tokens too, and drops none.

        Raises:
            ConfigError: the message states the rule, the value and the fix.
        """
        if self.decode_budget is None:
            names = {"decode_interval": "--kv-decode-interval", "decode_window": "decode_window"}
            for key, name in names.items():
                if key in self.model_fields_set and not (packs_groups and key == "decode_interval"):
                    other = " or --kv-packed-dtype k4v3" if key == "decode_interval" else ""
                    raise ConfigError(
                        f"{name} needs --kv-decode-budget{other}; set it, or remove {name}"
                    )
            return
        if window < min_window:
            raise ConfigError(
                f"decode_window must be at least {min_window} for this method, got {window}; set"
                f" decode_window to {max(min_window, MAX_DEFAULT_WINDOW)}"
            )
        if window > self.decode_interval:
            raise ConfigError(
                f"decode_window must be at most decode_interval={self.decode_interval}, got"
                f" {window}; set decode_window to {self.decode_interval} or less, because the"
                " engine stores the queries of one interval"
            )
        if self.decode_budget <= window:
            raise ConfigError(
                f"decode_budget={self.decode_budget} tokens per layer cannot hold the decode"
                f" window of {window} tokens and one more; set decode_budget above {window}"
            )
        if self.decode_budget < (min_budget := min_decode_budget(window, chunk_size)):
            raise ConfigError(
                f"decode_budget={self.decode_budget} tokens per layer cannot hold the decode"
                f" window of {window} tokens and {MIN_CHUNKS} chunks of {chunk_size} tokens; set"
                f" decode_budget to at least {min_budget}, or choose a method that keeps single"
                " tokens, such as streamingllm"
            )


def min_decode_budget(window: int, chunk_size: int) -> int:
    """Return the smallest decode budget in tokens per layer.

    Args:
        window: decode window in tokens.
        chunk_size: tokens per chunk that the method keeps; 0 if it keeps single tokens.
    """
    return window + max(MIN_CHUNKS * chunk_size, 1)
