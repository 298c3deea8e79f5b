"""Means over prompts, and how sure they are: a bootstrap over independent prompts."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

RESAMPLES = 4_000
CONFIDENCE = 0.95
_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over prompts.

    Args:
        mean: over all prompts.
        low, high: ends of the two-sided 95 % percentile interval.
        upper: end of the one-sided 95 % interval: with that confidence the mean is not above it.
        prompts: how many there are.
        independent: groups of prompts that were drawn together, a prompt alone being one.
    """

    mean: float
    low: float
    high: float
    upper: float
    prompts: int
    independent: int


def estimate(
    values: Sequence[float],
    groups: Sequence[Hashable],
    *,
    sizes: Sequence[float] | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Estimate:
    """The mean of `values` with percentile bootstrap intervals, in float64.

    Groups are drawn with replacement, each with all its prompts: two questions about one text tell
    less than two texts do (Efron, Tibshirani 1993, chapters 8 and 13). Values of a prompt that were
    already subtracted from each other keep their pairing.

    Args:
        values: one for each prompt, at least one.
        groups: what each prompt was drawn with.
        sizes: how many things each value is the sum over; the mean is then over those things, and
            prompts are what is drawn. One each by itself. Not all may be 0.
        seed: of the draws.
    """
    order = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    numbers = np.array([order[group] for group in groups])
    numerators = np.asarray(values, dtype=np.float64)
    denominators = np.ones(len(values)) if sizes is None else np.asarray(sizes, dtype=np.float64)
    count = len(order)
    sums = _by_group(numbers, numerators, count)
    counts = _by_group(numbers, denominators, count)
    means = _resampled(sums, counts, _drawn(count, seed, resamples))
    tail = (1 - CONFIDENCE) / 2
    low, high, upper = np.quantile(means, [tail, 1 - tail, CONFIDENCE])
    return Estimate(
        mean=float(numerators.sum() / denominators.sum()),
        low=float(low),
        high=float(high),
        upper=float(upper),
        prompts=len(values),
        independent=count,
    )


def _by_group(
    numbers: npt.NDArray[np.int64], values: npt.NDArray[np.float64], count: int
) -> npt.NDArray[np.float64]:
    return np.bincount(numbers, weights=values, minlength=count).astype(np.float64)


@lru_cache(maxsize=2)
def _drawn(count: int, seed: int, resamples: int) -> npt.NDArray[np.uint16]:
    """How often each of `count` groups is in each draw of as many: [resamples, count].

    Every figure of the same prompts takes the same draws.
    """
    generator = np.random.default_rng(seed)
    chances = np.full(count, 1 / count)
    drawn = np.empty((resamples, count), dtype=np.uint16)
    for start in range(0, resamples, _AT_ONCE):
        rows = min(_AT_ONCE, resamples - start)
        drawn[start : start + rows] = generator.multinomial(count, chances, size=rows)
    return drawn


def _resampled(
    sums: npt.NDArray[np.float64],
    sizes: npt.NDArray[np.float64],
    drawn: npt.NDArray[np.uint16],
) -> npt.NDArray[np.float64]:
    """The mean in each draw, some draws at a time."""
    parts = []
    for start in range(0, len(drawn), _AT_ONCE):
        times = drawn[start : start + _AT_ONCE].astype(np.float64)
        totals = times @ sizes
        # A draw of nothing but prompts without any place tells nothing.
        parts.append((times @ sums)[totals > 0] / totals[totals > 0])
    return np.concatenate(parts)


def unseen(independent: int) -> float:
    """The largest share of prompts that may lose everything and yet be missing from a sample.

    With 95 % confidence: ``(1 - share) ** independent = 0.05``. A bootstrap cannot know of them,
    since it draws from what was seen.
    """
    return float(1 - (1 - CONFIDENCE) ** (1 / independent))


def needed(max_drop: float) -> int:
    """Independent prompts from which on `unseen` is within `max_drop`, in (0, 1)."""
    count = max(1, math.floor(math.log(1 - CONFIDENCE) / math.log1p(-max_drop)) - 1)
    while unseen(count) > max_drop:
        count += 1
    return count
