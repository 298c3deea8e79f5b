"""The compression settings in a vLLM configuration."""

from collections.abc import Mapping
from typing import Any

from vllm_kvcompress.config import CompressionConfig


def given_in(additional_config: Any) -> CompressionConfig:
    """The compression settings of a vLLM configuration; the default, which is off, without any.

    Raises:
        ConfigError: the settings are wrong.
    """
    if not isinstance(additional_config, Mapping) or "kvcompress" not in additional_config:
        return CompressionConfig()
    return CompressionConfig.parse(additional_config["kvcompress"])


def settings_in(additional_config: Any) -> CompressionConfig | None:
    """The compression settings of a vLLM configuration; None when nothing can be compressed.

    Raises:
        ConfigError: the settings are wrong.
    """
    settings = given_in(additional_config)
    return settings if settings.active else None
