"""Spans of a prompt that are protected, as they are asked for and counted."""

from collections.abc import Iterable, Mapping, Sequence

from vllm_kvcompress.errors import ConfigError

MOST_SPANS = 32
"""Spans that a request may have protected: each is counted again in every plan."""

Spans = tuple[tuple[int, int], ...]
"""First token of each span and the one behind its last, in ascending order; none touch."""

Roles = Mapping[str, Spans]
"""The tokens of each role of a chat; none is in two of them."""


def parse_spans(raw: Iterable[Sequence[int]], tokens: int) -> Spans:
    """Spans as they are asked for, in ascending order; those that touch become one.

    Raises:
        ConfigError: one is no pair of whole numbers, is empty or lies outside the prompt's
            `tokens`, or two overlap.
    """
    spans: list[tuple[int, int]] = []
    for span in raw:
        if not (
            isinstance(span, Sequence) and len(span) == 2 and all(type(at) is int for at in span)
        ):
            raise ConfigError(
                "a protected span must be a pair of whole numbers, its first token and the one"
                f" behind its last, got {span!r}"
            )
        start, stop = span
        if not 0 <= start < stop <= tokens:
            raise ConfigError(
                f"a protected span must begin before it ends, within the prompt's {tokens} tokens,"
                f" got [{start}, {stop}]"
            )
        spans.append((start, stop))
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and start < joined[-1][1]:
            raise ConfigError(
                f"protected spans must not overlap, got {list(joined[-1])} and [{start}, {stop}]"
            )
        if joined and start == joined[-1][1]:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)


def clipped(spans: Spans, first: int, end: int) -> Spans:
    """What of some spans lies from token `first` on and before `end`."""
    inside = ((max(start, first), min(stop, end)) for start, stop in spans)
    return tuple((start, stop) for start, stop in inside if start < stop)


def count_before(spans: Spans, end: int) -> int:
    """Protected tokens among the first `end`."""
    return sum(max(min(stop, end) - start, 0) for start, stop in spans)


def token_count(spans: Spans) -> int:
    """Tokens of some spans."""
    return sum(stop - start for start, stop in spans)


def joined(spans: Iterable[tuple[int, int]]) -> Spans:
    """Spans in ascending order; those that overlap or touch become one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return tuple(found)


def others(spans: Spans, tokens: int) -> Spans:
    """What of a prompt's `tokens` is in none of some spans."""
    edges = [0, *(at for span in spans for at in span), tokens]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return tuple((start, stop) for start, stop in gaps if start < stop)
