"""`window_scores` of several layers at once, and what the tests of one layer leave out."""

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

close = {"rtol": 1e-4, "atol": 1e-6}  # docs/methods.md 9


def prompt(layers, tokens, heads, kv_heads, dim, block, w, dtype, *, interleave=False):
    """Layers of a prompt in one cache, NaN between them: queries, key_pages and pages."""
    rng = np.random.RandomState(0)
    stores, pages, used = [], [], 0
    for layer in range(layers):
        k = torch.from_numpy(rng.standard_normal((kv_heads, tokens, dim))).float()
        view, own = paged_keys(k, block, seed=layer, dtype=dtype, interleave=interleave)
        pages.append(own + used)
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
    ids=["fp32-tokens-first", "bf16-heads-first", "whole blocks", "of two spans"],
)
def test_layers_get_what_they_get_alone(tokens, layers, dtype, interleave):
    """Bit for bit, and what the reference says; with all that can be asked for and without."""
    queries, cache, pages = prompt(layers, tokens, 6, 2, 16, 16, 8, dtype, interleave=interleave)
    asks = [
        {"variance": True, "maximum": True, "pooled": tokens < 1100},
        {"variance": False, "maximum": False, "pooled": False},
    ]
    for asked in asks:
        together = window_scores_of_layers(queries, cache, pages, tokens, 0.3, **asked)
        assert len(together) == layers
        for query, own, got in zip(queries, pages, together, strict=True):
            alone = window_scores(query, cache, own, tokens, 0.3, **asked)
            want = reference.run(query, cache, own, tokens, 0.3, **asked)
            for name in got._fields:
                values = [getattr(found, name) for found in (got, alone, want)]
                if not asked.get(name, True):
                    assert values == [None] * 3
                    continue
                assert torch.equal(values[0], values[1]), name
                torch.testing.assert_close(values[0], values[2], **close)


@pytest.mark.parametrize(
    ("lengths", "pooled", "dtype"),
    [
        ([9, 37, 16, 40], False, torch.float32),
        ([9, 37, 16, 40], False, torch.bfloat16),
        ([1030, 9, 1024], False, torch.bfloat16),
        ([70, 9, 33, 64], True, torch.bfloat16),
    ],
    ids=["short", "short-bf16", "of two spans", "pooled"],
)
def test_rows_of_other_lengths_get_what_they_get_alone(lengths, pooled, dtype):
    """Bit for bit; 0 where a row has no token, and no page behind its length is read."""
    w, most = 8, max(lengths) + 5
    queries, cache, pages = prompt(len(lengths), most, 6, 2, 16, 16, w, dtype)
    for row, length in enumerate(lengths):
        pages[row, -(-length // 16) :] = len(cache) + 1000
    asked = {"variance": True, "maximum": True, "pooled": pooled}
    counts = torch.tensor(lengths, dtype=torch.int32)
    together = window_scores_of_rows(
        torch.stack(queries), cache, pages, most, 0.3, lengths=counts, **asked
    )
    for row, length in enumerate(lengths):
        own = pages[row, : -(-length // 16)]
        alone = window_scores(queries[row], cache, own, length, 0.3, **asked)
        got = together.row(row)
        for name in ("total", "variance", "last", "maximum"):
            want, found = getattr(alone, name), getattr(got, name)
            assert torch.equal(found[:, : want.shape[1]], want), name
            assert not found[:, want.shape[1] :].any(), name
        assert torch.equal(got.recent, alone.recent)
        torch.testing.assert_close(got.entropy, alone.entropy, **close)
        torch.testing.assert_close(got.shift, alone.shift, **close)


def test_a_row_that_is_its_window_has_no_past():
    """A layer may hold no more than that of a prompt that was packed before."""
    w, lengths = 8, [8, 20]
    queries, cache, pages = prompt(2, 25, 6, 2, 16, 16, w, torch.float32)
    counts = torch.tensor(lengths, dtype=torch.int32)
    asked = {"variance": True, "maximum": True}
    got = window_scores_of_rows(
        torch.stack(queries), cache, pages, 25, 0.3, lengths=counts, **asked
    )
    none, some = got.row(0), got.row(1)
    assert not none.total.any()
    assert not none.variance.any()
    assert not none.maximum[:, w:].any()
    torch.testing.assert_close(none.last[:, :w].sum(1), torch.ones(6))
    torch.testing.assert_close(none.recent.sum(1), torch.full((6,), float(w)))
    alone = window_scores(queries[1], cache, pages[1, :2], 20, 0.3, **asked)
    assert torch.equal(some.total[:, :12], alone.total)


@pytest.mark.parametrize("pooled", [False, True])
def test_each_row_has_its_scale(pooled):
    """As layers of a quantised cache have."""
    queries, cache, pages = prompt(3, 70, 6, 2, 16, 16, 8, torch.bfloat16)
    scales = torch.tensor([0.3, 0.017, 1.9])
    asked = {"variance": True, "maximum": True, "pooled": pooled}
    together = window_scores_of_layers(queries, cache, pages, 70, scales, **asked)
    for query, own, scale, got in zip(queries, pages, scales.tolist(), together, strict=True):
        alone = window_scores(query, cache, own, 70, scale, **asked)
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
    """The last: each layer's prompt is in one page."""
    tokens, scale = w + 70, dim**-0.5
    queries, cache, pages = prompt(2, tokens, heads, kv_heads, dim, block, w, dtype)
    asked = {"variance": w > 1, "maximum": True, "pooled": dim in (80, 96)}
    together = window_scores_of_layers(queries, cache, pages, tokens, scale, **asked)
    for query, own, got in zip(queries, pages, together, strict=True):
        want = reference.run(query, cache, own, tokens, scale, **asked)
        for name in got._fields:
            if getattr(want, name) is not None:
                torch.testing.assert_close(getattr(got, name), getattr(want, name), **close)


@pytest.mark.parametrize(("heads", "w"), [(4, 8), (3, 11), (1, 140)])
def test_equal_keys_get_equal_scores(heads, w):
    """Wherever they lie, in a tile of the past or beside the window: ties go by position."""
    past = 100
    k = torch.randn(1, past + w, 16)
    k[:, :past] = k[:, :1]
    view, pages = paged_keys(k, 16)
    asked = torch.randn(w, heads, 16), view, pages, past + w, 0.3
    got = window_scores(*asked, variance=True, maximum=True)
    pooled = window_scores(*asked, variance=False, maximum=True, pooled=True).maximum[:, 2 : -w - 2]
    assert torch.equal(pooled, pooled[:, :1].expand(-1, past - 4))
    assert torch.equal(got.maximum[:, :past], got.maximum[:, :1].expand(-1, past))
    assert torch.equal(got.total, got.total[:, :1].expand(-1, past))
    assert torch.equal(got.variance, got.variance[:, :1].expand(-1, past))
    assert torch.equal(got.last[:, :past], got.last[:, :1].expand(-1, past))


def test_a_negative_scale():
    view, pages = paged_keys(torch.randn(2, 40, 8), 16)
    q = torch.randn(4, 4, 8)
    first = window_scores(q, view, pages, 40, -0.7, variance=True, maximum=True)
    second = window_scores(-q, view, pages, 40, 0.7, variance=True, maximum=True)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_query_and_keys_of_two_dtypes():
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
    given = {**GOOD, "query": torch.stack(GOOD["queries"])}
    del given["queries"]
    with pytest.raises(ValueError, match=r"lengths must be \[2\] int32"):
        window_scores_of_rows(**given, scale=1.0, variance=True, lengths=lengths)
