"""Means over prompts with bootstrap confidence intervals, and the share of rules still obeyed."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

RESAMPLES = 4_000
CONFIDENCE = 0.95
_BATCH = 500
"""Draws that are computed at a time, to bound the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over prompts with its confidence intervals.

    Args:
        mean: mean over all prompts.
        low, high: ends of the two-sided 95 % percentile interval.
        upper: end of the one-sided 95 % interval. With 95 % confidence, the mean is at most this.
        prompts: number of prompts.
        independent: number of groups of prompts that are drawn together. A prompt without a group
            is its own group.
    """

    mean: float
    low: float
    high: float
    upper: float
    prompts: int
    independent: int

    @property
    def bound(self) -> float:
        """Return the upper bound of a loss with 95 % confidence: `upper`, or `unseen_share`."""
        return max(self.upper, unseen_share(self.independent))


def estimate(
    values: Sequence[float],
    groups: Sequence[Hashable],
    *,
    sizes: Sequence[float] | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Estimate:
    """Return the mean of `values` with percentile bootstrap intervals, in float64.

    Draws groups with replacement, each with all its prompts, because two questions about one text
    carry less information than two texts (Efron, Tibshirani 1993, chapters 8 and 13). Differences
    within a prompt stay paired.

    Args:
        values: one value per prompt, at least one.
        groups: the group of each prompt.
        sizes: number of items that each value sums over. The mean is then per item, while prompts
            are still what is drawn. Default 1 per prompt. Not all may be 0.
        seed: seed of the draws.
        resamples: number of draws.
    """
    order = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    group_numbers = np.array([order[group] for group in groups])
    numerators = np.asarray(values, dtype=np.float64)
    denominators = np.ones(len(values)) if sizes is None else np.asarray(sizes, dtype=np.float64)
    group_sums = np.bincount(group_numbers, numerators)
    group_sizes = np.bincount(group_numbers, denominators)
    means = []
    for counts in np.split(_draws(len(order), seed, resamples), range(_BATCH, resamples, _BATCH)):
        totals = counts @ group_sizes
        # A draw whose groups all have size 0 has no mean.
        means.append((counts @ group_sums)[totals > 0] / totals[totals > 0])
    tail = (1 - CONFIDENCE) / 2
    low, high, upper = np.quantile(np.concatenate(means), [tail, 1 - tail, CONFIDENCE])
    return Estimate(
        mean=float(numerators.sum() / denominators.sum()),
        low=float(low),
        high=float(high),
        upper=float(upper),
        prompts=len(values),
        independent=len(order),
    )


@lru_cache(maxsize=2)
def _draws(num_groups: int, seed: int, resamples: int) -> npt.NDArray[np.uint16]:
    """Return how often each group occurs in each bootstrap draw: [resamples, num_groups].

    Cached, so that all figures over the same prompts use the same draws.
    """
    generator, shares = np.random.default_rng(seed), np.full(num_groups, 1 / num_groups)
    counts = np.empty((resamples, num_groups), dtype=np.uint16)
    for part in np.split(counts, range(_BATCH, resamples, _BATCH)):
        part[:] = generator.multinomial(num_groups, shares, size=len(part))
    return counts


Drawn = TypeVar("Drawn")


def mean(
    items: Sequence[Drawn],
    value: Callable[[Drawn], float],
    group: Callable[[Drawn], Hashable],
    size: Callable[[Drawn], float] | None = None,
) -> Estimate | None:
    """Return the mean of `value` per unit of `size`, or per item; None without items."""
    if not items:
        return None
    sizes = None if size is None else [size(item) for item in items]
    return estimate([value(item) for item in items], [group(item) for item in items], sizes=sizes)


def unseen_share(independent: int) -> float:
    """Return the largest share of prompts that a sample may miss, with 95 % confidence.

    Solves ``(1 - share) ** independent = 0.05``. A bootstrap cannot account for prompts that are
    not in the sample, so reports never state an upper bound of the loss below this share.
    """
    return float(1 - (1 - CONFIDENCE) ** (1 / independent))


def prompts_needed(max_drop: float) -> int:
    """Return the fewest independent prompts with `unseen_share` at most `max_drop`, in (0, 1)."""
    count = max(1, math.floor(math.log(1 - CONFIDENCE) / math.log1p(-max_drop)) - 1)
    while unseen_share(count) > max_drop:
        count += 1
    return count


class RuleResults(NamedTuple):
    """Rule results of one prompt under one method and budget."""

    task: str
    rules: Mapping[str, Sequence[bool]]
    """For each rule name: whether the compressed cache obeys it, and whether the full one does."""
    drawn_with: Hashable
    """Prompts with the same value are not independent samples."""


def shares_obeyed(prompts: Iterable[RuleResults]) -> dict[str, Estimate]:
    """Return the share of rules that are still obeyed, by task and by ``task: rule``.

    Counts only rules that the full cache obeys. A rule that it breaks too says nothing about
    compression. A rule that the full cache never obeys is left out.
    """
    prompts = [prompt for prompt in prompts if prompt.rules]
    shares: dict[str, Estimate] = {}
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        task_prompts = [prompt for prompt in prompts if prompt.task == task]
        rules = list(dict.fromkeys(rule for prompt in task_prompts for rule in prompt.rules))
        for name, names in ((task, rules), *((f"{task}: {rule}", [rule]) for rule in rules)):
            if (share := _share_of_rules(task_prompts, names)) is not None:
                shares[name] = share
    return shares


def _share_of_rules(prompts: Sequence[RuleResults], rules: Sequence[str]) -> Estimate | None:
    def pairs(prompt: RuleResults) -> list[Sequence[bool]]:
        return [prompt.rules[rule] for rule in rules if rule in prompt.rules]

    def obeyed_by_full(prompt: RuleResults) -> int:
        return sum(full for _, full in pairs(prompt))

    return mean(
        [prompt for prompt in prompts if obeyed_by_full(prompt)],
        lambda prompt: sum(compressed and full for compressed, full in pairs(prompt)),
        lambda prompt: prompt.drawn_with,
        obeyed_by_full,
    )
