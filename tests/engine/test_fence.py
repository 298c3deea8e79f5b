"""Blocks that are freed while steps overlap and a connector may write: when others may have them.

A stand-in: the engine is real, with async scheduling, and no connector is there (`fenced`).
"""

import pytest

from checkpoints import make, tokens
from engines import engine, first_runner, settings
from fenced import fence

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
    for fenced in (False, True):
        with engine(
            model,
            additional_config=config(),
            async_scheduling=True,
            max_num_seqs=4,
            max_num_batched_tokens=512,
        ) as llm:
            seen = Seen(llm)
            if fenced:
                fence(llm)
            free = llm.free_blocks
            llm.generate([prompt[:200]], 1)  # their prefix is found in the cache
            answers.append(llm.generate(prompts, 40))
            llm.settle()
            assert llm.free_blocks == free
            assert seen.packed == 3
            # without it they are free at once, which is what the fence is for
            assert seen.early == (0 if fenced else seen.returned)
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
            *(scheduler.schedule, scheduler.update_from_output),
            manager._hand_over,
        )
        reads = []

        def handing_over(pending):
            pack, holding, own = pending
            kept = {block.block_id for block in own}
            read = manager.ordinary(pack.request_id, holding, pack.tokens)
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


def test_without_a_connector_nothing_waits(model):
    """vLLM frees at once, and so do we."""
    with engine(model, additional_config=config()) as llm:
        assert not llm.manager.fence.holds
        llm.generate([tokens(LENGTH, seed=4)], 20)
        assert not llm.scheduler.deferred_frees
