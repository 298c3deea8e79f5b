"""`window_scores_of_rows` with several rows, and further tests of one row."""

import numpy as np
import pytest
import torch

from cases import assert_close, assert_equal
from kvcompress_kernels.window_scores import reference, window_scores_of_rows
from one_row import scores_of_row, window_scores
from paging import paged_keys, paged_rows

pytestmark = pytest.mark.gpu


def prompt(layers, tokens, heads, kv_heads, dim, block, w, dtype, *, interleave=False):
    """Return queries ``[N, w, Hq, D]``, key pages and pages of a prompt's layers in one cache.

    Unused slots and pages hold NaN.
    """
    rng = np.random.RandomState(0)
    k = torch.from_numpy(rng.standard_normal((layers, kv_heads, tokens, dim)))
    cache, pages = paged_rows(paged_keys, k.float(), block, dtype=dtype, interleave=interleave)
    query = torch.from_numpy(rng.standard_normal((layers, w, heads, dim))).to(dtype)
    return query, cache, pages


@pytest.mark.parametrize(
    ("tokens", "layers", "dtype", "interleave"),
    [
        (37, 3, torch.float32, True),
        (37, 3, torch.bfloat16, False),
        (64, 3, torch.float32, False),
        (1100, 2, torch.bfloat16, True),
    ],
    ids=["fp32-tokens-first", "bf16-heads-first", "full blocks", "two spans"],
)
def test_batched_layers_score_like_single_layers(tokens, layers, dtype, interleave):
    """Scores are equal bit for bit and match the reference, with and without optional results."""
    queries, cache, pages = prompt(layers, tokens, 6, 2, 16, 16, 8, dtype, interleave=interleave)
    all_options = [
        {"variance": True, "maximum": True, "pooled": tokens < 1100},
        {"variance": False, "maximum": False, "pooled": False},
    ]
    for options in all_options:
        together = window_scores_of_rows(queries, cache, pages, tokens, 0.3, **options)
        for index in range(layers):
            got = scores_of_row(together, index)
            arguments = queries[index], cache, pages[index], tokens, 0.3
            assert_equal(got, window_scores(*arguments, **options))
            assert_close(got, reference.run(*arguments, **options))
            assert (got.variance is None, got.maximum is None) == (not options["variance"],) * 2


@pytest.mark.parametrize(
    ("lengths", "pooled", "dtype"),
    [
        ([9, 37, 16, 40], False, torch.float32),
        ([9, 37, 16, 40], False, torch.bfloat16),
        ([1030, 9, 1024], False, torch.bfloat16),
        ([70, 9, 33, 64], True, torch.bfloat16),
    ],
    ids=["short", "short-bf16", "two spans", "pooled"],
)
def test_batched_rows_score_like_single_rows(lengths, pooled, dtype):
    """Scores are equal bit for bit. No page past a row's length is read, and scores there are 0."""
    w, max_tokens = 8, max(lengths) + 5
    queries, cache, pages = prompt(len(lengths), max_tokens, 6, 2, 16, 16, w, dtype)
    for row, length in enumerate(lengths):
        pages[row, -(-length // 16) :] = len(cache) + 1000
    options = {"variance": True, "maximum": True, "pooled": pooled}
    counts = torch.tensor(lengths, dtype=torch.int32)
    together = window_scores_of_rows(
        queries, cache, pages, max_tokens, 0.3, lengths=counts, **options
    )
    for row, length in enumerate(lengths):
        row_pages = pages[row, : -(-length // 16)]
        alone = window_scores(queries[row], cache, row_pages, length, 0.3, **options)
        got = scores_of_row(together, row)
        for name in ("total", "variance", "last", "maximum"):
            want, actual = getattr(alone, name), getattr(got, name)
            assert torch.equal(actual[:, : want.shape[1]], want), name
            assert not actual[:, want.shape[1] :].any(), name
        assert torch.equal(got.recent, alone.recent)
        assert_close((got.entropy, got.shift), (alone.entropy, alone.shift))


def test_row_of_window_length_has_no_past():
    """A layer of a prompt that was packed before may hold only the window."""
    w, lengths = 8, [8, 20]
    queries, cache, pages = prompt(2, 25, 6, 2, 16, 16, w, torch.float32)
    counts = torch.tensor(lengths, dtype=torch.int32)
    options = {"variance": True, "maximum": True}
    got = window_scores_of_rows(queries, cache, pages, 25, 0.3, lengths=counts, **options)
    only_window, longer = scores_of_row(got, 0), scores_of_row(got, 1)
    assert not only_window.total.any()
    assert not only_window.variance.any()
    assert not only_window.maximum[:, w:].any()
    torch.testing.assert_close(only_window.last[:, :w].sum(1), torch.ones(6))
    torch.testing.assert_close(only_window.recent.sum(1), torch.full((6,), float(w)))
    alone = window_scores(queries[1], cache, pages[1, :2], 20, 0.3, **options)
    assert torch.equal(longer.total[:, :12], alone.total)


@pytest.mark.parametrize("pooled", [False, True])
def test_each_row_uses_its_own_scale(pooled):
    """Layers of a quantised cache have different scales."""
    queries, cache, pages = prompt(3, 70, 6, 2, 16, 16, 8, torch.bfloat16)
    scales = torch.tensor([0.3, 0.017, 1.9])
    options = {"variance": True, "maximum": True, "pooled": pooled}
    together = window_scores_of_rows(queries, cache, pages, 70, scales, **options)
    for index, scale in enumerate(scales.tolist()):
        alone = window_scores(queries[index], cache, pages[index], 70, scale, **options)
        assert_equal(scores_of_row(together, index), alone)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block", "w", "dtype"),
    [
        (4, 1, 128, 16, 32, torch.bfloat16),
        (16, 1, 64, 32, 16, torch.bfloat16),
        (9, 3, 80, 7, 3, torch.float16),
        (2, 2, 96, 128, 1, torch.bfloat16),
        (1, 1, 256, 48, 150, torch.bfloat16),
        (2, 1, 8, 160, 8, torch.bfloat16),
    ],
)
def test_shapes_of_models(heads, kv_heads, dim, block, w, dtype):
    """In the last case, each layer's prompt is in one page."""
    tokens, scale = w + 70, dim**-0.5
    queries, cache, pages = prompt(2, tokens, heads, kv_heads, dim, block, w, dtype)
    options = {"variance": w > 1, "maximum": True, "pooled": dim in (80, 96)}
    together = window_scores_of_rows(queries, cache, pages, tokens, scale, **options)
    for index in range(2):
        want = reference.run(queries[index], cache, pages[index], tokens, scale, **options)
        assert_close(scores_of_row(together, index), want)


@pytest.mark.parametrize(("heads", "w"), [(4, 8), (3, 11), (1, 140)])
def test_equal_keys_get_equal_scores(heads, w):
    """Their position in a tile or next to the window must not matter, so that ties are exact."""
    past = 100
    k = torch.randn(1, past + w, 16)
    k[:, :past] = k[:, :1]
    view, pages = paged_keys(k, 16)
    arguments = torch.randn(w, heads, 16), view, pages, past + w, 0.3
    got = window_scores(*arguments, variance=True, maximum=True)
    pooled = window_scores(*arguments, variance=False, maximum=True, pooled=True)
    lines = [x[:, :past] for x in (got.maximum, got.total, got.variance, got.last)]
    for line in (*lines, pooled.maximum[:, 2 : -w - 2]):
        assert torch.equal(line, line[:, :1].expand_as(line))


def test_negative_scale():
    view, pages = paged_keys(torch.randn(2, 40, 8), 16)
    q = torch.randn(4, 4, 8)
    first = window_scores(q, view, pages, 40, -0.7, variance=True, maximum=True)
    second = window_scores(-q, view, pages, 40, 0.7, variance=True, maximum=True)
    assert_close(first, second, rtol=1e-5, atol=1e-7)


def test_query_and_keys_of_different_dtypes():
    k, q = torch.randn(2, 40, 8).bfloat16(), torch.randn(4, 4, 8)
    options = {"variance": True, "maximum": True, "pooled": True}
    first = window_scores(q, *paged_keys(k, 16, dtype=torch.bfloat16), 40, 0.3, **options)
    second = window_scores(q, *paged_keys(k, 16), 40, 0.3, **options)
    assert_close(first, second, rtol=1e-5, atol=1e-7)


GOOD = {
    "query": torch.zeros(2, 4, 4, 8),
    "key_pages": torch.zeros(5, 2, 8, 16),
    "pages": torch.zeros(2, 3, dtype=torch.int64),
    "tokens": 40,
    "scale": 1.0,
    "variance": True,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(4, 4, 8)}, r"query must be \[N, w, Hq, D\]; got \(4, 4, 8\)"),
        ({"query": torch.zeros(0, 4, 4, 8)}, "there must be at least one row; got 0"),
        ({"query": torch.zeros(2, 0, 4, 8)}, r"0 < window < tokens must hold; got \(0, 40\)"),
        ({"query": torch.zeros(2, 40, 4, 8)}, r"0 < window < tokens must hold; got \(40, 40\)"),
        ({"query": torch.zeros(2, 1, 4, 8)}, "a variance needs a window of at least 2; got 1"),
        ({"query": torch.zeros(2, 4, 3, 8)}, "Hq must be a multiple of Hkv=2; got 3"),
        ({"query": torch.zeros(2, 4, 4, 6)}, "key_pages must have head dim 6"),
        ({"key_pages": torch.zeros(5, 2, 8)}, r"key_pages must be \[N, Hkv, D, bs\]"),
        ({"key_pages": torch.zeros(5, 2, 16, 8)}, "key_pages must have head dim 8"),
        ({"pooled": True}, "pooled needs maximum"),
        ({"pages": torch.zeros(1, 3, dtype=torch.int64)}, r"pages must be \[2, 3\]; got \(1, 3\)"),
        ({"tokens": 49}, r"pages must be \[2, 4\]; got \(2, 3\)"),
        ({"tokens": 0}, "0 < window < tokens must hold"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, r"lengths must be \[2\] int32"),
        ({"scale": torch.ones(3)}, r"scale must be a number or \[2\] float32"),
        ({"scale": torch.ones(2).double()}, r"scale must be a number or \[2\] float32"),
        ({"row_log_sums": torch.zeros(2, 5, 4)}, r"row_log_sums must be \[2, 4, 4\] float32"),
        ({"row_log_sums": torch.zeros(2, 4, 4).double()}, r"row_log_sums must be .* float32"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_arguments_are_checked(change, message):
    window_scores_of_rows(**GOOD)
    with pytest.raises(ValueError, match=f"window_scores: {message}"):
        window_scores_of_rows(**GOOD | change)
