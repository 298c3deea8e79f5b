import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import property_test
from kvcompress_kernels.move_kept import move_kept, reference

pytestmark = pytest.mark.gpu

prop = property_test(40, interpreted=5)
INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by the bytes of an element."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MORE_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.float64)


@pytest.fixture(autouse=True)
def _default_device(device):
    with device:
        yield


def cache(count, heads, dim, block, dtype=torch.bfloat16, layout="split", value_dim=None):
    """Return key and value pages of random bits, including NaN patterns."""
    value_dim = value_dim or dim
    if layout == "interleaved":  # [N, block, Hkv, D + Dv], as in FLASH_ATTN
        store = bits((count, block, heads, dim + value_dim), dtype)
        return store[..., :dim].permute(0, 2, 3, 1), store[..., dim:].permute(0, 2, 1, 3)
    if layout == "halves":  # [N, Hkv, 2 * block * D]: transposed K, then V, as in CPU_ATTN
        store = bits((count, heads, block * (dim + value_dim)), dtype)
        return (
            store[..., : dim * block].unflatten(2, (dim, block)),
            store[..., dim * block :].unflatten(2, (block, value_dim)),
        )
    return bits((count, heads, dim, block), dtype), bits((count, heads, block, value_dim), dtype)


def bits(shape, dtype):
    kind = INTS[dtype.itemsize]
    info = torch.iinfo(kind)
    high = min(info.max + 1, 2**63 - 1)
    return torch.randint(info.min, high, shape, dtype=torch.int64).to(kind).view(dtype)


def ints(x):
    """Return the bits, which compare equal even if they are NaN."""
    return x.view(INTS[x.itemsize])


def same(got, want):
    """Return whether two pairs of keys and values have the same bits."""
    return all(torch.equal(ints(a), ints(b)) for a, b in zip(got, want, strict=True))


def gather(k, v, pages, kept, *, op=None):
    """Copy one layer's kept tokens to new pages, and return these."""
    count = kept.shape[1] // k.shape[3]
    into = k.new_empty(count, *k.shape[1:]), v.new_empty(count, *v.shape[1:])
    destinations, counts = torch.arange(count)[None], torch.tensor([count], dtype=torch.int32)
    (op or move_kept)(k, v, pages[None], kept[None], counts, destinations, into=into)
    return into


def reference_move(k, v, pages, kept, counts, destinations, *, into):
    """Run the reference with the arguments of `move_kept`."""
    reference.run(k, v, pages, kept, counts, destinations, *into)


def scatter(k, v, keys, values, destinations):
    """Copy all pages `keys` and `values` of one layer to the pages `destinations` of k and v."""
    sources, count = torch.arange(len(keys))[None], torch.tensor([len(keys)], dtype=torch.int32)
    move_kept(keys, values, sources, None, count, destinations[None], into=(k, v))


def compact(k, v, pages, kept, destinations):
    """Copy one layer's kept tokens to pages that may overlap its source pages."""
    scatter(k, v, *gather(k, v, pages, kept), destinations)


def slow_gather(k, v, pages, kept):
    """Return the expected result of `gather`."""
    return gather(k, v, pages, kept, op=reference_move)


def choose(full, heads, block, count):
    """Return random positions for each head, ascending."""
    rows = [torch.randperm(full * block)[: count * block].sort().values for _ in range(heads)]
    return torch.stack(rows)


LAYOUTS = ["split", "interleaved", "halves"]


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
    """Compact into unused pages or into the prompt's own pages, in any order."""
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
    assert same((k, v), want)


# -- many layers at once ------------------------------------------------------------------


def step(counts, full, heads, dim, block, *, spare=0, **kwargs):
    """Return a cache and the arguments that move kept tokens of several rows in it.

    Unused table entries refer to a guard page or to position 0 of the prompt, so a kernel that
    follows them writes memory that the test compares.

    Args:
        counts: full pages that each row writes.
        full: source pages per row.
    """
    rows, max_pages = len(counts), max(counts) + spare
    total = rows * (full + max_pages) + 1
    k, v = cache(total, heads, dim, block, **kwargs)
    order = torch.randperm(total)
    guard, sources, targets = order[0], order[1:][: rows * full], order[1 + rows * full :]
    sources, targets = sources.view(rows, full), targets[: rows * max_pages].view(rows, max_pages)
    kept = torch.zeros(rows, heads, max_pages * block, dtype=torch.int32)
    for n, count in enumerate(counts):
        kept[n, :, : count * block] = choose(full, heads, block, count)
        targets[n, count:] = guard
    return k, v, sources, kept, torch.tensor(counts, dtype=torch.int32), targets


def moved_row_by_row(k, v, sources, kept, counts, targets):
    """Return the expected cache: read all rows with the reference, then write them."""
    block, want = k.shape[3], (ints(k).clone(), ints(v).clone())
    packed = [
        slow_gather(ints(k), ints(v), pages, row[:, : count * block])
        for pages, row, count in zip(sources, kept, counts.tolist(), strict=True)
    ]
    for (keys, values), pages in zip(packed, targets, strict=True):
        for i, page in enumerate(pages[: len(keys)].tolist()):
            want[0][page], want[1][page] = keys[i], values[i]
    return want


def check_move(case):
    want = moved_row_by_row(*case)
    move_kept(*case)
    assert same(case[:2], want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("counts", [[2], [0], [3, 0, 1], [1, 4, 4]])
@pytest.mark.parametrize("spare", [0, 2])
def test_rows_move_independently(layout, counts, spare):
    check_move(step(counts, 4, 3, 8, 4, layout=layout, spare=spare))


@pytest.mark.parametrize("dtype", [*FLOATS, *MORE_DTYPES])
def test_every_bit_is_kept(dtype):
    check_move(step([2, 1], 3, 2, 16, 4, dtype=dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("heads", "dim", "value_dim", "block"),
    [(1, 64, 64, 16), (3, 80, 80, 16), (2, 96, 64, 5), (1, 128, 128, 128), (1, 256, 6, 33)],
)
def test_shapes_of_models(layout, heads, dim, value_dim, block):
    """Test head dims that are no power of two, and blocks that do not divide a program's rows."""
    check_move(step([2, 1], 3, heads, dim, block, layout=layout, value_dim=value_dim))


def test_block_as_long_as_the_prompt():
    check_move(step([1, 1], 1, 2, 128, 150))


@pytest.mark.parametrize("kept_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("pages_dtype", [torch.int32, torch.int64])
def test_tables_may_be_int32_or_int64_slices_of_larger_buffers(kept_dtype, pages_dtype):
    k, v, sources, kept, counts, targets = step([2, 1, 3], 3, 2, 8, 4)
    pad = torch.nn.functional.pad
    sources = pad(sources, (2, 1), value=-1).to(pages_dtype)[:, 2:-1]
    kept = pad(kept, (3, 2), value=-1).to(kept_dtype)[:, :, 3:-2]
    targets = pad(targets, (1, 1), value=-1).to(pages_dtype).T.contiguous().T[:, 1:-1]
    want = moved_row_by_row(k, v, sources.long(), kept, counts, targets.long())
    move_kept(k, v, sources, kept, counts, targets)
    assert same((k, v), want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_that_overlap_their_sources(layout):
    """Two rows swap pages through staging pages."""
    k, v, sources, kept, counts, targets = step([3, 2], 3, 2, 8, 4, layout=layout)
    targets[0], targets[1, :2] = sources[1], sources[0, 1:]
    want = moved_row_by_row(k, v, sources, kept, counts, targets)
    staging = cache(5, 2, 8, 4)
    staging_pages = torch.tensor([[0, 1, 2], [3, 4, -1]])
    move_kept(k, v, sources, kept, counts, staging_pages, into=staging)
    move_kept(*staging, staging_pages, None, counts, targets, into=(k, v))
    assert same((k, v), want)


def test_no_rows_and_no_pages_change_nothing():
    k, v = cache(2, 2, 8, 4)
    before = k.clone(), v.clone()
    pages, counts = torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
    move_kept(k, v, pages, torch.zeros(0, 2, 4, dtype=torch.int32), counts, pages)
    one = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    move_kept(k, v, one[0], torch.zeros(1, 2, 0, dtype=torch.int32), one[1], one[0][:, :0])
    assert same((k, v), before)


def test_offsets_beyond_two_to_the_31_elements():
    """A CPU never allocates untouched memory, so this takes a few KiB there."""
    s_page, heads, block, dim = 2**30 + 16, 2, 4, 16
    store = torch.empty(2 * s_page + 4096, dtype=torch.uint8)
    k = store.as_strided((3, heads, dim, block), (s_page, 2 * block * dim, 1, dim))
    v = store.as_strided((3, heads, block, dim), (s_page, 2 * block * dim, dim, 1), block * dim)
    for to in (0, 2):
        pages = torch.tensor([[2 - to]], dtype=torch.int32)
        k[2 - to], v[2 - to] = (bits(x.shape[1:], torch.uint8) for x in (k, v))
        k[to], v[to] = 0, 0
        kept = torch.tensor([3, 0, 1, 2], dtype=torch.int32).expand(1, heads, -1)
        counts = torch.ones(1, dtype=torch.int32)
        move_kept(k, v, pages, kept, counts, 2 - pages)
        assert torch.equal(k[to], k[2 - to][:, :, [3, 0, 1, 2]])
        assert torch.equal(v[to], v[2 - to][:, [3, 0, 1, 2]])


K, V = torch.zeros(4, 2, 8, 4), torch.zeros(4, 2, 4, 6)
GOOD = {
    "key_pages": K,
    "value_pages": V,
    "pages": torch.zeros(3, 2, dtype=torch.int64),
    "kept": torch.zeros(3, 2, 4, dtype=torch.int32),
    "counts": torch.zeros(3, dtype=torch.int32),
    "destinations": torch.zeros(3, 1, dtype=torch.int64),
    "into": (K.clone(), V.clone()),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value_pages": V[:, :1]}, r"value_pages must be \[4, 2, 4, D\]"),
        ({"value_pages": V[:, :, :3]}, r"value_pages must be \[4, 2, 4, D\]"),
        ({"pages": GOOD["pages"][:1]}, r"kept must be \[1, 2, n\]"),
        ({"kept": GOOD["kept"][:, :1]}, r"kept must be \[3, 2, n\]"),
        ({"counts": GOOD["counts"][:1]}, r"counts must be \[3\]"),
        ({"destinations": GOOD["destinations"][:1]}, r"destinations must be \[3, max_pages\]"),
        ({"into": (K[:, :1], V)}, "pages of `into` must be"),
        ({"into": (K, V.double())}, "pages of `into` must be"),
    ],
)
def test_shapes_are_checked(change, message):
    with pytest.raises(ValueError, match=f"move_kept: {message}.*; got"):
        move_kept(**GOOD | change)
