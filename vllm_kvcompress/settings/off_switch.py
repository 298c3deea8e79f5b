"""The off switch: an environment variable that turns compression off, whatever the settings say.

A variable needs no change to arguments, works with any of them, and reaches every process that
reads settings. The result travels to all other processes in ``additional_config``.
"""

import logging
import os
from collections.abc import Container, Mapping
from typing import Any

from vllm_kvcompress.errors import ConfigError, shorten
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.parsing import Alias

logger = logging.getLogger("vllm.kvcompress")

OFF_SWITCH = "KVCOMPRESS_OFF"
_STATES = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("", "0", "false", "no", "off"), False
)


def is_switched_off() -> bool:
    """Return whether the operator has turned compression off.

    Raises:
        ConfigError: the variable has another value than those of `_STATES`.
    """
    value = os.environ.get(OFF_SWITCH, "")
    try:
        return _STATES[value.strip().lower()]
    except KeyError:
        raise ConfigError(
            f"{OFF_SWITCH} must be 1 or 0, got {shorten(value)}; set it to 1 to turn compression"
            " off, or unset it"
        ) from None


def without_compression(raw: Any, taken: Container[str] = ()) -> CompressionConfig:
    """Return settings that compress nothing, with the aliases and the usage reports of `raw`.

    Wrong settings are logged and not refused: nothing that concerns compression may stop a server
    that runs without it.

    Args:
        raw: settings as a user wrote them.
        taken: names of the model and of LoRA modules, which are served without an alias.
    """
    kept: dict[str, Any] = {"compress": "off"}
    try:
        settings = CompressionConfig.parse(raw)
        names, kept["usage"] = [alias.name for alias in settings.alias], settings.usage
    except ConfigError as e:
        logger.warning("%s is set, so wrong settings do not stop the server: %s", OFF_SWITCH, e)
        raw = raw if isinstance(raw, Mapping) else {}
        names, kept["usage"] = _alias_names(raw.get("alias")), raw.get("usage") is True
    if aliases := {name: "off" for name in names if name not in taken}:
        kept["alias"] = aliases
    return CompressionConfig.parse({key: value for key, value in kept.items() if value})


def _alias_names(raw: Any) -> list[str]:
    """Return the names of aliases whose meanings may be wrong."""
    raw = [raw] if isinstance(raw, str | Alias) else raw
    if isinstance(raw, list | tuple):
        raw = {str(each).rpartition("=")[0]: "" for each in raw if isinstance(each, str | Alias)}
    names = raw if isinstance(raw, Mapping) else {}
    return [name.strip() for name in names if isinstance(name, str) and name.strip()]
