"""The compression settings in a vLLM configuration: ``additional_config["kvcompress"]``.

vLLM includes that mapping in the key of its compile cache and sends it to every process.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.settings.config import KEYS, CompressionConfig

_KEY = "kvcompress"
_MIN_SIMILARITY = 0.82
"""Least `difflib` ratio (0 to 1) of a misspelling of ``kvcompress``; ``compressor`` is below."""
_SETTING_BY_LETTERS = {f"kv{name.replace('_', '')}": name for name in KEYS}
_parsed: dict[str, CompressionConfig] = {}
"""Parsed settings by their `repr`. Settings are frozen, so one parse per process is enough."""


def attach_settings(additional_config: Any, settings: CompressionConfig) -> dict[str, Any]:
    """Return a copy of `additional_config` with these settings added. Unset ones are left out.

    Raises:
        ConfigError: `additional_config` is neither None nor a mapping.
    """
    if additional_config is not None and not isinstance(additional_config, Mapping):
        raise ConfigError(
            "additional_config must be a JSON object, got"
            f" {type(additional_config).__name__}; write {{}} or leave it out"
        )
    return {**(additional_config or {}), _KEY: settings.to_additional_config()}


def has_settings(additional_config: Any) -> bool:
    """Return whether a vLLM configuration mentions compression, even to switch it off."""
    return isinstance(additional_config, Mapping) and _KEY in additional_config


def refuse_misspelt_settings(additional_config: Any) -> None:
    """Refuse a misspelt ``kvcompress`` key, and settings outside ``kvcompress``.

    Raises:
        ConfigError: a key resembles ``kvcompress``, or is a setting's name prefixed with ``kv_``.
    """
    if not isinstance(additional_config, Mapping):
        return
    for key, value in additional_config.items():
        if key == _KEY or not isinstance(key, str):
            continue
        letters = re.sub(r"[\W_]", "", key[:40].lower()).removeprefix("vllm")
        if "kvcomp" in letters or difflib.get_close_matches(letters, [_KEY], 1, _MIN_SIMILARITY):
            raise ConfigError(
                f"compression settings must be in additional_config[{_KEY!r}], got"
                f" {key[:40]!r}; did you mean {_KEY!r}?"
            )
        if letters == "additionalconfig" and has_settings(value):
            raise ConfigError(
                f"compression settings must be in additional_config[{_KEY!r}], got them one level"
                f" deeper, in {key[:40]!r}; remove that level"
            )
        name = _SETTING_BY_LETTERS.get(letters)
        if name is not None:
            raise ConfigError(
                f"compression settings must be in additional_config[{_KEY!r}], got"
                f" {key[:40]!r}; write {{{_KEY!r}: {{{name!r}: {value!r}}}}}"
            )


def raw_settings(additional_config: Any) -> Any:
    """Return the unchecked compression settings of a vLLM configuration, ``{}`` if it has none."""
    return additional_config[_KEY] if has_settings(additional_config) else {}


def parsed_settings(additional_config: Any) -> CompressionConfig:
    """Return the compression settings of a vLLM configuration. The default is off.

    Raises:
        ConfigError: a setting is invalid.
    """
    raw = raw_settings(additional_config)
    key = repr(raw)
    if key not in _parsed:
        _parsed[key] = CompressionConfig.parse(raw)
    return _parsed[key]


def active_settings(additional_config: Any) -> CompressionConfig | None:
    """Return the compression settings of a vLLM configuration, None if nothing is compressed.

    Raises:
        ConfigError: a setting is invalid.
    """
    settings = parsed_settings(additional_config)
    return settings if settings.active else None
