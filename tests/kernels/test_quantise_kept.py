import itertools
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import property_test
from kvcompress_kernels import k4v3
from kvcompress_kernels.builds import FLOAT8, FLOATS
from kvcompress_kernels.quantise_kept import quantise_kept, reference

pytestmark = [
    pytest.mark.gpu,
    # The interpreter warns where a kernel reduces nothing but NaN, which is defined on a GPU.
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]

prop = property_test(40, interpreted=6)
DTYPES = [*FLOATS, *FLOAT8]
ORDERS = ["".join(order) for order in itertools.permutations("PHT")]
"""Order of pages, heads and tokens in memory. The head dim is innermost."""
LAYOUTS = [*ORDERS, "halves"]
TIE = 1e-3
"""Distance from a rounding tie, in units of the rounded number, at which both sides are right."""


class Case(NamedTuple):
    """A cache, and the arguments that quantise several rows of it."""

    keys: torch.Tensor
    values: torch.Tensor
    pages: torch.Tensor
    kept: torch.Tensor | None
    tokens: torch.Tensor
    destinations: torch.Tensor
    into: torch.Tensor
    key_scale: float | torch.Tensor = 1.0
    value_scale: float | torch.Tensor = 1.0

    @property
    def itemsize(self):
        return self.into.shape[3] // (2 * self.keys.shape[2])

    def run(self, op):
        """Return the bytes of `into` after `op` on a copy of the cache."""
        into = self.into.clone(memory_format=torch.preserve_format)
        op(*self[:6], into=into, key_scale=self.key_scale, value_scale=self.value_scale)
        return into


def reference_op(*args, into, key_scale, value_scale):
    reference.run(*args, into, key_scale, value_scale)


def cache(count, heads, dim, block, dtype, layout):
    """Return key pages, value pages, and the bytes of both as rows of tokens. All are zero."""
    if layout == "halves":  # as in CPU_ATTN: transposed K, then V
        store = torch.zeros(count, heads, 2 * block * dim, dtype=dtype)
        keys = store[..., : block * dim].unflatten(2, (dim, block))
        values = store[..., block * dim :].unflatten(2, (block, dim))
        return keys, values, store.view(torch.uint8).unflatten(2, (block, -1))
    sizes = {"P": count, "H": heads, "T": block}
    store = torch.zeros(*(sizes[axis] for axis in layout), 2 * dim, dtype=dtype)
    store = store.permute(*(layout.index(axis) for axis in "PHT"), 3)
    return store[..., :dim].mT, store[..., dim:], store.view(torch.uint8)


def numbers(shape, dtype, *, special=False):
    """Return random numbers ``[..., D]`` whose channels have different statistics."""
    x = torch.randn(shape)
    x[..., 1] += 200.0
    x[..., 2] = 0.7
    x[..., 3] = 0.0
    x[..., 4] = -x[..., 4].abs() * 100
    x[..., 5] *= 1e-6
    x[..., 6] = 200.03
    if special:
        x[..., 7] *= 1e5
        x[..., 8] = 3e38
        x[..., 9] = -3e38
        for number in (torch.nan, torch.inf, -torch.inf):
            x[torch.rand(shape) < 0.02] = number
            x[..., 10 + torch.randint(5, ())] = number
    return x.to(dtype)


def case(
    counts,
    *,
    dim=64,
    heads=2,
    block=16,
    dtype=torch.bfloat16,
    layout="PTH",
    keep_all=False,
    special=False,
    spare=1,
    aliased=True,
    key_scale=1.0,
    value_scale=1.0,
):
    """Return a case whose rows have `counts` tokens.

    Unused entries of `destinations` refer to a guard page, which the tests compare.

    Args:
        aliased: write to pages of the same memory as the source pages.
        spare: unused destinations of each row.
    """
    rows, longest = len(counts), max(counts)
    prompt = longest if keep_all else longest + longest // 2 + 3
    full, page_tokens = -(-prompt // block), k4v3.page_tokens(block, dtype.itemsize)
    needed = [-(-count // page_tokens) for count in counts]
    max_pages = max(needed) + spare
    total = rows * (full + max_pages) + 1
    keys, values, into = cache(total, heads, dim, block, dtype, layout)
    into.copy_(torch.randint(256, into.shape, dtype=torch.uint8))
    order = torch.randperm(total)
    pages, targets = order[1:][: rows * full], order[1 + rows * full :]
    pages, targets = pages.view(rows, full), targets.view(rows, max_pages)
    for row, count in enumerate(needed):
        targets[row, count:] = order[0]
    source = pages.flatten()
    keys[source] = numbers((len(source), heads, block, dim), dtype, special=special).mT
    values[source] = numbers((len(source), heads, block, dim), dtype, special=special)
    kept = None
    if not keep_all:
        kept = torch.zeros(rows, heads, longest, dtype=torch.int32)
        for row, head in itertools.product(range(rows), range(heads)):
            positions = torch.randperm(prompt)[: counts[row]].sort().values
            kept[row, head, : counts[row]] = positions
    if not aliased:
        into = into.clone(memory_format=torch.preserve_format)
    tokens = torch.tensor(counts, dtype=torch.int32)
    return Case(keys, values, pages, kept, tokens, targets, into, key_scale, value_scale)


def kept_numbers(c, row):
    """Return the kept keys and values ``[Hkv, groups, 64, D]`` float64, NaN past the last token."""
    _, heads, dim, block = c.keys.shape
    count = int(c.tokens[row])
    position = torch.arange(count)[None] if c.kept is None else c.kept[row, :, :count].long()
    page, slot, head = c.pages[row][position // block], position % block, torch.arange(heads)
    parts = []
    for part, scale in ((c.keys.mT, c.key_scale), (c.values, c.value_scale)):
        factor = torch.as_tensor(scale, dtype=torch.float32).expand(len(c.pages))[row]
        x = torch.full((heads, -(-count // 64) * 64, dim), torch.nan, dtype=torch.float64)
        x[:, :count] = part[page.long(), head[:, None], slot].double() * factor.double()
        parts.append(x.unflatten(1, (-1, 64)))
    return parts


def written_groups(c, content, row):
    """Return the groups ``[Hkv, groups, ...]`` that a row wrote into the bytes `content`."""
    count = -(-int(c.tokens[row]) // 64)
    group = k4v3.read_pages(content, c.destinations[row], c.itemsize)
    return k4v3.Group(*(part.transpose(0, 1).flatten(1, 2)[:, :count] for part in group))


def assert_nearest_half(got, exact):
    """Check that float16 `got` is `exact` rounded to nearest, up to the side of a tie."""
    want = exact.half()
    spacing = (want.double().abs() / 1024).clamp(min=2.0**-24)
    error = (got.double() - exact).abs() - (want.double() - exact).abs()
    assert got.isfinite().all()
    assert (error <= TIE * spacing).all()


def assert_quantised(codes, scale, minimum, x, dim, levels):
    """Check codes, scales and minima of `x` along `dim` against the definition in float64."""
    missing = x.isnan()
    lowest = x.masked_fill(missing, torch.inf).amin(dim)
    largest = x.masked_fill(missing, -torch.inf).amax(dim)
    empty = missing.all(dim)
    assert_nearest_half(minimum, lowest.masked_fill(empty, 0.0).clamp(-65504, 65504))
    spread = (largest - minimum.double()).masked_fill(empty, 0.0)
    assert_nearest_half(scale, (spread / (levels - 1)).clamp(0, 65504))
    step = scale.double().unsqueeze(dim)
    exact = (x - minimum.double().unsqueeze(dim)) / step.where(step > 0, 1.0)
    exact = exact.where((step > 0) & ~missing, 0.0).clamp(0, levels - 1)
    want = (exact + 0.5).floor()
    tie = (exact % 1 - 0.5).abs() < TIE
    assert ((codes == want) | tie & ((codes - exact).abs() < 0.51)).all()


def check(c):
    """Check every byte of `into` after the op."""
    content, want = c.run(quantise_kept), c.run(reference_op)
    written = torch.zeros(c.into.shape, dtype=torch.bool)
    rows, page_tokens = 32 // c.itemsize, k4v3.page_tokens(c.into.shape[2], c.itemsize)
    for row, count in enumerate(c.tokens.tolist()):
        keys, values = kept_numbers(c, row)
        got, expected = (written_groups(c, x, row) for x in (content, want))
        for group in (got, expected):
            assert_quantised(*group[:3], keys, -2, 16)
            assert_quantised(*group[3:], values, -1, 8)
        assert torch.equal(got.key_minimum, expected.key_minimum) or c.key_scale != 1.0
        assert torch.equal(got.value_minimum, expected.value_minimum) or c.value_scale != 1.0
        past = torch.arange(keys.shape[1] * 64).view(-1, 64) >= count
        for part in (got.key_codes, got.value_codes, got.value_scale, got.value_minimum):
            assert not part[:, past].any()
        for first in range(0, count, page_tokens):
            used = -(-min(count - first, page_tokens) // 64) * rows
            written[c.destinations[row, first // page_tokens], :, :used] = True
    assert torch.equal(content[~written], c.into[~written])
    return content, want


@prop
@given(
    dim=st.sampled_from([64, 80, 96, 128, 256]),
    heads=st.integers(1, 3),
    block=st.sampled_from([32, 128]),
    counts=st.lists(st.sampled_from([0, 1, 63, 64, 65, 128, 200, 256]), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    keep_all=st.booleans(),
    special=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
)
def test_quantised_pages(counts, seed, **options):
    torch.manual_seed(seed)
    check(case(counts, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_16(layout, dtype):
    check(case([130, 64], heads=3, dtype=dtype, layout=layout))


@pytest.mark.parametrize("counts", [[0], [1], [63], [64], [65], [0, 300, 1]])
@pytest.mark.parametrize("keep_all", [False, True])
def test_partial_groups_and_pages(counts, keep_all):
    check(case(counts, block=32, keep_all=keep_all))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity(dtype):
    check(case([70, 64], block=32, dtype=dtype, special=True))


def test_nan_does_not_change_other_numbers():
    c = case([64], block=64, heads=1, keep_all=True)
    page = c.pages[0, 0]
    keys, values = numbers((2, 64, 64), torch.bfloat16)
    c.keys[page, 0], c.values[page, 0] = keys.mT, values
    clean = written_groups(c, c.run(quantise_kept), 0)
    middle_token, middle_channel = int(keys[:, 0].argsort()[32]), int(values[5].argsort()[32])
    c.keys[page, 0, 0, middle_token] = torch.nan
    c.values[page, 0, 5, middle_channel] = torch.nan
    got = written_groups(c, c.run(quantise_kept), 0)
    clean.key_codes[0, 0, middle_token, 0] = 0
    clean.value_codes[0, 0, 5, middle_channel] = 0
    for a, b in zip(got, clean, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("by_row", [False, True])
def test_scales_of_a_float8_cache(by_row, dtype):
    scales = 0.037, 2.9
    if by_row:
        scales = torch.tensor([0.037, 1.3]), torch.tensor([2.9, 1.0])
    check(case([70, 64], block=32, dtype=dtype, key_scale=scales[0], value_scale=scales[1]))
    check(case([70, 64], block=32, dtype=dtype, key_scale=scales[0]))
    check(case([70, 64], block=32, dtype=dtype, value_scale=scales[1]))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_numbers_on_the_grid_are_exact(dim):
    """Numbers that are a float16 minimum plus multiples of a float16 scale are kept exactly."""
    c = case([128], dim=dim, dtype=torch.float32)
    grid = torch.randint(16, c.keys.shape) / 8 - 1
    c.keys.copy_(grid)
    c.values.copy_(torch.randint(8, c.values.shape) / 4 - 1)
    for row in c.pages:
        c.keys[row, :, :, ::4], c.keys[row, :, :, 1::4] = -1.0, 0.875
        c.values[row, :, :, 0], c.values[row, :, :, 1] = -1.0, 0.75
    keep = torch.arange(128, dtype=torch.int32).expand(1, 2, 128)
    c = c._replace(kept=keep)
    keys, values = kept_numbers(c, 0)
    got = k4v3.dequantise(written_groups(c, c.run(quantise_kept), 0), torch.float64)
    assert torch.equal(got[0], keys)
    assert torch.equal(got[1], values)


@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_pages_may_be_of_another_dtype(itemsize):
    """Float32 numbers may be packed in the bytes of a float16 or float8 cache."""
    c = case([150], dtype=torch.float32)
    block = 32 // itemsize
    into = torch.randint(256, (6, 2, block, 2 * 64 * itemsize), dtype=torch.uint8)
    check(c._replace(into=into, destinations=torch.tensor([[4, 1, 5, 0]])))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tables_may_be_slices_of_larger_buffers(dtype):
    c = case([130, 64, 1])
    pad = torch.nn.functional.pad
    tables = dict(
        pages=pad(c.pages, (2, 1), value=-1).to(dtype)[:, 2:-1],
        kept=pad(c.kept, (3, 2), value=-1).to(dtype)[:, :, 3:-2],
        destinations=pad(c.destinations, (1, 1), value=-1).to(dtype).T.contiguous().T[:, 1:-1],
        tokens=torch.stack([c.tokens, c.tokens + 1], 1)[:, 0],
    )
    want, _ = check(c)
    content = c._replace(**tables).run(quantise_kept)
    assert torch.equal(content, want)


def test_no_rows_and_no_pages_change_nothing():
    c = case([64])
    none = c._replace(
        pages=c.pages[:0], kept=c.kept[:0], tokens=c.tokens[:0], destinations=c.destinations[:0]
    )
    assert torch.equal(none.run(quantise_kept), c.into)
    none = c._replace(
        kept=c.kept[:, :, :0], tokens=torch.zeros_like(c.tokens), destinations=c.destinations[:, :0]
    )
    assert torch.equal(none.run(quantise_kept), c.into)


def test_pages_in_the_memory_of_the_source():
    """The op writes into the cache that it reads."""
    c = case([200, 70], block=32)
    want = c.run(reference_op)
    quantise_kept(*c[:6], into=c.into)
    for row in range(2):
        got, expected = (written_groups(c, x, row) for x in (c.into, want))
        assert torch.equal(got.key_minimum, expected.key_minimum)
        assert (got.key_codes != expected.key_codes).float().mean() < 1e-3


@pytest.mark.parametrize(("source", "target"), [(0, 2), (2, 0)])
def test_offsets_beyond_two_to_the_31_bytes(source, target):
    """A CPU never allocates untouched memory, so this takes a few KiB there."""
    s_page, block, width = 2**30 + 16, 64, 256
    large = torch.empty(2 * s_page + block * width, dtype=torch.uint8)
    x, results = numbers((2, block, 64), torch.bfloat16), []
    for stride in (block * width, s_page):
        store = large[: 2 * stride + block * width]
        into = store.as_strided((3, 1, block, width), (stride, stride, width, 1))
        keys, values = into.view(torch.bfloat16).chunk(2, -1)
        keys[source, 0], values[source, 0] = x
        quantise_kept(
            keys.mT,
            values,
            torch.tensor([[source]]),
            None,
            torch.tensor([block], dtype=torch.int32),
            torch.tensor([[target]]),
            into=into,
        )
        results.append(into[target, 0, :16].clone())
    assert torch.equal(*results)


GOOD = {
    "key_pages": torch.zeros(4, 2, 64, 16),
    "value_pages": torch.zeros(4, 2, 16, 64),
    "pages": torch.zeros(3, 2, dtype=torch.int64),
    "kept": torch.zeros(3, 2, 4, dtype=torch.int32),
    "tokens": torch.zeros(3, dtype=torch.int32),
    "destinations": torch.zeros(3, 1, dtype=torch.int64),
    "into": torch.zeros(4, 2, 16, 256, dtype=torch.uint8),
}
K, V, INTO = GOOD["key_pages"], GOOD["value_pages"], GOOD["into"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_pages": K[0]}, r"key_pages must be \[N, Hkv, D, bs\]"),
        ({"key_pages": K.to(torch.uint8)}, "key_pages must be floats: view a quantised cache"),
        ({"value_pages": V.to(torch.int8)}, "value_pages must be floats: view a quantised cache"),
        ({"value_pages": V[:3]}, r"value_pages must be \[4, 2, 16, 64\]"),
        ({"value_pages": V[..., :32]}, r"value_pages must be \[4, 2, 16, 64\]"),
        ({"value_pages": V.half()}, r"value_pages must be \[4, 2, 16, 64\] float32"),
        ({"pages": GOOD["pages"][:1]}, r"kept must be \[1, 2, n\]"),
        ({"kept": GOOD["kept"][:, :1]}, r"kept must be \[3, 2, n\]"),
        ({"kept": GOOD["kept"][0]}, r"kept must be \[3, 2, n\]"),
        ({"tokens": GOOD["tokens"][:1]}, r"tokens must be \[3\]"),
        ({"destinations": GOOD["destinations"][:1]}, r"destinations must be \[3, max_pages\]"),
        ({"destinations": GOOD["destinations"][0]}, r"destinations must be \[3, max_pages\]"),
        ({"into": INTO.view(torch.int8)}, "into must be uint8"),
        ({"into": INTO[:, :1]}, r"into must be \[P, 2, rows, bytes\]"),
        ({"into": INTO[..., :192]}, r"bytes in \[128, 256, 512\]"),
        ({"into": INTO.mT.contiguous().mT}, "into must have a contiguous last axis"),
        ({"into": torch.zeros(4, 2, 16, 257, dtype=torch.uint8)[..., :256]}, "even strides"),
        ({"into": INTO[:, :, :8]}, "KV blocks of a multiple of 16 tokens"),
        ({"key_pages": K[:, :, :32], "value_pages": V[..., :32], "into": INTO[..., :128]}, "k4v3"),
        ({"key_scale": torch.ones(2)}, r"key_scale must be a float, or \[3\] float32"),
        ({"value_scale": torch.ones(3).double()}, r"value_scale must be a float, or \[3\] float32"),
    ],
)
def test_arguments_are_checked(change, message):
    with pytest.raises(ValueError, match=f"quantise_kept: .*{message}.*; got"):
        quantise_kept(**GOOD | change)
