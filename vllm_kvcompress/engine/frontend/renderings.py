"""Where two renderings of a chat differ: what stands in one alone is the part that was changed."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

STAND_IN = "kvcompress0stands0here"
"""A text, or a tool's name, that no chat has."""

Span = tuple[int, int]
Text = str | list[int]
"""What a template makes of a chat: text, or tokens where the renderer has its own tokenizer."""


class PartError(ValueError):
    """A part of a chat cannot be found; the message is half a sentence that says why."""


@dataclass(frozen=True, slots=True)
class Letters:
    """First letter of each token, and the one behind its last: both ascending.

    Args:
        first: the number of the first token that is told; special ones before it have no letters.
    """

    starts: list[int]
    stops: list[int]
    first: int

    @classmethod
    def of(cls, prompt: Mapping[str, Any], renderer: Any, tokenizing: Any) -> "Letters":
        """Of a rendered prompt, as its tokenizer tells them.

        Raises:
            PartError: it does not.
        """
        offsets = prompt.get("prompt_token_offsets")
        if not offsets:
            asking = replace(tokenizing, return_token_offsets=True)
            made = renderer.tokenize_prompt({"prompt": prompt["prompt"]}, asking)
            offsets = made.get("prompt_token_offsets")
            if not offsets or made["prompt_token_ids"] != prompt["prompt_token_ids"]:
                raise PartError("its tokenizer does not tell which letters a token has")
        places = [(int(start), int(stop)) for start, stop in offsets]
        first = next((at for at, place in enumerate(places) if place != (0, 0)), 0)
        told = [place for place in places[first:] if place != (0, 0)]
        return cls([start for start, _ in told], [stop for _, stop in told], first)

    def tokens(self, start: int, stop: int) -> Span:
        """The tokens that have any of these letters."""
        own = bisect_right(self.stops, start), bisect_left(self.starts, stop)
        return self.first + own[0], self.first + max(own)


def _in_common(a: Text, b: Text, *, most: int, backwards: bool = False) -> int:
    """Letters or tokens that both begin with, or end with, at most `most`."""
    low, high = 0, min(len(a), len(b), most)
    while low < high:
        count = (low + high + 1) // 2
        same = a[len(a) - count :] == b[len(b) - count :] if backwards else a[:count] == b[:count]
        low, high = (count, high) if same else (low, count - 1)
    return low


def instead_of(whole: Text, other: Text) -> Span | None:
    """What of the chat a stand-in took the place of; None where the template leaves it out."""
    if whole == other:
        return None
    start = _in_common(whole, other, most=len(whole))
    behind = _in_common(whole, other, most=min(len(whole), len(other)) - start, backwards=True)
    stop, there = len(whole) - behind, other[start : len(other) - behind]
    whole_there = isinstance(there, list) or STAND_IN in there
    if start >= stop or not whole_there or len(there) > len(STAND_IN) + 2:
        raise PartError("the chat template changes other text with it")
    return start, stop


def beside_tool(whole: Text, other: Text, names: Sequence[str], *, front: bool) -> Span | None:
    """All that stands behind one more tool that was put first, or before one that was put last.

    So the one begins where the tools do, and the other ends there. None where the template leaves
    tools out.

    Args:
        names: of the tools, each of which must be there.
    """
    if whole == other:
        return None
    first = _in_common(whole, other, most=len(whole))
    last = _in_common(whole, other, most=len(whole), backwards=True)
    tokens = isinstance(whole, list)
    # a tool is put in between, and what was there stays; tokens merge where it is put in
    if first + last < len(whole) - 4 * tokens:
        raise PartError("the chat template writes them in more than one place")
    start = max(len(whole) - last - tokens, 0) if front else 0
    stop = len(whole) if front else min(first + tokens, len(whole))
    if isinstance(whole, str) and not all(name in whole[start:stop] for name in names):
        raise PartError("the chat template puts them in another order")
    return start, stop
