"""`key_cosines` and `value_norms` with every shape, dtype and stride of the cache."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import test_key_cosines
import test_value_norms
from kvcompress_kernels import builds

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
prop = settings(derandomize=True, deadline=None, max_examples=5 if INTERPRETED else 25)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("op", [test_key_cosines, test_value_norms], ids=["keys", "values"]),
]


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
    got = op.compare(op.random(kv_heads, tokens, dim, seed=tokens), block)
    assert (got.shape, got.is_contiguous()) == ((kv_heads, tokens), True)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, *builds.FLOAT8], ids=str
)
@pytest.mark.parametrize("interleave", [False, True])
def test_dtypes_and_strides(op, interleave, dtype, device):
    e4m3 = dtype is torch.float8_e4m3fn
    if e4m3 and device.type == "cuda" and builds.architecture(device) < 89:
        pytest.skip("this GPU has no instruction for float8_e4m3fn")
    got = op.compare(op.random(2, 75, 80), dtype=dtype, interleave=interleave)
    assert got.dtype == torch.float32
    assert got.isfinite().all()


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize(
    ("kv_heads", "tokens", "dim", "block", "interleave"),
    [(3, 129, 80, 7, False), (1, 17, 33, 1, True), (2, 261, 20, 16, True), (2, 1, 256, 32, False)],
)
def test_rows_equal_calls_with_one_row(op, rows, kv_heads, tokens, dim, block, interleave):
    x = torch.stack([op.random(kv_heads, tokens, dim, seed=seed) for seed in range(rows)])
    got = op.compare_rows(x, block, interleave=interleave, dtype=torch.bfloat16)
    assert (got.dtype, got.is_contiguous()) == (torch.float32, True)
    assert got.isfinite().all()


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
