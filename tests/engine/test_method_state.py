"""State of methods that pack requests again: attention sums by page and thresholds by slot."""

import pytest
import torch

from vllm_kvcompress.engine.pages.pool import PagePool

LAYERS, BLOCKS, HEADS, BLOCK, WIDTH = 3, 7, 2, 4, 6
ORDERS = {
    # order of layers, blocks and heads in the allocation, outermost first
    "layers, blocks": "LBHN",
    "blocks, layers": "BLHN",
    "layers, heads, blocks": "LHBN",
    "blocks, heads, layers": "BHLN",
}


def pool_of(order: str) -> PagePool:
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": BLOCK}
    store = torch.zeros(*(sizes[axis] for axis in order), WIDTH)
    layers = store.permute(*(order.index(axis) for axis in "LBHN"), 4).unbind()
    return PagePool([*layers], max_requests=3, max_rows=4, max_blocks=8, block_size=BLOCK)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_sums_are_stored_by_page_in_every_layout(order):
    """Also in layouts with heads outermost, in which most flat ids are not pages."""
    pool = pool_of(order)
    pool.allocate_method_state(HEADS, sums=True, thresholds=False)
    pages = pool.flat_ids_in_all_layers(torch.arange(BLOCKS))
    assert pool.thresholds is None
    assert pool.sums._sums.numel() == LAYERS * BLOCKS * HEADS * BLOCK
    sums = torch.rand(LAYERS, HEADS, BLOCKS * BLOCK, generator=torch.Generator().manual_seed(1))
    pool.sums.write(pages, torch.full((LAYERS,), BLOCKS), sums)
    assert torch.equal(pool.sums.read(pages), sums)
    reversed_sums = sums.unflatten(2, (BLOCKS, BLOCK)).flip(2).flatten(2)
    assert torch.equal(pool.sums.read(pages.flip(1)), reversed_sums)


def test_write_only_changes_the_counted_pages():
    """Page ids past a row's count may be garbage, and the last page may be partial."""
    pool = pool_of("LBHN")
    pool.allocate_method_state(HEADS, sums=True, thresholds=False)
    all_pages = pool.flat_ids_in_all_layers(torch.arange(1, BLOCKS))
    before = torch.rand(LAYERS, HEADS, (BLOCKS - 1) * BLOCK)
    pool.sums.write(all_pages, torch.full((LAYERS,), BLOCKS - 1), before)
    counts, sums = torch.tensor([2, 0, 3], dtype=torch.int32), torch.rand(LAYERS, HEADS, 11)
    pages = all_pages[:, [4, 1, 2]].int()
    pages[0, 2], pages[1] = 10**6, -7  # garbage past the counts
    pool.sums.write(pages, counts, sums)
    after = pool.sums.read(all_pages)
    for layer, count in enumerate(counts.tolist()):
        for index, column in enumerate((4, 1, 2)):
            actual = after[layer, :, column * BLOCK :][:, :BLOCK]
            expected = before[layer, :, column * BLOCK :][:, :BLOCK]
            if index < count:
                expected = sums[layer, :, index * BLOCK :][:, :BLOCK]
            assert torch.equal(actual[:, : expected.shape[1]], expected)
    for column in (0, 3, 5):
        span = slice(column * BLOCK, column * BLOCK + BLOCK)
        assert torch.equal(after[..., span], before[..., span])


def test_thresholds_belong_to_a_request_and_are_cleared_with_its_slot():
    pool = pool_of("LBHN")
    pool.allocate_method_state(HEADS, sums=False, thresholds=True)
    pool.admit("a")
    pool.admit("b")
    slots = pool.slots(["b", "a"])
    assert pool.thresholds.read(slots).isnan().all()
    thresholds = torch.rand(2, LAYERS, HEADS)
    pool.thresholds.write(slots, thresholds)
    assert torch.equal(pool.thresholds.read(slots[::-1]), thresholds.flip(0))
    pool.forget("a")
    pool.admit("c")
    assert pool.slots(["c"]) == slots[1:]
    assert pool.thresholds.read(pool.slots(["c"])).isnan().all()
    assert torch.equal(pool.thresholds.read(slots[:1]), thresholds[:1])
