import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import INTERPRETED, property_test
from kvcompress_kernels.page_tables import page_tables, reference

pytestmark = pytest.mark.gpu

prop = property_test(60, interpreted=5)
i32 = torch.int32


@pytest.fixture(autouse=True)
def _default_device(device):
    with device:
        yield


@pytest.fixture
def triton(device):
    """Return the Triton module, or skip the test if its kernel cannot run."""
    if not INTERPRETED and device.type == "cpu":
        pytest.skip("needs a GPU or TRITON_INTERPRET=1")
    from kvcompress_kernels.page_tables import triton as page_tables_triton

    return page_tables_triton


def batch(rows, layers, width, block, blocks_in_pool=50, capacity=None):
    """Return a random batch in which some rows are compressed. The null block 0 pads tables."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(torch.initial_seed())

    def pick(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    table = torch.zeros(rows, width, dtype=i32)
    lengths = torch.zeros(rows, dtype=i32)
    first = torch.zeros(rows, dtype=i32)
    count = torch.zeros(rows, layers, dtype=i32)
    for r in range(rows):
        tokens = pick(1, width * block)
        used = -(-tokens // block)
        table[r, :used] = torch.randperm(blocks_in_pool - 1, generator=generator)[:used].int() + 1
        lengths[r] = tokens
        if pick(0, 2):
            first[r] = pick(0, tokens // block)
            table[r, : first[r]] = 0  # These blocks were freed.
            for layer in range(layers):
                count[r, layer] = pick(0, int(first[r]))
    capacity = int(count.max()) if capacity is None else capacity
    packed = torch.randint(1000, 2000, (rows, layers, capacity), generator=generator, dtype=i32)
    return table, lengths, packed, count, first


def flat_ids(layout, layers, blocks):
    """Return (layer_offset, block_stride); see docs/architecture.md, The flat page pool."""
    if layout == "compact":
        return torch.arange(layers, dtype=i32) * blocks, 1
    return torch.arange(layers, dtype=i32), layers


def tables_of(table, lengths, packed, count, first, layer_offset, stride, block, *, op=None):
    """Run the op with one slot per row and zeroed buffers of the batch's size."""
    (rows, width), layers = table.shape, len(layer_offset)
    out = torch.zeros(layers, rows, width, dtype=i32), torch.zeros(layers, rows, dtype=i32)
    slots, live = torch.arange(rows, dtype=i32), torch.tensor(rows, dtype=i32)
    ids = layer_offset, stride, block
    (op or page_tables)(table, lengths, packed, count, first, *ids, slots, live, *out)
    return out


def check(case, layer_offset, stride, block):
    """Compare with the reference. Past a length, a table may only refer to the row's own pages."""
    table = case[0]
    before = [x.clone() for x in case]
    got, got_lengths = tables_of(*case, layer_offset, stride, block)
    assert all(torch.equal(a, b) for a, b in zip(before, case, strict=True))
    want, want_lengths = tables_of(*case, layer_offset, stride, block, op=reference.run)
    assert torch.equal(got_lengths, want_lengths)
    for layer, offset in enumerate(layer_offset.tolist()):
        for r, length in enumerate(got_lengths[layer].tolist()):
            used, row = -(-length // block), got[layer, r].tolist()
            assert row[:used] == want[layer, r, :used].tolist()
            owned = {offset + stride * b for b in [0, *table[r].tolist()]}
            assert set(row[used:]) <= owned | {0}
    return got, got_lengths


@prop
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 12),
    st.sampled_from([1, 16, 32]),
    st.sampled_from(["compact", "outermost"]),
    st.integers(0, 2**31 - 1),
    st.integers(0, 20),
)
def test_random_batches_match_the_reference(rows, layers, width, block, layout, seed, spare):
    """`packed` has `spare` unused columns, possibly past the width of the table."""
    torch.manual_seed(seed)
    case = batch(rows, layers, width, block)
    case = (*case[:2], torch.nn.functional.pad(case[2], (0, spare), value=-7), *case[3:])
    check(case, *flat_ids(layout, layers, 50), block)


# 70 tokens in blocks of 16: 4 full blocks became 2 pages and 1 page, and block 9 is the tail.
PACKED = [[0, 0, 0, 0, 9, 0]], [70], [[[41, 57], [33, 0]]], [[2, 1]], [4]
ONLY_THE_TAIL = [[0, 0, 5, 6]], [50], [[[], []]], [[0, 0]], [2]
ALL_PAGES = [[0, 0, 0]], [48], [[[7, 8, 9]]], [[3]], [3]


@pytest.mark.parametrize(
    ("case", "ids", "tables", "lengths"),
    [
        (PACKED, ("compact", 2, 20), [[41, 57, 9], [33, 29]], [38, 22]),
        (PACKED, ("outermost", 2, 20), [[41, 57, 18], [33, 19]], [38, 22]),
        (ONLY_THE_TAIL, ("outermost", 2, 50), [[10, 12], [11, 13]], [18, 18]),
        (ALL_PAGES, ("compact", 1, 50), [[7, 8, 9]], [48]),
    ],
    ids=["packed", "outermost", "only the tail", "a full table"],
)
def test_hand_computed_examples(case, ids, tables, lengths):
    case = tuple(torch.tensor(x, dtype=i32) for x in case)
    got, got_lengths = check(case, *flat_ids(*ids), 16)
    assert [row[0, : len(want)].tolist() for row, want in zip(got, tables, strict=True)] == tables
    assert got_lengths[:, 0].tolist() == lengths


def test_inputs_may_be_slices_of_larger_buffers():
    """vLLM passes views of larger buffers."""
    table, lengths, packed, count, first = batch(3, 2, 6, 16)
    wide = torch.full((8, 20), 77, dtype=i32)
    wide[:3, :6] = table
    pool = torch.full((8, 2, 30), 88, dtype=i32)
    pool[:3, :, : packed.shape[2]] = packed
    offset, stride = flat_ids("outermost", 2, 50)
    one = tables_of(table, lengths, packed, count, first, offset, stride, 16)
    views = wide[:3, :6], lengths, pool[:3, :, : packed.shape[2]], count, first
    two = check(views, offset, stride, 16)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


# -- persistent buffers ---------------------------------------------------------------------------

STALE = -5


def into(case, layer_offset, stride, block, *, live, rows, width, slots=None):
    """Run the op on buffers that hold `STALE`, with the rows' compression state in random slots."""
    table, lengths, packed, count, first = case
    batch_size = len(table)
    slots = torch.randperm(batch_size + 3)[:batch_size].int() if slots is None else slots
    state = packed, count, first
    pools = [torch.full((batch_size + 3, *x.shape[1:]), 77, dtype=i32) for x in state]
    for pool, x in zip(pools, state, strict=True):
        pool[slots.long()] = x
    layers = len(layer_offset)
    out = torch.full((layers, rows, width), STALE, dtype=i32)
    out_lengths = torch.full((layers, rows), STALE, dtype=i32)
    scalar = torch.tensor(live, dtype=i32)
    sizes = layer_offset, stride, block
    page_tables(table, lengths, *pools, *sizes, slots, scalar, out, out_lengths)
    return out, out_lengths


def check_into(out, out_lengths, case, layer_offset, stride, block, live):
    want, want_lengths = tables_of(*case, layer_offset, stride, block, op=reference.run)
    layers, rows = out_lengths.shape
    assert torch.equal(out_lengths[:, :live], want_lengths[:, :live])
    assert not out_lengths[:, live:].any()
    for layer in range(layers):
        for r in range(rows):
            used = -(-int(out_lengths[layer, r]) // block)
            got = out[layer, r].tolist()
            blocks = [0, *(case[0][r].tolist() if r < live else ())]
            owned = {int(layer_offset[layer]) + stride * b for b in blocks}
            assert got[:used] == want[layer, r, :used].tolist() if r < live else got[0] in owned
            assert set(got[used:]) <= {STALE, *owned}


@pytest.mark.parametrize("layout", ["compact", "outermost"])
@pytest.mark.parametrize("live", [0, 1, 3, 5])
@pytest.mark.parametrize(("layers", "width"), [(1, 7), (3, 128), (9, 300)])
def test_live_rows_match_the_reference(layout, live, layers, width):
    """The buffers have more rows and columns than the batch."""
    case = batch(5, layers, width - 2, 16, blocks_in_pool=400)
    ids = *flat_ids(layout, layers, 400), 16
    out = into(case, *ids, live=live, rows=7, width=width)
    check_into(*out, case, *ids, live)


@pytest.mark.parametrize("seed", range(3))
def test_buffers_may_be_narrower_than_vllms_table(seed):
    """The buffers are as wide as the layers' tables, and the sequences are longer."""
    torch.manual_seed(seed)
    table = torch.stack([torch.randperm(399)[:300].int() + 1 for _ in range(4)])
    lengths = torch.tensor([4800, 4787, 3000, 1], dtype=i32)
    first = torch.tensor([290, 280, 170, 0], dtype=i32)
    count = torch.tensor([[5, 9, 0], [1, 1, 1], [12, 3, 0], [0, 0, 0]], dtype=i32)
    case = table, lengths, torch.randint(1000, 2000, (4, 3, 12), dtype=i32), count, first
    ids = *flat_ids("compact", 3, 400), 16
    out = into(case, *ids, live=4, rows=5, width=30)
    assert int(out[1].max()) == 3000 - (170 - 12) * 16 <= 30 * 16
    check_into(*out, case, *ids, 4)


def test_lengths_are_limited_to_the_buffers_width():
    """A dummy batch may use the maximum sequence length with a pool that cannot hold it."""
    table, no_blocks = torch.zeros(2, 300, dtype=i32), torch.zeros(2, dtype=i32)
    case = table, torch.tensor([4800, 481], dtype=i32), torch.zeros(2, 3, 4, dtype=i32)
    case = *case, torch.zeros(2, 3, dtype=i32), no_blocks
    _, lengths = into(case, *flat_ids("compact", 3, 400), 16, live=2, rows=3, width=30)
    assert lengths.tolist() == [[480, 480, 0]] * 3


def test_one_program_may_write_all_columns(triton, monkeypatch):
    """A grid with enough rows does not split the columns."""
    monkeypatch.setattr(triton, "PROGRAMS", 1)
    case = batch(4, 2, 300, 16, blocks_in_pool=400)
    ids = *flat_ids("compact", 2, 400), 16
    out = into(case, *ids, live=3, rows=4, width=300)
    check_into(*out, case, *ids, 3)


def test_uncompressed_requests_may_share_a_slot():
    table = torch.randint(1, 50, (3, 6), dtype=i32)
    lengths = torch.tensor([1, 33, 96], dtype=i32)
    empty = torch.zeros(1, 2, 4, dtype=i32), torch.zeros(1, 2, dtype=i32), torch.zeros(1, dtype=i32)
    offset, stride = flat_ids("outermost", 2, 50)
    out, out_lengths = (torch.full(shape, STALE, dtype=i32) for shape in ((2, 3, 6), (2, 3)))
    slots, live = torch.zeros(3, dtype=i32), torch.tensor(3, dtype=i32)
    page_tables(table, lengths, *empty, offset, stride, 16, slots, live, out, out_lengths)
    assert torch.equal(out, table * stride + offset[:, None, None])
    assert torch.equal(out_lengths, lengths.expand(2, 3))


def test_outputs_may_be_slices_of_larger_buffers():
    case = batch(3, 2, 6, 16)
    ids = *flat_ids("compact", 2, 50), 16
    out, out_lengths = torch.full((2, 8, 20), STALE, dtype=i32), torch.zeros(2, 8, dtype=i32)
    views = out[:, 2:5, 4:10], out_lengths[:, 2:5]
    slots, live = torch.arange(3, dtype=i32), torch.tensor(3, dtype=i32)
    page_tables(*case, *ids, slots, live, *views)
    check_into(*views, case, *ids, 3)
    views[0].fill_(STALE)
    assert (out == STALE).all()


def test_inside_a_cuda_graph(gpu):
    """Capture with one row, then replay with other inputs and numbers of rows."""
    ids = *flat_ids("compact", 2, 400), 16
    case = batch(4, 2, 200, 16, blocks_in_pool=400, capacity=200)
    slots, live = torch.arange(4, dtype=i32), torch.tensor(1, dtype=i32)
    out, out_lengths = torch.zeros(2, 4, 200, dtype=i32), torch.zeros(2, 4, dtype=i32)
    page_tables(*case, *ids, slots, live, out, out_lengths)  # compiles the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        page_tables(*case, *ids, slots, live, out, out_lengths)
    for rows in (4, 2):
        torch.manual_seed(rows)
        for tensor, replacement in zip(case, batch(4, 2, 200, 16, 400, 200), strict=True):
            tensor.copy_(replacement)
        live.fill_(rows)
        out.fill_(STALE)
        graph.replay()
        check_into(out, out_lengths, case, *ids, rows)


@pytest.mark.parametrize(
    "change",
    [
        {"block_table": torch.zeros(3, 0, dtype=i32)},
        {"seq_lens": torch.zeros(3, dtype=torch.int64)},
        {"packed": torch.zeros(4, 1, 5, dtype=i32)},
        {"packed": torch.zeros(3, 2, 5, dtype=i32)},
        {"packed": torch.zeros(4, 5, 2, dtype=i32).transpose(1, 2)},
        {"num_packed": torch.zeros(3, 2, dtype=i32)},
        {"layer_offset": torch.zeros(3, dtype=i32)},
        {"live": torch.zeros(1, dtype=i32)},
        {"out_lengths": torch.zeros(2, 3, dtype=i32)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_tensors_are_checked(change):
    shapes = {"block_table": (3, 6), "seq_lens": (3,), "packed": (4, 2, 5), "num_packed": (4, 2)}
    shapes |= {"first_block": (4,), "layer_offset": (2,), "slots": (3,), "live": ()}
    shapes |= {"out_tables": (2, 4, 6), "out_lengths": (2, 4)}
    good = {name: torch.zeros(shape, dtype=i32) for name, shape in shapes.items()}
    page_tables(**good, block_stride=1, block_size=16)
    with pytest.raises(ValueError, match="page_tables: "):
        page_tables(**good | change, block_stride=1, block_size=16)
