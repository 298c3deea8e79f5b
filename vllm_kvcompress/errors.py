"""Exceptions of this package.

KVCompressError
+ ConfigError      a setting is wrong; the message names the key and the fix
  + OverrideError  a request's setting is wrong or not allowed
+ VllmHookError    the installed vLLM is not supported; nothing was changed
"""

from collections.abc import Iterator
from typing import Any

_MAX_MESSAGE = 2000
"""Characters of an `OverrideError`, which goes into a response and into the log."""


def shorten(value: Any, limit: int = 60) -> str:
    """Return the `repr` of a value on one line, cut after about `limit` characters.

    Cut text keeps its closing quote: ``'aaa'...``. The work does not grow with the value.
    """
    if isinstance(value, str):
        cut = value[:limit]
        while len(repr(cut)) > limit:
            cut = cut[:-1]
        return repr(cut) if len(cut) == len(value) else f"{cut!r}..."
    text = ""
    for piece in _repr_pieces(value, limit):
        text += piece
        if len(text) > limit:
            return f"{_printable(text[: limit - 3])}..."
    return _printable(text)


def quoted_id(request_id: str) -> str:
    """Return a request's id for the log: clients can put any text into it."""
    return shorten(request_id, 128)


def _repr_pieces(value: Any, limit: int) -> Iterator[str]:
    """Yield the `repr` of a value in pieces, so that a caller can stop in a large one."""
    if type(value) is dict:
        yield "{"
        for index, (key, inner) in enumerate(value.items()):
            yield ", " if index else ""
            yield from _repr_pieces(key, limit)
            yield ": "
            yield from _repr_pieces(inner, limit)
        yield "}"
    elif type(value) is list:
        yield "["
        for index, inner in enumerate(value):
            yield ", " if index else ""
            yield from _repr_pieces(inner, limit)
        yield "]"
    elif type(value) in (str, bytes):
        yield repr(value[: limit + 1])
    else:
        try:
            yield repr(value)
        except ValueError:  # an int with more digits than Python converts
            yield "a number with too many digits"


def _printable(text: str) -> str:
    """Return text with its control characters and other unprintable ones escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class KVCompressError(Exception):
    """Base class of all exceptions of this package."""


class ConfigError(KVCompressError, ValueError):
    """A setting is unknown, out of range, or in conflict with another setting."""


class OverrideError(ConfigError):
    """A request's compression settings are unknown, invalid or not allowed on this server.

    Args:
        reason: "not_allowed", "out_of_bounds", "invalid" or "too_long".
        message: one sentence with the rule, the value received and the fix. Values that a client
            sent must be shortened; a long message is cut, and control characters are escaped.
        parameter: field of the request that is wrong.
    """

    def __init__(self, reason: str, message: str, parameter: str = "vllm_xargs") -> None:
        super().__init__(_printable(message[:_MAX_MESSAGE]))
        self.reason = reason
        self.parameter = parameter

    @classmethod
    def invalid(cls, message: str) -> "OverrideError":
        """Return the error for a value that is wrong on any server."""
        return cls("invalid", message)

    @classmethod
    def not_allowed(cls, message: str, parameter: str = "vllm_xargs") -> "OverrideError":
        """Return the error for a setting that this server does not let requests choose."""
        return cls("not_allowed", message, parameter)

    @classmethod
    def out_of_bounds(cls, message: str) -> "OverrideError":
        """Return the error for a value above or below what this server allows."""
        return cls("out_of_bounds", message)


class VllmHookError(KVCompressError, RuntimeError):
    """A vLLM name that this package uses has changed, is missing or cannot be imported.

    Args:
        problem: what this package needs and what it found.
        fix: the fix; empty if `problem` includes it.
    """

    def __init__(self, problem: str, fix: str = "") -> None:
        super().__init__(f"{problem}; {fix}" if fix else problem)
        self.problem, self.fix = problem, fix
