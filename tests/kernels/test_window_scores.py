import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import INTERPRETED, TOLERANCE, assert_close, assert_equal, property_test
from kvcompress_kernels.window_scores import reference
from one_row import window_scores
from paging import amx_tiles, paged_keys, transposed_keys

pytestmark = pytest.mark.gpu

prop = property_test(40, interpreted=5)
TILE = 64 if INTERPRETED else 512
"""A multiple of the columns per tile of the kernels and of the CPU code."""
OPTIONS = {"variance": True, "maximum": True}


def compare(
    heads, kv_heads, tokens, w, dim=8, block=16, *, seed=0, q_scale=1.0, pooled=False, **paging
):
    dtype = paging.get("dtype", torch.float32)
    rng = np.random.RandomState(seed)
    q = torch.from_numpy(q_scale * rng.standard_normal((heads, w, dim))).to(dtype)
    k = torch.from_numpy(rng.standard_normal((kv_heads, tokens, dim))).to(dtype)
    view, pages = paged_keys(k, block, seed=seed, **paging)
    arguments = q.transpose(0, 1), view, pages, tokens, dim**-0.5
    got = window_scores(*arguments, variance=w > 1, maximum=True)
    assert_close(got, reference.run(*arguments, w > 1, True))
    if pooled:
        options = {"variance": False, "maximum": True, "pooled": True}
        found, want = window_scores(*arguments, **options), reference.run(*arguments, **options)
        torch.testing.assert_close(found.maximum, want.maximum, **TOLERANCE)
    assert got.total.shape == (heads, tokens - w)
    assert got.entropy.shape == got.shift.shape == ()
    return got


@pytest.mark.parametrize(
    ("seed", "heads", "kv_heads", "tokens", "dim", "w"),
    [
        (11, 2, 2, 12, 4, 3),
        (12, 4, 2, 20, 4, 4),
        (13, 4, 1, 37, 8, 8),
        (14, 6, 2, 101, 16, 16),
        (15, 9, 3, 129 if INTERPRETED else 257, 64, 32),
        (17, 3, 1, 5, 4, 4),
    ],
)
@pytest.mark.parametrize("block", [1, 16, 128])
def test_shapes_match_the_reference(seed, heads, kv_heads, tokens, dim, w, block):
    compare(heads, kv_heads, tokens, w, dim, block, seed=seed, q_scale=1.5, pooled=block == 16)


@pytest.mark.parametrize(
    ("tokens", "w"),
    [
        *((tokens, 2) for tokens in (15, 16, 17, 31, 32, 33, 48, 1024, 1040)),
        *((TILE + offset, 2) for offset in (-1, 0, 1)),
        *((tokens, 1) for tokens in (16, 17, TILE + 1)),
        *((tokens, 14) for tokens in (15, 17, 33, TILE + 1)),
    ],
)
def test_lengths_around_blocks_and_tiles(tokens, w):
    compare(4, 2, tokens, w, seed=tokens, pooled=w == 2)


@pytest.mark.parametrize("block", [512, 528, 1024])
def test_blocks_as_long_as_a_tile(block):
    compare(2, 1, block + 5, 8, block=block)


@pytest.mark.parametrize("w", range(1, 20))
def test_window_lengths(w):
    compare(4, 2, 20, w, block=8)


@pytest.mark.cpu
@pytest.mark.parametrize("w", [500, 600, 1029])
def test_windows_over_several_tiles(w):
    """Early rows see no key of the last tile."""
    compare(2, 1, 1030, w, dim=4)


@pytest.mark.parametrize(("heads", "kv_heads", "w"), [(2, 1, 130), (1, 1, 199), (5, 1, 40)])
def test_more_rows_than_one_tile_holds(heads, kv_heads, w):
    compare(heads, kv_heads, 200, w, dim=4, pooled=heads == 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1)])
def test_dtypes_and_strides(heads, kv_heads, interleave, dtype):
    compare(heads, kv_heads, 75, 9, dtype=dtype, interleave=interleave)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("q_scale", [1.0, 40.0])
@pytest.mark.parametrize("w", [5, 32])
def test_equal_keys_get_equal_scores(w, q_scale, dtype):
    """Their position must not matter, even at the edge of a tile, so that ties are exact.

    The first chunk of columns has the highest logits, and the last chunk much lower ones.
    """
    tokens = TILE + 37 + w
    keys = torch.randn(2, 7, 64).repeat(1, -(-tokens // 7), 1)[:, :tokens].to(dtype)
    keys[:, :7] *= 2
    view, pages = paged_keys(keys, 16, dtype=dtype)
    got = window_scores(q_scale * torch.randn(w, 6, 64), view, pages, tokens, 0.125, **OPTIONS)
    for name in ("total", "variance", "last", "maximum"):
        columns = getattr(got, name)[:, 7 : (tokens - w) // 7 * 7].view(6, -1, 7)
        assert torch.equal(columns, columns[:, :1].expand_as(columns)), name


@pytest.mark.cpu
@pytest.mark.parametrize("layout", [amx_tiles, transposed_keys])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_at_offsets(dtype, layout):
    tokens, block, dim = 150, 32, 16
    view, pages = paged_keys(torch.randn(2, tokens, dim), block, dtype=dtype)
    offsets = layout(block, dim)
    cache = torch.full((len(view), 2, block, 2 * dim), torch.nan, dtype=dtype)
    place = offsets.key_tokens.long() + offsets.key_dims.long()[:, None]
    cache.flatten(2)[..., place.flatten()] = view.flatten(2)
    keys = cache.as_strided(view.shape, (*cache.stride()[:2], block, 1))
    q = torch.randn(9, 6, dim)
    got = window_scores(q, keys, pages, tokens, 0.3, **OPTIONS, offsets=offsets)
    assert_equal(got, window_scores(q, view, pages, tokens, 0.3, **OPTIONS))


@pytest.mark.cpu
def test_threads_do_not_change_scores():
    view, pages = paged_keys(torch.randn(2, 700, 16), 16)
    arguments = torch.randn(9, 6, 16), view, pages, 700, 0.3
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 5):
            torch.set_num_threads(count)
            results.append(window_scores(*arguments, **OPTIONS, pooled=True))
    finally:
        torch.set_num_threads(threads)
    assert_equal(*results)


@prop
@given(
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 2), (8, 1)]),
    tokens=st.integers(2, 90),
    data=st.data(),
    block=st.sampled_from([1, 3, 8, 16, 32]),
    q_scale=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    interleave=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(heads, tokens, data, **options):
    w = data.draw(st.integers(1, tokens - 1))
    compare(*heads, tokens, w, dim=4, pooled=True, **options)


def test_sharp_attention_stays_finite():
    """With logits in the thousands A is 0 or 1, and ``0 log 0`` must be 0."""
    got = compare(2, 1, 40, 4, q_scale=3000.0, pooled=True)
    assert all(x.isfinite().all() for x in got)


@pytest.mark.skipif(INTERPRETED, reason="the Triton kernels subtract a logarithm instead")
@pytest.mark.parametrize("seed", range(20))
def test_a_query_that_attends_to_one_token_gives_it_exactly_one(seed):
    """Otherwise rounding would decide between tokens that queries attend to alone."""
    rng = np.random.RandomState(seed)
    k = torch.from_numpy(rng.standard_normal((1, 90, 64))).float()
    k /= k.norm(dim=-1, keepdim=True)
    chosen = rng.choice(86, size=4, replace=False)
    q = 4000 * k[0, chosen]
    assert (q @ k[0].T / 8).topk(2).values.diff(dim=-1).max() < -150
    view, pages = paged_keys(k, 16, seed=seed)
    found = window_scores(q[:, None], view, pages, 90, 0.125, variance=True, maximum=True)
    expected = torch.zeros(86)
    expected[chosen] = 1
    assert_equal(found.total[0], expected)


def test_variance_is_optional():
    k = torch.randn(2, 40, 8)
    view, pages = paged_keys(k, 16)
    q = torch.randn(4, 4, 8)
    full = window_scores(q, view, pages, 40, 0.3, **OPTIONS)
    less = window_scores(q, view, pages, 40, 0.3, variance=False)
    assert less.variance is None
    assert less.shift.item() == 0
    assert torch.equal(less.total, full.total)
    assert torch.equal(less.entropy, full.entropy)
    assert full.shift.item() == pytest.approx(full.variance.sum().item(), rel=1e-6)


def test_last_row_is_optional():
    view, pages = paged_keys(torch.randn(2, 40, 8), 16)
    q = torch.randn(4, 4, 8)
    full = window_scores(q, view, pages, 40, 0.3, **OPTIONS)
    less = window_scores(q, view, pages, 40, 0.3, **OPTIONS, last=False)
    assert less.last is None
    assert full.last.shape == (4, 40)
    for name in set(full._fields) - {"last"}:
        assert torch.equal(getattr(less, name), getattr(full, name)), name


LINES = ("total", "variance", "recent", "last", "maximum")
"""Results with one line per head."""


@pytest.mark.parametrize(
    ("heads", "kv_heads", "w", "tokens"),
    [(6, 2, 8, 75), (4, 4, 3, 40), (4, 1, 70, 90), (7, 1, 20, 64), (2, 1, 130, 150)],
    ids=["3", "1", "several tiles of heads", "not a power of two", "several chunks of rows"],
)
def test_lines_of_kv_heads(heads, kv_heads, w, tokens):
    """They are the means over the query heads of each KV head, and their maximum.

    With equal keys, lines are equal bit for bit in all columns.
    """
    k, q = torch.randn(kv_heads, tokens, 8), torch.randn(w, heads, 8)
    arguments = q, *paged_keys(k, 16), tokens, 0.3
    for pooled in (False, True):
        full = window_scores(*arguments, **OPTIONS, pooled=pooled)
        got = window_scores(*arguments, **OPTIONS, pooled=pooled, grouped=True)
        for name in LINES:
            lines = getattr(full, name).unflatten(0, (kv_heads, -1))
            want = lines.amax(1) if name == "maximum" else lines.mean(1)
            torch.testing.assert_close(getattr(got, name), want, rtol=1e-6, atol=1e-8)
        assert torch.equal(got.entropy, full.entropy)
        torch.testing.assert_close(got.shift, full.shift, rtol=1e-6, atol=0.0)
    arguments = q, *paged_keys(k[:, :1].expand_as(k), 16), tokens, 0.3
    got = window_scores(*arguments, **OPTIONS, grouped=True)
    for name in set(LINES) - {"recent"}:
        line = getattr(got, name)[:, : tokens - w]
        assert torch.equal(line, line[:, :1].expand_as(line)), name


@pytest.mark.parametrize("past", range(1, 8))
def test_pooled_rows_keep_their_sum(past):
    """With one row the maximum is the row itself. Short pasts have all columns near an end."""
    compare(2, 1, past + 1, 1, seed=past, q_scale=2.0, pooled=True)
    k, q = torch.randn(1, past + 1, 8), torch.randn(1, 2, 8)
    arguments = q, *paged_keys(k, 16), past + 1, 0.7
    got = window_scores(*arguments, variance=False, maximum=True, pooled=True)
    np.testing.assert_allclose(got.maximum[:, :past].sum(1), got.total.sum(1), rtol=1e-5)
    np.testing.assert_allclose(got.maximum[:, past:], got.recent, rtol=1e-5)


def test_rows_without_attention_to_the_past_pool_to_zero():
    """The sum of such a row is 0 in float32, and so is the sum of the pooled row."""
    past, w = 9, 3
    k, q = torch.zeros(1, past + w, 8), torch.full((w, 2, 8), 5.0)
    k[:, past:] = 5.0
    arguments = q, *paged_keys(k, 16), past + w, 1.0
    got = window_scores(*arguments, variance=False, maximum=True, pooled=True).maximum
    assert (got[:, :past] == 0).all()
    np.testing.assert_allclose(got[:, past:], [[1.0, 0.5, 1 / 3]] * 2, rtol=1e-4)


def test_strided_query():
    """The query is a slice of a batch and of a fused projection."""
    view, pages = paged_keys(torch.randn(2, 40, 8), 16)
    fused = torch.randn(9, 4, 24)
    q = fused[3:8, :, 8:16]
    one = window_scores(q, view, pages, 40, 0.3, **OPTIONS)
    two = window_scores(q.contiguous(), view, pages, 40, 0.3, **OPTIONS)
    assert_equal(one, two)
