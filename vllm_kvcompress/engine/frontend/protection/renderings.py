"""Find a part of a chat by comparing two renderings of it."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

PLACEHOLDER = "kvcompress0stands0here"
"""Text, or name of a tool, that no chat contains."""

Span = tuple[int, int]
Text = str | list[int]
"""Rendered chat: text, or token ids if the renderer has its own tokenizer."""


class PartError(ValueError):
    """A part of a chat cannot be found. The message is a clause that says why."""


@dataclass(frozen=True, slots=True)
class TokenOffsets:
    """Character offsets of the tokens of a prompt, both ascending.

    Args:
        starts: offset of the first character of each token.
        stops: offset after the last character of each token.
        first: index of the first token with characters; special tokens before it have none.
    """

    starts: list[int]
    stops: list[int]
    first: int

    @classmethod
    def of(cls, prompt: Mapping[str, Any], renderer: Any, tokenizing: Any) -> "TokenOffsets":
        """Return the offsets of a rendered prompt, tokenizing it again if it has none.

        Args:
            prompt: rendered prompt.
            renderer: vLLM's renderer.
            tokenizing: vLLM's tokenizer parameters.

        Raises:
            PartError: the tokenizer does not report offsets.
        """
        offsets = prompt.get("prompt_token_offsets")
        if not offsets:
            asking = replace(tokenizing, return_token_offsets=True)
            tokenized = renderer.tokenize_prompt({"prompt": prompt["prompt"]}, asking)
            offsets = tokenized.get("prompt_token_offsets")
            if not offsets or tokenized["prompt_token_ids"] != prompt["prompt_token_ids"]:
                raise PartError("its tokenizer does not report character offsets")
        places = [(int(start), int(stop)) for start, stop in offsets]
        first = next((index for index, place in enumerate(places) if place != (0, 0)), 0)
        with_text = [place for place in places[first:] if place != (0, 0)]
        return cls([start for start, _ in with_text], [stop for _, stop in with_text], first)

    def tokens(self, start: int, stop: int) -> Span:
        """Return the tokens that overlap the characters from `start` to `stop`."""
        first, end = bisect_right(self.stops, start), bisect_left(self.starts, stop)
        return self.first + first, self.first + max(first, end)


def _common_length(a: Text, b: Text, *, limit: int, backwards: bool = False) -> int:
    """Return the length of the common prefix, or suffix, of two renderings, at most `limit`."""
    low, high = 0, min(len(a), len(b), limit)
    while low < high:
        count = (low + high + 1) // 2
        same = a[len(a) - count :] == b[len(b) - count :] if backwards else a[:count] == b[:count]
        low, high = (count, high) if same else (low, count - 1)
    return low


def replaced_span(original: Text, variant: Text) -> Span | None:
    """Return the span that a placeholder replaced in a variant; None if the template omits it.

    Args:
        original: rendering of the chat.
        variant: rendering of the chat with a placeholder in one message.

    Raises:
        PartError: the template changes other text too.
    """
    if original == variant:
        return None
    start = _common_length(original, variant, limit=len(original))
    suffix_limit = min(len(original), len(variant)) - start
    suffix = _common_length(original, variant, limit=suffix_limit, backwards=True)
    stop, inserted = len(original) - suffix, variant[start : len(variant) - suffix]
    has_placeholder = isinstance(inserted, list) or PLACEHOLDER in inserted
    if start >= stop or not has_placeholder or len(inserted) > len(PLACEHOLDER) + 2:
        raise PartError("the chat template changes other text with it")
    return start, stop


def tools_span(original: Text, variant: Text, names: Sequence[str], *, front: bool) -> Span | None:
    """Return the span after a tool added in front, or before one added at the end.

    The first span begins where the tools begin, and the second ends where they end. None if the
    template omits tools.

    Args:
        original: rendering of the chat.
        variant: rendering of the chat with one more tool.
        names: names of the chat's own tools, which the span must contain.
        front: whether the tool was added in front.

    Raises:
        PartError: the tools are in several places, or in another order.
    """
    if original == variant:
        return None
    prefix = _common_length(original, variant, limit=len(original))
    suffix = _common_length(original, variant, limit=len(original), backwards=True)
    # Tokens can merge where the tool is inserted, so token ids get some tolerance.
    is_tokens = isinstance(original, list)
    if prefix + suffix < len(original) - 4 * is_tokens:
        raise PartError("the chat template writes them in more than one place")
    start = max(len(original) - suffix - is_tokens, 0) if front else 0
    stop = len(original) if front else min(prefix + is_tokens, len(original))
    if isinstance(original, str) and not _has_all(original[start:stop], names):
        raise PartError("the chat template puts them in another order")
    return start, stop


def _has_all(text: str, names: Sequence[str]) -> bool:
    """Return whether all names are in the text; fast if they are in this order."""
    place = 0
    for name in names:
        place = text.find(name, place)
        if place < 0 and (place := text.find(name)) < 0:
            return False
    return True
