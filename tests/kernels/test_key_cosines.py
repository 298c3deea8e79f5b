import numpy as np
import pytest
import torch

from kvcompress_kernels.key_cosines import cpu as key_cosines_cpu
from kvcompress_kernels.key_cosines import key_cosines, key_cosines_of_rows, reference
from paging import LargestStorage, paged_keys, paged_rows

pytestmark = pytest.mark.gpu

TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}  # docs/methods.md 9


def random(kv_heads, tokens, dim, *, seed=0, mean=0.5):
    """Return random keys ``[Hkv, S, d]`` with a common direction, as in real models."""
    rng = np.random.RandomState(seed)
    return torch.from_numpy(rng.standard_normal((kv_heads, tokens, dim)) + mean)


def compare(k, block=16, **kwargs):
    arguments = *paged_keys(k, block, **kwargs), k.shape[1]
    got = key_cosines(*arguments)
    assert got.shape == k.shape[:2]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, reference.run(*arguments), **TOLERANCE)
    return got


def compare_rows(k, block=16, **kwargs):
    """Compare the rows ``[N, Hkv, S, d]`` of one call with one call per row, bit for bit."""
    keys, pages = paged_rows(paged_keys, k, block, **kwargs)
    tokens = k.shape[2]
    together = key_cosines_of_rows(keys, pages, tokens)
    assert together.shape == k.shape[:3]
    for got, row_pages in zip(together, pages, strict=True):
        assert torch.equal(got, key_cosines(keys, row_pages, tokens))
    return together


def test_more_tiles_than_the_anchor_kernel_loads_at_once():
    compare(random(1, 128 * 33 + 5, 4), 128)


@pytest.mark.parametrize("interleave", [False, True])
def test_equal_keys_have_equal_cosines(interleave):
    """Their position in a page and a tile must not matter, so that ties are exact."""
    k = random(2, 300, 80).float()
    same = torch.arange(1, 300, 2)
    k[:, same] = k[:, :1]
    got = key_cosines(*paged_keys(k, 7, interleave=interleave), 300)
    assert (got[:, same] == got[:, :1]).all()
    assert len(got[0].unique()) == 150


def test_hand_computed_example():
    """The unit keys are (1, 0), (1, 0) and (0, 1), so the mean direction is (2, 1)."""
    k = torch.tensor([[[9.0, 0.0], [0.1, 0.0], [0.0, 3.0], [0.0, 0.0]]])
    want = torch.tensor([[2, 2, 1, 0]]) / 5**0.5
    torch.testing.assert_close(key_cosines(*paged_keys(k, 16), 4), want)


def test_keys_that_cancel_have_cosine_zero():
    k = torch.tensor([[[2.0, 0.0], [-1.0, 0.0]]])
    assert compare(k).tolist() == [[0.0, 0.0]]
    assert compare(torch.zeros(2, 5, 4)).tolist() == [[0.0] * 5] * 2


def test_key_scale_cancels():
    k = random(2, 50, 16).float()
    a, b = (key_cosines(*paged_keys(x, 16), 50) for x in (k, 0.25 * k))
    assert torch.equal(a, b)


@pytest.mark.cpu
@pytest.mark.parametrize("tile", [1, 4000])
def test_tile_size_does_not_matter(tile, monkeypatch):
    monkeypatch.setattr(key_cosines_cpu, "TILE", tile)
    compare(random(2, 100, 8))


@pytest.mark.cpu
def test_cpu_code_holds_one_tile_besides_its_result(monkeypatch):
    monkeypatch.setattr(key_cosines_cpu, "TILE", 1 << 14)
    k = paged_keys(torch.zeros(1, 20000, 4), 16)
    with LargestStorage() as largest:
        key_cosines_cpu.run(*k, 20000)
    assert largest.size == 20000 * 4


@pytest.mark.parametrize(
    ("pages", "table", "tokens", "message"),
    [
        (torch.zeros(3, 2, 16), 3, 40, r"key_pages must be \[N, Hkv, D, bs\]"),
        (torch.zeros(3, 2, 8, 16, dtype=torch.uint8), 3, 40, "view a quantised cache as its"),
        (torch.zeros(3, 2, 8, 16), 3, 0, "tokens must be positive; got 0"),
        (torch.zeros(3, 2, 8, 16), 2, 40, r"pages must be \[3\]; got \(2,\)"),
    ],
)
def test_invalid_arguments_are_rejected(pages, table, tokens, message):
    with pytest.raises(ValueError, match=f"key_cosines: .*{message}"):
        key_cosines(pages, torch.arange(table), tokens)


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        (torch.arange(3), r"pages must be \[N, W\] with N > 0; got \(3,\)"),
        (torch.zeros(0, 3, dtype=torch.int64), r"N > 0; got \(0, 3\)"),
        (torch.zeros(2, 2, dtype=torch.int64), r"pages must be \[2, 3\]; got \(2, 2\)"),
    ],
)
def test_pages_of_rows_are_checked(pages, message):
    with pytest.raises(ValueError, match=f"key_cosines: .*{message}"):
        key_cosines_of_rows(torch.zeros(3, 2, 8, 16), pages, 40)
