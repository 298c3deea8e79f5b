"""Helpers that parse settings as a user writes them, and check error messages."""

import pytest

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.settings.config import CompressionConfig


def parse(compress="cake", **more):
    return CompressionConfig.parse({"compress": compress, **more})


def refused(*words, raw=None, **settings_):
    """Return the error message of wrong settings; it must be one line and contain every word."""
    with pytest.raises(ConfigError) as caught:
        CompressionConfig.parse(raw if raw is not None else {"compress": "cake", **settings_})
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message
