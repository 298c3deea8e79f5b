"""SnapKV, CAKE, StreamingLLM and runs: docs/methods.md 4."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import methods_reference as ref
from kvcompress_kernels.apportion import cpu
from kvcompress_kernels.window_scores import window_scores_of_rows
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import AttentionStats
from vllm_kvcompress.methods.published.cake import CakeIndicator
from vllm_kvcompress.methods.published.cake_chunk import Runs
from vllm_kvcompress.methods.published.snapkv import SnapKV
from vllm_kvcompress.methods.published.streamingllm import StreamingLLM
from vllm_kvcompress.methods.registry import SCORERS

prop = settings(derandomize=True, deadline=None, max_examples=60)
CPU = torch.device("cpu")


def stats_of(total, kv_heads, *, rows=0, variance=None):
    total = torch.as_tensor(total, dtype=torch.float32)
    return AttentionStats(
        num_kv_heads=kv_heads,
        past=total.shape[1],
        device=CPU,
        num_queries=rows,
        total=total,
        variance=None if variance is None else torch.as_tensor(variance, dtype=torch.float32),
    )


def test_reads():
    grouped, keys = Reads.WINDOW | Reads.KV_HEADS, Reads.KEYS
    indicator, weights = grouped | Reads.VARIANCE, Reads.WINDOW | Reads.VALUES
    assert {name: scorer().reads for name, scorer in SCORERS.items()} == {
        "streamingllm": Reads.NOTHING,
        "h2o": Reads.COLUMN_SUMS,
        "tova": grouped | Reads.LAST,
        "snapkv": grouped,
        "cake": indicator,
        "runs": indicator | Reads.MAXIMUM | Reads.PROMPT_MAXIMUM,
        "caote": weights,
        "fastcaote": weights,
        "keydiff": keys,
        "lagkv": keys | Reads.VALUES,
        "random": Reads.NOTHING,
    }


shapes = st.tuples(
    st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (3, 1), (9, 3)]),
    st.integers(1, 40),
    st.sampled_from([1, 3, 5, 7, 9, 21]),
    st.integers(0, 2**31 - 1),
)


# -- SnapKV -----------------------------------------------------------------------------------


@prop
@given(shapes, st.sampled_from(["avg", "max"]))
def test_snapkv_equals_the_equation(shape, kind):
    (heads, kv_heads), past, kernel, seed = shape
    a = np.random.RandomState(seed).rand(heads, past)
    got = SnapKV(pooling=kind, kernel=kernel).score(stats_of(a, kv_heads))
    want = ref.pool(ref.over_group(a, kv_heads), kind, kernel)
    assert got.shape == (kv_heads, past)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-6)


# -- CAKE -------------------------------------------------------------------------------------


def test_cake_worked_example():
    """docs/methods.md 4.5: the mean alone would rank the columns the other way round."""
    rows = torch.tensor([[[0.1, 0.25], [0.3, 0.25]]])
    total, variance = rows.sum(1), rows.var(1)
    got = CakeIndicator(kernel=1).score(stats_of(total, 1, rows=2, variance=variance))
    assert got.tolist() == [pytest.approx([4.2, 0.25], rel=1e-6)]


@prop
@given(shapes, st.integers(2, 9), st.sampled_from([0.0, 1.0, 200.0]))
def test_cake_equals_the_equation(shape, w, gamma):
    (heads, kv_heads), past, kernel, seed = shape
    a = np.random.RandomState(seed).rand(heads, w, past)
    mean = a.mean(1)
    var = ((a - mean[:, None]) ** 2).sum(1) / (w - 1)
    pooled = ref.pool(mean + gamma * var, "avg", kernel)  # pool per query head, then the group
    got = CakeIndicator(gamma=gamma, kernel=kernel).score(
        stats_of(a.sum(1), kv_heads, rows=w, variance=var)
    )
    assert got.shape == (kv_heads, past)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), ref.over_group(pooled, kv_heads), rtol=1e-4, atol=1e-6)


def test_cake_shape_check():
    """docs/methods.md 2.3 and 4.5 by hand: from random queries and keys to the scores."""
    rs = np.random.RandomState(11)
    q, k = 1.5 * rs.standard_normal((2, 12, 4)), rs.standard_normal((2, 12, 4))
    window = torch.from_numpy(q[:, -3:]).float().transpose(0, 1)[None]
    page = torch.from_numpy(k).float().transpose(1, 2)[None]
    got = window_scores_of_rows(window, page, torch.tensor([[0]]), 12, 4**-0.5, variance=True)
    assert got.entropy.item() == pytest.approx(9.68691241, rel=1e-5)
    assert got.shift.item() == pytest.approx(0.0895930078, rel=1e-5)

    entropy, shift = (torch.cat([x, torch.ones(1)]) for x in (got.entropy, got.shift))
    share = cpu.preferences(entropy, shift, 1.6, 0.4).tolist()
    assert share == pytest.approx([0.00993233021, 1.0], rel=1e-4)

    score = CakeIndicator().score(stats_of(got.total[0], 2, rows=3, variance=got.variance[0]))
    want = [1.27455599, 1.94823446, 2.1232088, 1.54222999]
    assert score[0, :4].tolist() == pytest.approx(want, rel=1e-5)


# -- StreamingLLM -----------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", [0, 1, 4, 50])
@pytest.mark.parametrize("past", [0, 1, 3, 4, 20])
def test_streamingllm_keeps_sinks_then_the_latest(sinks, past):
    score = StreamingLLM(sinks=sinks).score(AttentionStats(num_kv_heads=3, past=past, device=CPU))
    assert score.shape == (3, past)
    assert score.dtype == torch.float32
    assert torch.equal(score[0], score[2])
    for keep in range(past + 1):
        first = list(range(min(sinks, keep, past)))
        want = first + list(range(past - (keep - len(first)), past))
        ranked = sorted(range(past), key=lambda j: (-score[0, j].item(), j))
        assert sorted(ranked[:keep]) == want


def test_streamingllm_orders_long_prompts_exactly():
    score = StreamingLLM().score(AttentionStats(num_kv_heads=1, past=2**24, device=CPU))[0, -5000:]
    assert (score.diff() == 1).all()


# -- guards -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scorer", [SnapKV(), CakeIndicator()])
def test_scorers_need_the_attention_they_read(scorer):
    with pytest.raises(ValueError, match="needs the window's attention"):
        scorer.score(AttentionStats(num_kv_heads=1, past=4, device=CPU))


def test_cake_needs_the_variance():
    with pytest.raises(ValueError, match="variance"):
        CakeIndicator().score(stats_of([[0.1, 0.2]], 1, rows=2))


def test_default_parameters():
    """docs/methods.md 4.1, 4.4 and 4.5."""
    assert (SnapKV().pooling, SnapKV().kernel) == ("max", 7)
    assert (CakeIndicator().gamma, CakeIndicator().kernel) == (200.0, 5)
    assert StreamingLLM().sinks == 4


@pytest.mark.parametrize("kernel", [1, 3])
def test_runs_rank_above_all_other_tokens(kernel):
    """docs/methods.md 4.10, by hand. The last run may be shorter, and no run may qualify."""
    attention = torch.tensor([[0.1, 0.2, 0.4, 0.25, 0.05]])
    stats = AttentionStats(
        num_kv_heads=1,
        past=5,
        device=torch.device("cpu"),
        num_queries=2,
        total=2 * attention,
        variance=torch.zeros(1, 5),
        maximum=torch.cat([attention, torch.ones(1, 2)], 1),
    )
    plain = CakeIndicator(kernel=kernel).score(stats)
    with_runs = Runs(size=2, kernel=kernel).score(stats)
    torch.testing.assert_close(with_runs[0, 2:4], torch.full((2,), 217.75))
    assert torch.equal(with_runs[0, [0, 1, 4]], plain[0, [0, 1, 4]])
    assert torch.equal(Runs(size=2, attention=0.7, kernel=kernel).score(stats), plain)
    assert (Runs(size=7).score(stats) > 201).all()
