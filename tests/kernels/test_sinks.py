"""Attention sinks: an extra logit in every row's softmax without a key."""

import math

import numpy as np
import pytest
import torch

import methods_reference as ref
from cases import INTERPRETED, TOLERANCE
from kvcompress_kernels.column_sums import column_sums
from kvcompress_kernels.window_scores import window_scores_of_rows
from one_row import window_scores
from paging import paged_keys

pytestmark = pytest.mark.gpu

SINKS = [-40.0, 0.7, 9.0, 2.5, 0.0, -3.0]
"""Sinks that take almost nothing, about as much as a key, or almost all of a row."""
SCALES = {"usual": 1.0, "huge": 300.0}
"""Factors on all logits. With 300, `exp` without subtracting the maximum would overflow."""


def layer(tokens, heads, kv_heads, dim, seed, scale):
    """Return float64 queries ``[Hq, S, D]`` with sinks, float64 keys and float32 sinks."""
    rng = np.random.RandomState(seed)
    q = rng.standard_normal((heads, tokens, dim)) * scale
    k = rng.standard_normal((kv_heads, tokens, dim))
    q, k = (x.astype(np.float32).astype(np.float64) for x in (q, k))
    sinks = np.array(SINKS[:heads]) * scale
    return ref.with_sinks(q, sinks), k, torch.from_numpy(sinks).float()


def as_float(x):
    return torch.from_numpy(np.asarray(x)).float()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("tokens", "w"), [(70, 8), (37, 36), (1100, 5)])
def test_window_scores_with_sinks(tokens, w, scale):
    """Every result matches, including the pooled maximum, whose rows keep their sums."""
    heads, kv_heads, dim = 6, 2, 16
    q, k, sinks = layer(tokens, heads, kv_heads, dim, 5, SCALES[scale])
    view, pages = paged_keys(as_float(k), 16)
    a = ref.attention(q, k, range(tokens - w, tokens))
    queries = as_float(q[:, tokens - w :]).transpose(0, 1)
    for pooled in (False, True) if scale == "usual" else (False,):
        options = {"variance": True, "maximum": True, "pooled": pooled, "sinks": sinks}
        got = window_scores(queries, view, pages, tokens, dim**-0.5, **options)
        past = a[:, :, : tokens - w]
        rows = np.stack([[ref.pooled_row(row) for row in head] for head in past])
        want = {
            "total": past.sum(1),
            "variance": past.var(1, ddof=1),
            "recent": a[:, :, tokens - w :].sum(1),
            "last": a[:, -1],
            "maximum": np.concatenate(
                [(rows if pooled else past).max(1), a[:, :, tokens - w :].max(1)], -1
            ),
            "entropy": -np.where(past > 0, past * np.log(np.where(past > 0, past, 1)), 0).sum(),
        }
        for name, exact in want.items():
            torch.testing.assert_close(
                getattr(got, name).double(),
                torch.from_numpy(np.asarray(exact)),
                msg=name,
                **(TOLERANCE if scale == "usual" else {"rtol": 2e-3, "atol": 2e-5}),
            )


def test_rows_of_different_lengths_use_their_own_sinks():
    """Test two layers of two requests. A sink of minus infinity equals no sink bit for bit."""
    heads, kv_heads, dim, w, max_tokens = 4, 2, 16, 5, 90
    lengths = [90, 41, 64, 17]
    views, pages, queries, sinks, used = [], [], [], [], 0
    for row, tokens in enumerate(lengths):
        q, k, row_sinks = layer(tokens, heads, kv_heads, dim, row, 1.0)
        view, page = paged_keys(as_float(k), 16, seed=row)
        table = torch.zeros(-(-max_tokens // 16), dtype=torch.int64)
        table[: len(page)] = page + used
        used += len(view)
        views.append(view)
        pages.append(table)
        queries.append(as_float(q[:, tokens - w :]).transpose(0, 1))
        sinks.append(row_sinks + row)
    cache = torch.cat(views)
    rows = torch.stack(queries), cache, torch.stack(pages), max_tokens, 0.25
    options = {"lengths": torch.tensor(lengths, dtype=torch.int32), "variance": False}
    got = window_scores_of_rows(*rows, **options, sinks=torch.stack(sinks))
    for row, tokens in enumerate(lengths):
        arguments = queries[row], cache, pages[row][: -(-tokens // 16)], tokens, 0.25
        alone = window_scores(*arguments, variance=False, sinks=sinks[row])
        assert torch.equal(got.total[row, :, : tokens - w], alone.total)
        assert torch.equal(got.last[row, :, :tokens], alone.last)
    without_sinks = window_scores_of_rows(*rows, **options, sinks=None)
    infinite = torch.full((len(lengths), heads), -math.inf)
    infinite_sinks = window_scores_of_rows(*rows, **options, sinks=infinite)
    assert torch.equal(infinite_sinks.total, without_sinks.total)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("tokens", "count"), [(70, 70), (131, 7), (1, 1), (200, 129)])
def test_column_sums_with_sinks(tokens, count, scale, monkeypatch):
    """Test keys that are read at once, and keys that are read in spans."""
    heads, kv_heads, dim = 6, 2, 16
    q, k, sinks = layer(tokens, heads, kv_heads, dim, 7, SCALES[scale])
    view, pages = paged_keys(as_float(k), 16)
    want = ref.attention(q, k, range(tokens - count, tokens)).sum(1)
    rows = as_float(q[:, tokens - count :]).transpose(0, 1)
    # The Triton kernels do not read spans of `KEYS` bytes.
    for keys in (24 << 20,) if INTERPRETED else (24 << 20, 64 * 8 * kv_heads * dim):
        monkeypatch.setattr("kvcompress_kernels.column_sums.cpu.KEYS", keys)
        got = column_sums(rows, view, pages, tokens, dim**-0.5, sinks)
        torch.testing.assert_close(
            got.double(),
            torch.from_numpy(np.asarray(want)),
            **(TOLERANCE if scale == "usual" else {"rtol": 2e-3, "atol": 2e-5}),
        )


def test_sinks_are_checked():
    q, k, sinks = layer(40, 4, 2, 8, 1, 1.0)
    view, pages = paged_keys(as_float(k), 16)
    rows = as_float(q[:, 32:]).transpose(0, 1)
    for wrong in (sinks[:3], sinks.double()):
        with pytest.raises(ValueError, match="sinks must be"):
            window_scores(rows, view, pages, 40, 0.3, variance=False, sinks=wrong)
        with pytest.raises(ValueError, match="sinks must be"):
            column_sums(rows, view, pages, 40, 0.3, wrong)
