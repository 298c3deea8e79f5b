"""The bootstrap, against cases that can be counted by hand."""

import itertools
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvcompress.compare.statistics import estimate, needed, unseen

VALUES = st.lists(st.floats(-1, 1), min_size=1, max_size=30)


def every_draw(sums: list[float], sizes: list[float]) -> list[float]:
    """The mean of each of the n ** n equally likely draws of n groups."""
    groups = range(len(sums))
    return [
        sum(sums[g] for g in drawn) / sum(sizes[g] for g in drawn)
        for drawn in itertools.product(groups, repeat=len(sums))
    ]


def test_quantiles_are_those_of_all_draws():
    values = [0.0, 0.1, 0.3, 0.55, 1.0]
    found = estimate(values, range(5), resamples=50_000)
    draws = every_draw(values, [1.0] * 5)
    low, high, upper = np.quantile(draws, [0.025, 0.975, 0.95])
    assert found.mean == pytest.approx(fmean(values))
    assert (found.low, found.high, found.upper) == pytest.approx((low, high, upper), abs=0.02)


def test_two_prompts_by_hand():
    """Means 0, 1/2 and 1 with chances 1/4, 1/2 and 1/4."""
    found = estimate([0.0, 1.0], "ab")
    assert (found.mean, found.low, found.high, found.upper) == (0.5, 0.0, 1.0, 1.0)


def test_prompts_of_one_text_are_drawn_together():
    values = [1.0, 1.0, 1.0, 0.0]
    alone, together = estimate(values, "abcd"), estimate(values, "aaab")
    assert (alone.independent, together.independent) == (4, 2)
    assert alone.mean == together.mean == 0.75
    draws = set(every_draw([3.0, 0.0], [3.0, 1.0]))
    assert draws == {0.0, 0.75, 1.0}
    assert {together.low, together.high} <= draws
    one = estimate(values, "aaaa")
    assert one.low == one.high == one.upper == 0.75


def test_sizes_make_it_a_mean_over_what_they_count():
    found = estimate([6.0, 0.0], "ab", sizes=[3.0, 1.0])
    assert found.mean == 1.5
    assert (found.low, found.high) == (0.0, 2.0)
    hollow = estimate([1.0, 0.0], "ab", sizes=[2.0, 0.0])
    assert (hollow.mean, hollow.low, hollow.high) == (0.5, 0.5, 0.5)


@given(VALUES, st.integers(0, 9))
def test_intervals_hold_their_order_and_repeat(values, seed):
    found = estimate(values, range(len(values)), seed=seed, resamples=2000)
    assert found == estimate(values, range(len(values)), seed=seed, resamples=2000)
    least, most = min(values) - 1e-12, max(values) + 1e-12
    assert least <= found.low <= found.upper <= found.high <= most
    assert least <= found.mean <= most


@given(st.floats(-1, 1), st.integers(1, 40))
def test_a_constant_is_sure(value, count):
    found = estimate([value] * count, range(count), resamples=2000)
    assert [found.low, found.high, found.upper] == pytest.approx([value] * 3)


def test_coverage_of_the_upper_bound():
    """Of 200 samples of 60 coins the bound is below the truth in about one of twenty."""
    coins = np.random.default_rng(0).random((200, 60)) < 0.3
    bounds = [estimate(list(map(float, row)), range(60), resamples=2000).upper for row in coins]
    assert 0.90 <= fmean(bound >= 0.3 for bound in bounds) <= 0.99


@pytest.mark.parametrize(("max_drop", "prompts"), [(0.02, 149), (0.05, 59), (0.1, 29), (0.95, 1)])
def test_prompts_that_a_bound_takes(max_drop, prompts):
    assert needed(max_drop) == prompts


@given(st.floats(0.001, 0.99))
def test_needed_is_the_fewest(max_drop):
    count = needed(max_drop)
    assert unseen(count) <= max_drop
    assert count == 1 or unseen(count - 1) > max_drop
