"""Protected spans of a prompt: parsing, merging and counting."""

from collections.abc import Iterable, Sequence

from vllm_kvcompress.errors import ConfigError

MAX_SPANS = 32
"""Most spans that a request may protect. Every plan counts the tokens of each span again."""

Spans = tuple[tuple[int, int], ...]
"""``(first token, token after the last)`` of each span, in ascending order. Spans do not touch."""


def parse_spans(raw: Iterable[Sequence[int]], tokens: int) -> Spans:
    """Return a request's spans in ascending order, with touching spans merged.

    Raises:
        ConfigError: a span is not a pair of whole numbers, is empty or lies outside the prompt's
            `tokens`, or two spans overlap.
    """
    spans: list[tuple[int, int]] = []
    for span in raw:
        if not (
            isinstance(span, Sequence)
            and len(span) == 2
            and all(type(edge) is int for edge in span)
        ):
            raise ConfigError(
                "a protected span must be a pair of whole numbers, its first token and the token"
                f" after its last, got {span!r}"
            )
        start, stop = span
        if not 0 <= start < stop <= tokens:
            raise ConfigError(
                f"a protected span must begin before it ends, within the prompt's {tokens} tokens,"
                f" got [{start}, {stop}]"
            )
        spans.append((start, stop))
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start < merged[-1][1]:
            raise ConfigError(
                f"protected spans must not overlap, got {list(merged[-1])} and [{start}, {stop}]"
            )
        if merged and start == merged[-1][1]:
            merged[-1] = merged[-1][0], stop
        else:
            merged.append((start, stop))
    return tuple(merged)


def clip_spans(spans: Spans, first: int, end: int) -> Spans:
    """Return the parts of the spans from token `first` up to, but not including, token `end`."""
    inside = ((max(start, first), min(stop, end)) for start, stop in spans)
    return tuple((start, stop) for start, stop in inside if start < stop)


def count_before(spans: Spans, end: int) -> int:
    """Return the number of protected tokens among the first `end` tokens."""
    return sum(max(min(stop, end) - start, 0) for start, stop in spans)


def token_count(spans: Spans) -> int:
    """Return the total number of tokens in the spans."""
    return sum(stop - start for start, stop in spans)


def merge_spans(spans: Iterable[tuple[int, int]]) -> Spans:
    """Return the spans in ascending order, with overlapping or touching spans merged."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return tuple(merged)


def complement(spans: Spans, tokens: int) -> Spans:
    """Return the spans of a prompt's `tokens` that lie in none of the given spans."""
    edges = [0, *(edge for span in spans for edge in span), tokens]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return tuple((start, stop) for start, stop in gaps if start < stop)
