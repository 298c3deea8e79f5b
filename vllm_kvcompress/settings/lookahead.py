"""Settings of the look-ahead: compression waits for output tokens, whose queries score the prompt.

This is the look-ahead of arXiv:2505.20334, not vLLM's speculative `num_lookahead_tokens`.
"""

import functools
import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import choose
from vllm_kvcompress.settings.declared import Parsed, SettingsGroup, declare, flag_of
from vllm_kvcompress.settings.parsing import TokensOrUnset

logger = logging.getLogger("vllm.kvcompress")

MAX_LOOKAHEAD = 1024
OnPressure = Literal["preemption", "waiting", "never"]
ON_PRESSURE: tuple[OnPressure, ...] = ("preemption", "waiting", "never")
RENAMED_KEYS: Mapping[str, str] = {"lookahead_yields": "lookahead_on_pressure"}
"""Old spelling of a key -> the key. Old spellings are accepted for one release."""


def _parse_on_pressure(value: Any) -> str:
    return choose("lookahead_on_pressure", {word: word for word in ON_PRESSURE}, str(value))


class LookaheadSettings(SettingsGroup):
    """`CompressionConfig.lookahead`: the output tokens that compression waits for."""

    tokens: TokensOrUnset = declare(
        None, "TOKENS", key="lookahead", unit="output tokens", ge=0, le=MAX_LOOKAHEAD
    )
    """Compression waits for this many output tokens, whose queries then score the prompt. 0
    compresses when the prefill ends."""
    on_pressure: Annotated[OnPressure, Parsed(_parse_on_pressure)] = declare(
        "preemption", "WHEN", key="lookahead_on_pressure"
    )
    """When a short KV pool ends look-aheads early: before a request would be preempted
    (preemption), also to admit a waiting request (waiting), or never."""
    slots: int | None = declare(None, key="lookahead_slots", unit="requests", ge=1, strict=True)
    """Requests that may be in their look-ahead at once. None is as many as run, within 1 GiB of
    queries per GPU."""


def current_names(raw: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return settings with every old key replaced by its current name.

    Raises:
        ConfigError: an old key and its current name are both set.
    """
    for old, new in RENAMED_KEYS.items():
        if old not in raw:
            continue
        if new in raw:
            raise ConfigError(
                f"{new} and its old name {old} are both set; remove {old} (or {flag_of(old)})"
            )
        _warn_once(old, new)
        raw = {new if key == old else key: value for key, value in raw.items()}
    return raw


@functools.cache
def _warn_once(old: str, new: str) -> None:
    logger.warning(
        "%s (%s) is deprecated and will be removed in the next release; use %s (%s)",
        flag_of(old),
        old,
        flag_of(new),
        new,
    )
