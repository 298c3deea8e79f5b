import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import TOLERANCE, property_test
from kvcompress_kernels.value_scores import cpu as value_scores_cpu
from kvcompress_kernels.value_scores import reference, value_scores_of_rows
from one_row import value_scores
from paging import LargestStorage, paged_rows, paged_values

pytestmark = pytest.mark.gpu

prop = property_test(25, interpreted=5)


def brute(h, v):
    """Return the change of ``h @ v``, ``[S, d]``, when one token is dropped and h renormalised."""
    change = []
    for j in range(len(h)):
        rest = np.delete(h, j)
        change.append((rest / rest.sum()) @ np.delete(v, j, 0) - h @ v)
    return np.array(change)


def random(heads, kv_heads, tokens, dim, *, seed=0, sharpness=1.5):
    """Return random attention rows ``[Hq, S]`` and values ``[Hkv, S, d]``."""
    rng = np.random.RandomState(seed)
    h = torch.from_numpy(sharpness * rng.standard_normal((heads, tokens))).softmax(-1)
    return h.float(), torch.from_numpy(rng.standard_normal((kv_heads, tokens, dim)))


def score(h, v, block=16, *, fast=False, reduce="mean", **options):
    return value_scores(h, *paged_values(v, block, **options), v.shape[1], fast=fast, reduce=reduce)


def compare(h, v, block=16, *, fast=False, reduce="mean", **options):
    arguments = h, *paged_values(v, block, **options), v.shape[1]
    got = value_scores(*arguments, fast=fast, reduce=reduce)
    assert got.shape == v.shape[:2]
    torch.testing.assert_close(got, reference.run(*arguments, fast, reduce), **TOLERANCE)
    return got


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tokens", "dim"),
    [(2, 2, 12, 4), (4, 1, 37, 8), (6, 2, 101, 16), (9, 3, 257, 64), (3, 1, 2, 4)],
)
@pytest.mark.parametrize("block", [1, 7, 32, "S"])
@pytest.mark.parametrize(("fast", "reduce"), [(False, "mean"), (True, "l2")])
def test_shapes_match_the_reference(heads, kv_heads, tokens, dim, block, fast, reduce):
    h, v = random(heads, kv_heads, tokens, dim, seed=tokens)
    compare(h, v, tokens if block == "S" else block, fast=fast, reduce=reduce)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_dtypes_and_strides(fast, interleave, dtype):
    """Test the combinations of `fast` and `reduce` that the shape test leaves out."""
    reduce = "mean" if fast else "l2"
    compare(*random(6, 2, 75, 8), fast=fast, reduce=reduce, dtype=dtype, interleave=interleave)


@prop
@given(
    st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 2), (8, 1)]),
    st.integers(1, 70),
    st.sampled_from([1, 3, 8, 32]),
    st.sampled_from([0.0, 1.0, 4.0]),
    st.booleans(),
    st.sampled_from(["mean", "l2"]),
    st.integers(0, 1000),
)
def test_any_shape(heads, tokens, block, sharpness, fast, reduce, seed):
    h, v = random(*heads, tokens, 4, seed=seed, sharpness=sharpness)
    h = 0.9 * h + 0.1 / tokens  # Near a weight of 1 the denominator magnifies rounding.
    compare(h, v, block, fast=fast, reduce=reduce, seed=seed)


def test_worked_example():
    """docs/methods.md 4.6 by hand: full and fast CAOTE evict different tokens."""
    h = torch.tensor([[0.5, 0.3, 0.2]])
    v = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]]])
    full, fast = score(h, v, fast=False), score(h, v, fast=True)
    np.testing.assert_allclose(full, [[0.70711, 0.40658, 0.42573]], atol=1e-5)
    np.testing.assert_allclose(fast, [[1.0, 0.42857, 0.35355]], atol=1e-5)


@prop
@given(st.integers(2, 40), st.sampled_from([0.0, 1.0, 3.0]), st.integers(0, 1000))
def test_score_is_the_change_of_the_output(tokens, sharpness, seed):
    h, v = random(1, 1, tokens, 8, seed=seed, sharpness=sharpness)
    h = (h / h.double().sum()).float()
    want = np.linalg.norm(brute(h[0].double().numpy(), v[0].numpy()), axis=1)
    np.testing.assert_allclose(score(h, v)[0], want, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("rest", [0.0, 1e-8, 1e-7, 1e-6, 1e-5])
@pytest.mark.parametrize("fast", [False, True])
def test_all_the_weight_on_one_token(fast, rest):
    h = torch.full((1, 33), rest / 32)
    h[:, 5] = 1 - rest
    assert score(h, torch.randn(1, 33, 8), fast=fast).isfinite().all()


@pytest.mark.parametrize("rest", [1e-30, 1e-8, 1e-7, 1e-5, 1e-3])
@pytest.mark.parametrize(
    ("tokens", "at", "reduce"),
    [
        (33, 5, "mean"),
        (33, 5, "l2"),
        *((1600, at, "mean") for at in (0, 1023, 1024, 1500)),  # two splits of the Triton kernels
    ],
)
def test_change_of_the_output_near_a_weight_of_one(rest, tokens, at, reduce):
    """Here ``1 - h`` and ``o - v`` are only rounding, but the output without the token is exact."""
    v = random(1, 1, tokens, 8)[1].float()
    h = torch.from_numpy(np.random.RandomState(1).dirichlet(np.ones(tokens)) * rest).float()[None]
    h[0, at] = 1 - rest
    others = np.delete(h[0].double().numpy(), at)
    left = (others / others.sum()) @ np.delete(v[0].double().numpy(), at, 0)
    want = h[0, at].item() * np.linalg.norm(left - v[0, at].double().numpy())
    assert score(h, v, reduce=reduce)[0, at].item() == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("tokens", [33, 1600])
@pytest.mark.parametrize("rest", [1e-7, 2e-6, 1e-5, 1e-3, 0.1])
def test_fast_near_a_weight_of_one(rest, tokens):
    """``1 - h`` is the clamped sum of the other weights: at 1e-5 subtracting would err by 0.6 %."""
    h, v = random(4, 2, tokens, 8)
    for row, at in enumerate((5, 0, tokens - 1, tokens // 2)):
        others = np.random.RandomState(row).dirichlet(np.ones(tokens)) * rest
        h[row] = torch.from_numpy(others)
        h[row, at] = 0
        h[row, at] = 1 - h[row].double().sum().item()
    got = score(h, v.float(), fast=True, reduce="l2")
    distance = torch.linalg.vector_norm(v.float().mean(1, keepdim=True) - v, dim=-1)
    left = h.double().sum(-1, keepdim=True) - h.double()  # exact in float64
    want = h / left.clamp_min(1e-6) * distance.repeat_interleave(2, 0)
    want = torch.linalg.vector_norm(want.view(2, 2, tokens), dim=1).float()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


def test_denominator_is_clamped():
    h, v = torch.tensor([[1.0, 0.0]]), torch.tensor([[[4.0], [0.0]]])
    assert score(h, v, fast=True)[0, 0].item() == pytest.approx(2e6, rel=1e-5)


def test_values_far_from_zero():
    """Values are 1000 +- 0.1, so expanding the square would leave only rounding."""
    h, v = random(1, 1, 40, 16)
    arguments = h, *paged_values(v * 0.1 + 1000, 16), 40
    got = value_scores(*arguments, fast=False, reduce="mean")
    torch.testing.assert_close(got, reference.run(*arguments, False, "mean"), rtol=0.02, atol=0)


@pytest.mark.cpu
@pytest.mark.parametrize("size", [1, 7 * 6 * 32, 10**9])
@pytest.mark.parametrize("fast", [False, True])
def test_tile_size_does_not_matter(fast, size, monkeypatch):
    h, v = random(6, 2, 75, 8)
    monkeypatch.setattr(value_scores_cpu, "DIFFERENCES", size)
    compare(h, v, fast=fast)


@pytest.mark.parametrize(
    ("lengths", "fast", "reduce"),
    [
        ([9, 37, 1, 64], False, "l2"),
        ([9, 37, 1, 64], True, "mean"),
        ([1025, 3, 1024], False, "mean"),
        ([1025, 3, 1024], True, "l2"),
    ],
    ids=["short", "short-fast", "two splits", "two splits-fast"],
)
def test_batched_rows_score_like_single_rows(lengths, fast, reduce):
    """Scores are equal bit for bit. Nothing past a row's length is read, and scores there are 0."""
    max_tokens, block = max(lengths) + 5, 16
    rows = [random(6, 2, length, 8, seed=i) for i, length in enumerate(lengths)]
    rows[0][0][:, 5] = 0.99  # a token with more than half of the weight
    caches = [paged_values(v, block, seed=i) for i, (_, v) in enumerate(rows)]
    cache = torch.cat([view for view, _ in caches])
    weights = torch.full((len(lengths), 6, max_tokens), torch.nan)
    pages = torch.full((len(lengths), -(-max_tokens // block)), len(cache) + 1000)
    first = 0
    for i, ((h, _), (view, row_pages)) in enumerate(zip(rows, caches, strict=True)):
        weights[i, :, : lengths[i]], pages[i, : len(row_pages)] = h, row_pages + first
        first += len(view)
    counts = torch.tensor(lengths, dtype=torch.int32)
    options = {"fast": fast, "reduce": reduce}
    together = value_scores_of_rows(weights, cache, pages, max_tokens, lengths=counts, **options)
    for i, ((h, _), row_cache, length) in enumerate(zip(rows, caches, lengths, strict=True)):
        assert torch.equal(together[i, :, :length], value_scores(h, *row_cache, length, **options))
        assert not together[i, :, length:].any()


@pytest.mark.parametrize(
    ("kv_heads", "tokens", "dim", "block", "fast", "reduce"),
    [
        (2, 37, 8, 16, False, "l2"),
        (1, 101, 33, 7, True, "mean"),
        (1, 1030, 4, 16, False, "mean"),  # two splits
        (3, 1, 20, 1, True, "l2"),
    ],
)
def test_rows_without_lengths_equal_single_calls(kv_heads, tokens, dim, block, fast, reduce):
    inputs = [random(3 * kv_heads, kv_heads, tokens, dim, seed=seed) for seed in range(3)]
    weights, v = (torch.stack(x) for x in zip(*inputs, strict=True))
    values, pages = paged_rows(paged_values, v, block, dtype=torch.bfloat16)
    options = {"fast": fast, "reduce": reduce}
    together = value_scores_of_rows(weights, values, pages, tokens, **options)
    assert together.shape == (3, kv_heads, tokens)
    for got, h, row_pages in zip(together, weights, pages, strict=True):
        assert torch.equal(got, value_scores(h, values, row_pages, tokens, **options))


def test_kv_heads_are_independent():
    """Values of another KV head and weights of another group do not change any bit."""
    h, v = random(6, 3, 30, 8)
    before = score(h, v)
    h[2:4], v[1] = h[[3, 5]], 7 * v[2]
    after = score(h, v)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.equal(before[1], after[1])


def test_strided_weights():
    """Every second row of a transposed array gives the same scores as a contiguous copy."""
    h, v = random(8, 2, 40, 8)
    strided = h.T.contiguous().T[::2]
    assert torch.equal(score(strided, v), score(strided.contiguous(), v))


@pytest.mark.cpu
def test_temporaries_stay_within_the_limit():
    """``o - v_j`` for all tokens at once would take 35 MB."""
    value_pages, pages = torch.randn(1, 3, 15000, 64), torch.tensor([0])
    h = torch.full((9, 15000), 1 / 15000)
    with LargestStorage() as largest:
        value_scores(h, value_pages, pages, 15000, fast=False, reduce="mean")
    assert largest.size <= value_scores_cpu.DIFFERENCES


@pytest.mark.usefixtures("triton_runs")
def test_triton_rejects_float64():
    h, v = random(2, 1, 20, 4)
    with pytest.raises(ValueError, match=r"got torch\.float64"):
        score(h, v, dtype=torch.float64)


GOOD = {
    "weights": torch.zeros(2, 4, 40),
    "value_pages": torch.zeros(5, 2, 16, 8),
    "pages": torch.zeros(2, 3, dtype=torch.int64),
    "tokens": 40,
    "fast": False,
    "reduce": "mean",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": torch.zeros(4, 40)}, r"weights must be \[N, Hq, tokens\]; got \(4, 40\)"),
        ({"weights": torch.zeros(0, 4, 40)}, "there must be at least one row; got 0"),
        ({"weights": torch.zeros(2, 4, 39)}, r"weights must be \[N, Hq, 40\]; got \(2, 4, 39\)"),
        ({"weights": torch.zeros(2, 3, 40)}, "Hq must be a multiple of Hkv=2; got 3"),
        ({"weights": torch.zeros(2, 0, 40)}, "Hq must be a multiple of Hkv=2; got 0"),
        ({"weights": torch.zeros(2, 4, 40).half()}, "weights must be float32; got torch.float16"),
        ({"value_pages": torch.zeros(5, 2, 16)}, r"value_pages must be \[N, Hkv, bs, D\]"),
        ({"pages": GOOD["pages"][:, :2]}, r"pages must be \[2, 3\]; got \(2, 2\)"),
        ({"tokens": 0}, "tokens must be positive; got 0"),
        ({"reduce": "max"}, "reduce must be 'mean' or 'l2'; got 'max'"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, r"lengths must be \[2\] int32"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_arguments_are_checked(change, message):
    value_scores_of_rows(**GOOD)
    with pytest.raises(ValueError, match=message):
        value_scores_of_rows(**GOOD | change)
