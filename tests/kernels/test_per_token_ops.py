"""`key_cosines` and `value_norms`: one number per token and KV head, from its key or value."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import one_row
from cases import TOLERANCE, property_test
from kvcompress_kernels import builds
from kvcompress_kernels.key_cosines import cpu as key_cosines_cpu
from kvcompress_kernels.key_cosines import key_cosines_of_rows
from kvcompress_kernels.key_cosines import reference as key_cosines_reference
from kvcompress_kernels.value_norms import cpu as value_norms_cpu
from kvcompress_kernels.value_norms import reference as value_norms_reference
from kvcompress_kernels.value_norms import value_norms_of_rows
from paging import LargestStorage, paged_keys, paged_rows, paged_values

pytestmark = pytest.mark.gpu

prop = property_test(25, interpreted=5)


class Op(NamedTuple):
    """One of the ops, and how to page what it reads.

    Args:
        cache: name of the argument that holds the pages, and its axes.
        mean: mean of the random numbers. Keys of real models have a common direction.
    """

    of_rows: Callable[..., torch.Tensor]
    of_one: Callable[..., torch.Tensor]
    cpu: Any
    reference: Any
    paged: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    cache: str
    mean: float
    rtol: float

    def random(self, kv_heads, tokens, dim, *, seed=0):
        rng = np.random.RandomState(seed)
        return torch.from_numpy(rng.standard_normal((kv_heads, tokens, dim)) + self.mean)

    def compare(self, x, block=16, **paging):
        """Return the result for ``[Hkv, S, d]``, which must match the reference."""
        arguments = *self.paged(x, block, **paging), x.shape[1]
        got = self.of_one(*arguments)
        assert (got.shape, got.dtype) == (x.shape[:2], torch.float32)
        assert got.is_contiguous()
        tolerance = TOLERANCE | {"rtol": self.rtol}
        torch.testing.assert_close(got, self.reference.run(*arguments), **tolerance)
        return got


# Lambdas, so that the fixtures can replace the ops in this module and in `one_row`.
KEYS = Op(
    of_rows=lambda *args: key_cosines_of_rows(*args),
    of_one=lambda *args: one_row.key_cosines(*args),
    cpu=key_cosines_cpu,
    reference=key_cosines_reference,
    paged=paged_keys,
    cache=r"key_pages must be \[N, Hkv, D, bs\]",
    mean=0.5,
    rtol=1e-4,
)
VALUES = Op(
    of_rows=lambda *args: value_norms_of_rows(*args),
    of_one=lambda *args: one_row.value_norms(*args),
    cpu=value_norms_cpu,
    reference=value_norms_reference,
    paged=paged_values,
    cache=r"value_pages must be \[N, Hkv, bs, D\]",
    mean=0.0,
    rtol=1e-5,
)
both = pytest.mark.parametrize("op", [KEYS, VALUES], ids=["keys", "values"])


@both
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
def test_shapes(op, kv_heads, tokens, dim, block):
    op.compare(op.random(kv_heads, tokens, dim, seed=tokens), block)


@both
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, *builds.FLOAT8], ids=str
)
@pytest.mark.parametrize("interleave", [False, True])
def test_dtypes_and_strides(op, interleave, dtype, device):
    e4m3 = dtype is torch.float8_e4m3fn
    if e4m3 and device.type == "cuda" and builds.architecture(device) < 89:
        pytest.skip("this GPU has no instruction for float8_e4m3fn")
    assert op.compare(op.random(2, 75, 80), dtype=dtype, interleave=interleave).isfinite().all()


@both
@pytest.mark.parametrize(
    ("kv_heads", "tokens", "dim", "block", "interleave"),
    [(3, 129, 80, 7, False), (1, 17, 33, 1, True), (2, 261, 20, 16, True), (2, 1, 256, 32, False)],
)
def test_rows_equal_calls_with_one_row(op, kv_heads, tokens, dim, block, interleave):
    """They are equal bit for bit."""
    x = torch.stack([op.random(kv_heads, tokens, dim, seed=seed) for seed in range(3)])
    cache, pages = paged_rows(op.paged, x, block, interleave=interleave, dtype=torch.bfloat16)
    together = op.of_rows(cache, pages, tokens)
    assert (together.shape, together.dtype) == (x.shape[:3], torch.float32)
    assert together.is_contiguous()
    assert together.isfinite().all()
    for got, row_pages in zip(together, pages, strict=True):
        assert torch.equal(got, op.of_one(cache, row_pages, tokens))


@both
@prop
@given(
    st.integers(1, 4),
    st.integers(1, 150),
    st.sampled_from([1, 3, 8, 33]),
    st.sampled_from([1, 3, 16]),
    st.integers(0, 1000),
)
def test_any_shape(op, kv_heads, tokens, dim, block, seed):
    x = op.random(kv_heads, tokens, dim, seed=seed)
    got = op.compare(x, block, seed=seed)
    # The page order must not change any bit, so that equal prompts rank tokens equally.
    assert torch.equal(got, op.compare(x, block, seed=seed + 1))


@both
@pytest.mark.parametrize("interleave", [False, True])
def test_equal_tokens_have_equal_results(op, interleave):
    """Their position in a page and a tile must not matter, so that ties are exact."""
    x = op.random(2, 300, 80).float()
    same = torch.arange(1, 300, 2)
    x[:, same] = x[:, :1]
    got = op.of_one(*op.paged(x, 7, interleave=interleave), 300)
    assert (got[:, same] == got[:, :1]).all()
    assert len(got[0].unique()) == 150


@both
@pytest.mark.cpu
@pytest.mark.parametrize("tile", [1, 4000])
def test_tile_size_does_not_matter(op, tile, monkeypatch):
    monkeypatch.setattr(op.cpu, "TILE", tile)
    op.compare(op.random(2, 100, 8))


@both
@pytest.mark.cpu
def test_cpu_code_holds_one_tile_besides_its_result(op, monkeypatch):
    monkeypatch.setattr(op.cpu, "TILE", 1 << 14)
    cache, pages = op.paged(torch.zeros(1, 20000, 4), 16)
    with LargestStorage() as largest:
        op.cpu.run_rows(cache, pages[None], 20000)
    assert largest.size == 20000 * 4


@both
@pytest.mark.parametrize(
    ("cache", "pages", "tokens", "message"),
    [
        (torch.zeros(3, 2, 16), torch.zeros(1, 3), 40, ""),
        (torch.zeros(3, 2, 16, 16).byte(), torch.zeros(1, 3), 40, "view a quantised cache as its"),
        (torch.zeros(3, 2, 16, 16), torch.zeros(1, 3), 0, "tokens must be positive; got 0"),
        (torch.zeros(3, 2, 16, 16), torch.zeros(3), 40, r"\[N, W\] with N > 0; got \(3,\)"),
        (torch.zeros(3, 2, 16, 16), torch.zeros(0, 3), 40, r"N > 0; got \(0, 3\)"),
        (torch.zeros(3, 2, 16, 16), torch.zeros(2, 2), 40, r"must be \[2, 3\]; got \(2, 2\)"),
    ],
)
def test_invalid_arguments_are_rejected(op, cache, pages, tokens, message):
    with pytest.raises(ValueError, match=message or op.cache):
        op.of_rows(cache, pages.long(), tokens)


# -- cosines --------------------------------------------------------------------------------------


def test_more_tiles_than_the_anchor_kernel_loads_at_once():
    KEYS.compare(KEYS.random(1, 128 * 33 + 5, 4), 128)


def test_hand_computed_cosines():
    """The unit keys are (1, 0), (1, 0) and (0, 1), so the mean direction is (2, 1)."""
    k = torch.tensor([[[9.0, 0.0], [0.1, 0.0], [0.0, 3.0], [0.0, 0.0]]])
    want = torch.tensor([[2, 2, 1, 0]]) / 5**0.5
    torch.testing.assert_close(KEYS.compare(k), want)


def test_keys_that_cancel_have_cosine_zero():
    k = torch.tensor([[[2.0, 0.0], [-1.0, 0.0]]])
    assert KEYS.compare(k).tolist() == [[0.0, 0.0]]
    assert KEYS.compare(torch.zeros(2, 5, 4)).tolist() == [[0.0] * 5] * 2


def test_key_scale_cancels():
    k = KEYS.random(2, 50, 16).float()
    assert torch.equal(KEYS.compare(k), KEYS.compare(0.25 * k))


# -- norms ----------------------------------------------------------------------------------------


def test_sign_is_ignored_and_zero_has_norm_zero():
    v = torch.tensor([[[1.0, -2.0], [-1.0, 2.0], [0.0, -0.0]]])
    assert VALUES.compare(v)[0].tolist() == [3.0, 3.0, 0.0]


def test_large_values_of_narrow_dtypes_do_not_overflow():
    v = torch.full((1, 3, 128), 60000.0)
    assert (VALUES.compare(v, dtype=torch.float16) == 128 * 60000.0).all()
