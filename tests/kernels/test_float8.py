"""Quantised caches: every op reads float8 as its values, or moves it bit for bit, or refuses it."""

import os

import pytest
import torch

from kvcompress_kernels import builds
from kvcompress_kernels.column_sums import column_sums
from kvcompress_kernels.column_sums import reference as column_sums_ref
from kvcompress_kernels.merge_evicted import merge_evicted
from kvcompress_kernels.value_scores import reference as value_scores_ref
from kvcompress_kernels.value_scores import value_scores
from kvcompress_kernels.window_scores import reference as window_scores_ref
from kvcompress_kernels.window_scores import window_scores
from paging import paged_keys, paged_values

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
close = {"rtol": 1e-4, "atol": 1e-6}  # docs/methods.md 9

float8 = pytest.mark.parametrize("float8", builds.FLOAT8)
query_of = pytest.mark.parametrize("dtype", builds.FLOATS)
# Heads, KV heads, tokens, head dim and block; whether a token's K lies beside its V.
sizes = pytest.mark.parametrize(
    ("size", "interleave"),
    [
        pytest.param(size, interleave, id="H{}-Hkv{}-T{}-D{}-bs{}".format(*size))
        for size, interleave in (
            ((6, 2, 75, 8, 16), True),
            ((4, 1, 33, 80, 7), True),
            ((3, 3, 130, 20, 130), False),
        )
    ],
)


@pytest.fixture(autouse=True)
def _the_gpu_reads_it(request, device):
    """Older GPUs have no instruction for e4m3: there the ops refuse it, as the last test says."""
    asked = getattr(request.node, "callspec", None)
    e4m3 = asked and asked.params.get("float8") is torch.float8_e4m3fn
    if e4m3 and device.type == "cuda" and builds.architecture(device) < 89:
        pytest.skip("this GPU has no instruction for float8_e4m3fn")


def cache(size, float8, interleave):
    """Keys ``[Hkv, S, D]`` in pages of float8 and, exactly, of float32; NaN in what is not read."""
    _, kv_heads, tokens, dim, block = size
    k = torch.randn(kv_heads, tokens, dim).to(float8)
    return k, [
        paged_keys(k.to(dtype), block, dtype=dtype, interleave=interleave)
        for dtype in (float8, torch.float32)
    ]


@float8
@query_of
@sizes
def test_window_scores(size, interleave, dtype, float8):
    heads, _, tokens, dim, _ = size
    w = 1 if tokens == 33 else 11
    q = torch.randn(w, heads, dim).to(dtype)
    _, (narrow, wide) = cache(size, float8, interleave)
    asked = {"variance": w > 1, "maximum": True, "pooled": w > 1}
    got = window_scores(q, *narrow, tokens, 0.3, **asked)
    want = window_scores_ref.run(q.float(), *wide, tokens, 0.3, **asked)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **close)
        assert a is None or a.isfinite().all()


@float8
@query_of
@sizes
def test_column_sums(size, interleave, dtype, float8):
    heads, _, tokens, dim, _ = size
    count = 1 if tokens == 33 else 32
    q = torch.randn(count, heads, dim).to(dtype)
    _, (narrow, wide) = cache(size, float8, interleave)
    got = column_sums(q, *narrow, tokens, 0.3)
    want = column_sums_ref.run(q.float(), *wide, tokens, 0.3)
    torch.testing.assert_close(got, want, **close)


@float8
@sizes
@pytest.mark.parametrize(("fast", "reduce"), [(False, "mean"), (True, "l2")])
def test_value_scores(reduce, fast, size, interleave, float8):
    heads, kv_heads, tokens, dim, block = size
    v = torch.randn(kv_heads, tokens, dim).to(float8)
    h = torch.randn(heads, tokens).softmax(-1)
    narrow, wide = (
        paged_values(v.to(dtype), block, dtype=dtype, interleave=interleave)
        for dtype in (float8, torch.float32)
    )
    got = value_scores(h, *narrow, tokens, fast=fast, reduce=reduce)
    want = value_scores_ref.run(h, *wide, tokens, fast, reduce)
    torch.testing.assert_close(got, want, **close)


@pytest.mark.parametrize(
    ("float8", "value"),
    [
        (torch.float8_e4m3fn, 2.0**-9),
        (torch.float8_e4m3fn, 448.0),
        (torch.float8_e5m2, 2.0**-16),
        (torch.float8_e5m2, 57344.0),
    ],
)
def test_least_and_largest_values(value, float8):
    v = torch.tensor([[[value], [-value], [0.0]]]).to(float8)
    h = torch.tensor([[0.25, 0.25, 0.5]])
    got = value_scores(h, *paged_values(v, 16, dtype=float8), 3, fast=False, reduce="mean")
    torch.testing.assert_close(got, torch.tensor([[value / 3, value / 3, 0.0]]), rtol=1e-6, atol=0)


@float8
def test_scale_of_keys_is_a_factor_on_the_logits(float8):
    k, (narrow, _) = cache((6, 2, 75, 8, 16), float8, False)
    q = torch.randn(30, 6, 8)
    scaled = paged_keys(4 * k.float(), 16)
    for a, b in (
        (column_sums(q, *narrow, 75, 4 * 0.3), column_sums(q, *scaled, 75, 0.3)),
        (
            window_scores(q[-9:], *narrow, 75, 4 * 0.3, variance=True).last,
            window_scores(q[-9:], *scaled, 75, 0.3, variance=True).last,
        ),
    ):
        torch.testing.assert_close(a, b, **close)


@float8
@pytest.mark.parametrize("fast", [False, True])
def test_scale_of_values_is_a_factor_on_the_scores(fast, float8):
    v, h = torch.randn(2, 75, 8).to(float8), torch.randn(6, 75).softmax(-1)
    narrow, scaled = paged_values(v, 16, dtype=float8), paged_values(4 * v.float(), 16)
    a = value_scores(h, *narrow, 75, fast=fast, reduce="mean")
    b = value_scores(h, *scaled, 75, fast=fast, reduce="mean")
    torch.testing.assert_close(4 * a, b, **close)


def merging(dtype):
    k, pages = paged_keys(torch.ones(2, 40, 8), 16, dtype=dtype)
    v, _ = paged_values(torch.ones(2, 40, 8), 16, dtype=dtype)
    kept = torch.arange(20).expand(1, 2, 20)
    return merge_evicted(k, v, pages[None], 40, kept, torch.tensor([20], dtype=torch.int32))


@float8
def test_merging_refuses_a_quantised_cache(float8):
    merging(torch.bfloat16)
    with pytest.raises(ValueError, match=f"merged tokens would be quantised again; got {float8}"):
        merging(float8)


def test_bytes_are_no_values():
    """vLLM allocates a quantised cache as uint8."""
    pages, table = torch.zeros(3, 2, 16, 16, dtype=torch.uint8), torch.arange(3)
    q, h = torch.zeros(40, 2, 16), torch.full((2, 40), 1 / 40)
    told = "view a quantised cache as its float8; got torch.uint8"
    with pytest.raises(ValueError, match=told):
        window_scores(q[:8], pages, table, 40, 1.0, variance=False)
    with pytest.raises(ValueError, match=told):
        column_sums(q, pages, table, 40, 1.0)
    with pytest.raises(ValueError, match=told):
        value_scores(h, pages, table, 40, fast=False, reduce="mean")


@pytest.mark.parametrize(("sm", "e4m3"), [(80, False), (86, False), (89, True), (90, True)])
def test_e4m3_needs_instructions_of_the_gpu(sm, e4m3, monkeypatch):
    monkeypatch.setattr(builds, "architecture", lambda device: sm)
    builds.check_cache("op", torch.empty(0, dtype=torch.float8_e5m2))
    pages = torch.empty(0, dtype=torch.float8_e4m3fn)
    if e4m3:
        return builds.check_cache("op", pages)
    with pytest.raises(ValueError, match=f"a cache on sm_{sm} must be .* got torch.float8_e4m3fn"):
        builds.check_cache("op", pages)
