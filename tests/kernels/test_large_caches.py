"""Results on a cache of more than 2**31 elements equal those on a small cache bit for bit.

A CPU never allocates untouched memory, so these tests take a few MiB there. On a GPU they take
4 GiB, and all memory outside the prompt holds NaN.
"""

import pytest
import torch

from cases import assert_equal
from kvcompress_kernels.column_sums import column_sums
from kvcompress_kernels.merge_evicted import merge_evicted
from one_row import key_cosines, lag_scores, value_norms, value_scores, window_scores

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM, BLOCK, TOKENS = 4, 2, 16, 16, 40
PAGES = (2, 0, 1)  # The prompt's first page is past element 2**31.
S_PAGE = 2**30 + 32  # elements between two pages


@pytest.fixture(autouse=True)
def _default_device(device):
    with device:
        yield


def views(store, token_major):
    """Return key pages ``[3, Hkv, D, block]`` and value pages ``[3, Hkv, block, D]`` of `store`."""
    inner = (BLOCK, KV_HEADS) if token_major else (KV_HEADS, BLOCK)
    stride = store.numel() // 3 // 16 * 16
    strides = (stride, inner[1] * 2 * DIM, 2 * DIM, 1)
    pages = store.as_strided((3, *inner, 2 * DIM), strides)
    per_head = pages.transpose(1, 2) if token_major else pages
    return per_head[..., :DIM].mT, per_head[..., DIM:]


@pytest.fixture(params=[True, False], ids=["token-major", "heads-first"])
def caches(request, device):
    """Return the same prompt in a small cache and in a large cache."""
    page = 2 * KV_HEADS * BLOCK * DIM
    small = torch.randn(3 * page).bfloat16()
    large = torch.empty(3 * S_PAGE, dtype=torch.bfloat16)
    if device.type == "cuda":
        large.fill_(torch.nan)
    for x, source in zip(views(large, request.param), views(small, request.param), strict=True):
        x.copy_(source)
    assert views(large, request.param)[0].stride(0) == S_PAGE
    return views(small, request.param), views(large, request.param)


@pytest.fixture
def inputs():
    """Return what the ops read besides the cache."""
    kept = torch.arange(0, TOKENS, 3, dtype=torch.int32).expand(1, KV_HEADS, -1)
    return {
        "query": torch.randn(8, HEADS, DIM).bfloat16(),
        "pages": torch.tensor(PAGES),
        "kept": kept,
        "count": torch.tensor([kept.shape[2]], dtype=torch.int32),
        "weights": torch.arange(1.0, 1 + HEADS * TOKENS).view(HEADS, TOKENS).softmax(1),
    }


def results(keys, values, query, pages, kept, count, weights):
    """Yield the results of every op that reads a prompt's cache."""
    for pooled in (False, True):
        options = {"variance": True, "maximum": True, "pooled": pooled}
        yield from window_scores(query, keys, pages, TOKENS, 0.25, **options)
    yield column_sums(query, keys, pages, TOKENS, 0.25)
    yield value_scores(weights, values, pages, TOKENS, fast=False, reduce="mean")
    yield value_norms(values, pages, TOKENS)
    yield key_cosines(keys, pages, TOKENS)
    yield lag_scores(keys, values, pages, TOKENS, sinks=4, lag=10)
    yield from merge_evicted(keys, values, pages[None], TOKENS, kept, count, kept.shape[2])


def test_large_cache_gives_the_results_of_a_small_cache(caches, inputs):
    small, large = (list(results(*cache, **inputs)) for cache in caches)
    assert len(small) == 22
    for got, want in zip(large, small, strict=True):
        assert want.isfinite().all()
        assert torch.equal(got, want)


def test_second_launch_gives_the_same_bits_and_inputs_are_unchanged(caches, inputs):
    tensors = *caches[0], *inputs.values()
    before = [x.clone() for x in tensors]
    first, second = (list(results(*caches[0], **inputs)) for _ in range(2))
    assert_equal(first, second)
    assert_equal(tensors, before)
