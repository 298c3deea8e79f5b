"""Rows of several lengths, each with its threshold, merged together."""

import math

import pytest
import torch

from kvcompress_kernels.merge_evicted import merge_evicted
from test_merge_evicted import close, defined, merge_one, paged, random

pytestmark = pytest.mark.gpu


def batch(sizes, heads, dim, dtype):
    """Layers of (tokens, kept) in one cache, NaN between them.

    Entries of the tables that no layer needs lead to a page of NaN.
    """
    width, most = 1 + max(-(-tokens // 16) for tokens, _ in sizes), max(n for _, n in sizes)
    kept = torch.full((len(sizes), heads, most), 16 * width - 1)
    prompts = []
    for n, (tokens, count) in enumerate(sizes):
        k, v, kept[n, :, :count] = random(heads, tokens, count, dim, seed=n)
        prompts.append(paged(k, v, 16, seed=n, dtype=dtype))
    keys, values = (torch.cat([prompt[i] for prompt in prompts]) for i in (0, 1))
    nothing = keys.isnan().flatten(1).all(1).nonzero()[0].item()
    pages, start = torch.full((len(sizes), width), nothing), 0
    for row, (own, _, table) in zip(pages, prompts, strict=True):
        row[: len(table)] = table + start
        start += len(own)
    order = torch.randperm(start, generator=torch.Generator().manual_seed(0))
    tokens, counts = torch.tensor(sizes, dtype=torch.int32).T.contiguous()
    return keys[order], values[order], order.argsort()[pages], tokens, kept.int(), counts


@pytest.mark.parametrize(
    ("counts", "least", "dtype"),
    [
        ([40], 1, torch.float32),
        ([40], 40, torch.float32),
        ([9, 40, 1], 1, torch.float32),
        ([9, 40, 3], 3, torch.bfloat16),
    ],
)
def test_layers_merge_as_if_alone(dtype, counts, least):
    """A layer that keeps all, layers that keep few; nothing behind their kept ones is read."""
    sizes = [(40, count) for count in counts]
    keys, values, pages, _, kept, stay = batch(sizes, 2, 8, dtype)
    got = merge_evicted(keys, values, pages[:, :-1], 40, kept, stay, least)
    for row, count in enumerate(counts):
        want = merge_one(keys, values, pages[row, :-1], 40, kept[row, :, :count])
        for x, y in zip(got[:2], want, strict=True):
            torch.testing.assert_close(x[row, :, :count], y, rtol=0, atol=0)
            assert (x[row, :, count:] == 0).all()


@pytest.mark.parametrize("beta", [0.7, 0.25])
def test_a_threshold_moves_with_what_is_evicted(beta):
    """Of rows of their own lengths; where none was, it is the mean, and where nothing is, it stays.

    The next eviction goes on from it: what merged once may be dropped then.
    """
    sizes, heads = [(75, 12), (33, 9), (16, 16)], 2
    keys, values, pages, lengths, kept, stay = batch(sizes, heads, 8, torch.float32)
    threshold = torch.tensor([[math.nan, 0.9], [-0.5, 0.1], [0.3, math.nan]])
    given = keys, values, pages[:, :-1], 75, kept, stay
    how = {} if beta == 0.7 else {"beta": beta}
    plain = defined(*given, lengths=lengths)
    changed = 0
    for _ in range(2):
        before = threshold.clone()
        got = merge_evicted(*given, lengths=lengths, threshold=threshold, **how)
        assert got.threshold.data_ptr() != threshold.data_ptr()
        assert torch.equal(threshold.nan_to_num(9), before.nan_to_num(9))
        want = defined(*given, lengths=lengths, threshold=threshold, **how)
        for x, y in zip(got[:2], want[:2], strict=True):
            torch.testing.assert_close(x, y, **close)
        torch.testing.assert_close(got.threshold, want.threshold, rtol=1e-5, atol=0, equal_nan=True)
        changed += sum(not torch.allclose(x, y) for x, y in zip(plain.keys, want.keys, strict=True))
        threshold = got.threshold
    assert changed >= 3


def test_what_was_merged_is_merged_again():
    """Three times over: the cache that merging left, and as many tokens behind it, merge again."""
    heads, kept_tokens, fresh = 2, 20, 12
    k, v, kept = random(heads, 50, kept_tokens, 8, seed=4)
    counts = torch.tensor([kept_tokens], dtype=torch.int32)
    ours = exact = k, v
    threshold = exact_threshold = None

    def asked(keys, values, turn):
        key_pages, value_pages, pages = paged(keys, values, 16, seed=turn, dtype=torch.float32)
        return key_pages, value_pages, pages[None], keys.shape[1], kept[None], counts

    for turn in range(3):
        got = merge_evicted(*asked(*ours, turn), threshold=threshold)
        want = defined(*asked(*exact, turn), threshold=exact_threshold)
        for x, y in zip(got[:2], want[:2], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(got.threshold, want.threshold, rtol=1e-4, atol=0)
        more = random(heads, fresh, 1, 8, seed=turn + 10)[:2]
        ours, exact = (
            tuple(torch.cat([x[0].double(), y], 1) for x, y in zip(merged[:2], more, strict=True))
            for merged in (got, want)
        )
        kept = random(heads, kept_tokens + fresh, kept_tokens, seed=turn + 20)[2]
        threshold, exact_threshold = got.threshold, want.threshold


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.full((2,), 75, dtype=torch.int32)}, r"lengths must be \[1\] int32"),
        ({"lengths": torch.tensor([75])}, r"lengths must be \[1\] int32; got .*int64"),
        ({"threshold": torch.zeros(1)}, r"threshold must be \[1, 2\] float32; got \(\(1,\)"),
        ({"threshold": torch.zeros(1, 2).double()}, r"threshold must be .* float32; got .*float64"),
        ({"beta": -0.1}, r"beta must be in \[0, 1\]; got -0.1"),
        ({"beta": 1.1}, r"beta must be in \[0, 1\]; got 1.1"),
        ({"beta": math.nan}, r"beta must be in \[0, 1\]; got nan"),
    ],
)
def test_what_a_threshold_goes_by_is_checked(change, message):
    keys, values, pages, lengths, kept, stay = batch([(20, 3)], 2, 8, torch.float32)
    given = keys, values, pages[:, :-1], 20, kept, stay
    merge_evicted(*given, lengths=lengths, threshold=torch.zeros(1, 2))
    with pytest.raises(ValueError, match=message):
        merge_evicted(*given, **change)
