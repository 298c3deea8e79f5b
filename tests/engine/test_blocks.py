"""Memory: what a compressed request holds, when it comes back, and who may use it then."""

import pytest

from checkpoints import make, tokens
from engines import BLOCK, V2, engine, first_runner, settings
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.settings.config import CompressionConfig

LENGTH = 1000


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make("llama-gqa", checkpoints_folder)


def blocks_of(length: int, layers: int, budget: float) -> int:
    """K for one prompt, from the lengths alone."""
    config = CompressionConfig.parse(settings(budget=budget)["kvcompress"])
    plan = page_plan(config.prompt(layers, length), BLOCK)
    assert plan is not None
    return plan.blocks


@first_runner
@pytest.mark.parametrize("length", [LENGTH, LENGTH // BLOCK * BLOCK, LENGTH // BLOCK * BLOCK + 1])
def test_while_decoding_a_request_holds_k_and_its_tail(model, length):
    with engine(model, additional_config=settings(budget=0.2)) as llm:
        before = llm.free_blocks
        llm.submit("r", tokens(length, seed=1), 70)
        llm.step()
        total = llm.pool.num_gpu_blocks - 1
        kept, seen = blocks_of(length, 4, 0.2), 0
        while llm.running():
            request = llm.running()[0]
            tail = -(-request.num_computed_tokens // BLOCK) - length // BLOCK
            assert llm.manager.num_blocks_held(request.request_id) == kept + tail
            assert before - llm.free_blocks == kept + tail
            usage = llm.scheduler.make_stats().kv_cache_usage  # what /metrics shows
            assert usage == pytest.approx((kept + tail) / total)
            seen += 1
            llm.step()
        assert seen >= 69
        assert llm.free_blocks == before


@first_runner
def test_the_blocks_come_back_in_the_step_that_compresses(model):
    with engine(model, additional_config=settings(budget=0.2)) as llm:
        free = llm.free_blocks
        llm.submit("r", tokens(LENGTH, seed=1), 5)
        llm.step()
        tail = -(-LENGTH // BLOCK) - LENGTH // BLOCK
        assert free - llm.free_blocks == blocks_of(LENGTH, 4, 0.2) + tail
        llm.drain()


@first_runner
def test_a_pool_for_four_serves_twelve_at_once(model):
    """Admission sees the blocks that came back: three times the requests, none preempted."""
    length, count = 640, 12
    full = -(-(length + 24) // BLOCK)
    with engine(
        model,
        additional_config=settings(budget=0.2),
        blocks=1 + 4 * full,
        max_model_len=length + 64,
        max_num_seqs=32,
        enable_prefix_caching=False,
    ) as llm:
        prompts = [tokens(length, seed=i) for i in range(count)]
        for i, prompt in enumerate(prompts):
            llm.submit(str(i), prompt, 24)
        most, done = 0, {}
        while llm.llm.llm_engine.has_unfinished_requests():
            done.update(llm.step())
            most = max(most, len(llm.running()))
            assert all(request.num_preemptions == 0 for request in llm.running())
        assert most >= 12
        assert len(done) == count
        assert all(len(output.outputs[0].token_ids) == 24 for output in done.values())
        assert llm.free_blocks == 4 * full


def test_trap_17_without_free_blocks_the_prompts_own_blocks_serve(model):
    """A pool that just fits the prompt: packed in place, never refused, never wrong."""
    length = 640
    full = -(-(length + 24) // BLOCK)
    prompts = [tokens(length, seed=5), tokens(length, seed=6)]
    with engine(model, additional_config=settings(budget=0.5)) as llm:
        roomy = [llm.generate([prompt], 8)[0] for prompt in prompts]
    for caching in (True, False):
        with engine(
            model,
            additional_config=settings(budget=0.5),
            blocks=1 + full,
            max_model_len=length + 24,
            enable_prefix_caching=caching,
        ) as llm:
            used = llm.watch_packing(lambda finished: finished.pack_request.in_place)
            assert [llm.generate([prompt], 8)[0] for prompt in prompts] == roomy
            assert used == [True, True]
            assert llm.free_blocks == full
            # what became a destination must not be found by its old hash
            assert llm.generate(prompts[::-1], 8) == roomy[::-1]


def test_aborts_at_every_stage_give_everything_back(model):
    with engine(
        model,
        additional_config=settings(),
        max_num_batched_tokens=128,
        max_num_seqs=8,
        max_model_len=2048,
    ) as llm:
        free = llm.free_blocks
        for steps in (2, 7, 9) if V2 else range(12):
            llm.submit(f"a{steps}", tokens(600, seed=steps), 20)
            llm.submit(f"b{steps}", tokens(200, seed=steps), 4)
            for _ in range(steps):
                llm.step()
            ids = [r.request_id for r in (*llm.scheduler.running, *llm.scheduler.waiting)]
            external = [i for i in ids if i.startswith(f"a{steps}")]
            llm.llm.llm_engine.abort_request(external, internal=True)
            llm.drain()
            assert llm.free_blocks == free
        assert not llm.manager.planner.schedules
        assert not llm.manager._packed
        assert not llm.manager._cacheable
