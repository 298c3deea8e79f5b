"""The keys that a request may set, and the refusal of misspelt and misplaced ones."""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.settings.protection import PROTECT, short

COMPRESS, BUDGET, ALIAS = "kv_compress", "kv_budget", "kv_alias"
DECODE_BUDGET, LOOKAHEAD = "kv_decode_budget", "kv_lookahead"
BY_ROLE = "kv_by_role"
CHOICES = (COMPRESS, BUDGET, DECODE_BUDGET, LOOKAHEAD)
KEYS = (*CHOICES, PROTECT, BY_ROLE)
XARGS = "vllm_xargs"
_TRANSFER = "kv_transfer_params"
OF_VLLM = frozenset({_TRANSFER, "kv_cache_report_mode"})
"""Keys of vLLM that begin as ours do."""
SPANS, ROLES = "kvcompress_spans", "kvcompress_roles"
"""Extra arguments that the API server adds to a request for the scheduler."""
_EXACT = frozenset({*KEYS, ALIAS, SPANS, ROLES, *OF_VLLM})
_LONGEST = 24
"""Characters of an unknown key that are compared with our keys."""
_BEGINS_AS_OURS = re.compile(r"kv[_-]", re.IGNORECASE)
_XARGS_MISSPELT = ("vllmxargs", "vllmextraargs", "xargs", "extraargs")
_DEEPEST = 4
"""Objects within objects that are searched for our keys."""


def _letters(key: str) -> str:
    """Return the key in lower case, without what separates its words."""
    return re.sub(r"[\W_]", "", key[:_LONGEST].lower())


_BY_LETTERS = {_letters(key.removeprefix("kv_")): key for key in KEYS} | {
    _letters(key): key for key in (*KEYS, ALIAS, *OF_VLLM)
}
"""The key that is meant by its letters, with or without the leading ``kv``."""


def _nearest(key: str) -> str | None:
    """Return the known key that a misspelt one most resembles; None if no key is near."""
    letters = _letters(key)
    if letters in _BY_LETTERS:
        return _BY_LETTERS[letters]
    if not letters.startswith("kv"):
        return None
    known = {_letters(name): name for name in (*KEYS, *OF_VLLM)}
    near = difflib.get_close_matches(letters, known, 1, 0.8)
    return known[near[0]] if near else None


def refuse_unknown(extra_args: Mapping[str, Any]) -> None:
    """Refuse extra arguments that look like settings of compression and are none.

    Args:
        extra_args: the request's ``vllm_xargs``, or ``SamplingParams.extra_args``.

    Raises:
        OverrideError: a key is misspelt, begins with ``kv_`` and is unknown, or holds an object
            with settings.
    """
    for key, value in extra_args.items():
        if key in _EXACT or not isinstance(key, str):
            continue
        near = _nearest(key)
        if near is not None or _BEGINS_AS_OURS.match(key):
            hint = f"did you mean {near!r}?" if near else f"a request may set {list(KEYS)}"
            raise OverrideError("invalid", f"{key[:_LONGEST]!r} is unknown; {hint}")
        if found := next(_settings_in(value), None):
            raise OverrideError(
                "invalid",
                f"{found!r} must stand beside the other extra arguments, got it inside"
                f" {key[:_LONGEST]!r}; move it out of there",
            )


def misplaced(body: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Return the settings that vLLM would ignore, by our own keys.

    Args:
        body: a request's body, or one object of it.
        fields: the keys that vLLM reads there.
    """
    return {
        key: value
        for key, value in body.items()
        if key in KEYS and key not in fields and isinstance(key, str)
    }


def refuse_misplaced(body: Mapping[str, Any], fields: Collection[str], place: str = XARGS) -> None:
    """Refuse settings of compression outside the object that vLLM hands on to us.

    Args:
        body: a request's body, or one object of it.
        fields: the keys that vLLM reads there. All others are ignored by vLLM.
        place: the object that settings must be in.

    Raises:
        OverrideError: a key is ours, begins with ``kv_``, or holds an object with settings.
    """
    for key, value in body.items():
        if key in fields or key == _TRANSFER or not isinstance(key, str):
            continue
        shown = key[:_LONGEST]
        if key in KEYS:
            raise OverrideError(
                "invalid",
                f"{key!r} ({short(value)}) must be inside {place}, got it outside, where vLLM"
                f" ignores it; send {place} with {key!r} in it",
            )
        near = _nearest(key) if _letters(key).startswith("kv") else None
        if near is not None or _BEGINS_AS_OURS.match(key):
            raise OverrideError(
                "invalid", f"{shown!r} is not a field of the request; {_hint(near, place)}"
            )
        _refuse_object(shown, value, place)


def _hint(near: str | None, place: str) -> str:
    if near is None:
        return f"inside {place} a request may set {list(KEYS)}"
    if near == _TRANSFER:
        return f"did you mean {near!r}?"
    return f"did you mean {near!r} inside {place}?"


def _refuse_object(key: str, value: Any, place: str) -> None:
    """Refuse an object under a key that vLLM ignores, if it holds settings."""
    if not isinstance(value, Mapping):
        return
    found = next(_settings_in(value), None)
    letters = _letters(key)
    if letters == "extrabody":
        if found is not None or any(_is_xargs(inner) for inner in value):
            raise OverrideError(
                "invalid",
                f"{key!r} is an argument of the openai client and not a field of the request, got"
                f" {short(value)}; send its keys at the top level, and settings such as"
                f" {BUDGET!r} inside {place}",
            )
        return
    if _is_xargs(key) and found is None:
        found = next((inner for inner in value if isinstance(inner, str) and _is_near(inner)), None)
    if found is not None:
        raise OverrideError(
            "invalid",
            f"{key!r} is not a field of the request; did you mean {place}? It holds"
            f" {found[:_LONGEST]!r}, which vLLM ignores there",
        )


def _is_near(key: str) -> bool:
    return _nearest(key) is not None or bool(_BEGINS_AS_OURS.match(key))


def _is_xargs(key: Any) -> bool:
    """Whether a key is ``vllm_xargs``, or resembles it."""
    return isinstance(key, str) and bool(
        difflib.get_close_matches(_letters(key), _XARGS_MISSPELT, 1, 0.8)
    )


def _settings_in(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield our keys in an object and in the objects within it."""
    if not isinstance(value, Mapping) or depth == _DEEPEST:
        return
    for key, inner in value.items():
        if key in KEYS:
            yield key
        yield from _settings_in(inner, depth + 1)
