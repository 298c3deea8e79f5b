"""Uniform, pyramid and CAKE budgets: docs/methods.md 2.1 to 2.3."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvcompress_kernels.apportion import cpu
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import BudgetSpec, LayerStats
from vllm_kvcompress.methods.parts.allocators import Uniform
from vllm_kvcompress.methods.published.cake import Cake
from vllm_kvcompress.methods.published.pyramidkv import Pyramid
from vllm_kvcompress.methods.registry import ALLOCATORS

prop = settings(derandomize=True, deadline=None, max_examples=100)


def budget_spec(n, budget, window, tokens):
    return BudgetSpec(num_layers=n, tokens=tokens, window=window, budget=budget)


def stats_of(*pairs):
    """Return layer statistics with these pairs of entropy and shift."""
    entropy, shift = torch.tensor(pairs, dtype=torch.float64).view(-1, 2).unbind(1)
    return LayerStats(entropy=entropy, shift=shift)


def weighted(*weights):
    """Return layer statistics whose preferences are `weights` at tau1 = tau2 = 1."""
    return stats_of(*((1.0, float(w)) for w in weights))


def allocate(allocator, *args):
    out = allocator.allocate(*args)
    assert out.dtype == torch.int64
    return out.tolist()


def preferences(cake, *pairs):
    stats = stats_of(*pairs)
    return cpu.preferences(stats.entropy, stats.shift, cake.tau1, cake.tau2).tolist()


@st.composite
def prompts(draw):
    window = draw(st.integers(0, 64))
    budget = draw(st.integers(window + 1, 2000))
    tokens = draw(st.integers(window + 1, 4000))
    return budget_spec(draw(st.integers(1, 48)), budget, window, tokens)


stats_value = st.floats(1e-30, 1e6) | st.just(0.0)


def test_reads():
    assert {name: allocator().reads for name, allocator in ALLOCATORS.items()} == {
        "uniform": Reads.NOTHING,
        "pyramid": Reads.NOTHING,
        "cake": Reads.WINDOW | Reads.VARIANCE,
        "dynamickv": Reads.SCORES,
        "global": Reads.SCORES,
        "d2o": Reads.COLUMN_SUMS,
    }
    assert [name for name, a in ALLOCATORS.items() if a.exact_ratio] == ["d2o"]


@prop
@given(prompts(), st.data())
def test_allocators_keep_sum_and_caps(p, data):
    pair = st.tuples(stats_value, stats_value)
    stats = data.draw(st.lists(pair, min_size=p.num_layers, max_size=p.num_layers))
    beta = data.draw(st.floats(1.01, 1e4))
    tau = data.draw(st.tuples(st.floats(0.2, 2), st.floats(0.05, 3)))
    for allocator in (Uniform(), Pyramid(beta=beta), Cake(tau1=tau[0], tau2=tau[1])):
        past = allocate(allocator, p, stats_of(*stats))
        assert len(past) == p.num_layers
        assert sum(past) == min(p.num_layers * p.base, p.num_layers * p.past)
        assert all(0 <= b <= p.past and type(b) is int for b in past)


# -- uniform ----------------------------------------------------------------------------------


@prop
@given(prompts())
def test_uniform_gives_equal_budgets(p):
    assert allocate(Uniform(), p) == [min(p.budget, p.tokens) - p.window] * p.num_layers


# -- pyramid ----------------------------------------------------------------------------------


def test_pyramid_worked_example():
    assert allocate(Pyramid(), budget_spec(4, 20, 4, 100)) == [31, 21, 11, 1]


def test_pyramid_hi_is_limited_to_the_prompt():
    # base 60, P 80: hi 117 -> 80, lo 40; 80, 66.67, 53.33, 40
    assert allocate(Pyramid(), budget_spec(4, 70, 10, 90)) == [80, 67, 53, 40]


@prop
@given(prompts(), st.floats(1.01, 1e3))
def test_pyramid_budgets_decrease(p, beta):
    past = allocate(Pyramid(beta=beta), p)
    assert past == sorted(past, reverse=True)


@prop
@given(prompts(), st.floats(1.01, 1e3))
def test_pyramid_is_within_a_token_of_the_line(p, beta):
    assume(p.num_layers > 1)
    base, past = min(p.base, p.past), p.past
    lo = base / beta
    hi = 2 * base - lo
    if hi > past:
        hi, lo = past, 2 * base - past
    line = [hi - i * (hi - lo) / (p.num_layers - 1) for i in range(p.num_layers)]
    got = allocate(Pyramid(beta=beta), p)
    assert all(abs(b - x) < 1 + 1e-6 for b, x in zip(got, line, strict=True))


# -- CAKE -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "budget", "window", "tokens", "expected"),
    [
        ((3, 1), 12, 4, 100, [12, 4]),
        ((3, 1), 12, 4, 14, [10, 6]),
        ((1, 20, 20, 100), 15, 4, 24, [0, 12, 12, 20]),
        ((0, 0, 0), 6, 4, 100, [2, 2, 2]),
        ((5, 0, 0), 7, 4, 8, [4, 3, 2]),
    ],
)
def test_cake_worked_examples(weights, budget, window, tokens, expected):
    p = budget_spec(len(weights), budget, window, tokens)
    assert allocate(Cake(), p, weighted(*weights)) == expected


@prop
@given(
    st.lists(st.tuples(st.floats(1e-3, 1e4), st.floats(1e-6, 1e2)), min_size=1, max_size=20),
    st.floats(0.2, 2),
    st.floats(0.4, 3),
)
def test_cake_preferences_are_ratios_of_the_equation(values, tau1, tau2):
    got = preferences(Cake(tau1=tau1, tau2=tau2), *values)
    want = [h ** (1 / tau1) * v ** (1 / tau2) for h, v in values]
    assert max(got) == 1.0
    assert got == pytest.approx([x / max(want) for x in want], rel=1e-9)


@pytest.mark.parametrize("zero", [(0.0, 2.0), (2.0, 0.0), (math.nan, 2.0)])
def test_cake_gives_no_weight_without_entropy_or_shift(zero):
    assert preferences(Cake(), zero, (2.0, 2.0)) == [0.0, 1.0]
    assert preferences(Cake(), zero, zero) == [0.0, 0.0]
    assert allocate(Cake(), budget_spec(2, 8, 4, 100), stats_of(zero, zero)) == [4, 4]


def test_cake_keeps_ratios_of_values_beyond_float64():
    for scale in (1e-200, 1e200):
        stats = [(scale, h * scale) for h in (3.0, 1.0)]
        assert preferences(Cake(), *stats) == pytest.approx([1.0, 1 / 3], rel=1e-9)


def test_cake_sum_is_exact_with_subnormal_preferences():
    """One layer is full and the others get 1e-310 each: tau2 = 0.1, V 31 decades apart."""
    stats = weighted(1.0, 1e-31, 1e-31)
    past = allocate(Cake(tau2=0.1), budget_spec(3, 9, 4, 14), stats)
    assert past == [10, 3, 2]


@pytest.mark.parametrize(
    "stats", [None, LayerStats(), weighted(), weighted(1.0), weighted(1.0, 2.0, 3.0)]
)
def test_cake_needs_the_statistics_of_every_layer(stats):
    with pytest.raises(ValueError, match="statistics of 2 layers"):
        allocate(Cake(), budget_spec(2, 8, 4, 100), stats)
