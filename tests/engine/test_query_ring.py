"""The ring against a list of every query: rows of one token and of many, padded or not."""

import random

import pytest
import torch

from engines import V2
from vllm_kvcompress.engine.pages.query_ring import QueryRing

pytestmark = pytest.mark.skipif(V2, reason="the ring is the same on both model runners")

LAYERS, HEADS, DIM, SLOTS, REQUESTS, ROWS = 2, 2, 4, 4, 7, 8


@pytest.mark.parametrize("window", [1, 5, 12])
def test_it_has_the_last_queries_of_every_slot(window):
    """Whatever was in its buffers before, whoever had its slots, and whatever pads a batch.

    Padding goes behind the rows, behind the tokens, or both, as graphs want it.
    """
    rng, device = random.Random(window), torch.device("cpu")
    ring = QueryRing(
        layers=LAYERS,
        slots=SLOTS,
        requests=REQUESTS,
        window=window,
        heads=HEADS,
        dim=DIM,
        max_rows=ROWS,
        dtype=torch.float32,
        device=device,
    )
    every: dict[int, list[torch.Tensor]] = {}
    lengths = [0] * REQUESTS
    slots, seq_lens = torch.zeros(ROWS, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    for step in range(60):
        if step % 4 == 0:
            if len(every) == SLOTS - 1:
                ended = rng.choice([*every])
                del every[ended]
                ring.release(ended)
            begun = rng.choice([i for i in range(1, REQUESTS) if i not in every])
            ring.admit(begun)
            every[begun] = []
        batch = rng.sample(range(1, REQUESTS), rng.randint(1, REQUESTS - 1))
        batch += [0] * rng.randint(0, 1)
        rng.shuffle(batch)
        counts = [rng.choice([1, 1, 3, window, 40]) if step % 3 else 1 for _ in batch]
        rows = rng.choice([len(batch), ROWS])
        padded = max(sum(counts) + rng.choice([0, 5]), rows)
        query = torch.randn(LAYERS, padded, HEADS, DIM)
        start = [0]
        slots.fill_(3)  # what an earlier batch left
        for row, (slot, count) in enumerate(zip(batch, counts, strict=True)):
            own = query[:, start[-1] : start[-1] + count]
            if slot in every:
                every[slot].extend(own.unbind(1))
            lengths[slot] += count
            slots[row], seq_lens[row] = slot, lengths[slot]
            start.append(start[-1] + count)
        start += [start[-1]] * (rows - len(batch))
        live = torch.tensor(len(batch), dtype=torch.int32)
        ring.follow(slots, seq_lens[: rng.choice([len(batch), ROWS])], live, rows)
        ring.lay_out(torch.tensor(start, dtype=torch.int32), padded, max(counts))
        for layer in range(LAYERS):
            ring.store(layer, query[layer])
        known = [slot for slot, queries in every.items() if len(queries) >= window]
        if known:
            got = ring.latest(known, [lengths[slot] for slot in known], window)
            want = torch.stack([torch.stack(every[slot][-window:], 1) for slot in known])
            assert torch.equal(got, want.flatten(0, 1))
