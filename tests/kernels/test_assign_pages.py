import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import property_test
from kvcompress_kernels.assign_pages import assign_pages, reference

pytestmark = pytest.mark.gpu

prop = property_test(60, interpreted=10)
i32, i64 = torch.int32, torch.int64
SLOTS, STALE = 7, -5


def case_of(seed, requests, layers, width, per_block=None):
    """Return arguments for requests with random counts, in distinct slots and of random blocks."""
    generator = torch.Generator().manual_seed(seed)

    def pick(high, *shape, dtype=i32):
        return torch.randint(0, high, shape, generator=generator, dtype=dtype)

    per_block = layers if per_block is None else per_block
    counts = pick(width + 1, requests, layers)
    used = -(-counts.sum(1) // per_block)
    starts = used.cumsum(0) - used
    slots = torch.randperm(SLOTS, generator=generator)[:requests]
    rows = torch.stack([slots, pick(99, requests), starts], 1).to(i64)
    blocks, offset = pick(5000, int(used.sum()), dtype=i64), pick(3000, per_block)
    return (rows, blocks, offset, 3, counts), pick(999, requests, layers)


def tables(layers, width):
    """Return stale buffers: packed, num_packed, first_block, group tokens."""
    shapes = (SLOTS, layers, width), (SLOTS, layers), (SLOTS,), (SLOTS, layers)
    return [torch.full(shape, STALE, dtype=i32) for shape in shapes]


def check(case, layers, width, group_tokens=None, *, with_groups=True):
    got, want = tables(layers, width), tables(layers, width)
    groups = got[3] if with_groups else None
    assign_pages(*case, *got[:3], group_tokens=group_tokens, out_group_tokens=groups)
    reference.run(*case, *want[:3], group_tokens, want[3] if with_groups else None)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    return got


@prop
@given(
    st.integers(0, SLOTS),
    st.integers(1, 9),
    st.integers(1, 40),
    st.sampled_from(["tokens", "tokens, no groups", "groups"]),
    st.integers(0, 2**31 - 1),
)
def test_random_requests_match_the_reference(requests, layers, width, kind, seed):
    """Slots of other requests keep their content."""
    case, tokens = case_of(seed, requests, layers, width)
    if kind == "groups":
        packed, *_ = check(case, layers, width + 1, tokens)
        assert not packed[case[0][:, 0], :, 0].any()
    else:
        check(case, layers, width, with_groups=kind != "tokens, no groups")


@pytest.mark.parametrize(
    ("requests", "layers", "width"), [(1, 1, 1), (2, 3, 1024), (1, 28, 1030), (3, 80, 300)]
)
def test_boundary_sizes_match_the_reference(requests, layers, width):
    check(case_of(0, requests, layers, width)[0], layers, width)


def test_flat_pages():
    """With one page per block, distance 1 and offset 0, blocks are flat pages."""
    case, _ = case_of(1, 2, 5, 12, per_block=1)
    flat = case[1]
    packed = check((*case[:2], torch.zeros(1, dtype=i32), 1, case[4]), 5, 12)[0]
    for (slot, _, start), counts in zip(case[0].tolist(), case[4], strict=True):
        pages = flat[start : start + int(counts.sum())].split(counts.tolist())
        for layer, expected in enumerate(pages):
            assert packed[slot, layer].tolist() == [*expected.tolist(), *[0] * (12 - len(expected))]


def test_hand_computed_example():
    requests = torch.tensor([[3, 8, 0]])
    blocks, offset = torch.tensor([7, 4]), torch.tensor([0, 100], dtype=i32)
    counts = torch.tensor([[3, 1]], dtype=i32)
    packed, count, first, groups = check((requests, blocks, offset, 1, counts), 2, 4)
    assert packed[3].tolist() == [[7, 107, 4, 0], [104, 0, 0, 0]]
    assert (count[3].tolist(), int(first[3]), groups[3].tolist()) == ([3, 1], 8, [0, 0])


def test_no_blocks_and_no_columns():
    requests, none = torch.tensor([[2, 4, 0]]), torch.zeros(1, 3, dtype=i32)
    where = torch.zeros(0, dtype=i64), torch.zeros(3, dtype=i32), 1
    packed, count, first, _ = check((requests, *where, none), 3, 5)
    assert not packed[2].any()
    assert not count[2].any()
    assert int(first[2]) == 4
    check((requests, *where, none), 3, 0)


def test_inputs_may_be_parts_of_one_upload():
    case, _ = case_of(2, 3, 4, 6)
    upload = torch.cat([case[0].flatten(), case[1]])
    parts = upload[:9].view(3, 3), upload[9:]
    wide = torch.zeros(3, 8, dtype=i32)
    wide[:, ::2] = case[4]
    check((*parts, *case[2:4], wide[:, ::2]), 4, 6)


@pytest.mark.parametrize(
    "change",
    [
        dict(requests=torch.zeros(2, 2, dtype=i64)),
        dict(requests=torch.zeros(2, 3, dtype=i32)),
        dict(blocks=torch.zeros(4, dtype=i32)),
        dict(counts=torch.zeros(2, 4, dtype=i32)),
        dict(counts=torch.zeros(2, 3, dtype=i64)),
        dict(packed=torch.zeros(5, 6, 3, dtype=i32).transpose(1, 2)),
        dict(num_packed=torch.zeros(4, 3, dtype=i32)),
        dict(first_block=torch.zeros(4, dtype=i32)),
        dict(group_tokens=torch.zeros(2, 3, dtype=i32)),
        dict(out_group_tokens=torch.zeros(5, 4, dtype=i32)),
    ],
    ids=lambda change: next(iter(change)),
)
def test_tensors_are_checked(change):
    shapes = dict(layer_offset=(3,), counts=(2, 3), packed=(5, 3, 6), num_packed=(5, 3))
    good = {name: torch.zeros(shape, dtype=i32) for name, shape in shapes.items()}
    good |= dict(first_block=torch.zeros(5, dtype=i32), block_stride=1)
    good |= dict(requests=torch.tensor([[1, 0, 0], [2, 0, 0]]), blocks=torch.zeros(4, dtype=i64))
    assign_pages(**good)
    with pytest.raises(ValueError, match="assign_pages: "):
        assign_pages(**good | change)
