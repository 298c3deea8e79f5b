import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import methods_reference as ref
from kvcompress_kernels import builds
from kvcompress_kernels.key_cosines import key_cosines
from kvcompress_kernels.key_cosines import reference as key_cosines_ref
from paging import Largest, paged_keys

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
prop = settings(derandomize=True, deadline=None, max_examples=5 if INTERPRETED else 25)
close = {"rtol": 1e-4, "atol": 1e-6}  # docs/methods.md 9


def random(kv_heads, tokens, dim, *, seed=0, mean=0.5):
    """Keys ``[Hkv, S, d]`` that lean to one side, as keys do."""
    rng = np.random.RandomState(seed)
    return torch.from_numpy(rng.standard_normal((kv_heads, tokens, dim)) + mean)


def compare(k, block=16, **how):
    dtype = how.setdefault("dtype", torch.float32)
    got = key_cosines(*paged_keys(k, block, **how), k.shape[1])
    assert got.shape == k.shape[:2]
    assert got.dtype == torch.float32
    want = -ref.keydiff(None, k.to(dtype).double().numpy(), None, 0)
    np.testing.assert_allclose(got, want, **close)
    return got


@pytest.mark.parametrize(
    ("kv_heads", "tokens", "dim", "block"),
    [
        (2, 12, 4, 1),
        (1, 37, 64, 16),
        (3, 129, 80, 7),
        (3, 129, 80, 16),
        (2, 257, 128, 32),
        (2, 257, 128, 128),
        (1, 1, 20, 16),
        (2, 33, 256, 32),
    ],
)
def test_shapes(kv_heads, tokens, dim, block):
    compare(random(kv_heads, tokens, dim, seed=tokens), block)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, *builds.FLOAT8], ids=str
)
@pytest.mark.parametrize("interleave", [False, True])
def test_dtypes_and_strides(interleave, dtype, device):
    e4m3 = dtype is torch.float8_e4m3fn
    if e4m3 and device.type == "cuda" and builds.architecture(device) < 89:
        pytest.skip("this GPU has no instruction for float8_e4m3fn")
    compare(random(2, 75, 80), dtype=dtype, interleave=interleave)


@prop
@given(
    st.integers(1, 4),
    st.integers(1, 150),
    st.sampled_from([1, 3, 8, 33]),
    st.sampled_from([1, 3, 16]),
    st.integers(0, 1000),
)
def test_any_shape(kv_heads, tokens, dim, block, seed):
    compare(random(kv_heads, tokens, dim, seed=seed), block, seed=seed)


def test_more_tiles_than_are_joined_at_a_time():
    compare(random(1, 128 * 33 + 5, 4), 128)


@pytest.mark.parametrize("interleave", [False, True])
def test_equal_keys_have_equal_cosines(interleave):
    """At every place of a page and a tile; ties go to the lower position then."""
    k = random(2, 300, 80).float()
    same = torch.arange(1, 300, 2)
    k[:, same] = k[:, :1]
    got = key_cosines(*paged_keys(k, 7, interleave=interleave), 300)
    assert (got[:, same] == got[:, :1]).all()
    assert len(got[0].unique()) == 150


def test_by_hand():
    """Unit keys (1, 0), (1, 0), (0, 1): the mean points to (2, 1), whatever their lengths."""
    k = torch.tensor([[[9.0, 0.0], [0.1, 0.0], [0.0, 3.0], [0.0, 0.0]]])
    want = torch.tensor([[2, 2, 1, 0]]) / 5**0.5
    torch.testing.assert_close(key_cosines(*paged_keys(k, 16), 4), want)


def test_keys_that_cancel_have_no_direction():
    k = torch.tensor([[[2.0, 0.0], [-1.0, 0.0]]])
    assert compare(k).tolist() == [[0.0, 0.0]]
    assert compare(torch.zeros(2, 5, 4)).tolist() == [[0.0] * 5] * 2


def test_a_scale_of_the_keys_cancels():
    k = random(2, 50, 16).float()
    a, b = (key_cosines(*paged_keys(x, 16), 50) for x in (k, 0.25 * k))
    assert torch.equal(a, b)


@pytest.mark.reference
@pytest.mark.parametrize("tile", [1, 4000])
def test_tiles_change_nothing_but_rounding(tile, monkeypatch):
    monkeypatch.setattr(key_cosines_ref, "TILE", tile)
    compare(random(2, 100, 8))


@pytest.mark.reference
def test_the_reference_holds_one_tile_beside_its_result(monkeypatch):
    monkeypatch.setattr(key_cosines_ref, "TILE", 1 << 14)
    k = paged_keys(torch.zeros(1, 20000, 4), 16)
    with Largest() as largest:
        key_cosines_ref.run(*k, 20000)
    assert largest.size == 20000 * 4


@pytest.mark.parametrize(
    ("pages", "table", "tokens", "told"),
    [
        (torch.zeros(3, 2, 16), 3, 40, r"key_pages must be \[N, Hkv, D, bs\]"),
        (torch.zeros(3, 2, 8, 16, dtype=torch.uint8), 3, 40, "view a quantised cache as its"),
        (torch.zeros(3, 2, 8, 16), 3, 0, "tokens must be positive; got 0"),
        (torch.zeros(3, 2, 8, 16), 2, 40, r"pages must be \[3\]; got \(2,\)"),
    ],
)
def test_what_is_refused(pages, table, tokens, told):
    with pytest.raises(ValueError, match=f"key_cosines: .*{told}"):
        key_cosines(pages, torch.arange(table), tokens)
