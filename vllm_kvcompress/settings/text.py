"""Numbers and JSON as users write them, read more strictly than Python does."""

import json
from typing import Any

from vllm_kvcompress.errors import ConfigError

PLAIN_DIGITS = "must be written with the digits 0 to 9, without underscores"


def has_plain_digits(text: str) -> bool:
    """Whether a number's text has no underscores and no digits of other scripts.

    Python reads ``1_000`` and Arabic-Indic digits as numbers. They are typing errors here: other
    tools refuse them, or read something else.
    """
    return text.isascii() and "_" not in text


def refuse_other_digits(value: Any) -> Any:
    """Return the value; raise ConfigError for a text that only Python reads as a number."""
    if isinstance(value, str) and not has_plain_digits(value):
        raise ConfigError(f"{PLAIN_DIGITS}, got {value!r}")
    return value


class RepeatedKeyError(ValueError):
    """A JSON object has a key twice, and every reader but the last value's loses one."""


def parse_json(text: str) -> Any:
    """Parse JSON whose objects have each key once.

    Raises:
        RepeatedKeyError: an object has a key twice.
        json.JSONDecodeError: the text is no JSON.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise RepeatedKeyError(
                f"the key {key[:40]!r} is given twice in one object; remove one of them"
            )
        found[key] = value
    return found
