"""Settings of the decode budget, which bounds the KV cache of a request while it generates."""

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.settings.declared import DEPLOY_DEFAULT, SettingsGroup, declare
from vllm_kvcompress.settings.parsing import Tokens, TokensOrNone, TokensOrUnset

MAX_DEFAULT_WINDOW = 8
"""Largest default decode window in tokens. A method with a smaller observation window uses that."""

MIN_CHUNKS = 2
"""Chunks that a decode budget must hold in addition to its window, for methods that keep chunks.
With one chunk, `cake-chunk` repeated one word endlessly."""


class DecodeSettings(SettingsGroup):
    """`CompressionConfig.decode`: the decode budget. Without one, outputs grow as in vLLM."""

    budget: TokensOrNone = declare(
        None, "TOKENS", key="decode_budget", unit="tokens per layer", ge=1, deployed=DEPLOY_DEFAULT
    )
    """Tokens per layer that a request may hold while it generates. With none, the KV cache of the
    output grows."""
    interval: Tokens = declare(128, "TOKENS", key="decode_interval", unit="output tokens", ge=1)
    """Output tokens between two compressions to --kv-decode-budget: a multiple of the KV block.
    With --kv-packed-dtype k4v3 and no decode budget: output tokens between two packings of the
    output in k4v3. No token is dropped, and the number is rounded up to whole packed pages."""
    window: TokensOrUnset = declare(None, key="decode_window", unit="output tokens", ge=0, le=128)
    """With a decode budget: the last output tokens, which are always kept and whose queries score
    the others. None is the observation window, at most 8."""

    def check(self, window: int, min_window: int, chunk_size: int, *, packs_groups: bool) -> None:
        """Check that the decode settings work together and with the method.

        Args:
            window: decode window in tokens.
            min_window: smallest decode window of the method, in tokens.
            chunk_size: tokens per chunk that the method keeps; 0 if it keeps single tokens.
            packs_groups: whether kept tokens are packed in k4v3. Then an interval without a budget
                packs output tokens too, and drops none.
        """
        if self.budget is None:
            names = {"interval": "--kv-decode-interval", "window": "decode_window"}
            for field, name in names.items():
                if field in self.model_fields_set and not (packs_groups and field == "interval"):
                    other = " or --kv-packed-dtype k4v3" if field == "interval" else ""
                    raise ConfigError(
                        f"{name} needs --kv-decode-budget{other}; set it, or remove {name}"
                    )
            return
        if window < min_window:
            raise ConfigError(
                f"decode_window must be at least {min_window} for this method, got {window}; set"
                f" decode_window to {max(min_window, MAX_DEFAULT_WINDOW)}"
            )
        if window > self.interval:
            raise ConfigError(
                f"decode_window must be at most decode_interval={self.interval}, got"
                f" {window}; set decode_window to {self.interval} or less, because the"
                " engine stores the queries of one interval"
            )
        if self.budget <= window:
            raise ConfigError(
                f"decode_budget={self.budget} tokens per layer cannot hold the decode"
                f" window of {window} tokens and one more; set decode_budget above {window}"
            )
        if self.budget < (min_budget := min_decode_budget(window, chunk_size)):
            raise ConfigError(
                f"decode_budget={self.budget} tokens per layer cannot hold the decode"
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
