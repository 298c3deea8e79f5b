"""The query ring against a list of all queries: decode and prefill rows, padded or not."""

import random

import pytest
import torch

from vllm_kvcompress.engine.pages.query_ring import QueryRing

LAYERS, HEADS, DIM, SLOTS, REQUESTS, ROWS = 2, 2, 4, 4, 7, 8


@pytest.mark.parametrize("window", [1, 5, 12])
def test_ring_returns_the_last_queries_of_every_slot(window):
    """Slots are reused by other requests, and batches are padded in rows, in tokens or in both.

    A replayed graph stores queries also in a batch without a ring slot, which lays out nothing.
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
    all_queries: dict[int, list[torch.Tensor]] = {}
    lengths = [0] * REQUESTS
    slots, seq_lens = torch.zeros(ROWS, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    inactive = 0
    for step in range(60):
        if step % 4 == 0:
            if len(all_queries) == SLOTS - 1:
                finished = rng.choice([*all_queries])
                del all_queries[finished]
                ring.release(finished)
            started = rng.choice([i for i in range(1, REQUESTS) if i not in all_queries])
            ring.admit(started)
            all_queries[started] = []
        batch = rng.sample(range(1, REQUESTS), rng.randint(1, REQUESTS - 1))
        if step % 5 == 4:
            batch = [slot for slot in batch if slot not in all_queries]
        batch += [0] * rng.randint(0 if batch else 1, 1)
        rng.shuffle(batch)
        counts = [rng.choice([1, 1, 3, window, 40]) if step % 3 else 1 for _ in batch]
        rows = rng.choice([len(batch), ROWS])
        padded = max(sum(counts) + rng.choice([0, 5]), rows)
        query = torch.randn(LAYERS, padded, HEADS, DIM)
        start = [0]
        slots.fill_(3)  # values of an earlier batch
        for row, (slot, count) in enumerate(zip(batch, counts, strict=True)):
            row_queries = query[:, start[-1] : start[-1] + count]
            if slot in all_queries:
                all_queries[slot].extend(row_queries.unbind(1))
            lengths[slot] += count
            slots[row], seq_lens[row] = slot, lengths[slot]
            start.append(start[-1] + count)
        start += [start[-1]] * (rows - len(batch))
        live = torch.tensor(len(batch), dtype=torch.int32)
        ring.begin_batch(batch, recorded=False)
        assert ring.stores_queries == any(slot in all_queries for slot in batch)
        inactive += not ring.stores_queries
        ring.set_batch_rows(slots, seq_lens[: rng.choice([len(batch), ROWS])], live, rows)
        ring.lay_out(torch.tensor(start, dtype=torch.int32), padded, max(counts))
        for layer in range(LAYERS):
            ring.store(layer, query[layer])
        full = [slot for slot, queries in all_queries.items() if len(queries) >= window]
        if full:
            actual = ring.latest(full, [lengths[slot] for slot in full], window)
            expected = torch.stack([torch.stack(all_queries[slot][-window:], 1) for slot in full])
            assert torch.equal(actual, expected.flatten(0, 1))
    assert inactive >= 5


def test_writes_that_a_graph_records_are_laid_out_without_requests():
    device = torch.device("cpu")
    ring = QueryRing(
        layers=1,
        slots=2,
        requests=2,
        window=2,
        heads=HEADS,
        dim=DIM,
        max_rows=2,
        dtype=torch.float32,
        device=device,
    )
    ring.begin_batch([0, 0], recorded=True)
    assert ring.stores_queries
    ring.begin_batch([0, 0], recorded=False)
    assert not ring.stores_queries
