"""KV blocks of compressed requests: how many they hold, and when they return them to the pool."""

import pytest

from checkpoints import tokens
from engines import BLOCK, V2, engine, model_runner_v1_only, settings
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.settings.config import CompressionConfig

LENGTH = 1000


def packed_blocks(length: int, layers: int, budget: float) -> int:
    """Return K, the number of packed blocks of a prompt, from lengths alone."""
    config = CompressionConfig.parse(settings(budget=budget)["kvcompress"])
    plan = page_plan(config.budget_spec(layers, length), BLOCK)
    assert plan is not None
    return plan.blocks


@model_runner_v1_only
@pytest.mark.parametrize("length", [LENGTH, LENGTH // BLOCK * BLOCK, LENGTH // BLOCK * BLOCK + 1])
def test_trap_06_trap_19_decoding_request_holds_its_packed_blocks_and_tail(model, length):
    with engine(model, additional_config=settings(budget=0.2)) as llm:
        free_before = llm.free_blocks
        llm.submit("r", tokens(length, seed=1), 70)
        llm.step()
        total = llm.pool.num_gpu_blocks - 1
        packed, num_steps = packed_blocks(length, 4, 0.2), 0
        while llm.running():
            request = llm.running()[0]
            tail = -(-request.num_computed_tokens // BLOCK) - length // BLOCK
            assert llm.num_blocks_held(request.request_id) == packed + tail
            assert free_before - llm.free_blocks == packed + tail
            usage = llm.scheduler.make_stats().kv_cache_usage  # shown in /metrics
            assert usage == pytest.approx((packed + tail) / total)
            num_steps += 1
            llm.step()
        assert num_steps >= 69
        assert llm.free_blocks == free_before


@model_runner_v1_only
def test_pool_for_four_uncompressed_requests_runs_twelve(model):
    """Admission uses the freed blocks: three times the requests run, and none is preempted."""
    length, count = 640, 12
    uncompressed_blocks = -(-(length + 24) // BLOCK)
    with engine(
        model,
        additional_config=settings(budget=0.2),
        blocks=1 + 4 * uncompressed_blocks,
        max_model_len=length + 64,
        max_num_seqs=32,
        enable_prefix_caching=False,
    ) as llm:
        prompts = [tokens(length, seed=i) for i in range(count)]
        for i, prompt in enumerate(prompts):
            llm.submit(str(i), prompt, 24)
        max_running, done = 0, {}
        while llm.llm.llm_engine.has_unfinished_requests():
            done.update(llm.step())
            max_running = max(max_running, len(llm.running()))
            assert all(request.num_preemptions == 0 for request in llm.running())
        assert max_running >= 12
        assert len(done) == count
        assert all(len(output.outputs[0].token_ids) == 24 for output in done.values())
        assert llm.free_blocks == 4 * uncompressed_blocks


def test_trap_17_prompts_are_packed_in_place_without_free_blocks(model):
    """In a pool that just fits the prompt, it is packed into its own blocks, and outputs are right.

    Blocks that became destinations must not be found by their old hash.
    """
    length = 640
    uncompressed_blocks = -(-(length + 24) // BLOCK)
    prompts = [tokens(length, seed=5), tokens(length, seed=6)]
    with engine(model, additional_config=settings(budget=0.5)) as llm:
        expected = [llm.generate([prompt], 8)[0] for prompt in prompts]
    for caching in (True, False):
        with engine(
            model,
            additional_config=settings(budget=0.5),
            blocks=1 + uncompressed_blocks,
            max_model_len=length + 24,
            enable_prefix_caching=caching,
        ) as llm:
            in_place = llm.watch_packing(lambda done: done.pack_request.in_place)
            assert [llm.generate([prompt], 8)[0] for prompt in prompts] == expected
            assert in_place == [True, True]
            assert llm.free_blocks == uncompressed_blocks
            assert llm.generate(prompts[::-1], 8) == expected[::-1]


@model_runner_v1_only
def test_a_prompt_waits_for_destinations_that_its_unshared_blocks_cannot_be(model):
    """Another request keeps the shared blocks. The prompt is compressed once that request ends."""
    shared = tokens(24 * BLOCK, seed=3)
    with engine(
        model,
        additional_config=settings(budget=0.2, allow_override="off"),
        blocks=1 + 25 + 5,
        max_model_len=29 * BLOCK,
        max_num_batched_tokens=3 * BLOCK,
    ) as llm:
        llm.submit("off", shared + tokens(8, seed=9), 20, extra_args={"kv_compress": "off"})
        while not llm.running() or not llm.running()[0].num_output_tokens:
            llm.step()
        assert llm.free_blocks == 5
        # Its 4 unshared blocks leave 1 block free, and it is packed into 6 blocks.
        llm.submit("r", shared + tokens(4 * BLOCK, seed=8), 4)
        llm.drain()
        assert llm.compressor.compressed == 1


def test_aborted_requests_return_their_blocks_at_every_stage(model):
    with engine(
        model,
        additional_config=settings(),
        max_num_batched_tokens=128,
        max_num_seqs=8,
        max_model_len=2048,
    ) as llm:
        free_before = llm.free_blocks
        for num_steps in (2, 7, 9) if V2 else range(12):
            llm.submit(f"a{num_steps}", tokens(600, seed=num_steps), 20)
            llm.submit(f"b{num_steps}", tokens(200, seed=num_steps), 4)
            for _ in range(num_steps):
                llm.step()
            requests = (*llm.scheduler.running, *llm.scheduler.waiting)
            request_ids = [request.request_id for request in requests]
            aborted = [name for name in request_ids if name.startswith(f"a{num_steps}")]
            llm.llm.llm_engine.abort_request(aborted, internal=True)
            llm.drain()
            assert llm.free_blocks == free_before
        assert not len(llm.scheduler.states)
        assert not llm.scheduler.states.limited_ids
