"""`window_scores` of many prompts at once: the kernels in the interpreter, by the reference."""

import os

import numpy as np
import pytest
import torch

from kvcompress_kernels.window_scores import reference as window_scores_ref
from kvcompress_kernels.window_scores import window_scores
from paging import paged_keys

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
close = {"rtol": 1e-4, "atol": 1e-6}  # METHODS section 9


@pytest.fixture
def triton():
    """The kernels themselves, in the interpreter or on a GPU."""
    if not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")
    from kvcompress_kernels.window_scores import triton as window_scores_triton

    return window_scores_triton


MAPS = {"variance": True, "recent": True, "last": True}
FIGURES = {"entropy": True, "shift": True}


def batch(tokens, heads, kv_heads, dim, block, w, dtype, *, interleave=False, seed=0):
    """Arguments of `run_batch`: prompts of `tokens` tokens in one cache, NaN between them."""
    rng = np.random.RandomState(seed)
    stores, pages, used = [], torch.zeros(len(tokens), -(-max(tokens) // block) + 2).long(), 0
    for row, count in enumerate(tokens):
        k = torch.from_numpy(rng.standard_normal((kv_heads, count, dim))).float()
        view, own = paged_keys(k, block, seed=seed + row, dtype=dtype, interleave=interleave)
        pages[row] = 2**40  # not to be followed
        pages[row, : len(own)] = own + used
        used += len(view)
        stores.append(view.permute(0, 3, 1, 2) if interleave else view)
    cache = torch.cat(stores)
    cache = cache.permute(0, 2, 3, 1) if interleave else cache
    query = torch.from_numpy(rng.standard_normal((len(tokens), w, heads, dim))).to(dtype)
    lengths = torch.tensor(tokens, dtype=torch.int32)
    return query, cache, pages, tokens, lengths, dim**-0.5


def check_batch(triton, case, **asked):
    query, cache, pages, tokens, _, scale = case
    w, block, kv_heads = query.shape[1], cache.shape[3], cache.shape[1]
    got = triton.run_batch(*case, **asked)
    for row, count in enumerate(tokens):
        own = pages[row, : -(-count // block)]
        want = window_scores_ref.run(query[row], cache, own, count, scale, w > 1)._asdict()
        for name, length in {"total": count - w, "variance": count - w, "recent": w}.items():
            if name == "total" or asked.get(name):
                check_map(getattr(got, name)[row], want[name], length, kv_heads, asked)
        if asked.get("last"):
            check_map(got.last[row], want["last"], count, kv_heads, asked)
        for name in ("entropy", "shift"):
            if asked.get(name):
                torch.testing.assert_close(getattr(got, name)[row], want[name], **close)
    for name, value in got._asdict().items():
        assert (value is None) == (name != "total" and not asked.get(name))


def check_map(got, want, length, kv_heads, asked):
    if asked.get("grouped"):
        want = want.unflatten(0, (kv_heads, -1)).mean(1)
    torch.testing.assert_close(got[:, :length], want, **close)
    assert (got[:, length:] == 0).all()


@pytest.mark.parametrize("tokens", [[37], [40, 9, 101], [64, 64, 64]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleave", [False, True])
def test_batch_equals_the_reference_by_rows(triton, tokens, dtype, interleave):
    case = batch(tokens, 6, 2, 16, 16, 8, dtype, interleave=interleave)
    check_batch(triton, case, **MAPS, **FIGURES)


@pytest.mark.parametrize("asked", [None, *MAPS, *FIGURES])
@pytest.mark.parametrize("grouped", [False, True])
def test_batch_gives_what_is_asked_for(triton, asked, grouped):
    case = batch([50, 70], 2, 1, 8, 16, 5, torch.bfloat16)
    check_batch(triton, case, grouped=grouped, **({asked: True} if asked else {}))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block", "w", "dtype", "grouped"),
    [
        (4, 1, 128, 16, 32, torch.bfloat16, False),
        (16, 1, 64, 32, 16, torch.bfloat16, True),
        (9, 3, 80, 7, 3, torch.float16, True),
        (2, 2, 96, 128, 1, torch.bfloat16, False),
        (1, 1, 256, 48, 150, torch.bfloat16, True),
    ],
)
def test_batch_with_shapes_of_models(triton, heads, kv_heads, dim, block, w, dtype, grouped):
    case = batch([w + 1, w + 70], heads, kv_heads, dim, block, w, dtype)
    asked = MAPS | FIGURES if w > 1 else {"recent": True, "last": True, "entropy": True}
    check_batch(triton, case, grouped=grouped, **asked)


def test_batch_of_prompts_in_one_page_each(triton):
    case = batch([100, 150], 2, 1, 8, 160, 8, torch.bfloat16)
    query, cache, pages, *rest = case
    check_batch(triton, (query, cache, pages[:, :1].contiguous(), *rest), **MAPS, **FIGURES)


def test_batch_gives_each_prompt_what_it_gets_alone(triton):
    """Bit for bit, however long its neighbours are."""
    query, cache, pages, tokens, lengths, scale = batch([90, 1100], 2, 1, 8, 16, 4, torch.float16)
    both = triton.run_batch(query, cache, pages, tokens, lengths, scale, **MAPS)
    for row, count in enumerate(tokens):
        alone = triton.run(query[row], cache, pages[row, : -(-count // 16)], count, scale, True)
        assert torch.equal(both.total[row, :, : count - 4], alone.total)
        assert torch.equal(both.variance[row, :, : count - 4], alone.variance)
        assert torch.equal(both.recent[row], alone.recent)
        assert torch.equal(both.last[row, :, :count], alone.last)


@pytest.mark.parametrize(("heads", "w"), [(4, 8), (3, 11), (1, 140)])
def test_equal_keys_get_equal_scores(heads, w):
    """Wherever they lie, in a tile of the past or beside the window: ties go by position."""
    past = 100
    k = torch.randn(1, past + w, 16)
    k[:, :past] = k[:, :1]
    view, pages = paged_keys(k, 16)
    got = window_scores(torch.randn(w, heads, 16), view, pages, past + w, 0.3, variance=True)
    assert torch.equal(got.total, got.total[:, :1].expand(-1, past))
    assert torch.equal(got.variance, got.variance[:, :1].expand(-1, past))
    assert torch.equal(got.last[:, :past], got.last[:, :1].expand(-1, past))


def test_a_negative_scale():
    view, pages = paged_keys(torch.randn(2, 40, 8), 16)
    q = torch.randn(4, 4, 8)
    one = window_scores(q, view, pages, 40, -0.7, variance=True)
    two = window_scores(-q, view, pages, 40, 0.7, variance=True)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_query_and_keys_of_two_dtypes():
    k, q = torch.randn(2, 40, 8).bfloat16(), torch.randn(4, 4, 8)
    one = window_scores(q, *paged_keys(k, 16, dtype=torch.bfloat16), 40, 0.3, variance=True)
    two = window_scores(q, *paged_keys(k, 16), 40, 0.3, variance=True)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("change", "asked"),
    [
        ({0: torch.zeros(2, 4, 4, 8, dtype=torch.float64)}, {}),
        ({0: torch.zeros(2, 40, 4, 8)}, {}),
        ({0: torch.zeros(2, 4, 3, 8)}, {}),
        ({0: torch.zeros(2, 4, 4, 6)}, {}),
        ({0: torch.zeros(2, 1, 4, 8)}, {"shift": True}),
        ({0: torch.zeros(2, 1, 4, 8)}, {"variance": True}),
        ({2: torch.zeros(2, 2).long()}, {}),
        ({2: torch.zeros(3, 5).long()}, {}),
        ({3: [40]}, {}),
        ({3: [40, 4]}, {}),
        ({3: []}, {}),
    ],
    ids=str,
)
def test_batches_check_shapes(triton, change, asked):
    case = batch([40, 30], 4, 2, 8, 16, 4, torch.float32)
    wrong = [change.get(at, value) for at, value in enumerate(case)]
    with pytest.raises(ValueError, match="window_scores: "):
        triton.run_batch(*wrong, **asked)
