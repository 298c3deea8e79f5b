"""Who goes away, stops or is paused while its answer is to judge its prompt leaves all behind."""

import pytest

from checkpoints import make
from engines import V2, engine, first_runner, leave_async_scheduling
from test_lookahead import AHEAD, ANSWER, PROMPTS, ahead, alone

__all__ = ["alone"]

CHUNKS = 3  # of the longest prompt; the second one ends with queries that may judge
PACKS = CHUNKS + AHEAD  # the step behind which it is packed
MOMENTS = [2, CHUNKS + 1, PACKS - 1, PACKS]
# While workers are at the last of so many steps, or behind it.
LEAVES = [(1, False), (2, True), (CHUNKS, False), (CHUNKS + 1, True), (PACKS - 1, False)]
LEAVES += [(PACKS, True), (PACKS, False), (PACKS + 1, True)]


@pytest.fixture(
    scope="module", params=[pytest.param(False, marks=first_runner), True], ids=["sync", "async"]
)
def one_slot(request, checkpoints_folder, alone):
    """An engine with a slot for one request that looks ahead, and not the blocks for two."""
    with pytest.MonkeyPatch.context() as patch:
        leave_async_scheduling(patch)
        opened = engine(
            make("llama-gqa", checkpoints_folder),
            additional_config=ahead(lookahead_slots=1),
            blocks=1 + 16,
            max_model_len=480,
            max_num_batched_tokens=len(PROMPTS[2]) // 2 - 3,
            async_scheduling=request.param,
            enable_prefix_caching=False,
        )
        with opened as llm:
            assert (llm.core.batch_queue_size > 1) == request.param
            yield llm


def gave_everything_back(llm, free):
    """No block, and no slot for queries, belongs to anybody."""
    llm.settle()
    assert llm.free_blocks == free
    assert not llm.manager.lookaheads
    assert not llm.manager.planner._looking
    assert llm.compressor.pool.ring._free == [1]
    assert not llm.compressor.pool._slots


@pytest.mark.parametrize(("steps", "in_a_step"), LEAVES[2::3] if V2 else LEAVES)
def test_who_goes_away_leaves_all_to_who_comes(one_slot, alone, watched, steps, in_a_step):
    """Before its look-ahead, in it, in the very step that packs its prompt, and behind it.

    The next request takes the only slot, and the blocks, while a step may still be under way.
    """
    llm, free, before = one_slot, one_slot.free_blocks, one_slot.compressor.compressed
    llm.submit("gone", PROMPTS[2], ANSWER)
    for _ in range(steps - 1):
        llm.step()
    (request,) = llm.scheduler.requests.values()
    if in_a_step:  # as the engine's process hears it: while its workers are busy
        llm.core.aborts_queue.put_nowait([request.request_id])
    llm.step()
    llm.llm.llm_engine.abort_request(["gone"])
    packs = request.num_computed_tokens >= len(PROMPTS[2]) + AHEAD
    packed = llm.watch_packing(lambda done: (done.todo.prompt_tokens, done.todo.answered))
    llm.submit("next", PROMPTS[1], ANSWER)
    assert [*llm.drain(limit=200).values()] == [alone[1]]
    gave_everything_back(llm, free)
    assert packed == [(len(PROMPTS[1]), AHEAD)]
    del llm.compressor.packer.observers[-1]
    assert llm.compressor.compressed - before == packs + 1
    assert packs == (steps >= PACKS)
    assert watched("planned") == {"cake": packs + 1}
    assert watched("skipped") == ({} if packs else {"aborted": 1})


@first_runner
@pytest.mark.parametrize("at", [1, AHEAD - 2, AHEAD - 1, AHEAD])
def test_an_answer_that_stops_by_itself(one_slot, alone, watched, at):
    """What nobody could know a step before; async, one more step is under way by then."""
    llm, free, before = one_slot, one_slot.free_blocks, one_slot.compressor.compressed
    want = alone[2][: at + 1]
    assert want.index(want[at]) == at
    assert llm.generate([PROMPTS[2]], ANSWER, stop_token_ids=[want[at]]) == [want]
    gave_everything_back(llm, free)
    packs = at + llm.core.batch_queue_size - 1 >= AHEAD
    assert llm.compressor.compressed - before == packs
    assert watched("planned") == ({"cake": 1} if packs else {})
    assert watched("skipped") == ({} if packs else {"answered": 1})


@first_runner
@pytest.mark.parametrize("steps", MOMENTS)
def test_a_pause_that_clears_the_cache(one_slot, alone, steps):
    """While it lasts nothing is held, not by a step under way either; then all goes on as ever."""
    llm, free = one_slot, one_slot.free_blocks
    llm.submit("r", PROMPTS[2], ANSWER)
    for _ in range(steps):
        llm.step()
    (request,) = llm.scheduler.requests.values()
    llm.core.pause_scheduler(mode="keep", clear_cache=True)
    llm.submit("next", PROMPTS[1], ANSWER)
    llm.settle()
    assert llm.free_blocks == free
    assert not llm.manager.lookaheads
    assert not llm.manager.planner._looking
    # with all that would judge it, it is a prompt of all its tokens
    same = ANSWER if request.num_output_tokens < AHEAD else AHEAD + 1
    llm.core.resume_scheduler()
    done = {name.split("-")[0]: answer for name, answer in llm.drain(limit=200).items()}
    assert done["r"][:same] == alone[2][:same]
    assert done["next"] == alone[1]
    gave_everything_back(llm, free)
