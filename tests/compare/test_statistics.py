"""Bootstrap intervals, compared with cases that can be computed by hand."""

import itertools
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvcompress.compare.statistics import estimate, prompts_needed, unseen_share

VALUES = st.lists(st.floats(-1, 1), min_size=1, max_size=30)


def every_draw(sums: list[float], sizes: list[float]) -> list[float]:
    """Return the mean of each of the n ** n equally likely draws of n groups."""
    groups = range(len(sums))
    return [
        sum(sums[g] for g in drawn) / sum(sizes[g] for g in drawn)
        for drawn in itertools.product(groups, repeat=len(sums))
    ]


def test_intervals_match_the_enumeration_of_all_draws():
    values = [0.0, 0.1, 0.3, 0.55, 1.0]
    result = estimate(values, range(5), resamples=50_000)
    draws = every_draw(values, [1.0] * 5)
    low, high, upper = np.quantile(draws, [0.025, 0.975, 0.95])
    assert result.mean == pytest.approx(fmean(values))
    assert (result.low, result.high, result.upper) == pytest.approx((low, high, upper), abs=0.02)


def test_intervals_of_two_prompts():
    """The draws have means 0, 1/2 and 1 with probabilities 1/4, 1/2 and 1/4."""
    result = estimate([0.0, 1.0], "ab")
    assert (result.mean, result.low, result.high, result.upper) == (0.5, 0.0, 1.0, 1.0)


def test_prompts_of_one_group_are_drawn_together():
    values = [1.0, 1.0, 1.0, 0.0]
    separate, together = estimate(values, "abcd"), estimate(values, "aaab")
    assert (separate.independent, together.independent) == (4, 2)
    assert separate.mean == together.mean == 0.75
    draws = set(every_draw([3.0, 0.0], [3.0, 1.0]))
    assert draws == {0.0, 0.75, 1.0}
    assert {together.low, together.high} <= draws
    one = estimate(values, "aaaa")
    assert one.low == one.high == one.upper == 0.75


def test_sizes_give_the_mean_per_item():
    result = estimate([6.0, 0.0], "ab", sizes=[3.0, 1.0])
    assert result.mean == 1.5
    assert (result.low, result.high) == (0.0, 2.0)
    hollow = estimate([1.0, 0.0], "ab", sizes=[2.0, 0.0])
    assert (hollow.mean, hollow.low, hollow.high) == (0.5, 0.5, 0.5)


@given(VALUES, st.integers(0, 9))
def test_intervals_are_ordered_and_reproducible(values, seed):
    result = estimate(values, range(len(values)), seed=seed, resamples=2000)
    assert result == estimate(values, range(len(values)), seed=seed, resamples=2000)
    lower, upper_bound = min(values) - 1e-12, max(values) + 1e-12
    assert lower <= result.low <= result.upper <= result.high <= upper_bound
    assert lower <= result.mean <= upper_bound


@given(st.floats(-1, 1), st.integers(1, 40))
def test_equal_values_have_an_empty_interval(value, count):
    result = estimate([value] * count, range(count), resamples=2000)
    assert [result.low, result.high, result.upper] == pytest.approx([value] * 3)


def test_the_upper_bound_covers_the_true_mean():
    """Over 200 samples of 60 coin flips, the bound is below the true mean in about 5 %."""
    coins = np.random.default_rng(0).random((200, 60)) < 0.3
    bounds = [estimate(list(map(float, row)), range(60), resamples=2000).upper for row in coins]
    assert 0.90 <= fmean(bound >= 0.3 for bound in bounds) <= 0.99


@pytest.mark.parametrize(("max_drop", "prompts"), [(0.02, 149), (0.05, 59), (0.1, 29), (0.95, 1)])
def test_prompts_needed_for_a_drop(max_drop, prompts):
    assert prompts_needed(max_drop) == prompts


@given(st.floats(0.001, 0.99))
def test_prompts_needed_is_minimal(max_drop):
    count = prompts_needed(max_drop)
    assert unseen_share(count) <= max_drop
    assert count == 1 or unseen_share(count - 1) > max_drop
