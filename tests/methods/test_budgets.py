"""Integer budgets: apportionment and rounding to pages, docs/methods.md 2.0 and 1.8."""

import os
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from host_sync import launches
from kvcompress_kernels import apportion as apportion_op
from kvcompress_kernels.apportion.reference import apportioned
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


# -- pages ------------------------------------------------------------------------------------


def plan(*, layers, block, leading=0, **lengths):
    sizes = {"num_layers": layers, "block_size": block, "leading_tokens": leading}
    return PagePlan(**sizes, **lengths)


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
    spec = BudgetSpec(num_layers=layers, tokens=tokens, window=window, budget=budget)
    plan = page_plan(spec, block)
    assume(plan is not None)
    weights = draw(st.lists(st.floats(0, 100), min_size=layers, max_size=layers))
    past, base = tokens - window, plan.budget_spec.budget - window
    shares, caps = [Fraction(w) for w in weights], [past] * layers
    past_budgets = apportioned(shares, layers * min(base, past), caps)
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


@pytest.mark.parametrize("leading", [0, 16])
def test_page_rounding_does_not_change_full_pages(leading):
    tokens, wanted = leading + 5 * 16 + 8, [5, 1, 2]
    p = plan(layers=3, tokens=tokens, block=16, window=0, budget=1, pages=8, leading=leading)
    assert round_to_pages([leading + pages * 16 + 8 for pages in wanted], p) == wanted


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
    [(Cake(), False, 0, 2), (Cake(), True, 5, 3), (D2O(), False, 11, 2), (Global(), False, 7, 10)],
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
