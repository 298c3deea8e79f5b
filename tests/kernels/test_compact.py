import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress_kernels import compact, gather_kept, scatter_kept

prop = settings(derandomize=True, deadline=None, max_examples=40)
INTS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def cache(count, heads, dim, block, dtype=torch.bfloat16, layout="split", value_dim=None):
    """Key and value pages of random bits, NaN patterns among them."""
    value_dim = value_dim or dim
    if layout == "interleaved":  # [N, block, Hkv, D + Dv], as FLASH_ATTN keeps it
        store = bits((count, block, heads, dim + value_dim), dtype)
        return store[..., :dim].permute(0, 2, 3, 1), store[..., dim:].permute(0, 2, 1, 3)
    if layout == "halves":  # [N, Hkv, 2 * block * D]: K transposed, then V plain, as on the CPU
        store = bits((count, heads, block * (dim + value_dim)), dtype)
        return (
            store[..., : dim * block].unflatten(2, (dim, block)),
            store[..., dim * block :].unflatten(2, (block, value_dim)),
        )
    return bits((count, heads, dim, block), dtype), bits((count, heads, block, value_dim), dtype)


def bits(shape, dtype):
    kind = INTS[dtype]
    info = torch.iinfo(kind)
    return torch.randint(info.min, info.max + 1, shape, dtype=torch.int64).to(kind).view(dtype)


def raw(x):
    return x.contiguous().view(INTS[x.dtype])


def same(a, b):
    return torch.equal(raw(a), raw(b))


def slow_gather(key_pages, value_pages, pages, kept):
    heads, block = key_pages.shape[1], key_pages.shape[3]
    count = kept.shape[1] // block
    keys = key_pages.new_zeros(count, heads, key_pages.shape[2], block)
    values = value_pages.new_zeros(count, heads, block, value_pages.shape[3])
    for h in range(heads):
        for i, position in enumerate(kept[h].tolist()):
            page, slot = pages[position // block], position % block
            keys[i // block, h, :, i % block] = key_pages[page, h, :, slot]
            values[i // block, h, i % block] = value_pages[page, h, slot]
    return keys, values


def choose(full, heads, block, count):
    """Other positions for each head, ascending."""
    rows = [torch.randperm(full * block)[: count * block].sort().values for _ in range(heads)]
    return torch.stack(rows)


LAYOUTS = ["split", "interleaved", "halves"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", INTS, ids=str)
@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_gather(layout, dtype, count):
    k, v = cache(9, 3, 8, 4, dtype, layout)
    pages, kept = torch.tensor([7, 0, 3, 8, 2]), choose(5, 3, 4, count)
    keys, values = gather_kept(k, v, pages, kept)
    want = slow_gather(k, v, pages, kept)
    assert keys.shape == (count, 3, 8, 4)
    assert values.shape == (count, 3, 4, 8)
    assert keys.dtype == values.dtype == dtype
    assert same(keys, want[0])
    assert same(values, want[1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_scatter(layout, count):
    k, v = cache(9, 2, 8, 4, layout=layout)
    keys, values = cache(count, 2, 8, 4)
    want = k.clone(), v.clone()
    destination = torch.tensor([6, 1, 4])[:count]
    for i, page in enumerate(destination.tolist()):
        want[0][page], want[1][page] = keys[i], values[i]
    scatter_kept(k, v, keys, values, destination)
    assert same(k, want[0])
    assert same(v, want[1])


@prop
@given(
    st.integers(1, 4),
    st.sampled_from([1, 2, 4, 16]),
    st.integers(1, 6),
    st.sampled_from(LAYOUTS),
    st.integers(0, 2**31 - 1),
    st.data(),
)
def test_compact(heads, block, full, layout, seed, data):
    """Into fresh pages, or into some of the prompt's own in any order."""
    torch.manual_seed(seed)
    count = data.draw(st.integers(0, full))
    k, v = cache(full + 4, heads, 8, block, layout=layout)
    pages = torch.randperm(full + 4)[:full]
    destination = torch.randperm(full + 4)[:count]
    kept = choose(full, heads, block, count)
    want = k.clone(), v.clone()
    packed = slow_gather(k, v, pages, kept)
    for i, page in enumerate(destination.tolist()):
        want[0][page], want[1][page] = packed[0][i], packed[1][i]
    compact(k, v, pages, kept, destination)
    assert same(k, want[0])
    assert same(v, want[1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_compact_onto_its_own_source(layout, order):
    """Everything is read before anything is written."""
    k, v = cache(3, 2, 8, 4, layout=layout)
    pages = torch.tensor([2, 0, 1])
    kept = torch.arange(12).expand(2, -1)
    before = k.clone(), v.clone()
    compact(k, v, pages, kept, torch.tensor(order))
    for source, destination in zip(pages.tolist(), order, strict=True):
        assert same(k[destination], before[0][source])
        assert same(v[destination], before[1][source])


def test_packed_pages_are_fresh_memory():
    k, v = cache(4, 2, 8, 4)
    keys, values = gather_kept(k, v, torch.tensor([1, 2]), torch.arange(8).expand(2, -1))
    before = keys.clone(), values.clone()
    k.zero_()
    v.zero_()
    assert same(keys, before[0])
    assert same(values, before[1])


def test_heads_of_values_may_be_narrower():
    k, v = cache(4, 2, 8, 4, value_dim=6)
    pages, kept = torch.tensor([3, 1]), choose(2, 2, 4, 1)
    got, want = gather_kept(k, v, pages, kept), slow_gather(k, v, pages, kept)
    assert same(got[0], want[0])
    assert same(got[1], want[1])


def test_one_page_holds_other_tokens_for_other_heads():
    k, v = cache(2, 2, 8, 4)
    kept = torch.tensor([[0, 1, 2, 7], [3, 4, 5, 6]])
    keys, values = gather_kept(k, v, torch.tensor([0, 1]), kept)
    assert same(keys[0, 0, :, 3], k[1, 0, :, 3])
    assert same(keys[0, 1, :, 0], k[0, 1, :, 3])
    assert same(values[0, 1, 1], v[1, 1, 0])


@pytest.mark.parametrize(
    ("value_shape", "kept_shape"),
    [
        ((4, 2, 4, 8), (2, 6)),
        ((4, 2, 4, 8), (2, 1)),
        ((4, 2, 4, 8), (1, 4)),
        ((4, 2, 4, 8), (4, 4)),
        ((4, 1, 4, 8), (2, 4)),
        ((3, 2, 4, 8), (2, 4)),
        ((4, 2, 8, 4), (2, 4)),
    ],
)
def test_gather_checks_shapes(value_shape, kept_shape):
    k, v = torch.zeros(4, 2, 8, 4), torch.zeros(value_shape)
    pages, kept = torch.arange(4), torch.zeros(kept_shape, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"gather_kept: .*; got"):
        gather_kept(k, v, pages, kept)
    with pytest.raises(ValueError, match=r"gather_kept: .*; got"):
        compact(k, v, pages, kept, torch.tensor([0]))


@pytest.mark.parametrize("wanted", [0, 1, 3])
def test_scatter_checks_the_number_of_pages(wanted):
    k, v = cache(4, 2, 8, 4)
    keys, values = cache(2, 2, 8, 4)
    before = k.clone()
    with pytest.raises(ValueError, match="destination must name 2 pages; got"):
        scatter_kept(k, v, keys, values, torch.arange(wanted))
    with pytest.raises(ValueError, match="scatter_kept"):
        scatter_kept(k, v, keys, values[:1], torch.arange(2))
    kept = torch.arange(8).expand(2, -1)
    with pytest.raises(ValueError, match="scatter_kept"):
        compact(k, v, torch.arange(2), kept, torch.arange(wanted))
    assert same(k, before)
