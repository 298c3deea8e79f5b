"""Stricter parsing of numbers and JSON than Python's own."""

import json
from typing import Any

from vllm_kvcompress.errors import ConfigError, shorten

PLAIN_DIGITS = "must be written with the digits 0 to 9, without underscores"


def has_plain_digits(text: str) -> bool:
    """Return whether `text` has no underscores and no digits of other scripts.

    Python parses ``1_000`` and Arabic-Indic digits. Other tools refuse or misread them, so we treat
    them as typing errors.
    """
    return text.isascii() and "_" not in text


def refuse_other_digits(value: Any) -> Any:
    """Return `value`; raise ConfigError if it is text with digits that only Python accepts."""
    if isinstance(value, str) and not has_plain_digits(value):
        raise ConfigError(f"{PLAIN_DIGITS}, got {shorten(value)}")
    return value


class RepeatedKeyError(ValueError):
    """A JSON object has the same key twice. Most parsers silently drop the first value."""


def parse_json(text: str) -> Any:
    """Parse JSON, and refuse objects with repeated keys.

    Raises:
        RepeatedKeyError: an object has the same key twice.
        json.JSONDecodeError: `text` is not valid JSON.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise RepeatedKeyError(
                f"the key {shorten(key)} is given twice in one object; remove one of them"
            )
        found[key] = value
    return found
