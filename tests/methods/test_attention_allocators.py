"""DynamicKV, D2O and global budgets: docs/methods.md 2.4 to 2.6."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import methods_reference as ref
from vllm_kvcompress.methods.budget_spec import BudgetSpec, LayerStats
from vllm_kvcompress.methods.published.d2o import D2O
from vllm_kvcompress.methods.published.defensivekv import Global, shares
from vllm_kvcompress.methods.published.dynamickv import DynamicKV

prop = settings(derandomize=True, deadline=None, max_examples=100)


def budget_spec(n, budget, window, tokens, total=None):
    return BudgetSpec(num_layers=n, tokens=tokens, window=window, budget=budget, total=total)


# -- DynamicKV --------------------------------------------------------------------------------


def test_dynamickv_worked_example():
    assert DynamicKV().settle(torch.tensor([[27, 6, 8, 7]]), 24, 60).tolist() == [14, 3, 4, 3]


@prop
@given(
    st.integers(1, 13),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 999),
)
def test_dynamickv_equals_the_reference(layers, heads, past, levels, every, seed):
    """Few score levels: ties cross heads and layers, and the lower layer counts first."""
    rng = np.random.RandomState(seed)
    scores = rng.randint(0, 3**levels, (layers, heads, past)).astype(np.float32)
    scores *= rng.lognormal(0, 1, (layers, 1, 1)).astype(np.float32)
    base = rng.randint(1, past + 1)
    r_max = float(rng.choice([1.0, 1.5, 3.0, 10.0]))
    spec, stats = budget_spec(layers, base + 8, 8, past + 8), torch.from_numpy(scores)
    got = DynamicKV(r_max=r_max, every=every).allocate(spec, LayerStats(scores=stats)).tolist()
    assert got == ref.dynamickv_budgets(list(scores), base, past, r_max, every)
    assert all(0 <= b <= min(int(r_max * base), past) for b in got)
    assert sum(got) <= layers * base


@pytest.mark.parametrize("allocator", [DynamicKV(), Global()], ids=["dynamickv", "global"])
def test_scores_may_have_any_strides(allocator):
    scores = torch.rand(92, 2, 6, generator=torch.Generator().manual_seed(5)).permute(2, 1, 0)
    found = [
        allocator.allocate(budget_spec(6, 20, 8, 100), LayerStats(scores=layers)).tolist()
        for layers in (scores, scores.contiguous())
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("stats", [None, LayerStats(), LayerStats(scores=torch.zeros(3, 1, 92))])
def test_allocators_by_scores_need_the_scores(stats):
    for allocator, name in ((DynamicKV(), "dynamickv"), (Global(), "global")):
        with pytest.raises(ValueError, match=f"{name} needs the scores of 2 layers"):
            allocator.allocate(budget_spec(2, 20, 8, 100), stats)


# -- D2O --------------------------------------------------------------------------------------

RAW = (3.59, 0.98, 3.15, 1.00, 2.38, 0.99)


def stats_of_variances(*rows):
    return LayerStats(column_variance=torch.tensor(rows, dtype=torch.float64))


@pytest.mark.parametrize(
    ("norm", "expected"),
    [("layer_minmax", [30, 67, 34, 67, 43, 67]), ("raw", [14, 84, 17, 83, 27, 83])],
)
def test_d2o_worked_example(norm, expected):
    """docs/methods.md 2.5 by hand, from rounded statistics: a budget may differ by 1."""
    got = D2O(norm=norm).allocate(
        budget_spec(6, 51, 0, 257, total=308), stats_of_variances(*((f,) for f in RAW))
    )
    got = got.tolist()
    assert sum(got) == 308
    assert all(abs(a - b) <= 1 for a, b in zip(got, expected, strict=True))


def test_d2o_head_minmax_scales_within_the_layer():
    rows = [(1.0, 3.0, 2.0), (100.0, 100.0, 400.0)]
    f = [np.mean([0, 1, 0.5]), np.mean([0, 0, 1])]
    variance = torch.tensor(rows, dtype=torch.float64)
    assert D2O(norm="head_minmax").densities(variance).tolist() == pytest.approx(f, abs=1e-5)
    assert D2O(norm="raw").densities(variance).tolist() == [2.0, 200.0]


@prop
@given(
    st.lists(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), min_size=1, max_size=40),
    st.sampled_from(["layer_minmax", "head_minmax", "raw"]),
    st.integers(1, 400),
    st.integers(0, 60),
    st.booleans(),
)
def test_d2o_keeps_sum_floor_and_caps(rows, norm, tokens, window, skips):
    n = len(rows)
    window = min(window, tokens - 1)
    total = n * window + min(n * 20, n * (tokens - window))
    p = budget_spec(n, window + 20, window, tokens, total=total)
    d2o = D2O(norm=norm, skip_layers=(0, 1, -1) if skips else ())
    got = d2o.allocate(p, stats_of_variances(*rows)).tolist()
    assert sum(got) == p.past_total
    assert all(min(8 - window, p.past) <= b <= p.past for b in got)


def test_d2o_skipped_layers_keep_all_tokens_within_the_total():
    stats = stats_of_variances(*((float(i),) for i in range(8)))
    d2o = D2O(skip_layers=(0, 1, -1))
    got = d2o.allocate(budget_spec(8, 50, 0, 100, total=400), stats).tolist()
    assert [got[0], got[1], got[-1]] == [100, 100, 100]
    assert sum(got) == 400
    small_budget = d2o.allocate(budget_spec(8, 20, 0, 100, total=160), stats).tolist()
    assert sum(small_budget) == 160
    assert min(small_budget) == 8
    one_layer = budget_spec(1, 20, 0, 100), stats_of_variances((1.0,))
    assert D2O(skip_layers=(5, -9)).allocate(*one_layer).tolist() == [20]


@pytest.mark.parametrize("stats", [None, stats_of_variances((1.0,)), stats_of_variances((), ())])
def test_d2o_needs_variances(stats):
    with pytest.raises(ValueError, match="variances of 2 layers"):
        D2O().allocate(budget_spec(2, 20, 0, 100), stats)


# -- global -----------------------------------------------------------------------------------


def global_budgets(scores, base, window=8):
    scores = torch.as_tensor(scores, dtype=torch.float32)
    layers, _, past = scores.shape
    spec = budget_spec(layers, base + window, window, past + window)
    return Global().allocate(spec, LayerStats(scores=scores)).tolist()


def test_global_worked_example():
    """docs/methods.md 2.6 by hand. In the last case, the lower layer gets the ties."""
    assert global_budgets([[[4, 3, 1, 0]], [[3, 1, 1, 1]]], 2) == [2, 2]
    assert global_budgets([[[4, 3, 1, 0]], [[9, 9, 9, 9]]], 1) == [2, 0]
    assert global_budgets([[[9, 9, 9, 9]], [[4, 3, 1, 0]]], 2) == [2, 2]
    assert global_budgets([[[9, 9, 9, 9]], [[9, 9, 9, 9]]], 1) == [2, 0]


@prop
@given(
    st.integers(1, 13),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(0, 999),
)
def test_global_equals_the_reference(layers, heads, past, levels, odd, seed):
    """Few score levels: ties cross heads and layers, and the lower layer counts first."""
    rng = np.random.RandomState(seed)
    scores = rng.randint(0, 3**levels, (layers, heads, past)).astype(np.float32)
    scores *= 2.0 ** rng.randint(-30, 30, (layers, 1, 1))
    for value in (math.inf, math.nan)[:odd]:
        scores[rng.random_sample(scores.shape) < 0.1] = value
    base = rng.randint(1, past + 1)
    got = global_budgets(scores, base)
    assert got == ref.global_budgets(list(scores), base, past)
    assert all(0 <= b <= past for b in got)
    assert sum(got) == layers * base


@pytest.mark.parametrize("huge", [3e38, 1e-42])
def test_global_handles_sums_outside_float32(huge):
    """Nothing becomes NaN: a sum beyond float32 is not infinite, and one below is not zero."""
    found = shares(torch.tensor([[[huge, huge, 0.0]], [[2.0, 1.0, 1.0]]]))
    assert torch.isfinite(found).all()
    assert found[0, 0, 0] > found[0, 0, 2] == 0
    assert sum(global_budgets(torch.full((2, 1, 3), huge), 2)) == 4
