"""The ops' references against the definitions in docs/methods.md (`methods_reference`).

`quantise_kept` is tested against the definition of the packed format in `k4v3`.
"""

import numpy as np
import pytest
import torch

import methods_reference as methods
from kvcompress_kernels.column_sums import reference as column_sums
from kvcompress_kernels.key_cosines import reference as key_cosines
from kvcompress_kernels.lag_scores import reference as lag_scores
from kvcompress_kernels.merge_evicted import reference as merge_evicted
from kvcompress_kernels.quantise_kept import reference as quantise_kept
from kvcompress_kernels.value_norms import reference as value_norms
from kvcompress_kernels.value_scores import reference as value_scores
from kvcompress_kernels.window_scores import reference as window_scores
from paging import paged_keys, paged_values

HEADS, KV_HEADS, TOKENS, DIM, W = 6, 2, 75, 8, 9
SCALE = DIM**-0.5


@pytest.fixture(scope="module")
def prompt():
    """Return queries, keys and values ``[H, S, D]`` as numpy arrays."""
    rng = np.random.RandomState(3)
    return [
        rng.standard_normal((heads, TOKENS, DIM)).astype(np.float32).astype(np.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


@pytest.fixture(scope="module")
def cache(prompt):
    """Return the key pages, the value pages and the prompt's pages."""
    k, v = (torch.from_numpy(x) for x in prompt[1:])
    keys, pages = paged_keys(k, 16)
    return keys, paged_values(v, 16)[0], pages


def rows(q, count):
    return torch.from_numpy(q[:, TOKENS - count :]).float().transpose(0, 1)


def assert_close(actual, exact, **tolerance):
    np.testing.assert_allclose(actual, exact, **{"rtol": 1e-5, "atol": 1e-7, **tolerance})


@pytest.mark.parametrize("sinks", [None, np.array([-40.0, 0.7, 9.0, 2.5, 0.0, -3.0])])
def test_attention(prompt, cache, sinks):
    q, k, _ = prompt
    keys, _, pages = cache
    sink_logits = None if sinks is None else torch.from_numpy(sinks).float()
    a = methods.attention(methods.with_sinks(q, sinks), k, range(TOKENS))
    a[np.isnan(a)] = 0
    got = column_sums.run(rows(q, TOKENS), keys, pages, TOKENS, SCALE, sink_logits)
    assert_close(got, a.sum(1))
    a, past = a[:, -W:], TOKENS - W
    got = window_scores.run(rows(q, W), keys, pages, TOKENS, SCALE, True, True, sinks=sink_logits)
    before = a[..., :past]
    assert_close(got.total, before.sum(1))
    assert_close(got.recent, a[..., past:].sum(1))
    assert_close(got.last, a[:, -1])
    assert_close(got.maximum, a.max(1))
    assert_close(got.variance, before.var(1, ddof=1))
    assert_close(got.shift, before.var(1, ddof=1).sum())
    assert_close(got.entropy, -(before * np.log(before)).sum())
    got = window_scores.run(rows(q, W), keys, pages, TOKENS, SCALE, False, True, True, sink_logits)
    pooled = np.stack([[methods.pooled_row(row) for row in head] for head in before])
    assert_close(got.maximum, np.concatenate([pooled.max(1), a[..., past:].max(1)], -1))


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("reduce", ["mean", "l2"])
def test_values(prompt, cache, fast, reduce):
    v, (_, values, pages) = prompt[2], cache
    h = torch.randn(HEADS, TOKENS, generator=torch.Generator().manual_seed(0)).softmax(-1)
    want = np.zeros((KV_HEADS, TOKENS))
    for g in range(KV_HEADS):
        for j in range(TOKENS):
            parts = []
            for row in h.double().numpy()[3 * g : 3 * g + 3]:
                o = v[g].mean(0) if fast else row @ v[g]
                parts.append(row[j] / (1 - row[j]) * np.linalg.norm(o - v[g, j]))
            want[g, j] = np.mean(parts) if reduce == "mean" else np.linalg.norm(parts)
    assert_close(value_scores.run(h, values, pages, TOKENS, fast, reduce), want)
    assert_close(value_norms.run(values, pages, TOKENS), np.abs(v).sum(-1))


def test_keys(prompt, cache):
    _, k, v = prompt
    keys, values, pages = cache
    cosines = key_cosines.run(keys, pages, TOKENS)
    assert_close(cosines, -methods.keydiff(None, k, None, 0), atol=1e-6)
    parts = (TOKENS - 4) // 16 - 1
    assert_close(lag_scores.run(keys, values, pages, parts, 4, 16), methods.lag_scores(k, v, 4, 16))


@pytest.mark.parametrize("values_only", [False, True])
@pytest.mark.parametrize("tau", [None, 0.25])
def test_merging(prompt, cache, values_only, tau):
    _, k, v = prompt
    keys, values, pages = cache
    kept = torch.stack([torch.arange(head, TOKENS, 4)[:18] for head in range(KV_HEADS)])
    counts, lengths = (torch.tensor([n], dtype=torch.int32) for n in (18, TOKENS))
    threshold = torch.full((1, KV_HEADS), torch.nan if tau is None else tau)
    prompt = keys, values, pages[None], TOKENS, kept[None], counts
    got = merge_evicted.run(*prompt, 18, values_only, lengths, threshold, 0.7)
    for head in range(KV_HEADS):
        options = {"values_only": values_only, "threshold": tau}
        want = methods.merge(k[head], v[head], kept[head].tolist(), **options)
        assert_close(got.keys[0, head], want[0])
        assert_close(got.values[0, head], want[1])


def test_packed_format():
    """Read every number of two heads' groups from the bytes where `k4v3` says that it is."""
    dim, tokens = 72, 75
    rng = np.random.RandomState(5)
    k, v = rng.standard_normal((2, KV_HEADS, tokens, dim)).astype(np.float32)
    k[:, :, 1] += 200
    keys, pages = paged_keys(torch.from_numpy(k), 16)
    values, _ = paged_values(torch.from_numpy(v), 16)
    into = torch.zeros(1, KV_HEADS, 32, 4 * dim, dtype=torch.uint8)
    counts, targets = torch.tensor([tokens], dtype=torch.int32), torch.tensor([[0]])
    quantise_kept.run(keys, values, pages[None], None, counts, targets, into)
    groups = into.reshape(KV_HEADS, 2, 64 * dim).numpy()

    for head, t in np.ndindex(KV_HEADS, tokens):
        content, at = groups[head, t // 64], t % 64
        members = range(t // 64 * 64, min(t // 64 * 64 + 64, tokens))

        def half(byte, content=content):
            return float(content[byte : byte + 2].view(np.float16)[0])

        for c in range(dim):
            j, high = c % (dim // 2), c // (dim // 2)
            code = content[at * dim // 2 + j] >> 4 * high & 15
            channel = k[head, members, c]
            scale, minimum = half(56 * dim + 2 * c), half(58 * dim + 2 * c)
            assert_close(minimum, channel.min(), rtol=2**-10)
            assert_close(scale, (channel.max() - minimum) / 15, rtol=2**-10)
            assert abs(k[head, t, c] - minimum - scale * code) <= 0.51 * scale
            low = content[32 * dim + at * dim // 4 + c % (dim // 4)] >> 2 * (c // (dim // 4)) & 3
            top = content[48 * dim + at * dim // 8 + c % (dim // 8)] >> c // (dim // 8) & 1
            scale, minimum = half(60 * dim + 2 * at), half(60 * dim + 128 + 2 * at)
            assert_close(minimum, v[head, t].min(), rtol=2**-10)
            assert_close(scale, (v[head, t].max() - minimum) / 7, rtol=2**-10)
            assert abs(v[head, t, c] - minimum - scale * (low + 4 * top)) <= 0.51 * scale
