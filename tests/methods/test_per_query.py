"""Column means instead of column sums in H2O and D2O: docs/methods.md 3."""

import numpy as np
import pytest
import torch

import methods_reference as ref
from settings_as_written import refused
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import AttentionStats
from vllm_kvcompress.methods.parts.pooling import column_means
from vllm_kvcompress.methods.published.d2o import D2O
from vllm_kvcompress.methods.published.h2o import H2O
from vllm_kvcompress.offline import compress

LAYERS, HEADS, KV_HEADS, TOKENS, DIM = 3, 4, 2, 61, 8


def inputs(seed):
    rs = np.random.RandomState(seed)
    shapes = [(LAYERS, heads, TOKENS, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (rs.standard_normal(shape) for shape in shapes)
    return tuple(torch.from_numpy(x).float() for x in (q * 1.5, k, v))


def exact(tensors):
    """Return the reference's inputs, per layer."""
    return [tuple(x[layer].double().numpy() for x in tensors) for layer in range(LAYERS)]


def past_scores(got, layer, window):
    return got.scores[layer][:, : TOKENS - window].numpy()


def test_column_means_worked_example():
    """Queries (1), (0.5, 0.5), (0.2, 0.3, 0.5): three see the first column, one the last."""
    sums = torch.tensor([[1.7, 0.8, 0.5]])
    np.testing.assert_allclose(column_means(sums), [[1.7 / 3, 0.4, 0.5]], rtol=1e-6)
    stats = AttentionStats(num_kv_heads=1, past=2, device=sums.device, sums=sums)
    np.testing.assert_allclose(H2O(per_query=True).score(stats), [[1.7 / 3, 0.4]], rtol=1e-6)
    assert H2O().score(stats).tolist() == sums[:, :2].tolist()


@pytest.mark.parametrize("window", [8, 32])
def test_h2o_equals_the_reference(window):
    tensors = inputs(1)
    policy = {"compress": "h2o", "window": window, "scorer_params": {"per_query": True}}
    got = compress(*tensors, policy=policy, budget=40)
    for layer, (q, k, v) in enumerate(exact(tensors)):
        want = ref.h2o(q, k, v, window, per_query=True)
        np.testing.assert_allclose(past_scores(got, layer, window), want, rtol=1e-4, atol=1e-6)
        for head in range(KV_HEADS):
            kept = [*ref.best(want[head], 40 - window), *range(TOKENS - window, TOKENS)]
            assert got.positions[layer][head].tolist() == kept


@pytest.mark.parametrize("scorer", [False, True])
@pytest.mark.parametrize("allocator", [False, True])
@pytest.mark.parametrize("norm", ["layer_minmax", "head_minmax", "raw"])
def test_d2o_ranking_and_variance_have_separate_parameters(scorer, allocator, norm):
    """`scorer_params` changes the ranking's columns, `allocator_params` the variance's."""
    tensors = inputs(3)
    policy = {
        "compress": "d2o",
        "scorer_params": {"per_query": scorer},
        "allocator_params": {"per_query": allocator, "norm": norm},
    }
    got = compress(*tensors, policy=policy, budget=0.4)
    columns = ref.column_means if allocator else ref.column_sums
    layer_columns = [columns(q, k) for q, k, _ in exact(tensors)]
    total = round(0.4 * TOKENS * LAYERS)
    assert got.budgets == ref.d2o_budgets(layer_columns, total, TOKENS, norm)
    for layer, (q, k, v) in enumerate(exact(tensors)):
        want = ref.h2o(q, k, v, 0, per_query=scorer)
        for head in range(KV_HEADS):
            kept = ref.heavy_recent(want[head], got.budgets[layer])
            assert got.positions[layer][head].tolist() == kept


def test_reads_of_per_query():
    assert H2O(per_query=True).reads == H2O().reads == D2O().reads == Reads.COLUMN_SUMS
    assert D2O(per_query=True).reads == Reads.COLUMN_SUMS | Reads.COLUMN_MEANS


def test_other_scorers_have_no_per_query():
    for name in ("snapkv", "cake", "tova", "caote", "fastcaote"):
        refused(
            "no parameter 'per_query'", raw={"compress": name, "scorer_params": {"per_query": True}}
        )
    refused("must be a bool", raw={"compress": "h2o", "scorer_params": {"per_query": 1}})
