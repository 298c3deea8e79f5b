"""Blocks that are freed while steps overlap and a connector may write: when others may have them.

A stand-in: the engine is real, with async scheduling, and no connector is there (`deferred`).
"""

from types import SimpleNamespace

import pytest

from checkpoints import make, tokens
from deferred_frees import defer_frees
from engines import engine, first_runner, settings
from vllm_kvcompress.engine.scheduling.deferred_free import DeferredFree

pytestmark = first_runner

M, LENGTH = 8, 417


def config(**more):
    return settings("cake-chunk", 0.3, lookahead=M, **more)


@pytest.fixture
def model(checkpoints_folder):
    return make("llama-two-layers", checkpoints_folder)


def test_a_block_is_nobody_elses_before_the_step_that_reads_it_has_ended(
    model, keep_async_scheduling, watched
):
    """Two requests share a prefix, and are packed in steps that overlap with the next ones."""
    prompt, answers, freed = tokens(LENGTH, seed=1), [], []
    prompts = [prompt, prompt[:200] + tokens(217, seed=2), tokens(300, seed=3)]
    for deferred in (False, True):
        with engine(
            model,
            additional_config=config(),
            async_scheduling=True,
            max_num_seqs=4,
            max_num_batched_tokens=512,
        ) as llm:
            seen = Seen(llm)
            if deferred:
                defer_frees(llm)
            free = llm.free_blocks
            llm.generate([prompt[:200]], 1)  # their prefix is found in the cache
            answers.append(llm.generate(prompts, 40))
            llm.settle()
            assert llm.free_blocks == free
            assert seen.packed == 3
            # without it they are free at once, which is what the fence is for
            assert seen.early == (0 if deferred else seen.returned)
            assert seen.overlapped > 0
        freed.append(watched("freed_blocks"))
    assert answers[0] == answers[1]
    # the tally of both engines, and twice that of the first
    assert freed[1][""] == 2 * freed[0][""] > 0


class Seen:
    """Which blocks are free while a step that packs is under way.

    early: blocks that this step's packing reads and that were in the pool before it had ended.
    returned: those that were in the pool once it had.
    overlapped: steps that were scheduled meanwhile.
    """

    def __init__(self, llm):
        self.early = self.returned = self.overlapped = self.packed = 0
        scheduler, manager, under_way = llm.scheduler, llm.manager, {}
        schedule, update, hand_over = (
            scheduler.schedule,
            scheduler.update_from_output,
            manager._hand_over,
        )
        reads = []

        def handing_over(pending):
            pack, footprint, own = pending
            kept = {block.block_id for block in own}
            read = manager.ordinary(pack.request_id, footprint, pack.tokens)
            reads.extend(block for block in read if block.block_id not in kept)
            self.packed += 1
            return hand_over(pending)

        def scheduling(*args, **kwargs):
            self.overlapped += bool(under_way)
            output = schedule(*args, **kwargs)
            if reads:
                under_way[id(output)] = list(reads)
                self.early += sum(block.ref_cnt == 0 for block in reads)
                reads.clear()
            return output

        def updating(output, *args, **kwargs):
            done = under_way.pop(id(output), [])
            free = [block for block in done if block.ref_cnt == 0]
            result = update(output, *args, **kwargs)
            if llm.scheduler.defer_block_free:
                assert not free
            self.returned += sum(block.ref_cnt == 0 for block in done)
            return result

        scheduler.schedule, scheduler.update_from_output = scheduling, updating
        manager._hand_over = handing_over


def test_what_waits_is_counted_once_and_only_if_nobody_else_reads_it():
    """Else look-aheads would give way for blocks that come back by themselves."""
    mine, shared, both = (SimpleNamespace(block_id=i, ref_cnt=n) for i, n in enumerate((1, 2, 2)))
    scheduler = SimpleNamespace(
        defer_block_free=True, deferred_frees=[(1, [mine, shared, both]), (2, [both])]
    )
    assert DeferredFree(None, scheduler).held() == 2
    scheduler.defer_block_free = False
    assert DeferredFree(None, scheduler).held() == 0


def test_without_a_connector_nothing_waits(model):
    """vLLM frees at once, and so do we."""
    with engine(model, additional_config=config()) as llm:
        assert not llm.manager.deferred_free.holds
        llm.generate([tokens(LENGTH, seed=4)], 20)
        assert not llm.scheduler.deferred_frees


@pytest.mark.parametrize("leaves", ["preempted", "aborted"])
@pytest.mark.parametrize("answered", [M - 2, M + 2, M + 12])
def test_who_leaves_while_a_step_is_under_way_keeps_its_blocks_until_it_is_over(
    leaves, answered, model, keep_async_scheduling
):
    """Before its prompt is packed, in the step that does so or the next, and long after."""
    prompts = [tokens(LENGTH, seed=1), tokens(300, seed=3)]
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 512, "async_scheduling": True}
    with engine(model, additional_config=config(), **options) as llm:
        want = [llm.generate([prompt], 40)[0] for prompt in prompts]
        defer_frees(llm)
        free, cuts = llm.free_blocks, llm.watch_preemptions()
        for at, prompt in enumerate(prompts):
            llm.submit(str(at), prompt, 40)
        done, left = {}, False
        while llm.llm.llm_engine.has_unfinished_requests():
            done |= {key: list(each.outputs[0].token_ids) for key, each in llm.step().items()}
            request = next((each for each in llm.running() if each.request_id[0] == "0"), None)
            if not left and request is not None and request.num_output_tokens == answered:
                left = True
                held = [*llm.manager.req_to_blocks[request.request_id]]
                held += llm.manager._packed.get(request.request_id, [])
                held = [block for block in held if not block.is_null]
                leave(llm, request, leaves)
                assert llm.scheduler.deferred_frees
                assert all(block.ref_cnt == 1 for block in held)
                llm.step()
                # the step that was under way is over, and whoever wants them may have them
                waiting = {
                    id(block) for _, blocks in llm.scheduler.deferred_frees for block in blocks
                }
                assert not any(id(block) in waiting for block in held)
        llm.settle()
        assert left
        assert llm.free_blocks == free
        assert not llm.scheduler.deferred_frees
    answers = {key.split("-")[0]: answer for key, answer in done.items()}
    assert answers["1"] == want[1]
    if leaves == "preempted":
        assert answers["0"][: cuts["0"][0]] == want[0][: cuts["0"][0]]
        # nothing was dropped before its look-ahead was over
        assert answered > M or answers["0"] == want[0]


def leave(llm, request, how):
    if how == "aborted":
        llm.llm.llm_engine.abort_request([request.request_id], internal=True)
    else:
        llm.preempt(request)
