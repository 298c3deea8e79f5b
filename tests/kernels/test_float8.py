"""Ops on a float8 cache: each op reads its values exactly or rejects it."""

import pytest
import torch

from cases import TOLERANCE
from kvcompress_kernels import builds
from kvcompress_kernels.column_sums import column_sums
from kvcompress_kernels.column_sums import reference as column_sums_ref
from kvcompress_kernels.merge_evicted import merge_evicted
from kvcompress_kernels.value_scores import reference as value_scores_ref
from kvcompress_kernels.window_scores import reference as window_scores_ref
from one_row import value_scores, window_scores
from paging import paged_keys, paged_values

pytestmark = pytest.mark.gpu


float8 = pytest.mark.parametrize("float8", builds.FLOAT8)
query_of = pytest.mark.parametrize("dtype", builds.FLOATS)
# size: heads, KV heads, tokens, head dim and block. interleave: K and V of a token are adjacent.
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
def _skip_unsupported_e4m3(request, device):
    """Skip e4m3 on GPUs without instructions for it. The ops reject it there (last test)."""
    callspec = getattr(request.node, "callspec", None)
    e4m3 = callspec and callspec.params.get("float8") is torch.float8_e4m3fn
    if e4m3 and device.type == "cuda" and builds.architecture(device) < 89:
        pytest.skip("this GPU has no instruction for float8_e4m3fn")


def cache(size, float8, interleave):
    """Return float8 keys ``[Hkv, S, D]``, and pages of them in float8 and in float32."""
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
    options = {"variance": w > 1, "maximum": True, "pooled": w > 1}
    got = window_scores(q, *narrow, tokens, 0.3, **options)
    want = window_scores_ref.run(q.float(), *wide, tokens, 0.3, **options)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)
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
    torch.testing.assert_close(got, want, **TOLERANCE)


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
    torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize(
    ("float8", "value"),
    [
        (torch.float8_e4m3fn, 2.0**-9),
        (torch.float8_e4m3fn, 448.0),
        (torch.float8_e5m2, 2.0**-16),
        (torch.float8_e5m2, 57344.0),
    ],
)
def test_smallest_and_largest_values(value, float8):
    v = torch.tensor([[[value], [-value], [0.0]]]).to(float8)
    h = torch.tensor([[0.25, 0.25, 0.5]])
    got = value_scores(h, *paged_values(v, 16, dtype=float8), 3, fast=False, reduce="mean")
    torch.testing.assert_close(got, torch.tensor([[value / 3, value / 3, 0.0]]), rtol=1e-6, atol=0)


@float8
def test_key_scale_multiplies_the_logits(float8):
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
        torch.testing.assert_close(a, b, **TOLERANCE)


@float8
@pytest.mark.parametrize("fast", [False, True])
def test_value_scale_multiplies_the_scores(fast, float8):
    v, h = torch.randn(2, 75, 8).to(float8), torch.randn(6, 75).softmax(-1)
    narrow, scaled = paged_values(v, 16, dtype=float8), paged_values(4 * v.float(), 16)
    a = value_scores(h, *narrow, 75, fast=fast, reduce="mean")
    b = value_scores(h, *scaled, 75, fast=fast, reduce="mean")
    torch.testing.assert_close(4 * a, b, **TOLERANCE)


def merging(dtype):
    k, pages = paged_keys(torch.ones(2, 40, 8), 16, dtype=dtype)
    v, _ = paged_values(torch.ones(2, 40, 8), 16, dtype=dtype)
    kept = torch.arange(20).expand(1, 2, 20)
    return merge_evicted(k, v, pages[None], 40, kept, torch.tensor([20], dtype=torch.int32))


@float8
def test_merging_rejects_a_quantised_cache(float8):
    merging(torch.bfloat16)
    with pytest.raises(ValueError, match=f"merged tokens would be quantised again; got {float8}"):
        merging(float8)


def test_uint8_cache_is_rejected():
    """vLLM allocates a quantised cache as uint8."""
    pages, table = torch.zeros(3, 2, 16, 16, dtype=torch.uint8), torch.arange(3)
    q, h = torch.zeros(40, 2, 16), torch.full((2, 40), 1 / 40)
    message = "view a quantised cache as its float8; got torch.uint8"
    with pytest.raises(ValueError, match=message):
        window_scores(q[:8], pages, table, 40, 1.0, variance=False)
    with pytest.raises(ValueError, match=message):
        column_sums(q, pages, table, 40, 1.0)
    with pytest.raises(ValueError, match=message):
        value_scores(h, pages, table, 40, fast=False, reduce="mean")


@pytest.mark.parametrize(("sm", "e4m3"), [(80, False), (86, False), (89, True), (90, True)])
def test_e4m3_needs_compute_capability_89(sm, e4m3, monkeypatch):
    monkeypatch.setattr(builds, "architecture", lambda device: sm)
    builds.check_cache("op", torch.empty(0, dtype=torch.float8_e5m2))
    pages = torch.empty(0, dtype=torch.float8_e4m3fn)
    if e4m3:
        return builds.check_cache("op", pages)
    with pytest.raises(ValueError, match=f"a cache on sm_{sm} must be .* got torch.float8_e4m3fn"):
        builds.check_cache("op", pages)
