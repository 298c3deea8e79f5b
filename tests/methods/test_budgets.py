"""Integer budgets: apportionment and rounding to pages, docs/methods.md 2.0 and 1.8."""

import itertools
import math
import os
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from host_sync import launches
from kvcompress_kernels import apportion as apportion_op
from kvcompress_kernels.apportion.reference import apportioned, water_fill
from vllm_kvcompress.methods import method
from vllm_kvcompress.methods.budget_spec import BudgetSpec, LayerStats
from vllm_kvcompress.methods.method import layer_pages
from vllm_kvcompress.methods.page_plan import PagePlan, page_plan
from vllm_kvcompress.methods.published.cake import Cake
from vllm_kvcompress.methods.published.d2o import D2O
from vllm_kvcompress.methods.published.defensivekv import Global

prop = settings(derandomize=True, deadline=None, max_examples=80)


def apportion(weights, total, caps, floor=0):
    weights, caps = torch.tensor(weights, dtype=torch.float64), torch.tensor(caps)
    out = apportion_op.apportion(weights, total, caps, floor)
    assert out.dtype == torch.int64
    return out.tolist()


def round_to_pages(tokens, plan):
    return method.round_to_pages(torch.tensor(tokens), plan).tolist()


@pytest.mark.parametrize(
    ("weights", "total", "caps", "floor", "expected"),
    [
        ((3, 1), 8, (10, 10), 0, [6, 2]),
        ((3, 1), 8, (5, 10), 0, [5, 3]),
        ((1, 1, 1), 10, (20, 20, 20), 0, [4, 3, 3]),
        ((0, 0, 0), 7, (20, 20, 20), 0, [3, 2, 2]),
        ((5, 0, 0), 9, (4, 10, 10), 0, [4, 3, 2]),
        ((10, 1, 1), 12, (20, 20, 20), 2, [7, 3, 2]),
        ((1, 2), 30, (10, 20), 0, [10, 20]),
        ((1, 2), 99, (10, 20), 0, [10, 20]),
        ((1, 2), 0, (10, 20), 0, [0, 0]),
        ((1, 1), 7, (1, 9), 3, [1, 6]),
    ],
)
def test_apportion_worked_examples(weights, total, caps, floor, expected):
    assert apportion(weights, total, caps, floor) == expected


@st.composite
def shares(draw, weight):
    n = draw(st.integers(1, 12))
    caps = draw(st.lists(st.integers(0, 300), min_size=n, max_size=n))
    floor = draw(st.integers(0, 20))
    lowest = sum(min(floor, c) for c in caps)
    total = draw(st.integers(lowest, sum(caps) + 5))
    return draw(st.lists(weight, min_size=n, max_size=n)), total, caps, floor


@prop
@given(shares(st.floats(0, 1e12, allow_subnormal=False) | st.sampled_from([0.0, 1.0])))
def test_apportion_keeps_total_caps_and_floors(case):
    weights, total, caps, floor = case
    out = apportion(weights, total, caps, floor)
    assert sum(out) == min(total, sum(caps))
    assert all(min(floor, c) <= b <= c for b, c in zip(out, caps, strict=True))
    assert all(type(b) is int for b in out)


@pytest.mark.parametrize(
    "weights",
    [
        (1e-310, 1e-310, 1.0),
        (5e-324, 5e-324, 5e-324),
        (1e308, 1e308, 1e308),
        (sys.float_info.max, 1.0, 0.0),
        (1e-300, 1e300, 1.0),
    ],
)
def test_apportion_is_exact_for_any_finite_weights(weights):
    """CAKE's exp(log P - max) reaches subnormals if tau2 is small."""
    for total in range(31):
        out = apportion(weights, total, [10, 10, 10])
        assert sum(out) == total, (total, out)
        assert all(0 <= b <= 10 for b in out)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((3e-310, 1e-310), [6, 2]),
        ((1.5e308, 0.5e308), [6, 2]),
        ((1.5e308, 1.5e308, 1e308), [3, 3, 2]),
    ],
)
def test_apportion_at_the_ends_of_float64(weights, expected):
    assert apportion(weights, 8, [10] * len(weights)) == expected


@prop
@given(shares(st.floats(0, 1e6, allow_subnormal=False)), st.integers(-40, 40))
def test_apportion_depends_on_ratios_only(case, power):
    weights, total, caps, floor = case
    assume(all(w == 0 or w > 1e-200 for w in weights))
    scaled = [w * 2.0**power for w in weights]
    assert apportion(weights, total, caps, floor) == apportion(scaled, total, caps, floor)


@prop
@given(shares(st.integers(0, 1000)))
def test_apportion_equals_exact_rationals(case):
    """Except where float64 cannot distinguish two fractional parts."""
    weights, total, caps, floor = case
    free = [c - min(floor, c) for c in caps]
    x = water_fill(weights, min(total, sum(caps)) - sum(caps) + sum(free), free)
    fraction = sorted({v - math.floor(v) for v in x})
    assume(all(b - a > Fraction(1, 10**8) for a, b in itertools.pairwise(fraction)))
    tied = len({v - math.floor(v) for v in x}) < len(x)
    got, want = apportion(weights, total, caps, floor), apportioned(weights, total, caps, floor)
    if not tied:
        assert got == want
    else:
        assert sum(got) == sum(want)
        assert all(abs(g - e) <= 1 for g, e in zip(got, want, strict=True))


@pytest.mark.parametrize("scale", [1, 3, 0.1, 7e-5])
def test_equal_fractions_go_to_the_lower_layer_at_any_scale(scale):
    """8 * 20 / 48, 8 * 8 / 48 and 8 * 2 / 48 all have the fraction 1/3, up to float64 noise."""
    weights = [w * scale for w in (20, 11, 8, 7, 2)]
    assert apportion(weights, 8, [44, 21, 59, 23, 37]) == [4, 2, 1, 1, 0]


@prop
@given(
    st.integers(1, 40),
    st.integers(0, 4000),
    st.integers(1, 200),
)
def test_equal_weights_give_the_remainder_to_the_first_layers(n, total, weight):
    assume(total < n * 200)
    out = apportion([float(weight)] * n, total, [200] * n)
    assert out == [total // n + (i < total % n) for i in range(n)]


@prop
@given(shares(st.floats(0, 1e3, allow_subnormal=False)))
def test_layers_with_larger_weights_never_get_less(case):
    weights, total, _caps, floor = case
    caps = [300] * len(weights)
    total = max(total, sum(min(floor, c) for c in caps))
    out = apportion(weights, total, caps, floor)
    ranked = sorted(range(len(out)), key=lambda i: (-weights[i], i))
    assert [out[i] for i in ranked] == sorted(out, reverse=True)


# -- pages ------------------------------------------------------------------------------------


def plan(*, layers, tokens, block, window, budget, pages, leading=0):
    return PagePlan(
        num_layers=layers,
        tokens=tokens,
        block_size=block,
        window=window,
        budget=budget,
        pages=pages,
        leading_tokens=leading,
    )


@pytest.mark.parametrize(
    ("tokens", "pages", "expected"),
    [
        # t=4, bs=16: (36-4)/16=2, (20-4)/16=1
        ([36, 20], 3, [2, 1]),
        # 1.5 and 1.5: the tie goes to the lower layer
        ([28, 28], 3, [2, 1]),
        # 1.25 and 1.75
        ([24, 32], 3, [1, 2]),
        # a minimum of one page for the window
        ([100, 4], 7, [6, 1]),
    ],
)
def test_round_to_pages_worked_examples(tokens, pages, expected):
    p = plan(layers=2, tokens=100, block=16, window=8, budget=28, pages=pages)
    assert (p.full_blocks, p.tail, p.floor_pages) == (6, 4, 1)
    assert round_to_pages(tokens, p) == expected


@st.composite
def plans_with_tokens(draw):
    """Draw a plan from `page_plan` and token budgets that an allocator could return."""
    layers, block = draw(st.integers(1, 12)), draw(st.sampled_from([1, 2, 8, 16, 32, 128]))
    tokens = draw(st.integers(2, 40 * block))
    window = draw(st.integers(0, min(tokens - 1, 3 * block)))
    budget = draw(st.integers(window + 1, tokens))
    plan = page_plan(
        BudgetSpec(num_layers=layers, tokens=tokens, window=window, budget=budget), block
    )
    assume(plan is not None)
    weights = draw(st.lists(st.floats(0, 100), min_size=layers, max_size=layers))
    past, base = tokens - window, plan.budget_spec.budget - window
    past_budgets = apportioned(
        [Fraction(w) for w in weights], layers * min(base, past), [past] * layers
    )
    return plan, [b + window for b in past_budgets]


@prop
@given(plans_with_tokens())
def test_page_rounding_keeps_sum_and_bounds(case):
    p, tokens = case
    pages = round_to_pages(tokens, p)
    assert sum(pages) == p.pages
    assert all(p.floor_pages <= x <= p.full_blocks for x in pages)
    exact = [Fraction(n - p.tail, p.block_size) for n in tokens]
    if all(x >= p.floor_pages for x in exact):
        assert all(abs(got - x) < 1 for got, x in zip(pages, exact, strict=True))


@prop
@given(plans_with_tokens())
def test_page_rounding_keeps_the_order_of_budgets(case):
    p, tokens = case
    pages = round_to_pages(tokens, p)
    ranked = sorted(range(len(tokens)), key=lambda i: (-tokens[i], i))
    assert [pages[i] for i in ranked] == sorted(pages, reverse=True)


@prop
@given(
    st.integers(1, 30), st.integers(1, 60), st.integers(1, 64), st.sampled_from([0, 1]), st.data()
)
@example(3, 5, 16, 1, None)
def test_page_rounding_does_not_change_full_pages(layers, full_blocks, block, first_blocks, data):
    tail, leading = block // 2, first_blocks * block
    low = 1  # every layer keeps a page
    if data is None:
        wanted = [5, 1, 2]
    else:
        wanted = data.draw(
            st.lists(st.integers(low, full_blocks), min_size=layers, max_size=layers)
        )
    p = plan(
        layers=layers,
        tokens=leading + full_blocks * block + tail,
        block=block,
        window=0,
        budget=1,
        pages=sum(wanted),
        leading=leading,
    )
    assert round_to_pages([leading + x * block + tail for x in wanted], p) == wanted


# -- launches ---------------------------------------------------------------------------------


class CountOperators(TorchDispatchMode):
    """Counts operators that launch a kernel: all except views and allocations."""

    def __init__(self):
        super().__init__()
        self.launched = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        allocates = func.overloadpacket.__name__.startswith(("empty", "new_empty"))
        self.launched += not (func.is_view or allocates)
        return func(*args, **kwargs or {})


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="uses meta tensors")
@pytest.mark.parametrize(
    ("allocator", "has_caps", "operators", "kernels"),
    [
        (Cake(), False, 0, 2),
        (Cake(), True, 5, 3),
        (D2O(), False, 11, 2),
        (Global(), False, 7, 10),
    ],
)
@pytest.mark.parametrize("layers", [4, 32])
def test_page_counts_take_few_launches(
    allocator, has_caps, operators, kernels, layers, monkeypatch
):
    """`has_caps`: the layers hold different numbers of pages."""

    def on_device(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    spec = BudgetSpec(num_layers=layers, tokens=8192, window=32, budget=819)
    statistics = LayerStats(
        entropy=on_device(layers),
        shift=on_device(layers),
        column_variance=on_device(layers, 32),
        scores=on_device(layers, 8, spec.past),
    )
    caps = on_device(layers, dtype=torch.int64) if has_caps else None
    launched = launches(monkeypatch)
    with CountOperators() as counted:
        pages = layer_pages(allocator, page_plan(spec, 16), statistics, caps)
    assert (pages.shape, pages.dtype) == ((layers,), torch.int64)
    assert counted.launched == operators
    assert len(launched) == kernels
