"""Distances between the output of a compressed cache and the output of the full cache."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

_ROUNDING = 1e-6
"""Rounding error of a sum of float32 probabilities that should be 1."""
_END_REPEATS = 4
"""Repetitions at the end of an output that count as a loop."""
_NGRAM, _NGRAM_REPEATS = 8, 3
"""Words of a passage, and its occurrences anywhere in the output, that count as a loop."""
POSITION_RANGES: Mapping[str, slice] = {
    "1 to 32": slice(0, 32),
    "33 to 64": slice(32, 64),
    "from 65": slice(64, None),
}
"""Ranges of output token positions, by report name. Forgotten content tends to show late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Comparison of two greedy outputs.

    Args:
        exact: whether they are equal.
        shared: length of their common prefix, so the index of the first difference if they differ.
        similarity: 1 minus their edit distance divided by the longer length, in [0, 1].
    """

    exact: bool
    shared: int
    similarity: float


def agreement(full: Sequence[str], other: Sequence[str]) -> Agreement:
    """Return the agreement of two outputs, given as tokens or as characters."""
    return Agreement(
        exact=list(full) == list(other),
        shared=shared_length(full, other),
        similarity=similarity(full, other),
    )


def shared_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def similarity(a: Sequence[str], b: Sequence[str]) -> float:
    """Return ``1 - d / max(len(a), len(b))`` with Levenshtein distance d; 1 if both are empty."""
    longer = max(len(a), len(b))
    if not longer:
        return 1.0
    return 1.0 - distance(a, b) / longer


def distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the Levenshtein distance: the fewest insertions, deletions and replacements.

    Computes one row of the dynamic-programming table at a time. An insertion costs its distance to
    the column where it starts, so a running minimum of ``cost - column`` replaces the recurrence
    within a row.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys((*a, *b)))}
    columns = np.arange(len(b) + 1)
    b_numbers = np.array([numbers[name] for name in b], dtype=np.int64)
    row = columns
    for name in a:
        replaced = row[:-1] + (b_numbers != numbers[name])
        best = np.concatenate(([row[0] + 1], np.minimum(replaced, row[1:] + 1)))
        row = np.minimum.accumulate(best - columns) + columns
    return int(row[-1])


def loops(text: str) -> bool:
    """Return whether an output repeats itself.

    It repeats itself if it ends with the same words `_END_REPEATS` times or more in a row, not
    counting a last word that was cut off, or if a passage of `_NGRAM` words occurs
    `_NGRAM_REPEATS` times without overlap.
    """
    words = text.split()
    return _repeats_at_end(words) or _repeats_at_end(words[:-1]) or _repeats_a_passage(words)


def _repeats_a_passage(words: list[str]) -> bool:
    # For each passage: its occurrences so far, and the first index after the last occurrence.
    seen: dict[tuple[str, ...], tuple[int, int]] = {}
    for start in range(len(words) - _NGRAM + 1):
        passage = tuple(words[start : start + _NGRAM])
        occurrences, next_start = seen.get(passage, (0, 0))
        if start >= next_start:
            seen[passage] = occurrences + 1, start + _NGRAM
            if occurrences + 1 == _NGRAM_REPEATS:
                return True
    return False


def _repeats_at_end(words: list[str]) -> bool:
    lengths = range(1, len(words) // _END_REPEATS + 1)
    return any(words[-n * _END_REPEATS :] == words[-n:] * _END_REPEATS for n in lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Comparison of next-token distributions over positions with the same preceding text.

    Args:
        places: number of positions.
        same_first: positions at which both sides have the same most likely token.
        kl: sum over positions of KL(full || compressed) in nats. A lower bound, because only the
            most likely tokens are known.
    """

    places: int
    same_first: int
    kl: float


def divergence(
    full: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]
) -> Divergence:
    """Compare the log-probabilities of two caches position by position.

    Args:
        full: for each position, the full cache's most likely tokens and their log-probabilities.
        other: the same for the compressed cache, with equal length.
    """
    pairs = list(zip(full, other, strict=True))
    return Divergence(
        places=len(pairs),
        same_first=sum(_most_likely(p) == _most_likely(q) for p, q in pairs),
        kl=math.fsum(coarse_kl(p, q) for p, q in pairs),
    )


def total(parts: Sequence[Divergence]) -> Divergence:
    """Return the comparison over the positions of all `parts`."""
    return Divergence(
        places=sum(part.places for part in parts),
        same_first=sum(part.same_first for part in parts),
        kl=math.fsum(part.kl for part in parts),
    )


def coarse_kl(p: Mapping[str, float], q: Mapping[str, float]) -> float:
    """Return KL(p || q) in nats over the tokens in both, with all other tokens as one outcome.

    Merging outcomes never increases KL, so this is a lower bound of the true KL. Probability mass
    of the merged outcome below `_ROUNDING` counts as 0.

    Args:
        p, q: log-probabilities of the most likely tokens, by token name.
    """
    shared = p.keys() & q.keys()
    kl = math.fsum(math.exp(p[name]) * (p[name] - q[name]) for name in shared)
    rest_p = 1 - math.fsum(math.exp(p[name]) for name in shared)
    rest_q = 1 - math.fsum(math.exp(q[name]) for name in shared)
    if rest_p > _ROUNDING:
        kl += rest_p * math.log(rest_p / max(rest_q, _ROUNDING))
    return max(kl, 0.0)


def _most_likely(logprobs: Mapping[str, float]) -> str:
    return max(logprobs, key=lambda name: logprobs[name])
