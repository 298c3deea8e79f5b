"""`count_highest` against a sort of all scores that an update knows."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import INTERPRETED, property_test
from kvcompress_kernels.count_highest import count_highest, reference

pytestmark = pytest.mark.gpu

prop = property_test(300, interpreted=20)
inf = math.inf
ODD = torch.tensor([inf, -inf, 0.0, -0.0, 1e-45, -1e-45, 2e-45, 1e-38, 3e38, -3e38, 1.0])
LAYERS_AND_EVERY = (
    *[(1, 1), (1, 9), (4, 1), (4, 2), (4, 3), (4, 4), (20, 1), (32, 4)],
    *[(33, 4), (33, 17), (33, 32), (33, 33)],
)
"""They make 1, 2, 4, 8, 9 or 20 updates."""


def scores_of(kind, layers, columns, seed):
    generator = torch.Generator().manual_seed(seed)

    def pick(low, high):
        return torch.randint(low, high, (layers, columns), generator=generator)

    if kind == "random":
        return torch.randn(layers, columns, generator=generator)
    if kind == "ties":
        return pick(-1, 2).float()
    if kind == "equal":
        return torch.full((layers, columns), float(pick(-1, 2)[0, 0]))
    if kind == "close":  # They differ in their last digit only.
        return (pick(0, 9).int() + 0x3F800000).view(torch.float32)
    if kind == "odd":
        return ODD[pick(0, len(ODD))]
    return pick(-(2**31), 2**31).int().view(torch.float32).nan_to_num(0.5, inf, -inf)


KINDS = ("random", "ties", "equal", "close", "odd", "all bits")


def check(scores, keep, every):
    layers, columns = scores.shape
    got = count_highest(scores, keep, every)
    assert (got.dtype, got.shape) == (torch.int64, (-(-layers // every), layers))
    keep = min(max(keep, 0), layers * columns)
    assert torch.equal(got, reference.run(scores, keep, every))
    for update, counts in enumerate(got):
        known = min((update + 1) * every, layers)
        assert int(counts.sum()) == keep * known // layers
        assert not counts[known:].any()


@prop
@given(
    st.sampled_from(KINDS),
    st.sampled_from(LAYERS_AND_EVERY),
    st.integers(1, 40),
    st.floats(-0.1, 1.1),
    st.integers(0, 2**31 - 1),
)
def test_counts_match_a_sort(kind, layers_and_every, columns, share, seed):
    layers, every = layers_and_every
    check(scores_of(kind, layers, columns, seed), round(share * layers * columns), every)


ENDS = [("ties", 0), ("odd", 3)]
EACH = enumerate(LAYERS_AND_EVERY)
ENDS_OF_SHAPES = [
    (*end, shape) for i, shape in EACH for end in (ENDS[i % 2 :][:1] if INTERPRETED else ENDS)
]
"""Both ends with each shape. In the interpreter, the shapes alternate between them."""


@pytest.mark.parametrize(("kind", "excess", "layers_and_every"), ENDS_OF_SHAPES, ids=str)
def test_no_score_or_all_scores_are_counted(kind, excess, layers_and_every):
    layers, every = layers_and_every
    scores = scores_of(kind, layers, 7, 1)
    for keep in (-excess, 7 * layers + excess):
        check(scores, keep, every)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [4096, 4097, 9000])
def test_layers_of_several_tiles_match_a_sort(kind, columns):
    scores = scores_of(kind, 3, columns, columns)
    for keep in (5, columns + 100, 3 * columns - 1):
        check(scores, keep, 2)


def test_hand_computed_example():
    """Update 0 knows layer 0 and counts 2 scores; update 1 knows both layers and counts 4."""
    scores = torch.tensor([[0.5, 3.0, 0.5, -1.0], [2.0, 0.5, inf, 0.5]])
    assert count_highest(scores, 4, 1).tolist() == [[2, 0], [2, 2]]
    assert count_highest(scores, 4, 2).tolist() == [[2, 2]]
    assert count_highest(scores, 6, 2).tolist() == [[3, 3]]


def test_zeros_of_both_signs_tie():
    """The lower layer counts first, whatever the sign."""
    for first, second in ((0.0, -0.0), (-0.0, 0.0)):
        scores = torch.tensor([[first] * 3, [second] * 3])
        assert [count_highest(scores, keep, 2)[0].tolist() for keep in (2, 4)] == [[2, 0], [3, 1]]


def test_subnormal_numbers_are_not_zero():
    scores = torch.tensor([[0.0, -1e-45], [1e-45, 2e-45]])
    counts = [count_highest(scores, keep, 2)[0].tolist() for keep in (1, 2, 3, 4)]
    assert counts == [[0, 1], [0, 2], [1, 2], [2, 2]]


def test_scores_are_not_written():
    scores = scores_of("odd", 5, 60, 1)
    before = scores.clone()
    count_highest(scores, 99, 2)
    assert torch.equal(scores.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize(("layers", "columns", "updates"), [(0, 4, 0), (3, 0, 2)])
def test_no_layers_or_columns(layers, columns, updates):
    counts = count_highest(torch.zeros(layers, columns), 5, 2)
    assert counts.tolist() == [[0] * layers] * updates


def test_more_than_2_31_scores(gpu):
    columns = 2**30
    scores = torch.zeros(3, columns, device=gpu)
    scores[2, :2] = 1.0
    scores[2, -3:] = 2.0
    want = {3: [0, 0, 3], 5: [0, 0, 5], columns + 7: [columns, 2, 5]}
    for keep, counts in want.items():
        assert count_highest(scores, keep, 3).tolist() == [counts]
    assert count_highest(scores, 3 * columns, 2).tolist() == [[columns] * 2 + [0], [columns] * 3]


@pytest.mark.parametrize(
    ("scores", "every", "message"),
    [
        (torch.zeros(2, 3, 4), 1, r"scores must be \[N, M\]; got \(2, 3, 4\)"),
        (torch.zeros(2, 3).double(), 1, "scores must be float32; got torch.float64"),
        (torch.zeros(3, 2).T, 1, r"scores must be contiguous; got \(1, 2\)"),
        (torch.empty(1, 2**31, device="meta"), 1, "M must be at most"),
        (torch.zeros(2, 3), 0, "layers_per_update must be positive; got 0"),
    ],
    ids=["shape", "dtype", "layout", "columns", "every"],
)
def test_arguments_are_checked(scores, every, message):
    with pytest.raises(ValueError, match=message):
        count_highest(scores, 1, every)
