"""How far an answer from a compressed cache is from the full cache's own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_ROUNDING = 1e-6
"""What float32 probabilities that should add up to 1 may miss."""
_TIMES = 4
"""So often said in a row, words are a loop."""
_RUN, _RUNS = 8, 3
"""So many words that stand in so many places are a loop, whatever stands between them."""
PLACES: Mapping[str, slice] = {
    "1 to 32": slice(0, 32),
    "33 to 64": slice(32, 64),
    "from 65": slice(64, None),
}
"""Tokens of an answer, from which to which one. What a cache forgot shows late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Two greedy answers, side by side.

    Args:
        exact: whether they are the same.
        shared: tokens at their start that are the same, so the first divergence; all where exact.
        similarity: 1 less their edit distance over the longer one's length, in [0, 1].
    """

    exact: bool
    shared: int
    similarity: float


def agreement(full: Sequence[str], other: Sequence[str]) -> Agreement:
    """Compare two answers, as tokens or as characters."""
    shared = 0
    while shared < min(len(full), len(other)) and full[shared] == other[shared]:
        shared += 1
    return Agreement(
        exact=list(full) == list(other), shared=shared, similarity=similarity(full, other)
    )


def similarity(a: Sequence[str], b: Sequence[str]) -> float:
    """``1 - d / max(len(a), len(b))``, with d Levenshtein's distance; 1 where both are empty."""
    longer = max(len(a), len(b))
    if not longer:
        return 1.0
    return 1.0 - distance(a, b) / longer


def distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Levenshtein's distance: fewest insertions, deletions and replacements.

    A row of the table at a time: an insertion costs its distance to where it starts, so a running
    minimum of ``cost - column`` does what the recurrence does cell by cell.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys((*a, *b)))}
    columns = np.arange(len(b) + 1)
    other = np.array([numbers[name] for name in b], dtype=np.int64)
    row = columns
    for name in a:
        replaced = row[:-1] + (other != numbers[name])
        best = np.concatenate(([row[0] + 1], np.minimum(replaced, row[1:] + 1)))
        row = np.minimum.accumulate(best - columns) + columns
    return int(row[-1])


def loops(text: str) -> bool:
    """Whether an answer says the same again and again.

    It ends by saying the same words `_TIMES` times in a row, or more; its last word may have been
    cut off, and is then no part of what is said again. Or the same `_RUN` words stand in it
    `_RUNS` times, none of them in two of these places.
    """
    words = text.split()
    return _ends_alike(words) or _ends_alike(words[:-1]) or _comes_again(words)


def _comes_again(words: list[str]) -> bool:
    seen: dict[tuple[str, ...], tuple[int, int]] = {}
    for at in range(len(words) - _RUN + 1):
        run = tuple(words[at : at + _RUN])
        times, free = seen.get(run, (0, 0))
        if at >= free:
            seen[run] = times + 1, at + _RUN
            if times + 1 == _RUNS:
                return True
    return False


def _ends_alike(words: list[str]) -> bool:
    runs = range(1, len(words) // _TIMES + 1)
    return any(words[-run * _TIMES :] == words[-run:] * _TIMES for run in runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """How two caches judge the next token, over places with the same text before them.

    Args:
        places: how many there are.
        same_first: in how many the most likely token is the same.
        kl: sum over them of KL(full || compressed), in nats, of what is known: a lower bound.
    """

    places: int
    same_first: int
    kl: float


def divergence(
    full: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]
) -> Divergence:
    """Compare the log-probabilities of two caches, place by place.

    Args:
        full: the most likely tokens in each place, by name, as the full cache has them.
        other: the same of the compressed one, as many places.
    """
    pairs = list(zip(full, other, strict=True))
    return Divergence(
        places=len(pairs),
        same_first=sum(_first(p) == _first(q) for p, q in pairs),
        kl=math.fsum(coarse_kl(p, q) for p, q in pairs),
    )


def coarse_kl(p: Mapping[str, float], q: Mapping[str, float]) -> float:
    """KL(p || q) in nats over the tokens that both name, and all others as one outcome.

    Merging outcomes never makes KL larger, so it is a lower bound of the true one. Of what is left
    to the others, amounts that rounding alone may leave count as none.

    Args:
        p, q: log-probabilities of the most likely tokens, by name.
    """
    both = p.keys() & q.keys()
    known = math.fsum(math.exp(p[name]) * (p[name] - q[name]) for name in both)
    rest_p = 1 - math.fsum(math.exp(p[name]) for name in both)
    rest_q = 1 - math.fsum(math.exp(q[name]) for name in both)
    if rest_p > _ROUNDING:
        known += rest_p * math.log(rest_p / max(rest_q, _ROUNDING))
    return max(known, 0.0)


def _first(likely: Mapping[str, float]) -> str:
    return max(likely, key=lambda name: likely[name])
