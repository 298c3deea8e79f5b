"""Means over prompts, and how sure they are: a bootstrap over independent prompts."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
CONFIDENCE = 0.95


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
    means = _resampled(sums, counts, np.random.default_rng(seed), resamples)
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


def _resampled(
    sums: npt.NDArray[np.float64],
    sizes: npt.NDArray[np.float64],
    generator: np.random.Generator,
    resamples: int,
) -> npt.NDArray[np.float64]:
    """Means of `resamples` draws of as many groups as there are, some at a time."""
    count = len(sums)
    at_once = max(1, 4_000_000 // count)
    parts = []
    for start in range(0, resamples, at_once):
        drawn = generator.multinomial(
            count, np.full(count, 1 / count), size=min(at_once, resamples - start)
        ).astype(np.float64)
        totals = drawn @ sizes
        # A draw of nothing but prompts without any place tells nothing.
        parts.append((drawn @ sums)[totals > 0] / totals[totals > 0])
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
