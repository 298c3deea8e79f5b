"""Protected prompt tokens: the operator's setting and the request's ``kv_protect``.

Both can name parts of a chat, which the server locates in the rendered template. A request can also
give token spans.
"""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from vllm_kvcompress.errors import ConfigError, OverrideError, shorten
from vllm_kvcompress.methods.base import closest
from vllm_kvcompress.settings.declared import DEPLOY_DEFAULT, Parsed, SettingsGroup, declare

PROTECT = "kv_protect"
SYSTEM, TOOLS, QUESTION = "system", "tools", "question"
WORDS = (SYSTEM, TOOLS, QUESTION)
NONE = "none"
_DIGITS = 12
"""Maximum digits of a token index."""
_MAX_PARTS, _MAX_LENGTH = 256, 64
"""Maximum words and spans of one request, and characters of each."""
_RULE = (
    f"must be one or more of {', '.join(WORDS)} separated by commas, token spans such as 0:200, or"
    f" {NONE}"
)


def _parse_words(value: Any) -> tuple[str, ...]:
    words, spans = parse_protect("protect", value)
    if spans:
        raise ConfigError(
            f"protect must be one or more of {', '.join(WORDS)}, or {NONE}, got"
            f" {shorten(value)}; only a request can give token spans, in {PROTECT}"
        )
    return words


class ProtectSettings(SettingsGroup):
    """`CompressionConfig.protection`: what the operator protects."""

    words: Annotated[tuple[str, ...], Parsed(_parse_words)] = declare(
        (), "PARTS", key="protect", deployed=DEPLOY_DEFAULT
    )
    """Parts of a chat that every layer keeps: system, tools, question, or several of them separated
    by commas. With none, no part is protected."""

    @property
    def full_share(self) -> bool:
        """Return whether unprotected tokens keep their full share of the budget.

        This holds if the operator protects parts. If only a request does, unprotected tokens get at
        least half of the budget.
        """
        return bool(self.words)


class Protection(NamedTuple):
    """Protected parts and spans of one request's prompt.

    Args:
        words: parts of the chat, in the order of WORDS.
        spans: token spans as (start, end), end exclusive, as the request gave them.
        granted: those of `words` that the operator protects; the request adds the others.
        named: words in the request itself, each of which must be found in the prompt.
    """

    words: tuple[str, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    granted: tuple[str, ...] = ()
    named: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.words or self.spans)


def parse_protect(key: str, value: Any) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    """Parse text, or a list of texts and pairs, into words in the order of WORDS and token spans.

    Raises:
        ConfigError: a word is unknown, a span is not a pair of whole numbers, or `none` is combined
            with something else.
    """
    if isinstance(value, str) and len(value) > _MAX_PARTS * _MAX_LENGTH:
        raise ConfigError(f"{key} {_RULE}, got {len(value)} characters: {shorten(value)}")
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ConfigError(f"{key} {_RULE}, got {shorten(value)}")
    if len(items) > _MAX_PARTS:
        raise ConfigError(f"{key} {_RULE}, at most {_MAX_PARTS} in all, got {len(items)}")
    words, spans = set[str](), list[tuple[int, int]]()
    for item in items:
        if isinstance(item, str) and len(item) > _MAX_LENGTH:
            raise ConfigError(f"{key} {_RULE}, got {shorten(item)}")
        text = item.strip() if isinstance(item, str) else ""
        if text in (*WORDS, NONE):
            words.add(text)
        elif (span := _span(item)) is not None:
            spans.append(span)
        elif text and ":" not in text:
            hint = closest(text, dict.fromkeys((*WORDS, NONE)))
            raise ConfigError(f"{key} {_RULE}; {shorten(text)} is unknown{hint}")
        else:
            raise ConfigError(f"{key} {_RULE}, got {shorten(item)}")
    if NONE in words and (len(words) > 1 or spans):
        raise ConfigError(f"{key} {_RULE}; {NONE} cannot be combined, got {shorten(value)}")
    return tuple(word for word in WORDS if word in words), tuple(spans)


def _span(item: Any) -> tuple[int, int] | None:
    """Return a pair, or text with a colon, as two whole numbers; None for anything else."""
    if isinstance(item, str):
        before, colon, behind = item.partition(":")
        bounds = before.strip(), behind.strip()
        if not colon or not all(bound.isascii() and bound.isdigit() for bound in bounds):
            return None
        if max(map(len, bounds)) > _DIGITS:
            return None
        return int(bounds[0]), int(bounds[1])
    if isinstance(item, list | tuple) and len(item) == 2:
        first, last = item
        if all(type(index) is int and abs(index) < 10**_DIGITS for index in (first, last)):
            return first, last
    return None


def protection_of(
    protect: tuple[str, ...], extra_args: Mapping[str, Any] | None, *, may_choose: bool
) -> Protection:
    """Return what one request protects in its prompt.

    Args:
        protect: words that the operator protects.
        extra_args: extra arguments of the request, optionally with ``kv_protect``.
        may_choose: whether requests may remove the operator's protection.

    Raises:
        OverrideError: ``kv_protect`` is wrong or not allowed.
    """
    if not extra_args or PROTECT not in extra_args:
        return Protection(words=protect, granted=protect)
    try:
        words, spans = parse_protect(PROTECT, extra_args[PROTECT])
    except ConfigError as e:
        raise OverrideError.invalid(str(e)) from None
    if may_choose:
        granted_words = tuple(word for word in protect if word in words)
        return Protection(words=words, spans=spans, granted=granted_words, named=words)
    if not words and not spans and protect:
        raise OverrideError.not_allowed(
            f"this server protects {', '.join(protect)}, and requests cannot change that; remove"
            f" {PROTECT}, or ask the operator for --kv-allow-override",
        )
    all_words = tuple(word for word in WORDS if word in {*words, *protect})
    return Protection(words=all_words, spans=spans, granted=protect, named=words)
