"""ChunkKV's chunks and D2O's split: docs/methods.md 5 and 6."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import methods_reference as ref
from vllm_kvcompress.methods.parts.topk import TopK
from vllm_kvcompress.methods.published.chunkkv import Chunks
from vllm_kvcompress.methods.published.d2o import HeavyRecent

prop = settings(derandomize=True, deadline=None, max_examples=150)


def select(selector, scores, keep, kept_after=0):
    """Return one layer's positions."""
    one = torch.tensor([keep])
    return selector.select(scores[None], scores.shape[1], one, kept_after, keep)[0]


@st.composite
def scored(draw):
    """Draw scores with few levels, so that there are many ties."""
    heads, n = draw(st.integers(1, 3)), draw(st.integers(1, 60))
    rng = np.random.RandomState(draw(st.integers(0, 9999)))
    return rng.randint(0, draw(st.sampled_from([2, 5, 1000])), (heads, n)).astype(np.float32)


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (4, [0, 1, 12, 13]),
        (6, [0, 1, 2, 3, 12, 13]),
        (8, [0, 1, 2, 3, 4, 5, 12, 13]),
        (2, [12, 13]),
        (1, [12]),
        (0, []),
    ],
)
def test_chunks_worked_example(keep, expected):
    t = torch.tensor([[0.0, 0, 5, 0, 1, 1, 1, 1, 0, 0, 0, 0, 9, 0]])
    assert select(Chunks(size=4), t, keep).tolist() == [expected]


@prop
@given(scored(), st.integers(1, 70), st.booleans(), st.data())
def test_chunks_equal_the_reference(scores, size, shared, data):
    keep = data.draw(st.integers(0, scores.shape[1]))
    got = select(Chunks(size=size, shared=shared), torch.from_numpy(scores), keep, 5)
    assert got.shape == (len(scores), keep)
    for head, row in enumerate(scores):
        t = scores.sum(0) if shared else row
        assert got[head].tolist() == ref.chunks(t.astype(np.float64), keep, size)


def test_chunks_rank_nan_last():
    t = torch.tensor([[torch.nan, 1.0, 0.0, 0.5, torch.nan, torch.nan]])
    assert select(Chunks(size=2), t, 2).tolist() == [[2, 3]]


def test_layers_reuse_the_ranking_of_an_earlier_layer():
    assert [Chunks(reuse=3).source(layer) for layer in range(7)] == [0, 0, 0, 3, 3, 3, 6]
    assert [TopK().source(layer) for layer in range(3)] == [0, 1, 2]


def test_top_k_shared_over_heads():
    rows = torch.tensor([[9.0, 0, 0, 4], [0, 5.0, 0, 4]])
    assert select(TopK(), rows, 1).tolist() == [[0], [1]]
    assert select(TopK(shared=True), rows, 2).tolist() == [[0, 3], [0, 3]]


# -- D2O's split --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "sinks", "heavy", "recent"),
    [(5, 4, 0, 1), (8, 4, 2, 2), (16, 4, 8, 4), (51, 4, 35, 12), (128, 4, 92, 32), (3, 3, 0, 0)],
)
def test_heavy_recent_split(n, sinks, heavy, recent):
    scores = torch.rand(2, 300, generator=torch.Generator().manual_seed(n))
    protected = HeavyRecent().protect(scores[None], torch.tensor([n]), 0)[0]
    assert torch.isinf(protected[0, :sinks]).all()
    assert int(torch.isinf(protected[0]).sum()) == sinks + recent
    assert torch.isinf(protected[0, 300 - recent :]).all()
    assert select(HeavyRecent(), scores, n).shape == (2, sinks + heavy + recent)


@prop
@given(scored(), st.integers(0, 40), st.data())
def test_tokens_kept_after_count_as_recent(scores, kept_after, data):
    """The tail and the window already are recent tokens: the split covers all kept tokens."""
    keep = data.draw(st.integers(0, scores.shape[1]))
    n = scores.shape[1]
    got = select(HeavyRecent(), torch.from_numpy(scores), keep, kept_after)
    _, _, recent = ref.split(keep + kept_after)
    sinks = min(4, keep)
    recent = min(max(recent - kept_after, 0), keep - sinks)
    for head, row in enumerate(scores):
        middle = sorted(range(sinks, n - recent), key=lambda j: (-row[j], j))
        heavy = middle[: keep - sinks - recent]
        assert got[head].tolist() == sorted([*range(sinks), *heavy, *range(n - recent, n)])


def test_heavy_recent_keeps_sinks_and_recents_despite_infinite_scores():
    scores = torch.full((1, 20), torch.inf)
    scores[0, 10:] = torch.nan
    assert select(HeavyRecent(), scores, 8).tolist() == [[0, 1, 2, 3, 4, 5, 18, 19]]
