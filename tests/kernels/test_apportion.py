import itertools
import math
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from cases import INTERPRETED, property_test
from kvcompress_kernels.apportion import (
    apportion,
    apportion_by_preference,
    cpu,
    reference,
    round_to_pages,
)

pytestmark = pytest.mark.gpu

prop = property_test(80, interpreted=15)
LAYERS = [1, 2, 3, 28, 32, 64, 80, 128, 256]
KINDS = ["uniform", "counts", "ties", "equal", "float32", "none", "decades"]
f64, i64 = torch.float64, torch.int64


def rng(seed):
    return torch.Generator().manual_seed(seed)


def with_layers(*cases):
    """Return each case with each number of layers; in the interpreter, only the first with 256.

    There, more than 80 layers are slow, and their kernel is the one of 80 with more tiles.
    """
    return [
        (*case, layers)
        for case in cases
        for layers in LAYERS
        if not INTERPRETED or layers <= 80 or (case == cases[0] and layers == 256)
    ]


def integers(low, high, shape, generator):
    return torch.randint(low, high + 1, shape, generator=generator)


def weights_of(kind, shape, generator):
    """Return random weights, a tenth of which are 0."""
    uniform = torch.rand(shape, generator=generator, dtype=f64)
    weights = {
        "uniform": uniform,
        "counts": integers(0, 5000, shape, generator),
        "ties": integers(0, 3, shape, generator),
        "equal": torch.ones(shape),
        "float32": uniform.float(),
        "none": torch.zeros(shape),
        "decades": 10 ** (-310 * uniform),
    }[kind]
    return weights.where(torch.rand(shape, generator=generator) > 0.1, 0)


def same(got, want):
    assert got.dtype == i64
    assert torch.equal(got, want), (got.tolist(), want.tolist())


# -- apportion ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "layers"), with_layers(*zip(KINDS)))
def test_budgets_equal_the_cpu_code(kind, layers):
    """For rows with totals of their own, and with one total and one cap for all rows."""
    generator = rng(layers)
    weights = weights_of(kind, (3, layers), generator)
    caps, floor = integers(0, 300, (3, layers), generator), layers % 5
    low, high = caps.clamp(max=floor).sum(1, keepdim=True), caps.sum(1, keepdim=True)
    totals = low + (torch.tensor([[0.0], [0.3], [0.9]]) * (high - low)).long()
    got = apportion(weights, totals, caps, floor)
    same(got, cpu.run(weights, totals, caps, floor))
    assert torch.equal(got.sum(1, keepdim=True), totals)
    total = 37 * layers + 1
    same(apportion(weights, total, 120, floor), cpu.run(weights, total, 120, floor))


@st.composite
def rows(draw):
    n = draw(st.integers(1, 12))
    caps = draw(st.lists(st.integers(0, 300), min_size=n, max_size=n))
    floor = draw(st.integers(0, 20))
    lowest = sum(min(floor, cap) for cap in caps)
    total = draw(st.integers(lowest, sum(caps) + 5))
    return draw(st.lists(st.integers(0, 1000), min_size=n, max_size=n)), total, caps, floor


@prop
@given(rows())
def test_budgets_equal_exact_rationals(case):
    """Except by one token where float64 sees two fractional parts as equal."""
    weights, total, caps, floor = case
    free = [cap - min(floor, cap) for cap in caps]
    x = reference.water_fill(weights, min(total, sum(caps)) - sum(caps) + sum(free), free)
    fractions = sorted({share - math.floor(share) for share in x})
    assume(all(b - a > Fraction(1, 10**8) for a, b in itertools.pairwise(fractions)))
    arguments = torch.tensor(weights), total, torch.tensor(caps), floor
    got, want = apportion(*arguments), reference.run(*arguments)
    if len(fractions) == len(x):
        same(got, want)
    assert int((got - want).abs().max()) <= 1


@prop
@given(rows(), st.floats(0, 1e12, allow_subnormal=False))
def test_budgets_keep_total_caps_and_floors(case, scale):
    weights, total, caps, floor = case
    got = apportion(torch.tensor(weights, dtype=f64) * scale, total, torch.tensor(caps), floor)
    assert int(got.sum()) == min(total, sum(caps))
    bounds = zip(got.tolist(), caps, strict=True)
    assert all(min(floor, cap) <= budget <= cap for budget, cap in bounds)


@prop
@given(rows())
def test_layers_with_larger_weights_never_get_less(case):
    """Of equal weights, the remainder goes to the first layers."""
    weights, total, _, floor = case
    got = apportion(torch.tensor(weights), max(total, floor * len(weights)), 300, floor).tolist()
    ranked = sorted(range(len(got)), key=lambda i: (-weights[i], i))
    assert [got[i] for i in ranked] == sorted(got, reverse=True)


@pytest.mark.parametrize(
    "weights",
    [
        (1e-310, 1e-310, 1.0),
        (3e-310, 1e-310, 2e-310),
        (5e-324, 5e-324, 5e-324),
        (1e308, 1e308, 1e308),
        (sys.float_info.max, 1.0, 0.0),
        (1e-300, 1e300, 1.0),
        (math.nan, 2.0, 1.0),
        (math.nan, math.nan, math.nan),
    ],
)
@pytest.mark.parametrize("caps", [(10, 10, 10), (0, 3, 30), (30, 0, 3)])
def test_arbitrary_weights_equal_the_cpu_code(weights, caps):
    batch = torch.tensor([weights] * 34, dtype=f64)
    totals, most = torch.arange(34)[:, None], torch.tensor([caps] * 34)
    got = apportion(batch, totals, most)
    same(got, cpu.run(batch, totals, most, 0))
    assert got.sum(1).tolist() == [min(total, sum(caps)) for total in range(34)]


@pytest.mark.parametrize("scale", [1, 3, 0.1, 7e-5])
def test_equal_fractions_go_to_the_lower_layer(scale):
    """8 * 20 / 48, 8 * 8 / 48 and 8 * 2 / 48 all have the fraction 1/3, up to float64 noise."""
    weights = torch.tensor([20, 11, 8, 7, 2], dtype=f64) * scale
    assert apportion(weights, 8, torch.tensor([44, 21, 59, 23, 37])).tolist() == [4, 2, 1, 1, 0]


@pytest.mark.parametrize("layers", [3, 32, 80])
def test_the_remainder_of_equal_weights_goes_to_the_first_layers(layers):
    got = apportion(torch.full((layers,), 0.3), 7 * layers + 2, 200)
    assert got.tolist() == [8, 8, *[7] * (layers - 2)]


def test_excess_of_full_layers_goes_to_the_others():
    weights, caps = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([10, 20, 5])
    for total in (35, 36, 1000):
        same(apportion(weights, total, caps), caps)
    assert apportion(weights, 33, caps).tolist() == [10, 20, 3]
    assert apportion(weights, 0, caps).tolist() == [0, 0, 0]
    assert apportion(weights, 0, torch.zeros(3, dtype=i64)).tolist() == [0, 0, 0]


def test_shapes_and_strides():
    """Totals of any accepted shape, two batch dimensions, no rows, and strided tensors."""
    generator = rng(0)
    weights, caps = torch.rand(2, 3, 5, generator=generator), torch.full((2, 3, 5), 40)
    totals = integers(0, 180, (2, 3, 1), generator)
    want = cpu.run(weights, totals, caps, 2)
    same(apportion(weights, totals, caps, 2), want)
    same(apportion(weights, totals, 40, 2), want)
    same(apportion(weights.permute(2, 0, 1).contiguous().permute(1, 2, 0), totals, caps, 2), want)
    one = cpu.run(weights, 100, caps, 0)
    for total in (100, torch.tensor(100), torch.tensor([100]), torch.full((2, 3, 1), 100)):
        same(apportion(weights, total, caps), one)
    assert apportion(weights[:, :0], 3, caps[:, :0]).shape == (2, 0, 5)


def test_totals_beyond_int32():
    assert apportion(torch.tensor([1.0, 2.0, 1.0]), 2**40, 2**39).tolist() == [2**38, 2**39, 2**38]


# -- CAKE's preferences ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tau1", "tau2", "layers"), with_layers((1.0, 1.0), (1.6, 0.4), (0.05, 20.0))
)
def test_preferences_equal_the_cpu_code(tau1, tau2, layers):
    generator = rng(layers)
    entropy, shift = 100 * torch.rand(2, 2, layers, generator=generator)
    entropy[0, ::7], shift[1, ::5] = 0.0, math.nan
    got = apportion_by_preference(entropy, shift, 50 * layers, 120, tau1=tau1, tau2=tau2)
    same(got, cpu.run_preferences(entropy, shift, 50 * layers, 120, tau1, tau2))


@prop
@given(
    st.lists(st.tuples(st.floats(1e-3, 1e4), st.floats(1e-6, 1e2)), min_size=1, max_size=9),
    st.floats(0.2, 2),
    st.floats(0.4, 3),
)
def test_preferences_are_those_of_the_equation(values, tau1, tau2):
    entropy, shift = torch.tensor(values, dtype=f64).unbind(1)
    arguments = entropy, shift, 20 * len(values), torch.full((len(values),), 60)
    got = apportion_by_preference(*arguments, tau1=tau1, tau2=tau2)
    want = reference.run_preferences(*arguments, tau1, tau2)
    assert int((got - want).abs().max()) <= 1
    assert int(got.sum()) == 20 * len(values)


def test_temperatures_are_not_rounded_to_float32():
    tau, one = 0.1, torch.ones(2, dtype=f64)
    entropy = torch.tensor([2.0**tau, 1.0], dtype=f64)
    got = apportion_by_preference(entropy, one, 3 * 2**33, 2**40, tau1=tau, tau2=1.0)
    assert got.tolist() == [2**34, 2**33]


@pytest.mark.parametrize("zero", [(0.0, 2.0), (2.0, 0.0), (math.nan, 2.0), (2.0, math.nan)])
def test_layers_without_entropy_or_shift(zero):
    def budgets(*values):
        entropy, shift = torch.tensor(values).unbind(1)
        return apportion_by_preference(entropy, shift, 9, 20, tau1=1.0, tau2=1.0).tolist()

    assert budgets(zero, (2.0, 2.0)) == [0, 9]
    assert budgets(zero, zero) == [5, 4]


# -- pages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "floor", "layers"), with_layers(*itertools.product([20, 90], [0, 1, 3]))
)
def test_pages_equal_the_cpu_code_and_the_reference(mean, floor, layers):
    """With fewer and with more pages than the budgets fill."""
    generator = rng(layers)
    tokens = integers(0, 1600, (2, layers), generator)
    caps = integers(max(floor, 90), 130, (2, layers), generator)
    for most, tail in ((caps, 13), (130, -5)):
        sizes = dict(pages=mean * layers, page_tokens=16, tail=tail, floor_pages=floor)
        got = round_to_pages(tokens, **sizes, max_pages=most)
        same(got, cpu.run_pages(tokens, *sizes.values(), most))
        assert got.sum(1).tolist() == [mean * layers] * 2
        assert bool(((got >= floor) & (got <= most)).all())
        exact = reference.run_pages(tokens, *sizes.values(), most)
        # Scaled shares may tie in float64 where exact ones do not.
        assert int((got - exact).abs().max()) <= 1


@prop
@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=12),
    st.sampled_from([1, 2, 16, 64]),
    st.integers(-20, 20),
    st.data(),
)
def test_pages_equal_exact_integers_if_none_are_missing(tokens, page_tokens, tail, data):
    """Budgets that do not fill more pages than there are need no shares."""
    full = [max(n - tail, page_tokens) // page_tokens for n in tokens]
    most = max(full) + 3
    pages = data.draw(st.integers(sum(full), most * len(full)))
    sizes = dict(pages=pages, page_tokens=page_tokens, tail=tail, floor_pages=1)
    got = round_to_pages(torch.tensor(tokens), **sizes, max_pages=most)
    want = reference.pages_of(tokens, *sizes.values(), [most] * len(tokens))
    assert got.tolist() == want


def test_layers_may_have_fewer_pages_than_the_minimum():
    tokens, most = torch.tensor([900, 10, 500]), torch.tensor([40, 0, 1])
    sizes = dict(pages=20, page_tokens=16, tail=0, floor_pages=2)
    assert round_to_pages(tokens, **sizes, max_pages=most).tolist() == [19, 0, 1]


# -- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        dict(weights=torch.tensor(1.0)),
        dict(weights=torch.zeros(3, 0)),
        dict(caps=torch.zeros(2, dtype=i64)),
        dict(caps=torch.zeros(2, 3, dtype=torch.int32)),
        dict(total=torch.zeros(2, 1)),
        dict(total=torch.zeros(2, dtype=i64)),
        dict(total=torch.zeros(1, 2, dtype=i64)),
    ],
    ids=lambda change: next(iter(change)),
)
def test_arguments_are_checked(change):
    good = dict(weights=torch.zeros(2, 3), total=4, caps=torch.ones(2, 3, dtype=i64))
    apportion(**good)
    with pytest.raises(ValueError, match="apportion: "):
        apportion(**good | change)


def test_other_arguments_are_checked():
    taus = dict(tau1=1.0, tau2=1.0)
    with pytest.raises(ValueError, match=r"shift must be \[3\]"):
        apportion_by_preference(torch.ones(3), torch.ones(2), 1, 1, **taus)
    with pytest.raises(ValueError, match="temperatures must be positive"):
        apportion_by_preference(torch.ones(3), torch.ones(3), 1, 1, **taus | {"tau2": 0.0})
    sizes = dict(pages=3, page_tokens=16, tail=0, floor_pages=1, max_pages=2)
    with pytest.raises(ValueError, match="tokens must be int64"):
        round_to_pages(torch.ones(3), **sizes)
    with pytest.raises(ValueError, match="page_tokens must be positive"):
        round_to_pages(torch.ones(3, dtype=i64), **sizes | {"page_tokens": 0})
