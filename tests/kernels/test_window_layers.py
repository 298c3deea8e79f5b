"""`window_scores` of several layers and rows, and further tests of single layers."""

import numpy as np
import pytest
import torch

from kvcompress_kernels.window_scores import (
    reference,
    window_scores,
    window_scores_of_layers,
    window_scores_of_rows,
)
from paging import paged_keys

pytestmark = pytest.mark.gpu

TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}  # docs/methods.md 9


def prompt(layers, tokens, heads, kv_heads, dim, block, w, dtype, *, interleave=False):
    """Return queries, key_pages and pages of a prompt's layers in one cache.

    Unused slots and pages hold NaN.
    """
    rng = np.random.RandomState(0)
    stores, pages, used = [], [], 0
    for layer in range(layers):
        k = torch.from_numpy(rng.standard_normal((kv_heads, tokens, dim))).float()
        view, row_pages = paged_keys(k, block, seed=layer, dtype=dtype, interleave=interleave)
        pages.append(row_pages + used)
        used += len(view)
        stores.append(view.permute(0, 3, 1, 2) if interleave else view)
    cache = torch.cat(stores)
    cache = cache.permute(0, 2, 3, 1) if interleave else cache
    queries = torch.from_numpy(rng.standard_normal((layers, w, heads, dim))).to(dtype)
    return list(queries), cache, torch.stack(pages)


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
        together = window_scores_of_layers(queries, cache, pages, tokens, 0.3, **options)
        assert len(together) == layers
        for query, row_pages, got in zip(queries, pages, together, strict=True):
            alone = window_scores(query, cache, row_pages, tokens, 0.3, **options)
            want = reference.run(query, cache, row_pages, tokens, 0.3, **options)
            for name in got._fields:
                values = [getattr(scores, name) for scores in (got, alone, want)]
                if not options.get(name, True):
                    assert values == [None] * 3
                    continue
                assert torch.equal(values[0], values[1]), name
                torch.testing.assert_close(values[0], values[2], **TOLERANCE)


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
        torch.stack(queries), cache, pages, max_tokens, 0.3, lengths=counts, **options
    )
    for row, length in enumerate(lengths):
        row_pages = pages[row, : -(-length // 16)]
        alone = window_scores(queries[row], cache, row_pages, length, 0.3, **options)
        got = together.row(row)
        for name in ("total", "variance", "last", "maximum"):
            want, actual = getattr(alone, name), getattr(got, name)
            assert torch.equal(actual[:, : want.shape[1]], want), name
            assert not actual[:, want.shape[1] :].any(), name
        assert torch.equal(got.recent, alone.recent)
        torch.testing.assert_close(got.entropy, alone.entropy, **TOLERANCE)
        torch.testing.assert_close(got.shift, alone.shift, **TOLERANCE)


def test_row_of_window_length_has_no_past():
    """A layer of a prompt that was packed before may hold only the window."""
    w, lengths = 8, [8, 20]
    queries, cache, pages = prompt(2, 25, 6, 2, 16, 16, w, torch.float32)
    counts = torch.tensor(lengths, dtype=torch.int32)
    options = {"variance": True, "maximum": True}
    got = window_scores_of_rows(
        torch.stack(queries), cache, pages, 25, 0.3, lengths=counts, **options
    )
    only_window, longer = got.row(0), got.row(1)
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
    together = window_scores_of_layers(queries, cache, pages, 70, scales, **options)
    for query, row_pages, scale, got in zip(queries, pages, scales.tolist(), together, strict=True):
        alone = window_scores(query, cache, row_pages, 70, scale, **options)
        for name in got._fields:
            assert torch.equal(getattr(got, name), getattr(alone, name)), name


@pytest.mark.parametrize("scale", [torch.ones(2), torch.ones(3).double(), torch.ones(3, 1)])
def test_scales_are_checked(scale):
    queries, cache, pages = prompt(3, 40, 6, 2, 16, 16, 8, torch.float32)
    with pytest.raises(ValueError, match=r"scale must be a number or \[3\] float32; got"):
        window_scores_of_layers(queries, cache, pages, 40, scale, variance=True)


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
    together = window_scores_of_layers(queries, cache, pages, tokens, scale, **options)
    for query, row_pages, got in zip(queries, pages, together, strict=True):
        want = reference.run(query, cache, row_pages, tokens, scale, **options)
        for name in got._fields:
            if getattr(want, name) is not None:
                torch.testing.assert_close(getattr(got, name), getattr(want, name), **TOLERANCE)


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
    inner = pooled.maximum[:, 2 : -w - 2]
    assert torch.equal(inner, inner[:, :1].expand(-1, past - 4))
    assert torch.equal(got.maximum[:, :past], got.maximum[:, :1].expand(-1, past))
    assert torch.equal(got.total, got.total[:, :1].expand(-1, past))
    assert torch.equal(got.variance, got.variance[:, :1].expand(-1, past))
    assert torch.equal(got.last[:, :past], got.last[:, :1].expand(-1, past))


def test_negative_scale():
    view, pages = paged_keys(torch.randn(2, 40, 8), 16)
    q = torch.randn(4, 4, 8)
    first = window_scores(q, view, pages, 40, -0.7, variance=True, maximum=True)
    second = window_scores(-q, view, pages, 40, 0.7, variance=True, maximum=True)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_query_and_keys_of_different_dtypes():
    k, q = torch.randn(2, 40, 8).bfloat16(), torch.randn(4, 4, 8)
    first = window_scores(
        q,
        *paged_keys(k, 16, dtype=torch.bfloat16),
        40,
        0.3,
        variance=True,
        maximum=True,
        pooled=True,
    )
    second = window_scores(q, *paged_keys(k, 16), 40, 0.3, variance=True, maximum=True, pooled=True)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


GOOD = {
    "queries": [torch.zeros(4, 4, 8)] * 2,
    "key_pages": torch.zeros(5, 2, 8, 16),
    "pages": torch.zeros(2, 3, dtype=torch.int64),
    "tokens": 40,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": []}, "there must be at least one layer; got 0"),
        ({"queries": [torch.zeros(4, 4, 8)]}, r"pages must be \[1, 3\]; got \(2, 3\)"),
        ({"queries": [torch.zeros(4, 4, 8), torch.zeros(3, 4, 8)]}, "one shape and dtype"),
        ({"queries": [torch.zeros(4, 4, 8), torch.zeros(4, 4, 8).half()]}, "one shape and dtype"),
        ({"queries": [torch.zeros(40, 4, 8)] * 2}, "0 < window < tokens must hold"),
        ({"queries": [torch.zeros(1, 4, 8)] * 2}, "a variance needs a window of at least 2"),
        ({"queries": [torch.zeros(4, 3, 8)] * 2}, "Hq must be a multiple of Hkv=2"),
        ({"queries": [torch.zeros(4, 4, 6)] * 2}, "key_pages must have head dim 6"),
        ({"pooled": True}, "pooled needs maximum"),
        ({"pages": torch.zeros(2, 2, dtype=torch.int64)}, r"pages must be \[2, 3\]"),
        ({"pages": torch.zeros(3, dtype=torch.int64)}, r"pages must be \[2, 3\]"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_shapes_are_checked(change, message):
    window_scores_of_layers(**GOOD, scale=1.0, variance=True)
    with pytest.raises(ValueError, match=message):
        window_scores_of_layers(**GOOD | change, scale=1.0, variance=True)


@pytest.mark.parametrize(
    "lengths", [torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)]
)
def test_lengths_are_checked(lengths):
    arguments = {**GOOD, "query": torch.stack(GOOD["queries"])}
    del arguments["queries"]
    with pytest.raises(ValueError, match=r"lengths must be \[2\] int32"):
        window_scores_of_rows(**arguments, scale=1.0, variance=True, lengths=lengths)
