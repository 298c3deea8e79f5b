"""300 seeded random requests in a pool that is too small: nothing lost, nothing leaked."""

import random

import pytest

from checkpoints import make, tokens
from engines import BLOCK, V2, engine, settings

COUNT = 12 if V2 else 300
LONGEST = 400 if V2 else 6000
POOL = 24 if V2 else 195  # blocks; the longest prompt needs most of them


def requests(seed: int):
    """(prompt, new tokens, arrival step, abort step or None): mostly short, some very long."""
    rng = random.Random(seed)
    stems = [tokens(LONGEST, seed=100 + i) for i in range(3)]
    for index in range(COUNT):
        long = index % 25 == 0
        length = rng.randint(1, LONGEST) if long else rng.randint(1, LONGEST // 6)
        if rng.random() < 0.5:
            shared = rng.randint(0, length)
            prompt = rng.choice(stems)[:shared] + tokens(length - shared, seed=index)
        else:
            prompt = tokens(length, seed=index)
        abort = rng.randint(1, 12) if rng.random() < 0.15 else None
        new = rng.randint(1, 24) if rng.random() < 0.6 else rng.randint(60, 220)
        yield prompt, new, rng.randint(0, 1), abort


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_soak(checkpoints_folder):
    model = make("llama-gqa", checkpoints_folder)
    options = dict(
        additional_config=settings("cake", 0.3),
        max_model_len=LONGEST + 96,
        max_num_seqs=96,
    )
    todo = list(requests(seed=17))
    done: dict[str, list[int]] = {}
    aborted: dict[int, str] = {}
    steps = 0
    with engine(model, blocks=1 + POOL, max_num_batched_tokens=512, **options) as llm:
        free = llm.free_blocks
        resumed = llm.watch_preemptions()
        pending_aborts: list[tuple[int, str]] = []
        for index, (prompt, new, wait, abort) in enumerate(todo):
            llm.submit(str(index), prompt, new)
            if abort is not None:
                pending_aborts.append((steps + wait + abort, str(index)))
            for _ in range(wait):
                done.update({k: list(v.outputs[0].token_ids) for k, v in llm.step().items()})
                steps += 1
                for due, request_id in [p for p in pending_aborts if p[0] <= steps]:
                    pending_aborts.remove((due, request_id))
                    aborted[int(request_id)] = request_id
                    llm.llm.llm_engine.abort_request([request_id])
        done.update(llm.drain())
        assert llm.free_blocks == free
        assert not llm.manager._settled
        assert not llm.manager._packed
        assert not llm.manager._cacheable
        compressed = llm.compressor.compressed
    expected = {str(i) for i in range(COUNT)} - set(aborted.values())
    assert aborted
    assert expected <= done.keys()
    assert compressed > COUNT // 10
    if not V2:
        assert resumed, "the pool was meant to force preemption"
    # one engine, one request at a time: nobody to share with, nobody to preempt for
    with engine(model, enable_prefix_caching=False, **options) as llm:
        for index, (prompt, new, _, _) in enumerate(todo):
            request_id = str(index)
            if request_id not in expected:
                continue
            # A prompt under the threshold is never compressed, whatever happens to it.
            cuts = resumed.get(request_id, []) if len(prompt) >= 128 else []
            llm.alone(prompt, new, done[request_id], cuts)
    assert BLOCK * POOL >= LONGEST
