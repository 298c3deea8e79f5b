"""Scorers that read no query: KeyDiff and LagKV, docs/methods.md 4.8 and 4.9."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import methods_reference as ref
from vllm_kvcompress.methods.budget_spec import AttentionStats, PagedKeys, PagedValues
from vllm_kvcompress.methods.published.keydiff import KeyDiff
from vllm_kvcompress.methods.published.lagkv import LagKV
from vllm_kvcompress.methods.published.streamingllm import StreamingLLM
from vllm_kvcompress.offline import compress

prop = settings(derandomize=True, deadline=None, max_examples=40)
DIM = 8


def inputs(layers, kv_heads, tokens, *, seed):
    """Return queries of NaN, which must not be read, keys with a common direction, and values."""
    rs = np.random.RandomState(seed)
    k, v = (torch.from_numpy(rs.standard_normal((layers, kv_heads, tokens, DIM))) for _ in "kv")
    queries = torch.full((layers, 2 * kv_heads, tokens, DIM), torch.nan)
    return queries, (k + 0.4).float(), v.float()


def stats_of(k, v, window, page=16):
    """Return the statistics of one layer's ``[Hkv, S, D]``."""
    heads, tokens, dim = k.shape
    num_pages = -(-tokens // page)
    padded = [torch.zeros(heads, num_pages * page, dim, device=x.device) for x in (k, v)]
    for target, x in zip(padded, (k, v), strict=True):
        target[:, :tokens] = x
    keys, values = (x.view(heads, num_pages, page, dim).transpose(0, 1) for x in padded)
    pages = torch.arange(num_pages, device=k.device)
    return AttentionStats(
        num_kv_heads=heads,
        past=max(tokens - window, 0),
        device=k.device,
        keys=PagedKeys(key_pages=keys.mT, pages=pages, tokens=tokens),
        values=PagedValues(value_pages=values, pages=pages, tokens=tokens),
    )


SCORED = {
    "keydiff": ({}, ref.keydiff),
    "lagkv": ({"lag": 16}, lambda *x: ref.lagkv(*x, lag=16)),
    "lagkv-default": ({}, ref.lagkv),
    "lagkv-no-sinks": ({"sinks": 0, "lag": 9}, lambda *x: ref.lagkv(*x, sinks=0, lag=9)),
}


@pytest.mark.parametrize("name", SCORED)
@pytest.mark.parametrize(
    ("kv_heads", "tokens", "window", "budget"),
    [(2, 101, 32, 0.5), (1, 130, 0, 0.37), (3, 97, 1, 0.2), (1, 420, 32, 0.6), (2, 90, 48, 0.9)],
)
@pytest.mark.parametrize("page", [1, 16])
def test_equals_the_reference(name, kv_heads, tokens, window, budget, page):
    params, reference = SCORED[name]
    q, k, v = inputs(2, kv_heads, tokens, seed=tokens)
    policy = {"scorer": name.partition("-")[0], "window": window, "scorer_params": params}
    got = compress(q, k, v, policy=policy, budget=budget, page_size=page)
    kept_after = max(window, tokens % page)  # tail tokens do not compete either
    for layer, n in enumerate(got.budgets):
        assert n < tokens
        exact = (x[layer].double().numpy() for x in (q, k, v))
        want = reference(*exact, window)[:, : tokens - kept_after]
        found = got.scores[layer][:, : tokens - kept_after].numpy()
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-6)
        for kept, row in zip(got.positions[layer].tolist(), want, strict=True):
            assert kept == [*ref.best(row, n - kept_after), *range(tokens - kept_after, tokens)]


@pytest.mark.parametrize("scorer", [KeyDiff(), LagKV(lag=20)])
def test_equal_tokens_keep_the_first_ones(scorer):
    """For LagKV the first of each partition, since it compares ranks."""
    k = torch.ones(2, 104, DIM)
    score = scorer.score(stats_of(k, k, 4))
    for row in score.numpy():
        if isinstance(scorer, KeyDiff):
            assert len(set(row.tolist())) == 1
        else:
            assert row[4:24].tolist() == [np.float32(rank) / 20 for rank in range(19, -1, -1)]
            assert row[24:44].tolist() == row[4:24].tolist()


# -- KeyDiff --------------------------------------------------------------------------------------


def test_keydiff_reads_only_keys_and_keeps_the_different_one():
    k = torch.ones(1, 40, DIM)
    k[0, 17, 0] = -5.0
    stats = stats_of(k, torch.full_like(k, torch.nan), 0)
    assert KeyDiff().score(stats).argmax().item() == 17


# -- LagKV ----------------------------------------------------------------------------------------


@prop
@given(st.integers(1, 200), st.integers(0, 40), st.integers(0, 9), st.integers(2, 60))
def test_partitions_keep_the_same_share(tokens, window, sinks, lag):
    """Sinks rank first, then the last complete partition and later tokens, then the others."""
    k, v = (x[0] for x in inputs(1, 2, tokens, seed=tokens)[1:])
    past, parts = max(tokens - window, 0), max((tokens - sinks) // lag - 1, 0)
    score = LagKV(sinks=sinks, lag=lag).score(stats_of(k, v, window))
    assert score.shape == (2, past)
    assert score.dtype == torch.float32
    start = sinks + parts * lag
    assert (score[:, :sinks] == torch.inf).all()
    ranks, latest = score[:, sinks:start], score[:, start:]
    assert torch.equal(latest, torch.arange(start, max(past, start)).float().expand(2, -1))
    expected_ranks = torch.arange(lag).float() / lag
    for part in ranks.split(lag, dim=1):
        if part.shape[1] == lag:  # the window may begin inside a partition
            assert torch.equal(part.sort().values, expected_ranks.expand(2, -1))


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 100, 259])
def test_lagkv_equals_streamingllm_for_one_partition(tokens):
    k, v = (x[0] for x in inputs(1, 2, tokens, seed=1)[1:])
    stats = stats_of(k, v, 1)
    assert torch.equal(LagKV().score(stats), StreamingLLM().score(stats))


def test_a_budget_below_the_last_partition_keeps_the_latest_tokens():
    q, k, v = inputs(1, 1, 300, seed=2)
    got = compress(q, k, v, policy={"scorer": "lagkv", "window": 8}, budget=50)
    assert got.positions[0].tolist() == [[0, 1, 2, 3, *range(254, 300)]]


@pytest.mark.parametrize("constant", [0.0, 7.0, 1e-40])
def test_constant_channels_give_finite_scores(constant):
    k, v = (x[0] for x in inputs(1, 2, 100, seed=5)[1:])
    k[..., 3] = v[..., 0] = constant
    got = LagKV(lag=12).score(stats_of(k, v, 8))[:, 4:]
    assert got.isfinite().all()
    want = ref.lagkv(None, k.double().numpy(), v.double().numpy(), 8, lag=12)[:, 4:]
    np.testing.assert_allclose(got, want, rtol=1e-4)


# -- both -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scorer", "message"),
    [(KeyDiff(), "needs the cached keys; got none"), (LagKV(), "needs the cached keys and values")],
)
def test_scorers_need_the_caches_they_read(scorer, message):
    with pytest.raises(ValueError, match=message):
        scorer.score(AttentionStats(num_kv_heads=1, past=4, device=torch.device("cpu")))
