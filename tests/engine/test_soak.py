"""Seeded random requests in a pool that is too small: nothing lost, nothing leaked."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from checkpoints import make, tokens
from engines import BLOCK, V2, engine, settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of one engine.

    Args:
        count: requests.
        longest: tokens of the longest prompt.
        pool: blocks; the longest prompt needs most of them.
        chunk: tokens a step may compute.
        talkative: share of the requests that want a long answer.
        options: of the engine.
    """

    count: int
    longest: int
    pool: int
    chunk: int = 512
    talkative: float = 0.4
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Request:
    """One request, and when it is sent and given up, in steps."""

    prompt: list[int]
    new: int
    wait: int
    abort: int | None
    priority: int


SMALL = dict(count=24, longest=450, pool=22, chunk=256, talkative=0.8)
LOADS = {
    "plain": Load(count=300, longest=6000, pool=195),
    "async": Load(**SMALL, options={"async_scheduling": True}),
    "priority": Load(**SMALL, options={"scheduling_policy": "priority"}),
}
if V2:
    LOADS = {"plain": Load(count=12, longest=400, pool=24)}


def requests(load: Load, seed: int):
    """Mostly short, some very long; half of them begin alike."""
    rng = random.Random(seed)
    stems = [tokens(load.longest, seed=100 + i) for i in range(3)]
    for index in range(load.count):
        long = index % 25 == 0 or load.longest < 1000
        length = rng.randint(1, load.longest if long else load.longest // 6)
        shared = rng.randint(0, length) if rng.random() < 0.5 else 0
        yield Request(
            prompt=rng.choice(stems)[:shared] + tokens(length - shared, seed=index),
            new=rng.randint(60, 220) if rng.random() < load.talkative else rng.randint(1, 24),
            wait=rng.randint(0, 1),
            abort=rng.randint(1, 12) if rng.random() < 0.15 else None,
            priority=rng.randint(0, 3),
        )


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", LOADS)
def test_soak(name, checkpoints_folder, keep_async_scheduling):
    model, load = make("llama-gqa", checkpoints_folder), LOADS[name]
    options = dict(
        additional_config=settings("cake", 0.3),
        max_model_len=load.pool * BLOCK,
        max_num_seqs=96,
    )
    todo = list(requests(load, seed=17))
    done: dict[str, list[int]] = {}
    aborted: set[str] = set()
    due: list[tuple[int, str]] = []
    steps = 0
    with engine(
        model, blocks=1 + load.pool, max_num_batched_tokens=load.chunk, **options, **load.options
    ) as llm:
        free = llm.free_blocks
        resumed = llm.watch_preemptions()
        for index, request in enumerate(todo):
            llm.submit(str(index), request.prompt, request.new, priority=request.priority)
            if request.abort is not None:
                due.append((steps + request.wait + request.abort, str(index)))
            for _ in range(request.wait):
                done.update({k: list(v.outputs[0].token_ids) for k, v in llm.step().items()})
                steps += 1
                for when, request_id in [item for item in due if item[0] <= steps]:
                    due.remove((when, request_id))
                    aborted.add(request_id)
                    llm.llm.llm_engine.abort_request([request_id])
        done.update(llm.drain())
        llm.settle()
        assert llm.free_blocks == free
        assert not llm.manager._settled
        assert not llm.manager._packed
        assert not llm.manager._cacheable
        compressed = llm.compressor.compressed
    expected = {str(i) for i in range(load.count)} - aborted
    assert aborted
    assert expected <= done.keys()
    assert compressed > load.count // 10
    if not V2:
        assert resumed, "the pool was meant to force preemption"
    # one engine, one request at a time: nobody to share with, nobody to preempt for
    with engine(model, enable_prefix_caching=False, **options) as llm:
        for request_id in sorted(expected, key=int):
            request = todo[int(request_id)]
            # A prompt under the threshold is never compressed, whatever happens to it.
            cuts = resumed.get(request_id, []) if len(request.prompt) >= 128 else []
            llm.alone(request.prompt, request.new, done[request_id], cuts)
