"""`merge_evicted` with several rows of different lengths and thresholds."""

import math

import pytest
import torch

from kvcompress_kernels.merge_evicted import merge_evicted
from paging import paged_cache
from test_merge_evicted import TOLERANCE, merge_one, random, reference_merge

pytestmark = pytest.mark.gpu


def batch(sizes, heads, dim, dtype):
    """Return layers of (tokens, kept) `sizes` in one cache, with NaN in all unused memory.

    Unused table entries refer to a page of NaN.
    """
    width, max_kept = 1 + max(-(-tokens // 16) for tokens, _ in sizes), max(n for _, n in sizes)
    kept = torch.full((len(sizes), heads, max_kept), 16 * width - 1)
    prompts = []
    for n, (tokens, count) in enumerate(sizes):
        k, v, kept[n, :, :count] = random(heads, tokens, count, dim, seed=n)
        prompts.append(paged_cache(k, v, 16, seed=n, dtype=dtype))
    keys, values = (torch.cat([prompt[i] for prompt in prompts]) for i in (0, 1))
    nan_page = keys.isnan().flatten(1).all(1).nonzero()[0].item()
    pages, start = torch.full((len(sizes), width), nan_page), 0
    for row, (prompt_keys, _, table) in zip(pages, prompts, strict=True):
        row[: len(table)] = table + start
        start += len(prompt_keys)
    order = torch.randperm(start, generator=torch.Generator().manual_seed(0))
    tokens, num_kept = torch.tensor(sizes, dtype=torch.int32).T.contiguous()
    return keys[order], values[order], order.argsort()[pages], tokens, kept.int(), num_kept


@pytest.mark.parametrize(
    ("counts", "min_kept", "dtype"),
    [
        ([40], 1, torch.float32),
        ([40], 40, torch.float32),
        ([9, 40, 1], 1, torch.float32),
        ([9, 40, 3], 3, torch.bfloat16),
    ],
)
def test_batched_layers_merge_like_single_layers(dtype, counts, min_kept):
    """Some layers keep all tokens and some keep few. Positions past a row's count are not read."""
    sizes = [(40, count) for count in counts]
    keys, values, pages, _, kept, num_kept = batch(sizes, 2, 8, dtype)
    got = merge_evicted(keys, values, pages[:, :-1], 40, kept, num_kept, min_kept)
    for row, count in enumerate(counts):
        want = merge_one(keys, values, pages[row, :-1], 40, kept[row, :, :count])
        for x, y in zip(got[:2], want, strict=True):
            torch.testing.assert_close(x[row, :, :count], y, rtol=0, atol=0)
            assert (x[row, :, count:] == 0).all()


def test_launch_sizes_do_not_change_a_layer(triton_runs, monkeypatch):
    """A batch has more tiles, more counting programs and longer rows than a layer needs alone."""
    from kvcompress_kernels.merge_evicted import triton

    sizes = [(300, 3), (170, 12), (300, 1)]
    keys, values, pages, lengths, kept, num_kept = batch(sizes, 2, 8, torch.float32)
    cache, pages = (keys, values), pages[:, :-1]
    alone = [
        merge_evicted(
            *cache, pages[i : i + 1, : -(-tokens // 16)], tokens, kept[i : i + 1, :, :count],
            num_kept[i : i + 1], count,
        )
        for i, (tokens, count) in enumerate(sizes)
    ]  # fmt: skip
    monkeypatch.setattr(triton, "SEGMENT", 128)
    together = merge_evicted(*cache, pages, 300, kept, num_kept, 1, lengths=lengths)
    for i, (layer, (_, count)) in enumerate(zip(alone, sizes, strict=True)):
        for got, want in zip(together[:2], layer[:2], strict=True):
            torch.testing.assert_close(got[i, :, :count], want[0], rtol=0, atol=0)
        assert torch.equal(together.threshold[i], layer.threshold[0])


@pytest.mark.parametrize("beta", [0.7, 0.25])
def test_threshold_is_updated_by_each_eviction(beta):
    """A NaN threshold becomes the mean, and a row without evicted tokens keeps its threshold.

    The second call starts from the threshold of the first call, so it may drop tokens that merged
    before.
    """
    sizes, heads = [(75, 12), (33, 9), (16, 16)], 2
    keys, values, pages, lengths, kept, num_kept = batch(sizes, heads, 8, torch.float32)
    threshold = torch.tensor([[math.nan, 0.9], [-0.5, 0.1], [0.3, math.nan]])
    arguments = keys, values, pages[:, :-1], 75, kept, num_kept
    kwargs = {} if beta == 0.7 else {"beta": beta}
    without_threshold = reference_merge(*arguments, lengths=lengths)
    changed = 0
    for _ in range(2):
        before = threshold.clone()
        got = merge_evicted(*arguments, lengths=lengths, threshold=threshold, **kwargs)
        assert got.threshold.data_ptr() != threshold.data_ptr()
        assert torch.equal(threshold.nan_to_num(9), before.nan_to_num(9))
        want = reference_merge(*arguments, lengths=lengths, threshold=threshold, **kwargs)
        for x, y in zip(got[:2], want[:2], strict=True):
            torch.testing.assert_close(x, y, **TOLERANCE)
        torch.testing.assert_close(got.threshold, want.threshold, rtol=1e-5, atol=0, equal_nan=True)
        rows = zip(without_threshold.keys, want.keys, strict=True)
        changed += sum(not torch.allclose(x, y) for x, y in rows)
        threshold = got.threshold
    assert changed >= 3


def test_merged_cache_can_be_merged_again():
    """Append 12 tokens to the merged cache and merge again, three times."""
    heads, kept_tokens, new_tokens = 2, 20, 12
    k, v, kept = random(heads, 50, kept_tokens, 8, seed=4)
    num_kept = torch.tensor([kept_tokens], dtype=torch.int32)
    actual = exact = k, v
    threshold = exact_threshold = None

    def arguments(keys, values, turn):
        key_pages, value_pages, pages = paged_cache(
            keys, values, 16, seed=turn, dtype=torch.float32
        )
        return key_pages, value_pages, pages[None], keys.shape[1], kept[None], num_kept

    for turn in range(3):
        got = merge_evicted(*arguments(*actual, turn), threshold=threshold)
        want = reference_merge(*arguments(*exact, turn), threshold=exact_threshold)
        for x, y in zip(got[:2], want[:2], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(got.threshold, want.threshold, rtol=1e-4, atol=0)
        more = random(heads, new_tokens, 1, 8, seed=turn + 10)[:2]
        actual, exact = (
            tuple(torch.cat([x[0].double(), y], 1) for x, y in zip(merged[:2], more, strict=True))
            for merged in (got, want)
        )
        kept = random(heads, kept_tokens + new_tokens, kept_tokens, seed=turn + 20)[2]
        threshold, exact_threshold = got.threshold, want.threshold


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.tensor([75])}, r"lengths must be \[1\] int32; got .*int64"),
        ({"threshold": torch.zeros(1)}, r"threshold must be \[1, 2\] float32; got \(\(1,\)"),
        ({"threshold": torch.zeros(1, 2).double()}, r"threshold must be .* float32; got .*float64"),
        ({"beta": -0.1}, r"beta must be in \[0, 1\]; got -0.1"),
        ({"beta": 1.1}, r"beta must be in \[0, 1\]; got 1.1"),
        ({"beta": math.nan}, r"beta must be in \[0, 1\]; got nan"),
    ],
)
def test_threshold_arguments_are_checked(change, message):
    keys, values, pages, lengths, kept, num_kept = batch([(20, 3)], 2, 8, torch.float32)
    arguments = keys, values, pages[:, :-1], 20, kept, num_kept
    merge_evicted(*arguments, lengths=lengths, threshold=torch.zeros(1, 2))
    with pytest.raises(ValueError, match=message):
        merge_evicted(*arguments, **change)
