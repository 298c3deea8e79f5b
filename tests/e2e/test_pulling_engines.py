"""Engines that pull their prompts from a real prefill server, each in this process.

So a test sees what they schedule and pack. `test_disaggregated` has two servers.
"""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from engines import V2, engine, first_runner, prepare_model_runner, settings

prepare_model_runner()  # what follows loads Triton

import again
from checkpoints import talking
from disaggregated import (
    ANSWER,
    LENGTH,
    PROMPTS,
    M,
    computed_here,
    one_of_two,
    pulling,
    submit,
)
from idling import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# where the process of another test has started it
URL = "DISAGGREGATED_PREFILL_URL"
MODEL = "DISAGGREGATED_MODEL"


@pytest.fixture(scope="module")
def model(demo_model, tmp_path_factory):
    known = os.environ.get(MODEL)
    return known or talking(tmp_path_factory.mktemp("model"), demo_model)


@pytest.fixture(scope="module")
def prefill(model, tmp_path_factory):
    """A server of vLLM alone."""
    if URL in os.environ:
        yield SimpleNamespace(url=os.environ[URL])
        return
    with one_of_two(model, tmp_path_factory.mktemp("prefill"), "kv_producer") as server:
        yield server


@pytest.fixture(scope="module")
def here(model):
    return computed_here(model)


@pytest.mark.parametrize("caching", [True] if V2 else [True, False])
def test_it_is_packed_at_the_same_step_by_the_same_queries(
    caching, model, prefill, here, monkeypatch
):
    with pulling(model, monkeypatch, enable_prefix_caching=caching) as llm:
        free, computed = llm.free_blocks, []
        packed = llm.watch_packing(
            lambda done: (done.pack_request.tokens, done.pack_request.plan.window)
        )
        execute = llm.worker.execute_model

        def executing(output):
            computed.append(dict(output.num_scheduled_tokens))
            assert output.kvcompress is None or output.num_scheduled_tokens
            return execute(output)

        llm.worker.execute_model = executing
        submit(llm, prefill, "r", PROMPTS[0])
        assert list(llm.drain().values()) == here[:1]
        assert llm.free_blocks == free
    # the prompt's last 16 judge it too, so they are computed, and no other token of it
    steps = [count for step in computed for count in step.values()]
    assert steps[0] == 16
    assert sum(steps) == 16 + ANSWER - 1
    assert packed == [(LENGTH + M, M + 16)]


def one_is_preempted(llm):
    """Answers by request, of which the first was preempted once its prompt was packed."""
    done, preempted = {}, False
    while llm.llm.llm_engine.has_unfinished_requests():
        done |= {key: list(each.outputs[0].token_ids) for key, each in llm.step().items()}
        for request in llm.running():
            first = request.request_id.startswith("0")
            if first and request.num_output_tokens == M + 4 and not preempted:
                preempted = True
                llm.preempt(request)
    assert preempted
    return {key.split("-")[0]: answer for key, answer in done.items()}


def begin_together(scheduler):
    """As where all prompts are computed: none starts before all were pulled, in their order."""
    handle = scheduler._handle_blocked_waiting_request

    def handling(request):
        if request.status.name != "WAITING_FOR_REMOTE_KVS":
            return handle(request)
        here = len(scheduler.finished_recving_kv_req_ids)
        began[0] = began[0] or here == len(PROMPTS)
        return began[0] and handle(request)

    began = [False]
    scheduler._handle_blocked_waiting_request = handling


@first_runner
def test_preempted_requests_and_such_as_find_no_slot_go_on(model, prefill, monkeypatch):
    """What was pulled once is not pulled again, and is packed as where nothing is pulled.

    With one slot for a look-ahead, the others are packed as they come, by their last queries.
    """
    own = settings("cake-chunk", 0.3, lookahead=M, lookahead_slots=1)
    options = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 2048}
    with engine(model, additional_config=own, **options) as llm:
        for at, prompt in enumerate(PROMPTS):
            llm.submit(str(at), prompt, ANSWER)
        alone = one_is_preempted(llm)
    with pulling(model, monkeypatch, own=own, **options) as llm:
        free, answered = llm.free_blocks, llm.watch_packing(lambda done: done.pack_request.answered)
        for at, prompt in enumerate(PROMPTS):
            submit(llm, prefill, str(at), prompt)
        begin_together(llm.scheduler)
        assert one_is_preempted(llm) == alone
        assert llm.free_blocks == free
        # two found no slot, and one was packed again with a part of its answer
        assert sorted(answered, key=str) == [M, None, None, None]
        assert not llm.manager.planner._looking


@first_runner
def test_where_blocks_are_short_one_is_preempted_and_not_pulled_again(model, prefill, monkeypatch):
    """Three that look ahead need more blocks than there are: none is packed before its time."""
    m, answer = 40, 60
    own = settings("cake-chunk", 0.3, lookahead=m, lookahead_yields="never")
    options = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 2048}
    with engine(model, additional_config=own, **options) as llm:
        want = [llm.generate([prompt], answer)[0] for prompt in PROMPTS]
    held = sum(-(-len(prompt) // 32) for prompt in PROMPTS)
    with pulling(model, monkeypatch, own=own, blocks=1 + held + 2, **options) as llm:
        free, cuts = llm.free_blocks, llm.watch_preemptions()
        allocated, pulled = llm.scheduler.connector.update_state_after_alloc, []

        def allocating(request, blocks, tokens):
            if tokens:
                pulled.append(request.request_id.split("-")[0])
            allocated(request, blocks, tokens)

        llm.scheduler.connector.update_state_after_alloc = allocating
        packed = llm.watch_packing(lambda done: done.pack_request.tokens)
        for at, prompt in enumerate(PROMPTS):
            submit(llm, prefill, str(at), prompt, answer)
        done = {key.split("-")[0]: each for key, each in llm.drain().items()}
        assert [done[str(at)] for at in range(len(PROMPTS))] == want
        assert llm.free_blocks == free
    assert cuts
    assert all(cut < m for each in cuts.values() for cut in each)
    assert sorted(pulled) == ["0", "1", "2"]
    assert sorted(packed) == sorted(len(prompt) + m for prompt in PROMPTS)


@first_runner
def test_one_that_ends_while_it_is_pulled_gives_all_back(model, prefill, here, monkeypatch):
    from vllm.v1.request import RequestStatus

    with pulling(model, monkeypatch) as llm:
        free = llm.free_blocks
        submit(llm, prefill, "gone", PROMPTS[0])
        llm.step()
        (request,) = llm.scheduler.requests.values()
        assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        assert llm.free_blocks < free
        # nothing is planned: all that it holds are its prompt's own blocks
        assert llm.manager.num_blocks_held(request.request_id) == -(-LENGTH // 32)
        assert not llm.manager.lookaheads
        assert not llm.manager.planner._looking
        llm.llm.llm_engine.abort_request([request.request_id], internal=True)
        submit(llm, prefill, "next", PROMPTS[2])
        assert list(llm.drain().values()) == here[2:]
        wait_for(lambda: (llm.settle(), llm.free_blocks == free)[1], seconds=60)
        assert not llm.manager.planner.schedules
        assert not llm.manager.planner._looking


@first_runner
def test_answers_may_be_bounded(model, prefill, monkeypatch):
    own = settings("cake", 0.3, lookahead=M, decode_budget=96, decode_interval=32)
    with engine(model, max_model_len=1024, additional_config=own) as llm:
        alone = llm.generate(PROMPTS[:1], 120)
    with pulling(model, monkeypatch, own=own) as llm:
        again_packed = llm.watch_repacking()
        submit(llm, prefill, "r", PROMPTS[0], 120)
        assert list(llm.drain().values()) == alone
        assert again_packed


@first_runner
def test_on_model_runner_v2(model, prefill, tmp_path):
    """CUDA runs it: the engines of this file on it, against the same prefill server."""
    file = str(Path(__file__).relative_to(again.ROOT))
    known = {"VLLM_USE_V2_MODEL_RUNNER": "1", URL: prefill.url, MODEL: model}
    done = again.run([file], known, tmp_path)
    assert done.ok, done.said
    assert done.passed[file] == 1
