"""The compression settings in a vLLM configuration, as ``additional_config["kvcompress"]``.

vLLM hashes that mapping into the key of its compile cache, and takes it to every process.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.settings.config import CompressionConfig

_KEY = "kvcompress"
_RESEMBLES = 0.82
"""How alike a misspelt key must be, of 1; ``compressor`` is not."""
_SETTINGS_BY_LETTERS = {
    f"kv{name.replace('_', '')}": name for name in CompressionConfig.model_fields
}
_parsed: dict[str, CompressionConfig] = {}
"""Settings are frozen: a process parses the same ones once, however many places ask."""


def attach_settings(additional_config: Any, settings: CompressionConfig) -> dict[str, Any]:
    """A vLLM configuration's mapping with these settings; what nobody gave is left out."""
    return {**(additional_config or {}), _KEY: settings.to_additional_config()}


def has_settings(additional_config: Any) -> bool:
    """Whether a vLLM configuration says anything of compression, be it that it is off."""
    return isinstance(additional_config, Mapping) and _KEY in additional_config


def refuse_misspelt_settings(additional_config: Any) -> None:
    """Refuse settings that stand beside ``kvcompress``, or under a misspelt name of it.

    Raises:
        ConfigError: a key resembles ``kvcompress``, or is a setting with ``kv_`` before it.
    """
    if not isinstance(additional_config, Mapping):
        return
    for key, value in additional_config.items():
        if key == _KEY or not isinstance(key, str):
            continue
        letters = re.sub(r"[\W_]", "", key[:40].lower()).removeprefix("vllm")
        if difflib.get_close_matches(letters, [_KEY], 1, _RESEMBLES):
            raise ConfigError(
                f"additional_config must have the settings of compression under {_KEY!r}, got"
                f" {key[:40]!r}; did you mean {_KEY!r}?"
            )
        name = _SETTINGS_BY_LETTERS.get(letters)
        if name is not None:
            raise ConfigError(
                f"additional_config must have the settings of compression under {_KEY!r}, got"
                f" {key[:40]!r}; write {{{_KEY!r}: {{{name!r}: {value!r}}}}}"
            )


def written_settings(additional_config: Any) -> Any:
    """What a vLLM configuration says of compression, as it was written; nothing is checked."""
    return additional_config[_KEY] if has_settings(additional_config) else {}


def settings_given(additional_config: Any) -> CompressionConfig:
    """The compression settings of a vLLM configuration; the default, which is off, without any.

    Raises:
        ConfigError: the settings are wrong.
    """
    written = written_settings(additional_config)
    key = repr(written)
    if key not in _parsed:
        _parsed[key] = CompressionConfig.parse(written)
    return _parsed[key]


def active_settings(additional_config: Any) -> CompressionConfig | None:
    """The compression settings of a vLLM configuration; None when nothing can be compressed.

    Raises:
        ConfigError: the settings are wrong.
    """
    settings = settings_given(additional_config)
    return settings if settings.active else None
