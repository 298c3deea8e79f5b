"""Prompts pulled from another server into small pools: every request ends.

The scheduler runs alone, with a fake KV connector (`fake_pulls`).
"""

import random

import pytest
from vllm.v1.request import RequestStatus

from checkpoints import make, tokens
from configuring import configure
from engines import slots_in_use
from fake_pulls import SIZE, PullScheduler

M = 8
CONFIGS = {
    "usual": {"compress": "cake-chunk", "lookahead": M},
    # The pool cannot hold longer prompts until such a look-ahead ends.
    "long": {"compress": "cake-chunk", "lookahead": 256},
    "bounded": {"compress": "cake", "lookahead": M, "decode_budget": 96, "decode_interval": 32},
    "packed": {"compress": "cake-chunk", "lookahead": M, "packed_dtype": "k4v3"},
    "packed outputs": {"compress": "cake", "packed_dtype": "k4v3", "decode_interval": 128},
}


@pytest.fixture(scope="module")
def vllm_config(checkpoints_folder):
    """vLLM's configuration, created once for all schedulers of this file."""
    return configure(
        make("llama-two-layers", checkpoints_folder),
        block_size=SIZE,
        max_model_len=1024,
        dtype="float32",
        enforce_eager=True,
        max_num_batched_tokens=512,
        max_num_seqs=8,
    )


def run_random_load(pulling, rng):
    """Add, load, abort and run random requests until all have ended.

    Returns:
        Number of packed requests, and of requests that found no blocks to be packed into.

    Raises:
        AssertionError: a request does not end, or holds resources after its end.
    """
    free_before, num_to_add = pulling.free, 14
    shared = tokens(320, seed=rng.randrange(3))
    max_tokens = (free_before - 1) * SIZE
    for _ in range(3000):
        if num_to_add and rng.random() < 0.5:
            num_to_add -= 1
            prompt = shared[: rng.randrange(0, 321)] + tokens(
                rng.randrange(1, 300), seed=rng.randrange(1000)
            )
            num_output = rng.choice([1, 3, 20, 60])
            prompt = prompt[: max_tokens - num_output]
            pulling.add(str(num_to_add), prompt, num_output, pull=rng.random() < 0.8)
        done = [name for name in pulling.loading if rng.random() < 0.15]
        failed = [name for name in done if rng.random() < 0.1]
        if pulling.scheduler.requests and rng.random() < 0.02:
            pulling.abort(rng.choice(list(pulling.scheduler.requests)))
            failed = []
        pulling.step(done, failed)
        states = pulling.scheduler.states
        statuses = {state.request.status for state in states if state.has_lookahead_slot}
        # A request that waits for its load holds no look-ahead slot.
        assert RequestStatus.WAITING_FOR_REMOTE_KVS not in statuses
        if not num_to_add and not pulling.scheduler.requests:
            break
    pulling.step()  # returns blocks that held groups in k4v3
    unfinished = {name: each.status.name for name, each in pulling.scheduler.requests.items()}
    assert not unfinished, (unfinished, pulling.free)
    assert pulling.free == free_before
    scheduler = pulling.scheduler
    assert not any((len(scheduler.states), slots_in_use(scheduler), pulling.loading))
    assert not any((len(scheduler.lookaheads), scheduler.step_builder._deferred_free._unfreed))
    assert not pulling.with_groups
    compression_stats = pulling.scheduler.step_builder.stats
    return compression_stats.planned.total(), compression_stats.skipped["full_pool"]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("slots", [1, 8])
def test_pulled_requests_end_and_return_their_blocks(name, slots, vllm_config):
    num_packed = num_uncompressed = 0
    # Few prompts are long enough to be packed if the look-ahead is long.
    for seed in range(20 if name == "long" else 10):
        rng = random.Random(seed)
        config = {"budget": rng.choice([0.3, 0.6, 0.9])} | CONFIGS[name]
        pulling = PullScheduler(vllm_config, rng.choice([24, 27, 40]), slots, **config)
        packed, uncompressed = run_random_load(pulling, rng)
        num_packed, num_uncompressed = num_packed + packed, num_uncompressed + uncompressed
    assert num_packed > 10
    # Only prompts without a look-ahead can find no blocks.
    assert num_uncompressed == 0 or slots == 1 or name in {"long", "packed outputs"}


def add_requests_that_fill_the_pool(pulling):
    """Add two prompts that share a cached prefix, and one that takes the rest of the pool."""
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
def test_pulled_prompts_start_without_a_free_block(budget, slots, vllm_config):
    pulling = PullScheduler(
        vllm_config, 27, slots, compress="cake-chunk", budget=budget, lookahead=M
    )
    add_requests_that_fill_the_pool(pulling)
    pulling.step(["0", "1"])
    # Both have their prompt, and no block to pack it into.
    assert pulling.step().keys() == {"0", "1"}
    pulling.step(["last"])
    for _ in range(300):
        pulling.step()
    assert not pulling.scheduler.requests
    assert pulling.free == 26
    # With one slot, the second request finds none and stays uncompressed.
    compression_stats = pulling.scheduler.step_builder.stats
    assert compression_stats.skipped["full_pool"] == (slots == 1)
    assert (compression_stats.slotless_lookaheads > 0) == (slots == 1)


def test_reserved_blocks_are_counted_once_for_several_pulled_prompts(vllm_config):
    """Blocks are reserved for two look-aheads whose prompts share a prefix."""
    pulling = PullScheduler(vllm_config, 40, 8, compress="cake-chunk", budget=0.9, lookahead=200)
    prefix = tokens(256, seed=1)
    for name in range(2):
        pulling.add(str(name), prefix + tokens(40, seed=2 + name), 250, pull=False)
        pulling.step()
    reserved, free_blocks = pulling.scheduler.lookaheads.reserved_blocks(0), pulling.free
    prompt_blocks = 2
    num_fitting = (free_blocks - reserved) // prompt_blocks
    assert reserved > prompt_blocks < num_fitting
    for name in range(num_fitting + 1):
        pulling.add(f"pulled {name}", tokens(prompt_blocks * SIZE - 4, seed=30 + name))
    pulling.step()
    assert len(pulling.loading) == num_fitting
    assert pulling.scheduler._inflight_prefill_reserved_blocks() == 0


def test_pulled_prompt_that_is_computed_again_returns_its_blocks(vllm_config, monkeypatch):
    pulling = PullScheduler(vllm_config, 27, 8, compress="cake-chunk", budget=0.3, lookahead=M)
    monkeypatch.setattr(
        pulling.scheduler.schedules, "longest_prefix_hit", lambda state, max_tokens: 0
    )
    pulling.add("r", tokens(300, seed=1), 9)
    pulling.step()
    pulling.step(["r"])
    assert pulling.step() == {"r": 300}
    for _ in range(10):
        pulling.step()
    assert pulling.free == 26


@pytest.mark.parametrize("compress", ["snapkv", "cake-chunk"])
def test_pulled_prompts_are_scored_only_by_queries_computed_here(compress, vllm_config):
    """Also by an early compression, before all queries of the look-ahead are computed."""
    # Two prompts of 10 blocks leave one block, and both need one more during their look-ahead.
    pulling = PullScheduler(vllm_config, 22, 8, compress=compress, budget=0.3, lookahead=32)
    pulled_tokens, early_targets = {}, []
    scheduler = pulling.scheduler
    update, builder = scheduler._update_waiting_for_remote_kv, scheduler.step_builder
    apply_pack = builder._apply_pack

    def recording_update(request):
        update(request)
        pulled_tokens[request.request_id] = request.num_computed_tokens

    def checking_apply_pack(state):
        pack = state.planned_pack
        if scheduler.requests[pack.request_id].num_preemptions == 0:
            early_targets.append(pack.early_target)
            assert pack.plan.window <= pack.tokens - pulled_tokens[pack.request_id]
        return apply_pack(state)

    scheduler._update_waiting_for_remote_kv = recording_update
    builder._apply_pack = checking_apply_pack
    for name in range(12):
        pulling.add(str(name), tokens(300, seed=name), 60)
    for _ in range(800):
        pulling.step(list(pulling.loading))
    assert not scheduler.requests
    assert any(early_targets)


def test_a_lookahead_with_column_sums_takes_a_pulled_prompt(vllm_config):
    """The allocator reads the attention of all queries, but the look-ahead decides about hits."""
    options = {"allocator": "d2o", "lookahead": None, "decode_budget": 96, "decode_interval": 32}
    pulling = PullScheduler(vllm_config, 60, 4, compress="cake-chunk", budget=0.3, **options)
    pulling.add("pulled", tokens(320, seed=1), 100)
    pulling.step()
    pulling.step(["pulled"])
    assert pulling.step() == {"pulled": 1}


def test_a_session_with_streamed_input_has_one_record(vllm_config):
    """vLLM adds each part of the input to the session's request, and the last part ends it."""
    pulling = PullScheduler(vllm_config, 60, 8, compress="cake-chunk", max_whole=512, piece=128)
    scheduler = pulling.scheduler
    for part in range(3):
        scheduler.add_request(pulling.session_part("s", tokens(100, seed=part), resumable=True))
        (state,) = scheduler.states
        assert state.request is scheduler.requests["s"]
        for _ in range(6):
            pulling.step()
    scheduler.add_request(pulling.session_part("s", [0], resumable=False))
    pulling.step()
    assert not scheduler.requests
    assert not len(scheduler.states)
    assert scheduler.step_builder.stats.skipped == {"unsupported": 1}


def test_uncompressed_pulled_prompt_is_counted_once(vllm_config):
    pulling = PullScheduler(vllm_config, 27, 8, compress="cake-chunk", budget=0.3, lookahead=M)
    pulling.add("short", tokens(20, seed=1), 9)
    pulling.step()
    pulling.step(["short"])
    for _ in range(10):
        pulling.step()
    assert pulling.scheduler.step_builder.stats.skipped.total() == 1
