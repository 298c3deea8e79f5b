"""What of a prompt is kept in any case: what an operator may set, and what a request may ask for.

By words for the parts of a chat, which the server finds in what its template makes of them, or by
the numbers of tokens.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, field_validator

from vllm_kvcompress.errors import ConfigError, OverrideError
from vllm_kvcompress.methods.base import closest

PROTECT = "kv_protect"
SYSTEM, TOOLS, QUESTION = "system", "tools", "question"
WORDS = (SYSTEM, TOOLS, QUESTION)
NONE = "none"
_DIGITS = 12
"""Of a token's number, at most."""
_RULE = (
    f"must be some of {', '.join(WORDS)} separated by commas, spans of tokens such as 0:200, or"
    f" {NONE}"
)


class ProtectSettings(BaseModel):
    """The settings of `CompressionConfig` that concern what is protected."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    protect: tuple[str, ...] = ()
    """Parts of a chat that every layer keeps: `system` (and developer) messages, `tools`, and the
    `question`, which is the last message of the user, or its first and last 256 tokens."""

    @property
    def full_share(self) -> bool:
        """Whether the other tokens keep all of their share of the budget: the operator protects.

        Where a request alone does, they keep at least half of the budget.
        """
        return bool(self.protect)

    @field_validator("protect", mode="before")
    @classmethod
    def _words(cls, value: Any) -> tuple[str, ...]:
        words, spans = parse_protect("protect", value)
        if spans:
            raise ConfigError(
                f"protect must be some of {', '.join(WORDS)}, or {NONE}, got {short(value)}; only"
                f" a request knows its tokens, and names them in {PROTECT}"
            )
        return words


class Protection(NamedTuple):
    """What of one request's prompt is protected.

    Args:
        words: parts of its chat, in the order of WORDS.
        spans: first token of each span and the one behind its last, as they were asked for.
        granted: of `words`, those that the operator protects; the request asks for the others.
        named: words that the request names itself, each of which must be found.
    """

    words: tuple[str, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    granted: tuple[str, ...] = ()
    named: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.words or self.spans)


def parse_protect(key: str, value: Any) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    """Words in the order of WORDS, and spans, from a text or a list of texts and pairs.

    Raises:
        ConfigError: a word is unknown, a span is no pair of whole numbers, or `none` has company.
    """
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ConfigError(f"{key} {_RULE}, got {short(value)}")
    words, spans = set[str](), list[tuple[int, int]]()
    for item in items:
        text = item.strip() if isinstance(item, str) else ""
        if text in (*WORDS, NONE):
            words.add(text)
        elif (span := _span(item)) is not None:
            spans.append(span)
        elif text and ":" not in text:
            near = closest(text, dict.fromkeys((*WORDS, NONE)))
            raise ConfigError(f"{key} {_RULE}; {text[:40]!r} is unknown{near}")
        else:
            raise ConfigError(f"{key} {_RULE}, got {short(item)}")
    if NONE in words and (len(words) > 1 or spans):
        raise ConfigError(f"{key} {_RULE}; {NONE} stands alone, got {short(value)}")
    return tuple(word for word in WORDS if word in words), tuple(spans)


def short(value: Any) -> str:
    """What was given, as far as a sentence has room for it."""
    try:
        text = repr(value)
    except ValueError:  # of a number that Python writes no text of
        text = "a number with too many digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _span(item: Any) -> tuple[int, int] | None:
    """Two whole numbers, as a pair or as a text with a colon between; None for anything else."""
    if isinstance(item, str):
        before, colon, behind = item.partition(":")
        both = before.strip(), behind.strip()
        if not colon or not all(part.isascii() and part.isdigit() for part in both):
            return None
        if max(map(len, both)) > _DIGITS:
            return None
        return int(both[0]), int(both[1])
    if isinstance(item, list | tuple) and len(item) == 2:
        first, last = item
        if all(type(at) is int and abs(at) < 10**_DIGITS for at in (first, last)):
            return first, last
    return None


def protection_of(
    protect: tuple[str, ...], extra_args: Mapping[str, Any] | None, *, free: bool
) -> Protection:
    """What of one request's prompt is protected.

    Args:
        protect: the words of the engine.
        extra_args: the request's, with ``kv_protect`` if it asks for anything.
        free: whether requests may take off what the operator protects.

    Raises:
        OverrideError: it asks for something that does not exist, or that it may not have.
    """
    if not extra_args or PROTECT not in extra_args:
        return Protection(words=protect, granted=protect)
    try:
        words, spans = parse_protect(PROTECT, extra_args[PROTECT])
    except ConfigError as e:
        raise OverrideError("invalid", str(e)) from None
    if free:
        kept = tuple(word for word in protect if word in words)
        return Protection(words=words, spans=spans, granted=kept, named=words)
    if not words and not spans and protect:
        raise OverrideError(
            "not_allowed",
            f"this server protects {', '.join(protect)}, and does not let requests take that off;"
            f" remove {PROTECT}, or ask the operator for --kv-allow-override",
        )
    both = tuple(word for word in WORDS if word in {*words, *protect})
    return Protection(words=both, spans=spans, granted=protect, named=words)
