import numpy as np
import pytest
import torch

from kvcompress_kernels.value_norms import cpu as value_norms_cpu
from kvcompress_kernels.value_norms import reference, value_norms, value_norms_of_rows
from paging import LargestStorage, paged_rows, paged_values

pytestmark = pytest.mark.gpu

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def random(kv_heads, tokens, dim, *, seed=0):
    rng = np.random.RandomState(seed)
    return torch.from_numpy(rng.standard_normal((kv_heads, tokens, dim)))


def compare(v, block=16, **kwargs):
    arguments = *paged_values(v, block, **kwargs), v.shape[1]
    got = value_norms(*arguments)
    assert got.shape == v.shape[:2]
    assert got.dtype == torch.float32
    assert got.is_contiguous()
    torch.testing.assert_close(got, reference.run(*arguments), **TOLERANCE)
    return got


def compare_rows(v, block=16, **kwargs):
    """Compare the rows ``[N, Hkv, S, d]`` of one call with one call per row, bit for bit."""
    values, pages = paged_rows(paged_values, v, block, **kwargs)
    tokens = v.shape[2]
    together = value_norms_of_rows(values, pages, tokens)
    assert together.shape == v.shape[:3]
    for got, row_pages in zip(together, pages, strict=True):
        assert torch.equal(got, value_norms(values, row_pages, tokens))
    return together


def test_equal_values_have_equal_norms():
    v = random(2, 1, 80).float().expand(2, 300, 80)
    got = compare(v, 7)
    assert (got == got[:, :1]).all()


def test_sign_is_ignored_and_zero_has_norm_zero():
    v = torch.tensor([[[1.0, -2.0], [-1.0, 2.0], [0.0, -0.0]]])
    assert compare(v)[0].tolist() == [3.0, 3.0, 0.0]


def test_large_values_of_narrow_dtypes_do_not_overflow():
    v = torch.full((1, 3, 128), 60000.0)
    assert (compare(v, dtype=torch.float16) == 128 * 60000.0).all()


@pytest.mark.cpu
@pytest.mark.parametrize("tile", [1, 4000])
def test_tile_size_does_not_matter(tile, monkeypatch):
    v = random(2, 100, 8)
    expected = compare(v)
    monkeypatch.setattr(value_norms_cpu, "TILE", tile)
    assert torch.equal(compare(v), expected)


@pytest.mark.cpu
def test_cpu_code_holds_one_tile_besides_its_result(monkeypatch):
    monkeypatch.setattr(value_norms_cpu, "TILE", 1 << 14)
    v = paged_values(torch.zeros(1, 20000, 4), 16)
    with LargestStorage() as largest:
        value_norms_cpu.run(*v, 20000)
    assert largest.size == 20000 * 4


@pytest.mark.parametrize(
    ("pages", "table", "tokens", "message"),
    [
        (torch.zeros(3, 2, 16), 3, 40, r"value_pages must be \[N, Hkv, bs, D\]"),
        (torch.zeros(3, 2, 16, 8, dtype=torch.uint8), 3, 40, "view a quantised cache as its"),
        (torch.zeros(3, 2, 16, 8), 3, 0, "tokens must be positive; got 0"),
        (torch.zeros(3, 2, 16, 8), 2, 40, r"pages must be \[3\]; got \(2,\)"),
    ],
)
def test_invalid_arguments_are_rejected(pages, table, tokens, message):
    with pytest.raises(ValueError, match=f"value_norms: .*{message}"):
        value_norms(pages, torch.arange(table), tokens)


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        (torch.arange(3), r"pages must be \[N, W\] with N > 0; got \(3,\)"),
        (torch.zeros(0, 3, dtype=torch.int64), r"N > 0; got \(0, 3\)"),
        (torch.zeros(2, 2, dtype=torch.int64), r"pages must be \[2, 3\]; got \(2, 2\)"),
    ],
)
def test_pages_of_rows_are_checked(pages, message):
    with pytest.raises(ValueError, match=f"value_norms: .*{message}"):
        value_norms_of_rows(torch.zeros(3, 2, 16, 8), pages, 40)
