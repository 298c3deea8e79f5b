"""Deferred frees: with overlapping steps and a KV connector, freed blocks wait for running steps.

The engine is real and uses async scheduling. `defer_frees` sets what a connector would set.
"""

from types import SimpleNamespace

import pytest

from checkpoints import make, tokens
from deferred_frees import defer_frees
from engines import engine, settings
from vllm_kvcompress.engine.scheduling.deferred_free import DeferredFree

M, LENGTH = 8, 417


def config(**more):
    return settings("cake-chunk", 0.3, lookahead=M, **more)


@pytest.fixture
def model(checkpoints_folder):
    return make("llama-two-layers", checkpoints_folder)


def test_blocks_are_not_free_before_the_step_that_reads_them_ends(
    model, async_scheduling_allowed, watched
):
    """Two requests share a prefix, and are packed in steps that overlap with the next steps."""
    prompt, outputs, freed_blocks = tokens(LENGTH, seed=1), [], []
    prompts = [prompt, prompt[:200] + tokens(217, seed=2), tokens(300, seed=3)]
    for deferred in (False, True):
        with engine(
            model,
            additional_config=config(),
            async_scheduling=True,
            max_num_seqs=4,
            max_num_batched_tokens=512,
        ) as llm:
            watch = FreeWatch(llm)
            if deferred:
                defer_frees(llm)
            free_before = llm.free_blocks
            llm.generate([prompt[:200]], 1)  # puts the shared prefix into the prefix cache
            outputs.append(llm.generate(prompts, 40))
            llm.finish_in_flight_steps()
            assert llm.free_blocks == free_before
            assert watch.packed == 3
            # Without deferring, all blocks are free at once, so this test can fail.
            assert watch.freed_early == (0 if deferred else watch.freed)
            assert watch.overlapped > 0
        freed_blocks.append(watched("freed_blocks"))
    assert outputs[0] == outputs[1]
    # `watched` adds up the counts of both engines.
    assert freed_blocks[1][""] == 2 * freed_blocks[0][""] > 0


class FreeWatch:
    """Records which blocks are free while a step that packs is running.

    packed: number of packings.
    freed_early: blocks read by a packing that were free before its step had ended.
    freed: blocks read by a packing that were free once its step had ended.
    overlapped: steps that were scheduled while another one was running.
    """

    def __init__(self, llm):
        self.freed_early = self.freed = self.overlapped = self.packed = 0
        scheduler, builder, running = llm.scheduler, llm.scheduler.step_builder, {}
        schedule, update = scheduler.schedule, scheduler.update_from_output
        apply_pack, read_blocks = builder._apply_pack, []

        def recording_apply_pack(state):
            pack, reused = state.planned_pack, state.reused_blocks
            reused_ids = {block.block_id for block in reused}
            blocks = state.unpacked_blocks(pack.tokens)
            read_blocks.extend(block for block in blocks if block.block_id not in reused_ids)
            self.packed += 1
            return apply_pack(state)

        def recording_schedule(*args, **kwargs):
            self.overlapped += bool(running)
            output = schedule(*args, **kwargs)
            if read_blocks:
                running[id(output)] = list(read_blocks)
                self.freed_early += sum(block.ref_cnt == 0 for block in read_blocks)
                read_blocks.clear()
            return output

        def recording_update(output, *args, **kwargs):
            blocks = running.pop(id(output), [])
            free_blocks = [block for block in blocks if block.ref_cnt == 0]
            result = update(output, *args, **kwargs)
            if llm.scheduler.defer_block_free:
                assert not free_blocks
            self.freed += sum(block.ref_cnt == 0 for block in blocks)
            return result

        scheduler.schedule, scheduler.update_from_output = recording_schedule, recording_update
        builder._apply_pack = recording_apply_pack


def test_deferred_blocks_counts_each_block_once_and_no_shared_block():
    """A lower count would compress look-aheads early although enough blocks return anyway."""
    only, shared, twice = (
        SimpleNamespace(block_id=block_id, ref_cnt=ref_cnt)
        for block_id, ref_cnt in enumerate((1, 2, 2))
    )
    scheduler = SimpleNamespace(
        defer_block_free=True, deferred_frees=[(1, [only, shared, twice]), (2, [twice])]
    )
    assert DeferredFree(None, scheduler).deferred_blocks() == 2
    scheduler.defer_block_free = False
    assert DeferredFree(None, scheduler).deferred_blocks() == 0


def test_blocks_are_freed_at_once_without_a_connector(model):
    with engine(model, additional_config=config()) as llm:
        assert not llm.scheduler.defer_block_free
        llm.generate([tokens(LENGTH, seed=4)], 20)
        assert not llm.scheduler.deferred_frees


@pytest.mark.parametrize("action", ["preempted", "aborted"])
@pytest.mark.parametrize("output_tokens", [M - 2, M + 2, M + 12])
def test_request_removed_during_a_step_frees_its_blocks_after_it(
    action, output_tokens, model, async_scheduling_allowed
):
    """Before its prompt is packed, in the step that packs it or the next one, and long after."""
    prompts = [tokens(LENGTH, seed=1), tokens(300, seed=3)]
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 512, "async_scheduling": True}
    with engine(model, additional_config=config(), **options) as llm:
        expected = [llm.generate([prompt], 40)[0] for prompt in prompts]
        defer_frees(llm)
        free_before, preemptions = llm.free_blocks, llm.watch_preemptions()
        for index, prompt in enumerate(prompts):
            llm.submit(str(index), prompt, 40)
        done, removed = {}, False
        while llm.llm.llm_engine.has_unfinished_requests():
            done |= {key: list(each.outputs[0].token_ids) for key, each in llm.step().items()}
            request = next((each for each in llm.running() if each.request_id[0] == "0"), None)
            if not removed and request is not None and request.num_output_tokens == output_tokens:
                removed = True
                held = [*llm.manager.req_to_blocks[request.request_id]]
                held += llm.packed_blocks(request.request_id)
                held = [block for block in held if not block.is_null]
                remove(llm, request, action)
                assert llm.scheduler.deferred_frees
                assert all(block.ref_cnt == 1 for block in held)
                llm.step()
                # The running step has ended, so its blocks are free.
                deferred_ids = {
                    id(block) for _, blocks in llm.scheduler.deferred_frees for block in blocks
                }
                assert not any(id(block) in deferred_ids for block in held)
        llm.finish_in_flight_steps()
        assert removed
        assert llm.free_blocks == free_before
        assert not llm.scheduler.deferred_frees
    assert done["1"] == expected[1]
    if action == "preempted":
        resumed_at = preemptions["0"][0]
        assert done["0"][:resumed_at] == expected[0][:resumed_at]
        # Nothing was dropped before the look-ahead was over, so the output must be equal.
        assert output_tokens > M or done["0"] == expected[0]


def remove(llm, request, action):
    if action == "aborted":
        llm.llm.llm_engine.abort_request([request.request_id], internal=True)
    else:
        llm.preempt(request)
