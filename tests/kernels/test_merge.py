import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress_kernels import merge_evicted, merge_ref
from paging import Largest, paged_keys, paged_values

prop = settings(derandomize=True, deadline=None, max_examples=25)
close = {"rtol": 1e-4, "atol": 1e-6}  # METHODS section 9


def slow(k, v, kept):
    """METHODS section 6 in float64 by loops: k ``[Hkv, S, d]``, v ``[Hkv, S, dv]``."""
    k_out, v_out = [], []
    for g, stay in enumerate(kept):
        norm = [max(np.linalg.norm(x), 1e-12) for x in k[g]]
        best = {}
        for i in sorted(set(range(k.shape[1])) - set(stay)):
            u = [k[g, i] @ k[g, j] / (norm[i] * norm[j]) for j in stay]
            best[i] = max(u), u.index(max(u))
        tau = sum(u for u, _ in best.values()) / max(len(best), 1)
        for n, j in enumerate(stay):
            rows = [(math.e, j)]
            rows += [(math.exp(u), i) for i, (u, at) in best.items() if at == n and u >= tau]
            total = sum(w for w, _ in rows)
            k_out.append(sum(w * k[g, i] for w, i in rows) / total)
            v_out.append(sum(w * v[g, i] for w, i in rows) / total)
    return np.array(k_out), np.array(v_out)


def paged(k, v, block, **how):
    """Pages of k and v, the same ones for both."""
    keys, pages = paged_keys(k, block, **how)
    return keys, paged_values(v, block, **how)[0], pages


def random(heads, tokens, count, dim=8, *, seed=0):
    """Keys, values and as many kept positions per head."""
    rng = np.random.RandomState(seed)
    k = torch.from_numpy(rng.standard_normal((heads, tokens, dim)) + 0.3)
    v = torch.from_numpy(rng.standard_normal((heads, tokens, dim + 2)))
    kept = [np.sort(rng.permutation(tokens)[:count]) for _ in range(heads)]
    return k, v, torch.from_numpy(np.stack(kept))


def merge(k, v, kept, block=16, **how):
    return merge_evicted(*paged(k, v, block, **how), k.shape[1], kept)


def compare(k, v, kept, block=16, *, dtype=torch.float32, **how):
    k, v = k.to(dtype), v.to(dtype)
    keys, values = merge(k, v, kept, block, dtype=dtype, **how)
    want_k, want_v = slow(k.double().numpy(), v.double().numpy(), kept.tolist())
    assert keys.shape == (*kept.shape, k.shape[2])
    assert values.shape == (*kept.shape, v.shape[2])
    assert keys.dtype == values.dtype == torch.promote_types(dtype, torch.float32)
    np.testing.assert_allclose(keys.flatten(0, 1), want_k, **close)
    np.testing.assert_allclose(values.flatten(0, 1), want_v, **close)


@pytest.mark.parametrize(
    ("heads", "tokens", "count", "dim"),
    [(2, 12, 5, 4), (1, 37, 9, 8), (4, 101, 60, 16), (3, 257, 100, 64), (1, 2, 1, 4)],
)
@pytest.mark.parametrize("block", [1, 7, 32, "S"])
def test_shapes_of_the_spec(heads, tokens, count, dim, block):
    compare(*random(heads, tokens, count, dim, seed=tokens), tokens if block == "S" else block)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleave", [False, True])
def test_dtypes_and_strides(interleave, dtype):
    compare(*random(3, 75, 30), dtype=dtype, interleave=interleave)


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
    """Unit keys at these cosines to ``(1, 0)``: ``[1, n, 2]``."""
    return torch.tensor([[[u, (1 - u * u) ** 0.5] for u in cosines]])


def test_by_hand():
    """The values of METHODS section 6; a third token lowers the threshold, and is dropped."""
    k = planar(1.0, 0.8, 0.2, -1.0)
    v = torch.tensor([[[0.0, 2.0], [1.0, 1.0], [3.0, 0.0], [50.0, 50.0]]])
    keys, values = merge(k, v, torch.tensor([[0]]))
    np.testing.assert_allclose(values[0, 0], [0.955318, 1.242794], atol=1e-6)
    weights = np.array([2.71828, 2.22554, 1.22140]) / 6.16522
    np.testing.assert_allclose(keys[0, 0], weights @ k[0, :3].numpy(), atol=1e-5)


def test_threshold_is_the_mean_over_the_evicted():
    """u = 0.8, 0.2: the mean 0.5 lets the first merge; 8 kept tokens of u = 1 have no say."""
    k = planar(*[1.0] * 8, 0.8, 0.2)
    _, values = merge(k, torch.eye(10)[None], torch.arange(8)[None])
    into = values[0, 0]
    assert into[8].item() == pytest.approx(math.exp(0.8) / (math.e + math.exp(0.8)), rel=1e-5)
    assert into[9] == 0


def test_each_kv_head_has_its_threshold():
    """Head 0 merges u = 0.9 of (0.9, 0.7), head 1 merges 0.3 of (0.3, 0.1)."""
    k = torch.cat([planar(1.0, 0.9, 0.7), planar(1.0, 0.3, 0.1)])
    _, values = merge(k, torch.eye(3).expand(2, 3, 3), torch.zeros(2, 1, dtype=torch.int64))
    assert (values[:, 0] > 0).tolist() == [[True, True, False]] * 2


@pytest.mark.parametrize("count", [1, 7, 23, 34, 3000])
def test_equal_cosines_are_all_merged(count):
    """The mean of equal numbers must not round above them, as it can in float32."""
    k = torch.tensor([[1.0, 0.0]] + [[2.0, 1.0]] * count)[None]
    _, values = merge(k, torch.arange(count + 1.0)[None, :, None], torch.tensor([[0]]), 512)
    w = math.exp(2 / 5**0.5)
    want = w * count * (count + 1) / 2 / (math.e + w * count)
    assert values.item() == pytest.approx(want, rel=1e-4)


def test_a_cosine_of_minus_one_can_merge():
    keys, _ = merge(planar(1.0, -1.0), torch.ones(1, 2, 1), torch.tensor([[0]]))
    want = (math.e - math.exp(-1)) / (math.e + math.exp(-1))
    np.testing.assert_allclose(keys[0, 0], [want, 0.0], atol=1e-6)


@pytest.mark.parametrize("tile", [1, 2, 4096])
def test_ties_go_to_the_earlier(tile, monkeypatch):
    """Kept 1, 2 and 4 are alike but for a power of two, which no cosine can see."""
    monkeypatch.setattr(merge_ref, "KEPT", tile)
    k = torch.tensor([[0.0, 1.0], [0.5, 0.5], [2.0, 2.0], [1.0, 0.7], [1.0, 1.0]])[None]
    _, values = merge(k, torch.eye(5)[None], torch.tensor([[0, 1, 2, 4]]))
    assert (values[0, :, 3] > 0).tolist() == [False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_untouched_tokens_keep_every_bit(dtype):
    """One token is evicted, so one of the kept changes; a value of -0.0 stays one."""
    k, v, _ = random(2, 40, 39)
    k, v = k.to(dtype), v.to(dtype)
    v[:, :39:3] = -0.0
    kept = torch.arange(39).expand(2, 39)
    keys, values = merge(k, v, kept, dtype=dtype)
    for got, was in (keys, k), (values, v):
        was = was[:, :39].to(got.dtype)
        same = ((got == was) & (got.signbit() == was.signbit())).all(-1)
        assert same.sum(1).tolist() == [38, 38]


def test_tokens_below_the_threshold_leave_no_trace():
    """Dropped tokens hold inf: a weight of zero would turn them into NaN."""
    k = planar(1.0, 0.9, 0.2)
    v = torch.tensor([1.0, 1.0, torch.inf])[None, :, None]
    _, values = merge(k, v, torch.tensor([[0]]))
    assert values.item() == pytest.approx(1.0)


def test_nothing_evicted_changes_nothing():
    k, v, _ = random(2, 33, 33)
    keys, values = merge(k, v, torch.arange(33).expand(2, 33))
    assert torch.equal(keys, k.float())
    assert torch.equal(values, v.float())


def test_all_use_the_original_tokens():
    """Two tokens merged into one: ``(e k + e a + e b) / 3 e``, in any order."""
    k = torch.tensor([[1.0, 0.0], [2.0, 0.0], [4.0, 0.0]])[None]
    keys, values = merge(k, torch.eye(3)[None], torch.tensor([[1]]))
    np.testing.assert_allclose(keys[0, 0], [7 / 3, 0.0], rtol=1e-6)
    np.testing.assert_allclose(values[0, 0], [1 / 3] * 3, rtol=1e-6)


@prop
@given(st.integers(2, 50), st.integers(0, 1000), st.data())
def test_weights_sum_to_one(tokens, seed, data):
    count = data.draw(st.integers(1, tokens - 1))
    k, v, kept = random(2, tokens, count, 4, seed=seed)
    _, values = merge(k, torch.ones_like(v), kept)
    np.testing.assert_allclose(values, np.ones(values.shape), rtol=1e-6)


@pytest.mark.parametrize("kept", [[0, 2], [1, 3]])
def test_keys_without_length(kept):
    """A zero key, kept or evicted, is at cosine 0 from everything."""
    k, v, _ = random(1, 5, 2)
    k[0, 2] = 0
    compare(k, v, torch.tensor([kept]))


@pytest.mark.parametrize(("kept_tile", "cosines"), [(1, 1), (7, 1), (7, 500), (4096, 2000)])
def test_tiles_do_not_matter(kept_tile, cosines, monkeypatch):
    monkeypatch.setattr(merge_ref, "KEPT", kept_tile)
    monkeypatch.setattr(merge_ref, "COSINES", cosines)
    compare(*random(3, 101, 40))


def test_same_result_twice():
    k, v, kept = random(3, 300, 20)
    for a, b in zip(merge(k, v, kept), merge(k, v, kept), strict=True):
        assert torch.equal(a, b)


def test_inputs_are_left_alone():
    k, v, kept = random(2, 40, 20)
    inputs = [x.nan_to_num(5.0) if x.is_floating_point() else x for x in paged(k, v, 16, spare=0)]
    inputs.append(kept)
    before = [x.clone() for x in inputs]
    merge_evicted(*inputs[:3], 40, kept)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


@pytest.mark.parametrize(("tokens", "count"), [(3000, 1500), (6000, 5900)])
def test_temporaries_stay_small(tokens, count):
    """All cosines of 1500 by 1500 tokens and 3 heads would take 27 MB."""
    key_pages, value_pages = torch.randn(1, 3, 64, tokens), torch.randn(1, 3, tokens, 64)
    kept = torch.arange(count).expand(3, count)
    with Largest() as seen:
        merge_evicted(key_pages, value_pages, torch.tensor([0]), tokens, kept)
    assert seen.size <= merge_ref.COSINES


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
        ({"kept": GOOD["kept"][:1]}, r"kept must be \[2, n\]; got \(1, 20\)"),
        ({"kept": GOOD["kept"][0]}, r"kept must be \[2, n\]; got \(20,\)"),
        ({"key_pages": torch.zeros(5, 2, 8)}, r"key_pages must be \[N, Hkv, D, bs\]"),
        ({"value_pages": torch.zeros(5, 2, 16)}, r"value_pages must be \[5, 2, 16, Dv\]"),
        ({"value_pages": torch.zeros(4, 2, 16, 8)}, r"value_pages must be \[5, 2, 16, Dv\]"),
        ({"value_pages": torch.zeros(5, 1, 16, 8)}, r"value_pages must be \[5, 2, 16, Dv\]"),
        ({"value_pages": torch.zeros(5, 2, 8, 16)}, r"value_pages must be \[5, 2, 16, Dv\]"),
        ({"pages": GOOD["pages"][:2]}, r"pages must be \[3\]; got \(2,\)"),
        ({"pages": GOOD["pages"][None]}, r"pages must be \[3\]; got \(1, 3\)"),
        ({"tokens": 49}, r"pages must be \[4\]; got \(3,\)"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_shapes_are_checked(change, message):
    merge_evicted(**GOOD)
    with pytest.raises(ValueError, match=message):
        merge_evicted(**GOOD | change)
