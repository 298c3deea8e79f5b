"""`window_scores_of_rows` with the logsumexp of each row, as FlashAttention returns it."""

import numpy as np
import pytest
import torch

from cases import KERNELS_RUN, TOLERANCE, assert_close, assert_equal
from kvcompress_kernels.cached_prompt import cached_keys
from kvcompress_kernels.window_scores import reference, window_scores_of_rows
from paging import paged_keys, paged_rows

pytestmark = pytest.mark.gpu

HUGE = TOLERANCE if KERNELS_RUN else {"rtol": 2e-3, "atol": 2e-5}
"""For logits in the thousands. The CPU code stores each row's logsumexp in float32."""
OPTIONS = {"variance": True, "maximum": True}
WRONG = {
    "too large by 1e-4": lambda exact: exact + 1e-4,
    "too small": lambda exact: exact - 3.0,
    "of one row": lambda exact: exact + torch.eye(*exact.shape[1:]),
    "NaN": lambda exact: exact * torch.nan,
    "one NaN": lambda exact: exact.index_fill(1, torch.tensor([0]), torch.nan),
    "infinite": lambda exact: exact + torch.inf,
    "minus infinity": lambda exact: exact - torch.inf,
    "zero": torch.zeros_like,
}


def prompt(layers, tokens, heads, kv_heads, dim, w, q_scale=1.0, dtype=torch.float32):
    """Return queries ``[N, w, Hq, D]``, key pages and page ids. Unused slots hold NaN.

    Multiples of 1/4 and 1/8 have exact products and sums in float32, however large they are.
    """
    rng = np.random.RandomState(3)
    query = rng.standard_normal((layers, w, heads, dim)) * 4
    query = torch.from_numpy(query.round() / 4 * q_scale).to(dtype)
    k = (rng.standard_normal((layers, kv_heads, tokens, dim)) * 8).round() / 8
    return query, *paged_rows(paged_keys, torch.from_numpy(k), 16, dtype=dtype)


def log_sums(query, cache, pages, tokens, scale, lengths=None):
    """Return ``[N, Hq, w]`` float32, computed in float64."""
    rows = []
    for row, (q, row_pages) in enumerate(zip(query.double(), pages, strict=True)):
        length = tokens if lengths is None else int(lengths[row])
        w, heads, _ = q.shape
        k = cached_keys(cache, row_pages[: -(-length // cache.shape[3])], length)
        k = k.double().repeat_interleave(heads // len(k), 0)
        logits = scale * torch.einsum("whd,hsd->hws", q, k)
        seen = torch.arange(length) <= torch.arange(length - w, length)[:, None]
        rows.append(logits.masked_fill(~seen, -torch.inf).logsumexp(-1))
    return torch.stack(rows).float()


def check(got, query, cache, pages, tokens, scale, tolerance=TOLERANCE, **options):
    for row, (q, row_pages) in enumerate(zip(query, pages, strict=True)):
        want = reference.run(q, cache, row_pages, tokens, scale, **options)
        for name in want._fields:
            if getattr(want, name) is not None:
                found = getattr(got, name)[row]
                torch.testing.assert_close(found, getattr(want, name), **tolerance, msg=name)


def scored(arguments, exact, **options):
    return window_scores_of_rows(*arguments, **options, row_log_sums=exact)


@pytest.mark.parametrize("q_scale", [1.0, 10.0, 100.0, 1000.0])
@pytest.mark.parametrize(("tokens", "w"), [(75, 9), (331, 32)])
def test_logits_of_any_size(tokens, w, q_scale):
    """A float32 log-sum-exp in the thousands is not accurate enough, so layers are scored again."""
    query, cache, pages = prompt(2, tokens, 4, 2, 16, w, q_scale)
    arguments = query, cache, pages, tokens, 0.25
    exact = log_sums(*arguments)
    tolerance = HUGE if q_scale == 1000.0 else TOLERANCE
    check(scored(arguments, exact, **OPTIONS), *arguments, tolerance, **OPTIONS)


@pytest.mark.parametrize("w", [1, 2, 3, 7, 8, 16, 31, 33, 64, 100, 127, 128, 140])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (3, 3)])
def test_window_lengths(w, heads, kv_heads):
    tokens, options = w + 67, {"variance": w > 1, "maximum": True}
    query, cache, pages = prompt(1, tokens, heads, kv_heads, 8, w, dtype=torch.bfloat16)
    arguments = query, cache, pages, tokens, 0.3
    check(scored(arguments, log_sums(*arguments), **options), *arguments, **options)


@pytest.mark.parametrize("tokens", [17, 31, 64, 65, 127, 1023, 1025, 2049])
def test_prompt_lengths(tokens):
    query, cache, pages = prompt(2, tokens, 2, 1, 8, 5)
    arguments = query, cache, pages, tokens, 0.3
    check(scored(arguments, log_sums(*arguments), **OPTIONS), *arguments, **OPTIONS)


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_log_sums_are_replaced(wrong):
    """Only the row with a wrong logsumexp is scored again."""
    query, cache, pages = prompt(3, 75, 4, 2, 16, 9, dtype=torch.bfloat16)
    arguments = query, cache, pages, 75, 0.3
    exact = log_sums(*arguments)
    changed = exact.clone()
    changed[1:2] = WRONG[wrong](exact[1:2])
    got = scored(arguments, changed, **OPTIONS)
    check(got, *arguments, **OPTIONS)
    right, alone = scored(arguments, exact, **OPTIONS), scored(arguments, exact * 0, **OPTIONS)
    for name in got._fields:
        found, used, unused = (getattr(scores, name) for scores in (got, right, alone))
        assert torch.equal(found[0], used[0]), name
        assert torch.equal(found[1], unused[1]), name
        assert torch.equal(found[2], used[2]), name


@pytest.mark.usefixtures("triton_runs")
def test_right_log_sums_are_used():
    """A deviation below the threshold is used, and changes the scores."""
    query, cache, pages = prompt(1, 75, 4, 2, 16, 9)
    arguments = query, cache, pages, 75, 0.3
    exact = log_sums(*arguments)
    got, changed = (scored(arguments, exact + error, **OPTIONS) for error in (0.0, 3e-5))
    torch.testing.assert_close(changed.total * np.exp(3e-5), got.total, rtol=1e-5, atol=0.0)
    assert (changed.total < got.total).all()


def test_rows_of_different_lengths():
    lengths = torch.tensor([75, 9, 40, 33], dtype=torch.int32)
    query, cache, pages = prompt(4, 75, 4, 2, 16, 9)
    arguments = query, cache, pages, 75, 0.3
    exact = log_sums(*arguments, lengths)
    exact[2] += 1.0
    got = scored(arguments, exact, **OPTIONS, lengths=lengths)
    want = window_scores_of_rows(*arguments, **OPTIONS, lengths=lengths)
    assert_close(got, want)


def test_each_row_uses_its_own_scale():
    scales = torch.tensor([0.3, 0.017, 1.9])
    query, cache, pages = prompt(3, 75, 4, 2, 16, 9)
    arguments = query, cache, pages, 75
    rows = [
        log_sums(*(x[i : i + 1] for x in (query,)), cache, pages[i : i + 1], 75, scale)
        for i, scale in enumerate(scales.tolist())
    ]
    got = scored((*arguments, scales), torch.cat(rows), **OPTIONS)
    want = window_scores_of_rows(*arguments, scales, **OPTIONS)
    assert_close(got, want)


@pytest.mark.parametrize("w", [9, 70])
def test_lines_of_kv_heads(w):
    query, cache, pages = prompt(2, 100, 8, 2, 16, w)
    arguments = query, cache, pages, 100, 0.3
    exact = log_sums(*arguments)
    got = scored(arguments, exact, **OPTIONS, grouped=True)
    want = window_scores_of_rows(*arguments, **OPTIONS, grouped=True)
    assert_close(got, want)


def test_equal_keys_get_equal_scores():
    """Their position in a tile or next to the window must not matter."""
    w, past = 9, 100
    k = torch.randn(1, past + w, 16)
    k[:, :past] = k[:, :1]
    view, pages = paged_keys(k, 16)
    arguments = torch.randn(1, w, 4, 16), view, pages[None], past + w, 0.3
    for exact in (log_sums(*arguments), torch.zeros(1, 4, w)):
        for grouped in (False, True):
            got = scored(arguments, exact, **OPTIONS, grouped=grouped)
            for name in ("total", "variance", "last", "maximum"):
                line = getattr(got, name)[0, :, :past]
                assert torch.equal(line, line[:, :1].expand_as(line)), name


@pytest.mark.parametrize("more", ["sinks", "pooled"])
def test_log_sums_are_unused_with_sinks_or_pooling(more):
    query, cache, pages = prompt(2, 75, 4, 2, 16, 9)
    options = {**OPTIONS, **({"pooled": True} if more == "pooled" else {"sinks": torch.ones(2, 4)})}
    arguments = query, cache, pages, 75, 0.3
    got = scored(arguments, log_sums(*arguments), **options)
    want = window_scores_of_rows(*arguments, **options)
    assert_equal(got, want)
