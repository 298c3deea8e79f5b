import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import INTERPRETED, TOLERANCE, property_test
from kvcompress_kernels.merge_evicted import cpu as merge_evicted_cpu
from kvcompress_kernels.merge_evicted import merge_evicted, reference
from paging import LargestStorage, paged_cache

pytestmark = pytest.mark.gpu

prop = property_test(25, interpreted=3)
FLOAT64 = pytest.param(torch.float64, marks=pytest.mark.cpu)


def random(heads, tokens, count, dim=8, *, seed=0):
    """Return random keys and values, and `count` kept positions per head."""
    rng = np.random.RandomState(seed)
    k = torch.from_numpy(rng.standard_normal((heads, tokens, dim)) + 0.3)
    v = torch.from_numpy(rng.standard_normal((heads, tokens, dim + 2)))
    kept = [np.sort(rng.permutation(tokens)[:count]) for _ in range(heads)]
    return k, v, torch.from_numpy(np.stack(kept))


def merge(k, v, kept, block=16, values_only=False, **kwargs):
    return merge_one(*paged_cache(k, v, block, **kwargs), k.shape[1], kept, values_only)


def merge_one(key_pages, value_pages, pages, tokens, kept, values_only=False, *, op=None):
    """Return the merged keys and values of one layer, by `merge_evicted` or by `op`."""
    count = torch.tensor([kept.shape[-1]], dtype=torch.int32)
    arguments = pages[None], tokens, kept[None], count, kept.shape[-1], values_only
    merged = (op or merge_evicted)(key_pages, value_pages, *arguments)
    return merged.keys[0], merged.values[0]


def reference_merge(*arguments, lengths=None, threshold=None, beta=0.7):
    """Run the reference with the arguments of `merge_evicted`."""
    _, _, _, tokens, kept, counts, *_ = arguments
    lengths = torch.full_like(counts, tokens) if lengths is None else lengths
    threshold = torch.full(kept.shape[:2], torch.nan) if threshold is None else threshold
    defaults = (1, False)[len(arguments) - 6 :]
    return reference.run(*arguments, *defaults, lengths, threshold, beta)


def compare(k, v, kept, block=16, *, dtype=torch.float32, **kwargs):
    arguments = (
        *paged_cache(k.to(dtype), v.to(dtype), block, dtype=dtype, **kwargs),
        k.shape[1],
        kept,
    )
    keys, values = merge_one(*arguments)
    want_keys, want_values = merge_one(*arguments, op=reference_merge)
    assert keys.shape == (*kept.shape, k.shape[2])
    assert values.shape == (*kept.shape, v.shape[2])
    assert keys.dtype == values.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(keys, want_keys, **TOLERANCE)
    torch.testing.assert_close(values, want_values, **TOLERANCE)


SIZES = [(2, 12, 5, 4), (1, 37, 9, 8), (1, 2, 1, 4)]
# Every kept token is a program, which takes 10 ms in the interpreter.
SIZES += (
    [(2, 101, 12, 16), (1, 257, 9, 64)] if INTERPRETED else [(4, 101, 60, 16), (3, 257, 100, 64)]
)


@pytest.mark.parametrize(("heads", "tokens", "count", "dim"), SIZES)
@pytest.mark.parametrize("block", [1, 7, 32, "S"])
def test_shapes_match_the_reference(heads, tokens, count, dim, block):
    compare(*random(heads, tokens, count, dim, seed=tokens), tokens if block == "S" else block)


@pytest.mark.parametrize("dtype", [FLOAT64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleave", [False, True])
def test_dtypes_and_strides(interleave, dtype):
    compare(*random(3, 75, 12), dtype=dtype, interleave=interleave)


@prop
@given(
    st.integers(1, 4),
    st.integers(1, 60),
    st.sampled_from([1, 3, 8, 32]),
    st.integers(0, 1000),
    st.data(),
)
def test_any_shape(heads, tokens, block, seed, data):
    count = data.draw(st.integers(1, tokens))
    compare(*random(heads, tokens, count, 4, seed=seed), block, seed=seed)


def planar(*cosines):
    """Return unit keys ``[1, n, 2]`` with these cosines to ``(1, 0)``."""
    return torch.tensor([[[u, (1 - u * u) ** 0.5] for u in cosines]])


@pytest.mark.parametrize("dtype", [FLOAT64, torch.float32, torch.bfloat16, torch.float16])
def test_values_only_keeps_the_keys(dtype):
    """Keys stay the same bit for bit, and values equal those of a merge with keys."""
    k, v, kept = random(2, 75, 12, seed=5)
    k, v = k.to(dtype), v.to(dtype)
    keys, values = merge(k, v, kept, dtype=dtype, values_only=True)
    both = merge(k, v, kept, dtype=dtype)
    kept_keys = torch.stack([k[head, positions] for head, positions in enumerate(kept)])
    assert torch.equal(keys, kept_keys.to(keys.dtype))
    assert torch.equal(keys.to(dtype), kept_keys)
    assert torch.equal(values, both[1])
    assert not torch.equal(both[0], keys)
    want = merge_one(*paged_cache(k, v, 16, dtype=dtype), 75, kept, True, op=reference_merge)
    assert torch.equal(keys, want[0])
    torch.testing.assert_close(values, want[1], **TOLERANCE)


def test_values_only_keeps_large_and_subnormal_keys():
    """Test keys that a sum would round, and keys in the subnormal range."""
    k, v, kept = random(1, 40, 6)
    k[0, kept[0]] *= torch.tensor([1e-18, 1e18, 1.0, 1e-42, 3.1, 0.0])[:, None]
    keys, _ = merge(k.float(), v.float(), kept, values_only=True)
    assert torch.equal(keys[0], k.float()[0, kept[0]])


def test_worked_example():
    """docs/methods.md 6 by hand. The third token is below the threshold and dropped."""
    k = planar(1.0, 0.8, 0.2, -1.0)
    v = torch.tensor([[[0.0, 2.0], [1.0, 1.0], [3.0, 0.0], [50.0, 50.0]]])
    keys, values = merge(k, v, torch.tensor([[0]]))
    np.testing.assert_allclose(values[0, 0], [0.955318, 1.242794], atol=1e-6)
    weights = np.array([2.71828, 2.22554, 1.22140]) / 6.16522
    np.testing.assert_allclose(keys[0, 0], weights @ k[0, :3].numpy(), atol=1e-5)


@pytest.mark.parametrize("count", [1, 7, 23, 34, 300, pytest.param(3000, marks=pytest.mark.cpu)])
def test_equal_cosines_are_all_merged(count):
    """The mean of equal float32 numbers can round above them, which must not drop the tokens."""
    k = torch.tensor([[1.0, 0.0]] + [[2.0, 1.0]] * count)[None]
    _, values = merge(k, torch.arange(count + 1.0)[None, :, None], torch.tensor([[0]]), 512)
    w = math.exp(2 / 5**0.5)
    want = w * count * (count + 1) / 2 / (math.e + w * count)
    assert values.item() == pytest.approx(want, rel=1e-4)


def test_ties_go_to_the_earlier_token():
    """Kept tokens 1, 2 and 4 differ by powers of two, so their cosines are equal."""
    k = torch.tensor([[0.0, 1.0], [0.5, 0.5], [2.0, 2.0], [1.0, 0.7], [1.0, 1.0]])[None]
    _, values = merge(k, torch.eye(5)[None], torch.tensor([[0, 1, 2, 4]]))
    assert (values[0, :, 3] > 0).tolist() == [False, True, False, False]


@pytest.mark.cpu
@pytest.mark.parametrize("tile", [1, 2])
def test_ties_go_to_the_earlier_tile(tile, monkeypatch):
    monkeypatch.setattr(merge_evicted_cpu, "KEPT", tile)
    test_ties_go_to_the_earlier_token()


@pytest.mark.parametrize(
    ("dtype", "first"), [(torch.float32, 0), (torch.float32, 32), (torch.bfloat16, 65)]
)
def test_ties_across_tiles_go_to_the_earlier_token(dtype, first):
    """Kept tokens from `first` on have equal cosines, in several tiles of kept tokens."""
    k = torch.zeros(1, 71, 2)
    k[0, :first, 1] = 1.0
    k[0, first:70, 0] = 2.0 ** (torch.arange(70 - first) % 5)
    k[0, 70] = torch.tensor([1.0, 0.5])
    _, values = merge(k, torch.eye(71)[None], torch.arange(70)[None], dtype=dtype)
    assert values[0, :, 70].nonzero()[:, 0].tolist() == [first]


@pytest.mark.parametrize("dtype", [FLOAT64, torch.float32, torch.bfloat16])
def test_kept_tokens_without_merges_keep_every_bit(dtype):
    """One token is evicted, so one kept token per head changes. A value of -0.0 stays -0.0."""
    k, v, _ = random(2, 24, 23)
    k, v = k.to(dtype), v.to(dtype)
    v[:, :23:3] = -0.0
    kept = torch.arange(23).expand(2, 23)
    keys, values = merge(k, v, kept, dtype=dtype)
    for got, cached in (keys, k), (values, v):
        cached = cached[:, :23].to(got.dtype)
        same = ((got == cached) & (got.signbit() == cached.signbit())).all(-1)
        assert same.sum(1).tolist() == [22, 22]


def test_dropped_tokens_are_not_added():
    """A dropped token holds inf, which a weight of zero would turn into NaN."""
    k = planar(1.0, 0.9, 0.2)
    v = torch.tensor([1.0, 1.0, torch.inf])[None, :, None]
    _, values = merge(k, v, torch.tensor([[0]]))
    assert values.item() == pytest.approx(1.0)


def test_no_evicted_tokens_change_nothing():
    k, v, _ = random(2, 33, 33)
    keys, values = merge(k, v, torch.arange(33).expand(2, 33))
    assert torch.equal(keys, k.float())
    assert torch.equal(values, v.float())


@pytest.mark.parametrize("kept", [[0, 2], [1, 3]])
def test_zero_keys_have_cosine_zero(kept):
    """Test a zero key that is kept and one that is evicted."""
    k, v, _ = random(1, 5, 2)
    k[0, 2] = 0
    compare(k, v, torch.tensor([kept]))


@pytest.mark.cpu
@pytest.mark.parametrize(("kept_tile", "cosines"), [(1, 1), (7, 1), (7, 500), (4096, 2000)])
def test_tile_size_does_not_matter(kept_tile, cosines, monkeypatch):
    monkeypatch.setattr(merge_evicted_cpu, "KEPT", kept_tile)
    monkeypatch.setattr(merge_evicted_cpu, "COSINES", cosines)
    compare(*random(3, 101, 40))


@pytest.mark.cpu
@pytest.mark.parametrize(("tokens", "count"), [(3000, 1500), (6000, 5900)])
def test_temporaries_stay_within_the_limit(tokens, count):
    """All cosines of 1500 by 1500 tokens and 3 heads would take 27 MB."""
    key_pages, value_pages = torch.randn(1, 3, 64, tokens), torch.randn(1, 3, tokens, 64)
    kept = torch.arange(count).expand(3, count)
    with LargestStorage() as largest:
        merge_one(key_pages, value_pages, torch.tensor([0]), tokens, kept)
    assert largest.size <= merge_evicted_cpu.COSINES


@pytest.mark.usefixtures("triton_runs")
def test_segment_size_does_not_matter(monkeypatch):
    """Tokens are added in the order of their positions, for any number of counting programs."""
    from kvcompress_kernels.merge_evicted import triton as merge_evicted_triton

    k, v, kept = random(1, 600, 3)
    one_segment = merge(k, v, kept)
    monkeypatch.setattr(merge_evicted_triton, "SEGMENT", 128)
    for a, b in zip(merge(k, v, kept), one_segment, strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("triton_runs")
def test_triton_rejects_float64():
    with pytest.raises(ValueError, match="do not support a float64 cache"):
        merge(*random(1, 20, 5), dtype=torch.float64)


GOOD = {
    "key_pages": torch.zeros(5, 2, 8, 16),
    "value_pages": torch.zeros(5, 2, 16, 8),
    "pages": torch.zeros(3, dtype=torch.int64),
    "tokens": 40,
    "kept": torch.arange(20).expand(2, 20),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kept": GOOD["kept"][:, :0]}, r"0 < n <= tokens must hold; got \(0, 40\)"),
        ({"kept": torch.arange(41).expand(2, 41)}, r"0 < n <= tokens must hold; got \(41, 40\)"),
        ({"kept": GOOD["kept"][:1]}, r"kept must be \[N, 2, n\]; got \(1, 1, 20\)"),
        ({"key_pages": torch.zeros(5, 2, 8)}, r"key_pages must be \[N, Hkv, D, bs\]"),
        ({"value_pages": torch.zeros(5, 2, 16)}, r"value_pages must be \[5, 2, 16, D\]"),
        ({"value_pages": torch.zeros(5, 2, 8, 16)}, r"value_pages must be \[5, 2, 16, D\]"),
        ({"pages": GOOD["pages"][:2]}, r"pages must be \[1, 3\]; got \(1, 2\)"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_shapes_are_checked(change, message):
    merge_one(**GOOD)
    with pytest.raises(ValueError, match=message):
        merge_one(**GOOD | change)


@pytest.mark.parametrize("counts", [torch.tensor(20), torch.tensor([20, 20])])
def test_counts_are_checked(counts):
    arguments = {**GOOD, "pages": GOOD["pages"][None], "kept": GOOD["kept"][None]}
    with pytest.raises(ValueError, match=r"counts must be \[1\]"):
        merge_evicted(**arguments, counts=counts)
    with pytest.raises(ValueError, match=r"0 < min_kept <= n must hold; got \(21, 20\)"):
        merge_evicted(**arguments, counts=counts.view(-1)[:1], min_kept=21)
