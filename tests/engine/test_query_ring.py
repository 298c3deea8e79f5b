"""The ring against a list of every query: rows of one token and of many, padded or not."""

import random

import pytest
import torch

from engines import V2
from vllm_kvcompress.engine.pages.query_ring import QueryRing

pytestmark = pytest.mark.skipif(V2, reason="the ring is the same on both model runners")

LAYERS, HEADS, DIM, SLOTS, ROWS = 2, 2, 4, 6, 8


@pytest.mark.parametrize("window", [1, 5, 12])
def test_it_has_the_last_queries_of_every_slot(window):
    """Whatever was in its buffers before, and whatever pads a batch.

    Padding goes behind the rows, behind the tokens, or both, as graphs want it.
    """
    rng, device = random.Random(window), torch.device("cpu")
    ring = QueryRing(
        layers=LAYERS,
        slots=SLOTS,
        window=window,
        heads=HEADS,
        dim=DIM,
        max_rows=ROWS,
        dtype=torch.float32,
        device=device,
    )
    every: dict[int, list[torch.Tensor]] = {slot: [] for slot in range(1, SLOTS)}
    slots, seq_lens = torch.zeros(ROWS, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    for step in range(60):
        batch = rng.sample(range(1, SLOTS), rng.randint(1, SLOTS - 1)) + [0] * rng.randint(0, 2)
        rng.shuffle(batch)
        counts = [rng.choice([1, 1, 3, window, 40]) if step % 3 else 1 for _ in batch]
        rows = rng.choice([len(batch), ROWS])
        padded = max(sum(counts) + rng.choice([0, 5]), rows)
        query = torch.randn(LAYERS, padded, HEADS, DIM)
        start = [0]
        slots.fill_(3)  # what an earlier batch left
        for row, (slot, count) in enumerate(zip(batch, counts, strict=True)):
            own = query[:, start[-1] : start[-1] + count]
            if slot:
                every[slot].extend(own.unbind(1))
            slots[row] = slot
            seq_lens[row] = len(every[slot]) if slot else count
            start.append(start[-1] + count)
        start += [start[-1]] * (rows - len(batch))
        live = torch.tensor(len(batch), dtype=torch.int32)
        ring.follow(slots, seq_lens[: rng.choice([len(batch), ROWS])], live, rows)
        ring.lay_out(torch.tensor(start, dtype=torch.int32), padded, max(counts))
        for layer in range(LAYERS):
            ring.store(layer, query[layer])
        known = [slot for slot, queries in every.items() if len(queries) >= window]
        if known:
            got = ring.latest(known, [len(every[slot]) for slot in known], window)
            want = torch.stack([torch.stack(every[slot][-window:], 1) for slot in known])
            assert torch.equal(got, want.flatten(0, 1))
