"""Top-k selection and what holds for every selector: docs/methods.md 1.6."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvcompress.methods.parts.topk import TopK
from vllm_kvcompress.methods.published.chunkkv import Chunks
from vllm_kvcompress.methods.published.d2o import HeavyRecent

prop = settings(derandomize=True, deadline=None, max_examples=80)


def top_k(scores, keep):
    """Return `TopK`'s positions of one layer."""
    kept = TopK().select(torch.stack([scores]), scores.shape[1], torch.tensor([keep]), 0, keep)
    assert kept.dtype == torch.int32
    return kept[0].long()


def sorted_top(row, keep):
    """Return the best positions as in docs/methods.md 1.6, by a plain sort with NaN last."""

    def rank(j):
        return (math.inf if math.isnan(row[j]) else -row[j], j)

    return sorted(sorted(range(len(row)), key=rank)[:keep])


def check(rows, keep):
    got = top_k(torch.tensor(rows, dtype=torch.float32), keep)
    assert got.shape == (len(rows), keep)
    # values that differ in float64 may be equal in float32
    exact = np.asarray(rows, dtype=np.float32).tolist()
    assert got.tolist() == [sorted_top(row, keep) for row in exact]


@st.composite
def tables(draw, value):
    heads, n = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    row = st.lists(value, min_size=n, max_size=n)
    return draw(st.lists(row, min_size=heads, max_size=heads)), draw(st.integers(0, n))


LARGEST = 3.4028234663852886e38
VALUES = {
    "arbitrary": st.floats(width=32, allow_nan=False),
    "ties": st.sampled_from([0.0, -0.0, 1.0, 2.0, 1e-45, -1.0]),
    "infinite": st.sampled_from([math.inf, -math.inf, LARGEST, -3.4e38, 0.0]),
    "nan ranks last": st.sampled_from([math.nan, math.inf, 1.0, 0.0, -LARGEST]),
}


@pytest.mark.parametrize("kind", VALUES)
@prop
@given(st.data())
def test_top_k_is_a_sort(kind, data):
    check(*data.draw(tables(VALUES[kind])))


def test_scores_are_not_modified():
    scores = torch.tensor([[math.nan, 1.0, math.inf, -math.inf]])
    before = scores.clone()
    top_k(scores, 2)
    assert torch.equal(scores.nan_to_num(7.0), before.nan_to_num(7.0))


def test_strided_and_expanded_scores():
    scores = torch.arange(24.0).view(6, 4).T[:, ::2]
    assert top_k(scores, 1).tolist() == [[2]] * 4
    assert top_k(torch.tensor([[1.0, 3.0, 3.0]]).expand(2, -1), 1).tolist() == [[1], [1]]


def test_no_columns_keep_nothing():
    assert top_k(torch.empty(2, 0), 0).shape == (2, 0)


@pytest.mark.parametrize(("keep", "expected"), [(-1, []), (4, [0, 1, 2])])
@pytest.mark.parametrize("selector", [TopK(), Chunks(), HeavyRecent()])
def test_keep_is_clamped(selector, keep, expected):
    """It is read on the device, where no error can be raised."""
    got = selector.select(torch.zeros(1, 1, 3), 3, torch.tensor([keep]), 0, 5)
    assert got.tolist() == [[[*expected, *[-1] * (5 - len(expected))]]]


@pytest.mark.parametrize("selector", [TopK(), TopK(shared=True), Chunks(size=3), HeavyRecent()])
def test_layers_are_selected_independently(selector):
    """Scores after the past tokens have no effect."""
    scores = torch.randint(0, 5, (4, 2, 48)).float()
    scores[..., 41:] = torch.inf
    keep = [7, 0, 41, 20]
    got = selector.select(scores, 41, torch.tensor(keep), 3, 41)
    for layer, n in enumerate(keep):
        row = scores[layer : layer + 1, :, :41].contiguous()
        want = selector.select(row, 41, torch.tensor([n]), 3, n)
        assert torch.equal(got[layer, :, :n], want[0])
        assert (got[layer, :, n:] == -1).all()
