"""What methods remember of answers: beside every page, whatever the pool's layout; per slot."""

import pytest
import torch

from vllm_kvcompress.engine.pages.pool import PagePool

LAYERS, BLOCKS, HEADS, BLOCK, WIDTH = 3, 7, 2, 4, 6
ORDERS = {
    # where layers, blocks and heads lie in one allocation, outermost first
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
def test_every_page_has_sums_of_its_own(order):
    """Also where heads lie outside of blocks, and most flat ids name no page."""
    pool = pool_of(order)
    pool.remember(HEADS, sums=True, thresholds=False)
    every = pool.every_layer(torch.arange(BLOCKS))
    assert pool.thresholds is None
    assert pool.sums._sums.numel() == LAYERS * BLOCKS * HEADS * BLOCK
    given = torch.rand(LAYERS, HEADS, BLOCKS * BLOCK, generator=torch.Generator().manual_seed(1))
    pool.sums.write(every, torch.full((LAYERS,), BLOCKS), given)
    assert torch.equal(pool.sums.read(every), given)
    # other pages of the same, in another order
    back = every.flip(1)
    turned = given.unflatten(2, (BLOCKS, BLOCK)).flip(2).flatten(2)
    assert torch.equal(pool.sums.read(back), turned)


def test_only_the_pages_that_count_are_written():
    """Others may be any number; the last page may be short."""
    pool = pool_of("LBHN")
    pool.remember(HEADS, sums=True, thresholds=False)
    every = pool.every_layer(torch.arange(1, BLOCKS))
    before = torch.rand(LAYERS, HEADS, (BLOCKS - 1) * BLOCK)
    pool.sums.write(every, torch.full((LAYERS,), BLOCKS - 1), before)
    counts, given = torch.tensor([2, 0, 3], dtype=torch.int32), torch.rand(LAYERS, HEADS, 11)
    pages = every[:, [4, 1, 2]].int()
    garbage = pages.clone()
    garbage[0, 2], garbage[1] = 10**6, -7
    pool.sums.write(garbage, counts, given)
    after = pool.sums.read(every)
    for layer, count in enumerate(counts.tolist()):
        for place, column in enumerate((4, 1, 2)):
            got = after[layer, :, column * BLOCK :][:, :BLOCK]
            want = before[layer, :, column * BLOCK :][:, :BLOCK]
            if place < count:
                want = given[layer, :, place * BLOCK :][:, :BLOCK]
            assert torch.equal(got[:, : want.shape[1]], want)
    for column in (0, 3, 5):
        span = slice(column * BLOCK, column * BLOCK + BLOCK)
        assert torch.equal(after[..., span], before[..., span])


def test_a_threshold_is_its_requests():
    pool = pool_of("LBHN")
    pool.remember(HEADS, sums=False, thresholds=True)
    pool.admit("a")
    pool.admit("b")
    slots = pool.slots(["b", "a"])
    assert pool.thresholds.read(slots).isnan().all()
    given = torch.rand(2, LAYERS, HEADS)
    pool.thresholds.write(slots, given)
    assert torch.equal(pool.thresholds.read(slots[::-1]), given.flip(0))
    pool.forget("a")
    pool.admit("c")
    assert pool.slots(["c"]) == slots[1:]
    assert pool.thresholds.read(pool.slots(["c"])).isnan().all()
    assert torch.equal(pool.thresholds.read(slots[:1]), given[:1])
