"""Prompts that are pulled into small pools: whatever comes and goes, everybody ends.

A scheduler alone, with a stand-in for its connector (`pulled`).
"""

import random

import pytest
from vllm.v1.request import RequestStatus

from checkpoints import make, tokens
from configuring import configure
from engines import first_runner
from pulled import SIZE, Pulling

pytestmark = first_runner

M = 8
WAYS = {
    "usual": {"compress": "cake-chunk", "lookahead": M},
    "never": {"compress": "cake-chunk", "lookahead": M, "lookahead_yields": "never"},
    "waiting": {"compress": "cake-chunk", "lookahead": M, "lookahead_yields": "waiting"},
    # longer prompts have no room to look ahead
    "long": {"compress": "cake-chunk", "lookahead": 256},
    "bounded": {"compress": "cake", "lookahead": M, "decode_budget": 96, "decode_interval": 32},
}


@pytest.fixture(scope="module")
def usual(checkpoints_folder):
    """vLLM's configuration, once for all schedulers of this file."""
    return configure(
        make("llama-two-layers", checkpoints_folder),
        block_size=SIZE,
        max_model_len=1024,
        dtype="float32",
        enforce_eager=True,
        max_num_batched_tokens=512,
        max_num_seqs=8,
    )


def drive(pulling, draw):
    """Let requests come and go; returns how many were packed, and how many found no blocks for it.

    Raises:
        AssertionError: one does not end, or keeps something.
    """
    free, to_come = pulling.free, 14
    shared = tokens(320, seed=draw.randrange(3))
    most = (free - 1) * SIZE
    for _ in range(3000):
        if to_come and draw.random() < 0.5:
            to_come -= 1
            prompt = shared[: draw.randrange(0, 321)] + tokens(
                draw.randrange(1, 300), seed=draw.randrange(1000)
            )
            answer = draw.choice([1, 3, 20, 60])
            prompt = prompt[: most - answer]
            pulling.add(str(to_come), prompt, answer, pull=draw.random() < 0.8)
        done = [name for name in pulling.loading if draw.random() < 0.15]
        failed = [name for name in done if draw.random() < 0.1]
        if pulling.scheduler.requests and draw.random() < 0.02:
            pulling.abort(draw.choice(list(pulling.scheduler.requests)))
            failed = []
        pulling.step(done, failed)
        looking = pulling.manager.planner._looking
        statuses = {pulling.scheduler.requests[name].status for name in looking}
        # whoever waits for its load holds no slot
        assert RequestStatus.WAITING_FOR_REMOTE_KVS not in statuses
        if not to_come and not pulling.scheduler.requests:
            break
    left = {name: each.status.name for name, each in pulling.scheduler.requests.items()}
    assert not left, (left, pulling.free)
    assert pulling.free == free
    planner = pulling.manager.planner
    kept = (planner.schedules, planner._looking, planner._pulled, pulling.loading)
    assert not any((*kept, pulling.manager.lookaheads, pulling.manager._packed))
    compression_stats = pulling.manager.compression_stats
    return compression_stats.planned.total(), compression_stats.skipped["full_pool"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("slots", [1, 8])
def test_everybody_ends_and_all_blocks_come_back(way, slots, usual):
    packed = whole = 0
    for seed in range(10):
        draw = random.Random(seed)
        own = {"budget": draw.choice([0.3, 0.6, 0.9])} | WAYS[way]
        done = drive(Pulling(usual, draw.choice([24, 27, 40]), slots, **own), draw)
        packed, whole = packed + done[0], whole + done[1]
    assert packed > 10
    # only where a prompt cannot look ahead
    assert whole == 0 or slots == 1 or way == "long"


def three_that_share(pulling):
    """Two prompts that share a prefix in the cache, and one that takes the rest of the pool."""
    prefix = tokens(256, seed=1)
    pulling.add("before", prefix + tokens(3, seed=9), 1, pull=False)
    pulling.step()
    for name in range(2):
        pulling.add(str(name), prefix + tokens(40, seed=2 + name))
    pulling.step()
    last = pulling.add("last", tokens(SIZE * pulling.free - 10, seed=4), 9)
    pulling.step()
    assert pulling.free == 0
    assert last.status == RequestStatus.WAITING_FOR_REMOTE_KVS


@pytest.mark.parametrize("budget", [0.3, 0.6])
@pytest.mark.parametrize("slots", [1, 8])
def test_prompts_that_were_pulled_run_without_a_free_block(budget, slots, usual):
    pulling = Pulling(usual, 27, slots, compress="cake-chunk", budget=budget, lookahead=M)
    three_that_share(pulling)
    pulling.step(["0", "1"])
    # each finds its prompt here and no block to pack it into
    assert pulling.step().keys() == {"0", "1"}
    pulling.step(["last"])
    for _ in range(300):
        pulling.step()
    assert not pulling.scheduler.requests
    assert pulling.free == 26
    # the second found no slot beside the first one's, and stays whole
    assert pulling.manager.compression_stats.skipped["full_pool"] == (slots == 1)
    assert (pulling.manager.compression_stats.slotless > 0) == (slots == 1)


def test_what_is_promised_is_left_once_however_many_are_pulled(usual):
    """Two that look ahead and share their prompts' beginning are promised blocks."""
    pulling = Pulling(usual, 40, 8, compress="cake-chunk", budget=0.9, lookahead=200)
    prefix = tokens(256, seed=1)
    for name in range(2):
        pulling.add(str(name), prefix + tokens(40, seed=2 + name), 250, pull=False)
        pulling.step()
    promised, free = pulling.manager.lookaheads.promised(0), pulling.free
    each = 2
    fit = (free - promised) // each
    assert promised > each < fit
    for name in range(fit + 1):
        pulling.add(f"pulled {name}", tokens(each * SIZE - 4, seed=30 + name))
    pulling.step()
    assert len(pulling.loading) == fit
    assert pulling.scheduler._inflight_prefill_reserved_blocks() == 0


def test_a_prompt_of_which_all_is_computed_gives_its_blocks_back(usual, monkeypatch):
    pulling = Pulling(usual, 27, 8, compress="cake-chunk", budget=0.3, lookahead=M)
    monkeypatch.setattr(pulling.manager.planner, "longest_hit", lambda request, most: 0)
    pulling.add("r", tokens(300, seed=1), 9)
    pulling.step()
    pulling.step(["r"])
    assert pulling.step() == {"r": 300}
    for _ in range(10):
        pulling.step()
    assert pulling.free == 26


@pytest.mark.parametrize("compress", ["snapkv", "cake-chunk"])
def test_nobody_is_judged_by_queries_that_were_computed_elsewhere(compress, usual):
    """Also where a look-ahead gives way before its answer has as many as it was to have."""
    own = {"budget": 0.3, "lookahead": 32, "lookahead_yields": "waiting"}
    pulling, first, cuts = Pulling(usual, 30, 8, compress=compress, **own), {}, []
    scheduler, manager = pulling.scheduler, pulling.manager
    update, hand_over = scheduler._update_waiting_for_remote_kv, manager._hand_over

    def updating(request):
        update(request)
        first[request.request_id] = request.num_computed_tokens

    def handing_over(pending):
        pack = pending[0]
        if scheduler.requests[pack.request_id].num_preemptions == 0:
            cuts.append(pack.cut)
            assert pack.plan.window <= pack.tokens - first[pack.request_id]
        return hand_over(pending)

    scheduler._update_waiting_for_remote_kv, manager._hand_over = updating, handing_over
    for name in range(12):
        pulling.add(str(name), tokens(300, seed=name), 60)
    for _ in range(400):
        pulling.step(list(pulling.loading))
    assert not scheduler.requests
    assert any(cuts)


def test_a_pulled_prompt_that_is_left_whole_is_told_once(usual):
    pulling = Pulling(usual, 27, 8, compress="cake-chunk", budget=0.3, lookahead=M)
    pulling.add("short", tokens(20, seed=1), 9)
    pulling.step()
    pulling.step(["short"])
    for _ in range(10):
        pulling.step()
    assert pulling.manager.compression_stats.skipped.total() == 1
