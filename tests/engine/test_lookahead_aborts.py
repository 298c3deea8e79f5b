"""Requests that are aborted, stop or are paused during their look-ahead return all resources."""

import pytest

from engines import V2, allow_async_scheduling, engine, model_runner_v1_only
from test_lookahead import LOOKAHEAD, NUM_OUTPUT, PROMPTS, lookahead_config, single_outputs

__all__ = ["single_outputs"]

# Chunks of the longest prompt. The workers keep queries for the look-ahead from the second one on.
CHUNKS = 3
PACK_STEP = CHUNKS + LOOKAHEAD  # the step after which the prompt is packed
PAUSE_STEPS = [2, CHUNKS + 1, PACK_STEP - 1, PACK_STEP]
# Number of steps, and whether the abort arrives while the workers run the last of them.
ABORTS = [(1, False), (2, True), (CHUNKS, False), (CHUNKS + 1, True), (PACK_STEP - 1, False)]
ABORTS += [(PACK_STEP, True), (PACK_STEP, False), (PACK_STEP + 1, True)]


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, marks=model_runner_v1_only), True],
    ids=["sync", "async"],
)
def one_slot(request, model, single_outputs):
    """An engine with one look-ahead slot and too few blocks for two requests."""
    with pytest.MonkeyPatch.context() as patch:
        allow_async_scheduling(patch)
        opened = engine(
            model,
            additional_config=lookahead_config(lookahead_slots=1),
            blocks=1 + 16,
            max_model_len=480,
            max_num_batched_tokens=len(PROMPTS[2]) // 2 - 3,
            async_scheduling=request.param,
            enable_prefix_caching=False,
        )
        with opened as llm:
            assert (llm.core.batch_queue_size > 1) == request.param
            yield llm


def check_nothing_is_held(llm, free_blocks):
    """Check that no request holds blocks or a query slot."""
    llm.finish_in_flight_steps()
    assert llm.free_blocks == free_blocks
    assert not llm.scheduler.lookaheads
    assert not llm.lookahead_slots_in_use
    assert llm.compressor.pool.ring._free == [1]
    assert not llm.compressor.pool._slots


@pytest.mark.parametrize(("num_steps", "during_step"), ABORTS[2::3] if V2 else ABORTS)
def test_aborted_requests_return_their_blocks_and_slot(
    one_slot, single_outputs, watched, num_steps, during_step
):
    """Abort before, during and after the look-ahead, and in the step that packs the prompt.

    The next request takes the only slot and the blocks, possibly while a step is still running.
    """
    llm, free_blocks = one_slot, one_slot.free_blocks
    compressed_before = llm.compressor.compressed
    llm.submit("aborted", PROMPTS[2], NUM_OUTPUT)
    for _ in range(num_steps - 1):
        llm.step()
    (request,) = llm.scheduler.requests.values()
    if during_step:  # the engine process receives aborts in this queue while its workers run
        llm.core.aborts_queue.put_nowait([request.request_id])
    llm.step()
    llm.llm.llm_engine.abort_request(["aborted"])
    is_packed = request.num_computed_tokens >= len(PROMPTS[2]) + LOOKAHEAD
    packed = llm.watch_packing(
        lambda done: (done.pack_request.prompt_tokens, done.pack_request.output_tokens)
    )
    llm.submit("next", PROMPTS[1], NUM_OUTPUT)
    assert [*llm.drain(limit=200).values()] == [single_outputs[1]]
    check_nothing_is_held(llm, free_blocks)
    assert packed == [(len(PROMPTS[1]), LOOKAHEAD)]
    del llm.compressor.packer.observers[-1]
    assert llm.compressor.compressed - compressed_before == is_packed + 1
    assert is_packed == (num_steps >= PACK_STEP)
    assert watched("planned") == {"cake": is_packed + 1}
    assert watched("skipped") == ({} if is_packed else {"aborted": 1})


@model_runner_v1_only
@pytest.mark.parametrize("stop_index", [1, LOOKAHEAD - 2, LOOKAHEAD - 1, LOOKAHEAD])
def test_requests_that_stop_at_a_token_return_their_blocks(
    one_slot, single_outputs, watched, stop_index
):
    """The stop is not known in advance. With async scheduling one more step is running by then."""
    llm, free_blocks = one_slot, one_slot.free_blocks
    compressed_before = llm.compressor.compressed
    expected = single_outputs[2][: stop_index + 1]
    stop_token = expected[stop_index]
    assert expected.index(stop_token) == stop_index
    assert llm.generate([PROMPTS[2]], NUM_OUTPUT, stop_token_ids=[stop_token]) == [expected]
    check_nothing_is_held(llm, free_blocks)
    is_packed = stop_index + llm.core.batch_queue_size - 1 >= LOOKAHEAD
    assert llm.compressor.compressed - compressed_before == is_packed
    assert watched("planned") == ({"cake": 1} if is_packed else {})
    assert watched("skipped") == ({} if is_packed else {"answered": 1})


@model_runner_v1_only
@pytest.mark.parametrize("num_steps", PAUSE_STEPS)
def test_pause_that_clears_the_cache_frees_everything(one_slot, single_outputs, num_steps):
    """Nothing is held during the pause, even if a step was running. Outputs do not change."""
    llm, free_blocks = one_slot, one_slot.free_blocks
    llm.submit("r", PROMPTS[2], NUM_OUTPUT)
    for _ in range(num_steps):
        llm.step()
    (request,) = llm.scheduler.requests.values()
    llm.core.pause_scheduler(mode="keep", clear_cache=True)
    llm.submit("next", PROMPTS[1], NUM_OUTPUT)
    llm.finish_in_flight_steps()
    assert llm.free_blocks == free_blocks
    assert not llm.scheduler.lookaheads
    assert not llm.lookahead_slots_in_use
    # A request with all its look-ahead tokens is resumed as a prompt of all its tokens.
    equal_tokens = NUM_OUTPUT if request.num_output_tokens < LOOKAHEAD else LOOKAHEAD + 1
    llm.core.resume_scheduler()
    outputs = llm.drain(limit=200)
    assert outputs["r"][:equal_tokens] == single_outputs[2][:equal_tokens]
    assert outputs["next"] == single_outputs[1]
    check_nothing_is_held(llm, free_blocks)
