"""Dequantised pages equal the float64 reference, and no other byte of the cache changes."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import property_test
from kvcompress_kernels import k4v3
from kvcompress_kernels.dequantise_pages import dequantise_pages, reference
from kvcompress_kernels.packed_attention import Offsets
from paging import amx_tiles, transposed_keys

pytestmark = pytest.mark.gpu

prop = property_test(40, interpreted=8)
LAYOUTS = ("PHT", "PTH", "TPH", "HPT", "THP", "HTP")
"""Orders of pages, heads and tokens in memory. The head dim is innermost."""
SIZES = (
    (64, torch.bfloat16),
    (80, torch.bfloat16),
    (96, torch.float16),
    (128, torch.bfloat16),
    (256, torch.float32),
    (64, torch.float32),
)
"""Head dims and dtypes of the cache. Numba takes 4 seconds for each."""
SPACING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-22}
"""Distance of two neighbours relative to the larger one."""


class Case(NamedTuple):
    """The arguments of the op."""

    pages: torch.Tensor
    offsets: Offsets | None
    packed: torch.Tensor
    destinations: torch.Tensor

    def run(self, op):
        """Return the pages after `op` on a copy of the cache."""
        pages = self.pages.clone(memory_format=torch.preserve_format)
        op(pages, *self[1:])
        return pages


def case(count, *, dim=64, dtype=torch.bfloat16, heads=2, block=32, layout="PHT", offsets=None):
    """Return a case with `count` packed pages. Unused memory holds NaN.

    Args:
        offsets: offsets of the ordinary pages; None for rows of tokens.
    """
    tokens = k4v3.page_tokens(block, dtype.itemsize)
    ratio = tokens // block
    total = count * (1 + ratio) + 2
    sizes = {"P": total, "H": heads, "T": block}
    store = torch.empty(*(sizes[axis] for axis in layout), 2 * dim, dtype=dtype)
    store.view(torch.uint8).fill_(0xFF)
    pages = store.permute(*(layout.index(axis) for axis in "PHT"), 3)
    ids = torch.randperm(total)[: total - 2].int()
    packed, destinations = ids[:count].clone(), ids[count:].clone()
    shape = count, heads, tokens // k4v3.GROUP, k4v3.GROUP, dim
    keys = torch.randn(shape) + 3 * torch.randn(count, heads, 1, 1, dim)
    values = torch.randn(shape)
    keys[..., 1], keys[..., 2], values[..., :5, :] = 200.0, 0.0, 0.7
    content = k4v3.to_bytes(k4v3.quantise(keys, values, k4v3.GROUP))
    pages.view(torch.uint8)[packed] = content.view(count, heads, block, -1)
    return Case(pages, offsets, packed, destinations)


def check(c):
    """Check every page after the op."""
    got, want = c.run(dequantise_pages), c.run(reference.run)
    written = c.destinations.long()
    other = [page for page in range(len(got)) if page not in set(written.tolist())]
    for pages in (got, want):
        assert torch.equal(pages.view(torch.uint8)[other], c.pages.view(torch.uint8)[other])
    got, want = got[written].double(), want[written].double()
    assert want.isfinite().all()
    # Only ties round differently, as the kernels compute in float32.
    assert ((got - want).abs() <= SPACING[c.pages.dtype] * want.abs() + 1e-6).all()
    assert (got != want).double().mean() < (0.5 if c.pages.dtype == torch.float32 else 1e-3)


@prop
@given(
    st.integers(1, 4),
    st.sampled_from(SIZES),
    st.integers(1, 3),
    st.sampled_from([32, 96, 128]),
    st.sampled_from(LAYOUTS),
    st.integers(0, 2**31 - 1),
)
def test_pages_equal_the_reference(count, size, heads, block, layout, seed):
    torch.manual_seed(seed)
    check(case(count, dim=size[0], dtype=size[1], heads=heads, block=block, layout=layout))


@pytest.mark.parametrize("block", [16, 48])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_few_tokens(block, layout):
    check(case(3, block=block, layout=layout))


@pytest.mark.cpu
@pytest.mark.parametrize("block", [32, 96, 128])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("offsets", [transposed_keys, amx_tiles])
def test_layouts_of_cpu_attn(offsets, size, block):
    dim, dtype = size
    check(case(2, dim=dim, dtype=dtype, block=block, offsets=offsets(block, dim)))


def test_numbers_saturate_in_float16():
    c = case(1, dim=96, dtype=torch.float16)
    rows = c.pages.view(torch.uint8)[c.packed.long()]
    group = k4v3.from_bytes(rows.view(1, 2, 2, 64 * 96))
    group.key_scale[:], group.value_scale[:] = 60000.0, 60000.0
    rows = k4v3.to_bytes(group).view_as(rows)
    c.pages.view(torch.uint8)[c.packed.long()] = rows
    got = c.run(dequantise_pages)[c.destinations.long()]
    assert got.isfinite().all()
    assert got.max() == 65504
    check(c)


def test_no_pages_change_nothing():
    c = case(1)
    none = c._replace(packed=c.packed[:0], destinations=c.destinations[:0])
    assert torch.equal(none.run(dequantise_pages).view(torch.uint8), c.pages.view(torch.uint8))


@pytest.mark.cpu
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_the_pages(threads):
    before, c = torch.get_num_threads(), case(9, heads=3)
    torch.set_num_threads(threads)
    try:
        check(c)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("target", [0, 2])
def test_offsets_beyond_two_to_the_31_bytes(target):
    """A CPU never allocates untouched memory, so this takes a few KiB there."""
    c = case(1, heads=1)
    s_page, size = 2**30 + 16, c.pages[0].numel()
    large = torch.empty(6 * s_page // 2 + size, dtype=torch.bfloat16)
    shape, strides = (6, 1, 32, 128), (s_page // 2, size, 128, 1)
    pages = large.as_strided(shape, strides)
    source = 5 if target == 0 else 0
    pages[source] = c.pages[int(c.packed)]
    destinations = torch.tensor([target, *(page for page in (1, 3, 4))], dtype=torch.int32)
    dequantise_pages(pages, None, torch.tensor([source], dtype=torch.int32), destinations)
    want = c.run(dequantise_pages)[c.destinations.long()]
    for page, expected in zip(destinations.tolist(), want, strict=True):
        assert torch.equal(pages[page], expected)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("pages must be one of", lambda c: c._replace(pages=c.pages.view(torch.uint8))),
        ("dense last axis", lambda c: c._replace(pages=c.pages.mT)),
        ("head dim", lambda c: c._replace(pages=c.pages[..., :64])),
        ("blocks of a multiple", lambda c: c._replace(pages=c.pages[:, :, :24])),
        ("packed must be", lambda c: c._replace(packed=c.packed.long())),
        ("destinations must be", lambda c: c._replace(destinations=c.destinations[:-1])),
    ],
)
def test_wrong_arguments(message, change):
    with pytest.raises(ValueError, match=message):
        dequantise_pages(*change(case(1)))
