"""Aggregation of the window's queries by mean, maximum or DefensiveKV: docs/methods.md 4.4."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import methods_reference as ref
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import AttentionStats
from vllm_kvcompress.methods.parts.aggregates import AGGREGATES
from vllm_kvcompress.methods.published.caote import Caote, FastCaote
from vllm_kvcompress.methods.published.snapkv import SnapKV
from vllm_kvcompress.offline import compress
from vllm_kvcompress.settings.config import CompressionConfig

prop = settings(derandomize=True, deadline=None, max_examples=40)
CPU = torch.device("cpu")


def inputs(layers, heads, kv_heads, tokens, dim, *, sink=0.0, seed=0):
    rs = np.random.RandomState(seed)
    shapes = ((layers, n, tokens, dim) for n in (heads, kv_heads, kv_heads))
    q, k, v = (rs.standard_normal(shape) for shape in shapes)
    q[..., 0] += sink
    k[:, :, 0, 0] += sink
    return tuple(torch.from_numpy(x).float() for x in (q, k, v))


def stats_of(maximum, kv_heads, w):
    maximum = torch.as_tensor(maximum, dtype=torch.float32)
    past = maximum.shape[1] - w
    return AttentionStats(
        num_kv_heads=kv_heads, past=past, device=CPU, num_queries=w, maximum=maximum
    )


@pytest.mark.parametrize("scorer", ["snapkv", "caote", "fastcaote"])
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("shape", [(2, 4, 2, 90, 8), (1, 3, 1, 600, 4), (1, 2, 2, 37, 4)])
def test_equals_the_reference(scorer, aggregate, shape):
    w = 32
    q, k, v = inputs(*shape, sink=1.5, seed=shape[3])
    policy = {"scorer": scorer, "window": w, "scorer_params": {"aggregate": aggregate}}
    got = compress(q, k, v, policy=policy, budget=35)
    for layer, found in enumerate(got.scores):
        exact = (x[layer].double().numpy() for x in (q, k, v))
        if scorer == "snapkv":
            want = ref.snapkv(*exact, w, aggregate=aggregate)
        else:
            want = ref.caote(*exact, w, fast=scorer == "fastcaote", aggregate=aggregate)
        np.testing.assert_allclose(found[:, : shape[3] - w], want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_value_norms_equal_the_reference(aggregate, page_size):
    w = 32
    q, k, v = inputs(2, 4, 2, 90, 8, seed=6)
    v[:, 1, 3] = 0.0
    params = {"aggregate": aggregate, "value_norm": True}
    policy = {"scorer": "snapkv", "window": w, "scorer_params": params}
    got = compress(q, k, v, policy=policy, budget=40, page_size=page_size)
    for layer, found in enumerate(got.scores):
        exact = (x[layer].double().numpy() for x in (q, k, v))
        want = ref.snapkv(*exact, w, aggregate=aggregate, value_norm=True)
        free = ~torch.isinf(found)
        assert free[:, :58].all()
        np.testing.assert_allclose(found[:, :58], want, rtol=1e-4, atol=1e-6)
        assert found[1, 3] == 0


def test_zero_values_score_zero():
    q, k, v = inputs(1, 2, 1, 90, 8)
    policy = {"compress": "snapkv", "scorer_params": {"value_norm": True}}
    got = compress(q, k, torch.zeros_like(v), policy=policy, budget=40)
    assert (got.scores[0][:, :58] == 0).all()
    assert got.positions[0][0].tolist() == [*range(8), *range(58, 90)]


def test_defensive_worked_example():
    """docs/methods.md 4.4: the queries' maximum from the reference, raised to its mean."""
    rows = np.array([[0.8, 0, 0, 0, 0, 0], [0, 0, 0, 0.4, 0, 0]])
    highest = np.max([ref.pooled_row(row) for row in rows], axis=0)
    np.testing.assert_allclose(highest, [0.8 / 3] * 3 + [0.08] * 3, rtol=1e-6)
    got = SnapKV(aggregate="defensive").score(stats_of(highest[None], 1, 0))
    want = [pytest.approx(0.26667, rel=1e-4)] * 3 + [pytest.approx(0.17333, rel=1e-4)] * 3
    assert got[0].tolist() == want


def test_aggregates_rank_differently():
    """All queries attend to key 20, and only one of them to key 7."""
    q, k, v = inputs(1, 1, 1, 60, 8, seed=3)
    q[..., 0], k[:, :, 20], k[:, :, 20, 0] = 3.0, 0.0, 4.0
    q[:, :, -20], k[:, :, 7], k[:, :, 7, 0] = 6.0, 3.0, -3.0
    kept = {}
    for aggregate in AGGREGATES:
        policy = {"compress": "snapkv", "scorer_params": {"aggregate": aggregate}}
        kept[aggregate] = compress(q, k, v, policy=policy, budget=0.6)
    best = {name: x.scores[0][0, :28].argmax().item() for name, x in kept.items()}
    # the first token of a plateau as wide as the pooling
    assert best == {"mean": 17, "max": 4, "defensive": 5}
    assert len({tuple(x.positions[0][0].tolist()) for x in kept.values()}) == 3


@prop
@given(
    st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 1)]),
    st.integers(1, 40),
    st.integers(1, 5),
    st.sampled_from(["max", "avg"]),
    st.sampled_from([1, 3, 7]),
    st.integers(0, 2**31 - 1),
)
def test_the_maximum_of_a_group_is_pooled(heads, past, w, kind, kernel, seed):
    query_heads, kv_heads = heads
    a = np.random.RandomState(seed).rand(query_heads, past + w)
    stats = stats_of(a, kv_heads, w)
    got = SnapKV(aggregate="max", pooling=kind, kernel=kernel).score(stats)
    grouped = a[:, :past].reshape(kv_heads, -1, past).max(1)
    np.testing.assert_allclose(got, ref.pool(grouped, kind, kernel), rtol=1e-5)
    assert (got.shape, got.dtype) == ((kv_heads, past), torch.float32)

    raised = SnapKV(aggregate="defensive").score(stats)
    want = np.maximum(grouped, grouped.mean(-1, keepdims=True))
    np.testing.assert_allclose(raised, want, rtol=1e-5)
    assert (raised.shape, raised.dtype) == ((kv_heads, past), torch.float32)


@prop
@given(
    st.sampled_from(["max", "defensive"]),
    st.integers(1, 30),
    st.integers(1, 5),
    st.integers(0, 2**31 - 1),
)
def test_caote_weights_sum_to_one(aggregate, past, w, seed):
    a = torch.from_numpy(np.random.RandomState(seed).rand(4, past + w)).float()
    stats = replace(stats_of(a, 2, w), total=a[:, :past], recent=a[:, past:])
    got = Caote(aggregate=aggregate).weights(stats)
    assert (got.shape, got.dtype) == (a.shape, torch.float32)
    np.testing.assert_allclose(got.sum(-1), np.ones(4), rtol=1e-5)
    # the window's columns are not pooled and keep their proportions
    np.testing.assert_allclose(got[:, past:] / got[:, -1:], a[:, past:] / a[:, -1:], rtol=1e-4)


def test_equal_keys_get_equal_scores_at_any_position():
    """Keys have a period of 16, so that their surroundings repeat except at the two ends."""
    rs = np.random.RandomState(5)
    period = rs.standard_normal((1, 1, 16, 8))
    k = np.tile(period, (1, 1, 70, 1))
    q = rs.standard_normal((1, 2, 1120, 8))
    q, k = (torch.from_numpy(x).float() for x in (q, k))
    policy = {"compress": "snapkv", "scorer_params": {"aggregate": "defensive"}}
    (scores,) = compress(q, k, k, policy=policy, budget=64).scores
    inner = scores[0, 16 : 1088 - 16].view(-1, 16)
    assert (inner == inner[:1]).all()
    assert inner[0].unique().numel() > 1


def test_reads_of_each_aggregate():
    window, maximum, pooled = Reads.WINDOW, Reads.MAXIMUM, Reads.POOLED
    expected = {"mean": window, "max": window | maximum, "defensive": window | maximum | pooled}
    assert {x: SnapKV(aggregate=x).reads & ~Reads.KV_HEADS for x in AGGREGATES} == expected
    assert all(Reads.KV_HEADS in SnapKV(aggregate=x).reads for x in AGGREGATES)
    assert {x: Caote(aggregate=x).reads & ~Reads.VALUES for x in AGGREGATES} == expected
    assert SnapKV(value_norm=True).reads == window | Reads.KV_HEADS | Reads.VALUES
    assert Caote(base="h2o").reads == Reads.COLUMN_SUMS | Reads.VALUES
    assert Caote(base="tova").reads == Reads.WINDOW | Reads.LAST | Reads.VALUES


@pytest.mark.parametrize("scorer", [SnapKV, Caote, FastCaote])
def test_unknown_aggregates_are_refused(scorer):
    with pytest.raises(ConfigError, match=r"aggregate must be one of \['mean', 'max', 'defen"):
        scorer(aggregate="median")


@pytest.mark.parametrize("base", ["tova", "h2o"])
def test_only_base_snapkv_takes_an_aggregate(base):
    message = rf"aggregate='max'.*base '{base}' does not have; set base"
    with pytest.raises(ConfigError, match=message):
        Caote(aggregate="max", base=base)


@pytest.mark.parametrize("scorer", ["snapkv", "caote", "fastcaote"])
@pytest.mark.parametrize("params", [{"kernel": 7}, {"kernel": 1}, {"pooling": "max"}])
def test_pooling_parameters_are_refused_with_defensive(scorer, params):
    policy = {"compress": "custom", "scorer": scorer, "window": 32}
    defensive = {"aggregate": "defensive", **params}
    with pytest.raises(ConfigError, match="has no effect with aggregate 'defensive'"):
        CompressionConfig.parse({**policy, "scorer_params": defensive})
    CompressionConfig.parse({**policy, "scorer_params": {"aggregate": "max", **params}})


def test_a_presets_kernel_is_accepted_with_defensive():
    policy = {"compress": "chunkkv", "scorer_params": {"aggregate": "defensive"}}
    assert CompressionConfig.parse(policy).method.scorer == SnapKV(aggregate="defensive", kernel=1)


def test_value_norm_needs_the_values():
    stats = replace(AttentionStats(num_kv_heads=1, past=2, device=CPU), total=torch.ones(1, 2))
    with pytest.raises(ValueError, match="value_norm needs the cached values"):
        SnapKV(value_norm=True).score(stats)


@pytest.mark.parametrize("scorer", [SnapKV, Caote])
@pytest.mark.parametrize("aggregate", ["max", "defensive"])
def test_an_aggregate_needs_the_maximum(scorer, aggregate):
    stats = replace(
        AttentionStats(num_kv_heads=1, past=2, device=CPU),
        total=torch.ones(1, 2),
        recent=torch.ones(1, 1),
    )
    aggregating = scorer(aggregate=aggregate)
    run = aggregating.weights if isinstance(aggregating, Caote) else aggregating.score
    with pytest.raises(ValueError, match=f"{aggregate} needs the window's maximum"):
        run(stats)
