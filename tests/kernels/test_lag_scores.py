import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import TOLERANCE, property_test
from kvcompress_kernels import builds
from kvcompress_kernels.lag_scores import cpu as lag_scores_cpu
from kvcompress_kernels.lag_scores import lag_scores_of_rows, reference
from one_row import lag_scores
from paging import LargestStorage, paged_cache, paged_keys, paged_rows, paged_values

pytestmark = pytest.mark.gpu

prop = property_test(25, interpreted=5)


def random(kv_heads, tokens, dim, *, seed=0):
    """Return random keys and values ``[Hkv, S, d]``. Two key channels are large, as in models."""
    rng = np.random.RandomState(seed)
    k, v = rng.standard_normal((2, kv_heads, tokens, dim))
    k[..., :2] = 20 + 5 * k[..., :2]
    return torch.from_numpy(k), torch.from_numpy(v)


def score(k, v, sinks, lag, block=16, **kwargs):
    return lag_scores(*paged_cache(k, v, block, **kwargs), k.shape[1], sinks=sinks, lag=lag)


def compare(k, v, sinks, lag, block=16, **kwargs):
    got = score(k, v, sinks, lag, block, **kwargs)
    parts = max((k.shape[1] - sinks) // lag - 1, 0)
    assert got.shape == (len(k), parts, lag)
    assert got.dtype == torch.float32
    if parts:
        want = reference.run(*paged_cache(k, v, block, **kwargs), parts, sinks, lag)
        torch.testing.assert_close(got, want, **TOLERANCE)
    return got


@pytest.mark.parametrize(
    ("kv_heads", "tokens", "dim", "sinks", "lag", "block"),
    [
        (2, 75, 4, 4, 16, 16),
        (1, 260, 64, 4, 128, 16),  # one scored partition and the full partition that follows it
        (1, 260, 64, 4, 128, 128),
        (3, 50, 80, 0, 7, 7),
        (3, 50, 80, 0, 7, 16),
        (2, 100, 128, 4, 32, 32),
        (1, 20, 20, 9, 1, 16),
        (2, 52, 256, 4, 12, 32),
    ],
)
def test_shapes(kv_heads, tokens, dim, sinks, lag, block):
    compare(*random(kv_heads, tokens, dim, seed=tokens), sinks, lag, block)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, *builds.FLOAT8], ids=str
)
@pytest.mark.parametrize("interleave", [False, True])
def test_dtypes_and_strides(interleave, dtype, device):
    e4m3 = dtype is torch.float8_e4m3fn
    if e4m3 and device.type == "cuda" and builds.architecture(device) < 89:
        pytest.skip("this GPU has no instruction for float8_e4m3fn")
    compare(*random(2, 75, 80), 4, 20, dtype=dtype, interleave=interleave)


@prop
@given(
    st.integers(1, 3),
    st.integers(1, 120),
    st.sampled_from([2, 3, 8, 33]),
    st.integers(0, 12),
    st.integers(1, 50),
    st.sampled_from([1, 3, 16]),
    st.integers(0, 1000),
)
def test_any_shape(kv_heads, tokens, dim, sinks, lag, block, seed):
    compare(*random(kv_heads, tokens, dim, seed=seed), sinks, lag, block, seed=seed)


@pytest.mark.parametrize(("tokens", "parts"), [(1, 0), (4, 0), (131, 0), (259, 0), (260, 1)])
def test_scored_partition_needs_a_full_partition_after_it(tokens, parts):
    assert score(*random(2, tokens, 4), 4, 128).shape == (2, parts, 128)


@pytest.mark.parametrize(
    ("kv_heads", "tokens", "dim", "sinks", "lag", "block", "interleave"),
    [
        (2, 75, 4, 4, 16, 16, False),
        (3, 50, 80, 0, 7, 7, True),
        (1, 101, 33, 3, 9, 1, False),
        (1, 20, 20, 9, 1, 16, True),
        (1, 3300, 2, 4, 1027, 16, False),
        (2, 30, 8, 4, 16, 16, False),  # no scored partition
    ],
)
def test_rows_equal_calls_with_one_row(kv_heads, tokens, dim, sinks, lag, block, interleave):
    inputs = [random(kv_heads, tokens, dim, seed=seed) for seed in range(3)]
    k, v = (torch.stack(x) for x in zip(*inputs, strict=True))
    options = {"interleave": interleave, "dtype": torch.bfloat16}
    keys, pages = paged_rows(paged_keys, k, block, **options)
    values, _ = paged_rows(paged_values, v, block, **options)
    together = lag_scores_of_rows(keys, values, pages, tokens, sinks=sinks, lag=lag)
    parts = max((tokens - sinks) // lag - 1, 0)
    assert together.shape == (3, kv_heads, parts, lag)
    assert (together.dtype, together.is_contiguous()) == (torch.float32, True)
    for got, row_pages in zip(together, pages, strict=True):
        want = lag_scores(keys, values, row_pages, tokens, sinks=sinks, lag=lag)
        assert torch.equal(got, want)


def test_tokens_outside_all_partitions_are_ignored():
    k, v = random(2, 70, 8)
    expected = compare(k, v, 4, 16)
    k[:, 4 + 4 * 16 :] = v[:, 4 + 4 * 16 :] = torch.nan
    k[:, :4] = v[:, :4] = torch.nan
    assert torch.equal(score(k, v, 4, 16), expected)


def test_equal_tokens_have_equal_scores():
    """Their position in a page and a tile must not matter, so that ties are exact."""
    k, v = random(2, 400, 80)
    same = torch.arange(5, 200, 2)
    for x in (k, v):
        x[:, same] = x[:, 4:5]
    got = score(k.float(), v.float(), 4, 196, 7)[:, 0]
    assert (got[:, same - 4] == got[:, :1]).all()


def test_hand_computed_example():
    """Keys (0, 2) and (1, 1), scaled by a partition from (0, 0) to (2, 1), are (0, 2), (0.5, 1).

    Their standard deviations are sqrt(2) and sqrt(1/8). All values are equal.
    """
    k = torch.tensor([[[0.0, 2.0], [1.0, 1.0], [2.0, 0.0], [0.0, 1.0]]])
    spread = torch.tensor([2.0, 0.125]).sqrt()
    want = (spread.softmax(-1) + 0.5) / 2
    got = score(k, torch.ones_like(k), 0, 2)
    torch.testing.assert_close(got, want[None, None])


@pytest.mark.parametrize("constant", [0.0, 1e-40, -65504.0])
def test_constant_channels_are_ignored(constant):
    k, v = random(2, 64, 8)
    k[..., 5] = v[..., 0] = constant
    got = compare(k.float(), v.float(), 4, 10)
    torch.testing.assert_close(got.sum(-1), torch.ones(2, 5))
    constants = torch.full((2, 64, 8), constant)
    assert (compare(constants, constants, 4, 10) == 0.1).all()


@pytest.mark.parametrize("min_range", [1e-45, 2.0**-126, 1e-18, 1e-6])
def test_nearly_constant_channels_stay_finite(min_range):
    k, v = random(1, 40, 8)
    k[:, 20:30, 3] = 0.0
    k[:, 25, 3] = min_range
    k[:, 10:20, 3] = torch.linspace(-4e17, 4e17, 10)
    got = score(k.float(), v.float(), 0, 10)
    assert got.isfinite().all()
    torch.testing.assert_close(got.sum(-1), torch.ones(1, 3))


def test_single_channel_has_deviation_zero():
    assert (score(*random(2, 40, 2), 0, 8)[:, :, 0] != 0.125).any()
    k = torch.randn(2, 40, 1)
    assert (score(k, k, 0, 8) == 0.125).all()


def test_value_head_dim_may_differ():
    (k, _), (_, v) = random(2, 60, 8), random(2, 60, 24)
    compare(k, v, 4, 16)


def test_cache_scales_cancel():
    k, v = (x.float() for x in random(2, 60, 8))
    assert torch.equal(score(k, v, 4, 16), score(0.25 * k, 8 * v, 4, 16))


@pytest.mark.cpu
@pytest.mark.parametrize("tile", [1, 4000])
def test_tile_size_does_not_matter(tile, monkeypatch):
    k, v = random(2, 100, 8)
    one_tile = compare(k, v, 4, 9)
    monkeypatch.setattr(lag_scores_cpu, "TILE", tile)
    assert torch.equal(compare(k, v, 4, 9), one_tile)


@pytest.mark.cpu
def test_cpu_code_holds_one_tile_besides_its_result(monkeypatch):
    monkeypatch.setattr(lag_scores_cpu, "TILE", 1 << 14)
    values, pages = paged_values(torch.ones(1, 20000, 4), 16)
    with LargestStorage() as largest:
        lag_scores_cpu._shares(values, pages, 199, 0, 100)
    assert largest.size == 199 * 100 * 4


KEYS, VALUES = torch.zeros(3, 2, 8, 16), torch.zeros(3, 2, 16, 8)


@pytest.mark.parametrize(
    ("keys", "values", "pages", "tokens", "sinks", "lag", "message"),
    [
        (KEYS[0], VALUES, (1, 3), 40, 4, 8, r"key_pages must be \[N, Hkv, D, bs\]"),
        (KEYS, VALUES[0], (1, 3), 40, 4, 8, r"value_pages must be \[3, 2, 16, D\]"),
        (KEYS.byte(), VALUES, (1, 3), 40, 4, 8, "key_pages must be floats: view a quantised"),
        (KEYS, VALUES.byte(), (1, 3), 40, 4, 8, "value_pages must be floats: view a quantised"),
        (KEYS, VALUES, (1, 3), 0, 4, 8, "tokens must be positive; got 0"),
        (KEYS, VALUES, (2, 2), 40, 4, 8, r"pages must be \[2, 3\]; got \(2, 2\)"),
        (KEYS, VALUES, (1, 3), 40, -1, 8, r"sinks >= 0 and lag >= 1 must hold; got \(-1, 8\)"),
        (KEYS, VALUES, (1, 3), 40, 4, 0, r"sinks >= 0 and lag >= 1 must hold; got \(4, 0\)"),
    ],
)
def test_invalid_arguments_are_rejected(keys, values, pages, tokens, sinks, lag, message):
    table = torch.zeros(pages, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"lag_scores: {message}"):
        lag_scores_of_rows(keys, values, table, tokens, sinks=sinks, lag=lag)
