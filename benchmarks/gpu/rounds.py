"""Run variants of a workload in alternating rounds, and compare them in pairs.

A machine's speed drifts by more than 1 %, the smallest difference that our goals require us to
detect. Variants that run in the
same round see the same machine, so each round gives one difference, and the median of the
differences has an interval that needs no assumption about their distribution.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from math import comb
from typing import Any, NamedTuple

Figures = dict[str, Any]
"""Figures of one variant in one round, by name."""
Variants = Mapping[str, Callable[[int], Figures]]
"""Functions that run a variant once, given the number of the round."""
ONE_PERCENT_ROUNDS = 40
"""Minimum number of rounds that tell 1 % apart. Seven rounds scattered by 2.5 % on the H200."""
CONFIDENCE = 0.95


def order(names: Sequence[str], number: int) -> list[str]:
    """Return the order of the variants in a round.

    Over ``2 * len(names)`` rounds each variant runs twice at each place, and each pair of
    adjacent variants runs as often in one order as in the other.
    """
    start = number // 2 % len(names)
    rotated = [*names[start:], *names[:start]]
    return rotated[::-1] if number % 2 else rotated


def alternate(rounds: int, variants: Variants) -> dict[str, list[Figures]]:
    """Run every variant in every round, after one warm-up round whose figures are dropped."""
    found: dict[str, list[Figures]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name in order([*variants], number):
            figures = variants[name](number)
            if number:
                found[name].append(figures)
    return found


class Difference(NamedTuple):
    """Relative difference of a figure between two variants: the median over rounds."""

    median: float
    low: float
    high: float
    """Ends of the interval of the median."""
    confidence: float
    """Probability that such an interval contains the median; below 0.95 with too few rounds."""
    rounds: int

    def __str__(self) -> str:
        interval = f"{100 * self.low:+.2f} to {100 * self.high:+.2f} %"
        return f"{interval} with {self.confidence:.0%} confidence, {self.rounds} rounds"


def difference(
    found: Mapping[str, Sequence[Figures]], variant: str, baseline: str, figure: str
) -> Difference:
    """Return the median of a figure's paired relative differences, 0.01 for 1 % more."""
    pairs = zip(found[variant], found[baseline], strict=True)
    differences = sorted(new[figure] / old[figure] - 1 for new, old in pairs)
    rank, confidence = interval_rank(len(differences))
    low, high = differences[rank - 1], differences[len(differences) - rank]
    return Difference(statistics.median(differences), low, high, confidence, len(differences))


def interval_rank(count: int) -> tuple[int, float]:
    """Return k, so that the k-th smallest and k-th largest of `count` values enclose the median.

    Also return the probability that they do, which does not depend on the distribution. It is at
    least `CONFIDENCE` if `count` allows it.
    """
    rank, confidence = 1, 1 - 2 * 0.5**count
    below = 1
    while rank < count // 2:
        below += comb(count, rank)
        narrower = 1 - 2 * below * 0.5**count
        if narrower < CONFIDENCE:
            break
        rank, confidence = rank + 1, narrower
    return rank, confidence


def report_rounds(report: Any, workload: str, found: Mapping[str, Sequence[Figures]]) -> None:
    """Keep all rounds of a workload in a `Report`, and add a row of medians for each variant."""
    report.keep_rounds(workload, found)
    for name, rounds in found.items():
        medians = {figure: median(rounds, figure) for figure in rounds[0]}
        report.row("requests", of=workload, variant=name, rounds=len(rounds), **medians)


def report_difference(
    report: Any,
    workload: str,
    found: Mapping[str, Sequence[Figures]],
    variant: str,
    baseline: str,
    figure: str,
) -> None:
    """Add a row with the paired difference of a figure between two variants to a `Report`."""
    result = difference(found, variant, baseline, figure)
    of = f"{workload}: {figure}"
    report.row("differences", of=of, variant=variant, than=baseline, **result._asdict())


def median(rounds: Sequence[Figures], figure: str) -> float:
    middle: float = statistics.median(figures[figure] for figures in rounds)
    return middle
