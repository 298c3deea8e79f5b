"""The keys that a request may set, and errors for misspelt and misplaced ones."""

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from vllm_kvcompress.errors import OverrideError, shorten
from vllm_kvcompress.settings.protection import PROTECT

COMPRESS, BUDGET, ALIAS = "kv_compress", "kv_budget", "kv_alias"
DECODE_BUDGET, LOOKAHEAD = "kv_decode_budget", "kv_lookahead"
PACKED_DTYPE = "kv_packed_dtype"


class RequestKey(NamedTuple):
    """A key that a request may set.

    Args:
        name: the key.
        needs: flags that the server needs, and `help`: the key's meaning, both for docs/flags.md.
        smallest: smallest whole number that it takes and its unit, if it takes a number.
    """

    name: str
    needs: str
    help: str
    smallest: str = "0"

    @property
    def minimum(self) -> int:
        """Return the number of `smallest`."""
        return int(self.smallest.split()[0])


_OVERRIDE, _TOKENS = "`--kv-allow-override`", "2 tokens per layer"
_KEYS = (
    RequestKey(COMPRESS, _OVERRIDE, "`off`, or a method that the server allows."),
    RequestKey(
        BUDGET,
        _OVERRIDE,
        "A budget within `--kv-budget-bounds`, written as in `--kv-budget`.",
        _TOKENS,
    ),
    RequestKey(
        PACKED_DTYPE,
        _OVERRIDE,
        "`auto`; or `k4v3`, if `--kv-packed-dtype`, an allowed method or an alias of the server"
        " uses it.",
    ),
    RequestKey(
        DECODE_BUDGET,
        f"{_OVERRIDE}, `--kv-decode-budget`",
        f"At least {_TOKENS}, and at most the server's decode budget.",
        _TOKENS,
    ),
    RequestKey(
        LOOKAHEAD,
        _OVERRIDE,
        "Output tokens, at most the look-ahead that the method has on this server.",
        "0 output tokens",
    ),
    RequestKey(
        PROTECT,
        "",
        "`system`, `tools`, `question` or spans of tokens such as `0:200`, separated by commas; or"
        " `none`. Without `--kv-allow-override`, at most about half of the budget.",
    ),
    RequestKey(
        ALIAS,
        "`--kv-alias`",
        "One of the server's aliases. Only offline; over HTTP, the request's `model` names it.",
    ),
)
REQUEST_KEYS = {key.name: key for key in _KEYS}
KEYS = tuple(name for name in REQUEST_KEYS if name != ALIAS)
"""The keys that a client may set over HTTP."""
XARGS = "vllm_xargs"
_TRANSFER = "kv_transfer_params"
VLLM_KEYS = frozenset({_TRANSFER, "kv_cache_report_mode"})
"""Keys of vLLM that also begin with ``kv_``."""
OPTIONS = "kvcompress_options"
"""Extra argument in which the checked options of a request travel. Clients cannot set it."""
_EXACT = frozenset({*KEYS, ALIAS, OPTIONS, *VLLM_KEYS})
_MAX_SHOWN = 24
"""Characters of an unknown key that are compared and shown."""
_KV_PREFIX = re.compile(r"kv[_-]", re.IGNORECASE)
_XARGS_NAMES = ("xargs", "extraargs")
_SIMILAR_XARGS_NAMES = ("vllmxargs", "vllmextraargs")
"""Names, as letters, that a misspelt ``vllm_xargs`` resembles. Shorter ones must match exactly,
because they resemble unrelated keys."""
_MAX_DEPTH = 4
"""Levels of nested objects that are searched for our keys."""
_MAX_SEARCHED, _MAX_COMPARED = 1000, 100


def _letters(key: str) -> str:
    """Return the key in lower case, without separators between its words."""
    return re.sub(r"[\W_]", "", key[:_MAX_SHOWN].lower())


_BY_LETTERS = {_letters(key.removeprefix("kv_")): key for key in KEYS} | {
    _letters(key): key for key in (*KEYS, ALIAS, *VLLM_KEYS)
}
"""Key by its letters, with or without the leading ``kv``."""


class _Search:
    """Looks for our keys in one request, in a time that does not grow with the request.

    Only the first `_MAX_SEARCHED` keys and list items are read. Of these keys, only the first
    `_MAX_COMPARED` that may be misspelt are compared with known ones, because difflib is slow.
    """

    def __init__(self) -> None:
        self._unread, self._uncompared = _MAX_SEARCHED, _MAX_COMPARED

    def entries(self, found: Any) -> Iterator[tuple[str, Any]]:
        """Yield the keys of an object and their values, or "" and each item of a list."""
        pairs: Iterable[tuple[Any, Any]] = ()
        if isinstance(found, Mapping):
            pairs = found.items()
        elif isinstance(found, list):
            pairs = (("", item) for item in found)
        for key, value in pairs:
            if self._unread <= 0:
                return
            self._unread -= 1
            if isinstance(key, str):
                yield key, value

    def nearest(self, key: str) -> str | None:
        """Return the known key that is most similar to a misspelt one; None if none is similar."""
        letters = _letters(key)
        if letters in _BY_LETTERS:
            return _BY_LETTERS[letters]
        if not letters.startswith("kv"):
            return None
        known = {_letters(name): name for name in (*KEYS, *VLLM_KEYS)}
        near = self._similar(letters, known)
        return known[near[0]] if near else None

    def is_xargs(self, key: str) -> bool:
        """Return whether a key is ``vllm_xargs`` or a misspelling of it."""
        letters = _letters(key)
        return letters in _XARGS_NAMES or bool(self._similar(letters, _SIMILAR_XARGS_NAMES))

    def settings_in(self, value: Any, depth: int = 0) -> Iterator[str]:
        """Yield our keys, including misspelt ones, in an object and its objects and lists."""
        if depth == _MAX_DEPTH:
            return
        for key, inner in self.entries(value):
            if key in KEYS or (_letters(key).startswith("kv") and self.nearest(key)):
                yield key
            yield from self.settings_in(inner, depth + 1)

    def _similar(self, letters: str, known: Collection[str]) -> list[str]:
        if not self._uncompared:
            return []
        self._uncompared -= 1
        return difflib.get_close_matches(letters, known, 1, 0.8)


def refuse_unknown(extra_args: Mapping[str, Any]) -> None:
    """Refuse extra arguments that look like compression settings but are not.

    Args:
        extra_args: ``vllm_xargs`` of the request, or ``SamplingParams.extra_args``.

    Raises:
        OverrideError: a key is misspelt, is unknown and begins with ``kv_``, or holds an object
            with compression settings.
    """
    search = _Search()
    for key, value in search.entries(extra_args):
        if key in _EXACT:
            continue
        near = search.nearest(key)
        if near is not None or _KV_PREFIX.match(key):
            hint = f"did you mean {near!r}?" if near else f"a request may set {list(KEYS)}"
            raise OverrideError.invalid(f"{key[:_MAX_SHOWN]!r} is unknown; {hint}")
        if found := next(search.settings_in(value), None):
            raise OverrideError.invalid(
                f"{found[:_MAX_SHOWN]!r} must be a top-level extra argument, but is inside"
                f" {key[:_MAX_SHOWN]!r}; move it to the top level",
            )


def misplaced(body: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Return our keys and their values in a place where vLLM ignores them.

    Args:
        body: the request body, or an object in it.
        fields: keys that vLLM reads there.
    """
    return {key: body[key] for key in KEYS if key in body and key not in fields}


def refuse_misplaced(body: Mapping[str, Any], fields: Collection[str], place: str = XARGS) -> None:
    """Refuse compression settings that vLLM does not pass on to this plugin.

    Args:
        body: the request body, or an object in it.
        fields: keys that vLLM reads there; it ignores all others.
        place: object in which the settings belong.

    Raises:
        OverrideError: a key is ours, begins with ``kv_``, or holds an object with our keys.
    """
    if outside := misplaced(body, fields):
        key, value = next(iter(outside.items()))
        raise OverrideError.invalid(
            f"{key!r} ({shorten(value)}) must be inside {place}, but is outside, where vLLM"
            f" ignores it; send {place} with {key!r} in it",
        )
    search = _Search()
    for key, value in search.entries(body):
        if key in fields or key == _TRANSFER:
            continue
        shown = key[:_MAX_SHOWN]
        near = search.nearest(key) if _letters(key).startswith("kv") else None
        if near is not None or _KV_PREFIX.match(key):
            raise OverrideError.invalid(
                f"{shown!r} is not a field of the request; {_hint(near, place)}"
            )
        _refuse_object(search, shown, value, place)


def _hint(near: str | None, place: str) -> str:
    if near is None:
        return f"inside {place} a request may set {list(KEYS)}"
    if near == ALIAS:
        return "name the alias in the request's `model`"
    if near == _TRANSFER:
        return f"did you mean {near!r}?"
    return f"did you mean {near!r} inside {place}?"


def _refuse_object(search: _Search, key: str, value: Any, place: str) -> None:
    """Refuse ``extra_body``, and objects with compression settings under a key vLLM ignores."""
    if not isinstance(value, Mapping | list):
        return
    if _letters(key) == "extrabody":
        raise OverrideError.invalid(
            f"{key!r} is an argument of the openai client and not a field of the request, got"
            f" {shorten(value)}; send its keys at the top level, and settings such as"
            f" {BUDGET!r} inside {place}",
        )
    found = next(search.settings_in(value), None)
    if found is None and isinstance(value, Mapping) and search.is_xargs(key):
        ours = (x for x, _ in search.entries(value) if search.nearest(x) or _KV_PREFIX.match(x))
        found = next(ours, None)
    if found is not None:
        raise OverrideError.invalid(
            f"{key!r} is not a field of the request; did you mean {place}? It holds"
            f" {found[:_MAX_SHOWN]!r}, which vLLM ignores there",
        )
