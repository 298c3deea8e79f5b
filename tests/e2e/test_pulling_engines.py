"""Engines in this process that pull prompts from a real prefill server.

The tests observe what the engines schedule and pack. `test_disaggregated` uses two servers.
"""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from engines import (
    V2,
    allow_async_scheduling,
    engine,
    model_runner_v1_only,
    prepare_model_runner,
    settings,
)

prepare_model_runner()  # before the imports that load Triton

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

import pytest_process
from checkpoints import text_checkpoint
from disaggregated import (
    LENGTH,
    OUTPUT_TOKENS,
    PROMPTS,
    M,
    local_outputs_of,
    pulling,
    submit,
    transfer_server,
)
from queued_packing import queue_packing
from server_metrics import wait_for
from vllm_kvcompress.engine.scheduling.step_builder import StepBuilder
from vllm_kvcompress.engine.worker.pulls import starts_pulls
from vllm_kvcompress.engine.worker.worker import CompressingWorker

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# set by test_on_model_runner_v2, which has started the server
URL = "DISAGGREGATED_PREFILL_URL"
MODEL = "DISAGGREGATED_MODEL"


@pytest.fixture(scope="module")
def model(demo_model, tmp_path_factory):
    known = os.environ.get(MODEL)
    folder = tmp_path_factory.mktemp("model")
    # k4v3 needs a head dim of 64
    return known or text_checkpoint(folder, demo_model, "llama-two-layers-d64")


@pytest.fixture(scope="module")
def prefill(model, tmp_path_factory):
    """Run an unmodified vLLM prefill server, or use the one that is already running."""
    if URL in os.environ:
        yield SimpleNamespace(url=os.environ[URL])
        return
    with transfer_server(model, tmp_path_factory.mktemp("prefill"), "kv_producer") as server:
        yield server


@pytest.fixture(scope="module")
def local_outputs(model):
    return local_outputs_of(model)


@pytest.mark.parametrize("caching", [True] if V2 else [True, False])
def test_pulled_prompts_are_packed_at_the_same_step_by_the_same_queries(
    caching, model, prefill, local_outputs, monkeypatch
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
        assert list(llm.drain().values()) == local_outputs[:1]
        assert llm.free_blocks == free
    # only the prompt's last 16 tokens are computed here, because their queries score the prompt
    steps = [count for step in computed for count in step.values()]
    assert steps[0] == 16
    assert sum(steps) == 16 + OUTPUT_TOKENS - 1
    assert packed == [(LENGTH + M, M + 16)]


def run_with_one_preemption(llm):
    """Return outputs by request; request "0" is preempted once, after its prompt was packed."""
    outputs, preempted = {}, False
    while llm.llm.llm_engine.has_unfinished_requests():
        outputs |= {key: list(output.outputs[0].token_ids) for key, output in llm.step().items()}
        for request in llm.running():
            is_first = request.request_id.startswith("0")
            if is_first and request.num_output_tokens == M + 4 and not preempted:
                preempted = True
                llm.preempt(request)
    assert preempted
    return {key.split("-")[0]: output_ids for key, output_ids in outputs.items()}


def start_together(scheduler):
    """Hold back all requests until all prompts are pulled, so that they start in order."""
    handle = scheduler._handle_blocked_waiting_request

    def handling(request):
        if request.status.name != "WAITING_FOR_REMOTE_KVS":
            return handle(request)
        num_pulled = len(scheduler.finished_recving_kv_req_ids)
        started[0] = started[0] or num_pulled == len(PROMPTS)
        return started[0] and handle(request)

    started = [False]
    scheduler._handle_blocked_waiting_request = handling


@model_runner_v1_only
def test_pulled_prompts_survive_preemption_and_missing_lookahead_slots(model, prefill, monkeypatch):
    """Preempted prompts are not pulled again, and are packed as in an engine without pulls.

    There is one look-ahead slot; requests without it are packed at once, scored by their last
    queries.
    """
    config = settings("cake-chunk", 0.3, lookahead=M, lookahead_slots=1)
    options = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 2048}
    with engine(model, additional_config=config, **options) as llm:
        for index, prompt in enumerate(PROMPTS):
            llm.submit(str(index), prompt, OUTPUT_TOKENS)
        expected = run_with_one_preemption(llm)
    with pulling(model, monkeypatch, config=config, **options) as llm:
        free, output_tokens = (
            llm.free_blocks,
            llm.watch_packing(lambda done: done.pack_request.output_tokens),
        )
        for index, prompt in enumerate(PROMPTS):
            submit(llm, prefill, str(index), prompt)
        start_together(llm.scheduler)
        assert run_with_one_preemption(llm) == expected
        assert llm.free_blocks == free
        # two requests found no slot, and the preempted one was packed again with its output tokens
        assert sorted(output_tokens, key=str) == [M, None, None, None]
        assert not llm.lookahead_slots_in_use


@model_runner_v1_only
def test_preempted_pulled_prompts_are_not_pulled_again(model, prefill, monkeypatch):
    """Three look-aheads need more blocks than the pool has, and none is compressed early."""
    monkeypatch.setattr(StepBuilder, "pack_early", lambda *args, **more: None)
    lookahead, max_tokens = 40, 60
    config = settings("cake-chunk", 0.3, lookahead=lookahead)
    options = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 2048}
    with engine(model, additional_config=config, **options) as llm:
        expected = [llm.generate([prompt], max_tokens)[0] for prompt in PROMPTS]
    num_prompt_blocks = sum(-(-len(prompt) // 32) for prompt in PROMPTS)
    with pulling(
        model, monkeypatch, config=config, blocks=1 + num_prompt_blocks + 2, **options
    ) as llm:
        free, cuts = llm.free_blocks, llm.watch_preemptions()
        allocated, pulled = llm.scheduler.connector.update_state_after_alloc, []

        def allocating(request, blocks, tokens):
            if tokens:
                pulled.append(request.request_id.split("-")[0])
            allocated(request, blocks, tokens)

        llm.scheduler.connector.update_state_after_alloc = allocating
        packed = llm.watch_packing(lambda outputs: outputs.pack_request.tokens)
        for index, prompt in enumerate(PROMPTS):
            submit(llm, prefill, str(index), prompt, max_tokens)
        outputs = {key.split("-")[0]: output for key, output in llm.drain().items()}
        assert [outputs[str(index)] for index in range(len(PROMPTS))] == expected
        assert llm.free_blocks == free
    assert cuts
    assert all(cut < lookahead for counts in cuts.values() for cut in counts)
    assert sorted(pulled) == ["0", "1", "2"]
    assert sorted(packed) == sorted(len(prompt) + lookahead for prompt in PROMPTS)


@model_runner_v1_only
@pytest.mark.parametrize("waits", [True, False])
def test_pulls_wait_for_packing(waits, model, prefill, local_outputs, monkeypatch):
    """Pulls start while the packing of the step before is still queued, as on a GPU.

    Without our rule, they overwrite freed blocks that packing reads, and outputs differ.
    """
    monkeypatch.setattr(StepBuilder, "pack_early", lambda *args, **more: None)

    def overwrite(scheduler_output):
        """Write to the blocks that a transfer writes to, as early as it may."""
        if starts_pulls(scheduler_output):
            pool = llm.compressor.pool
            for pull in scheduler_output.kv_connector_metadata.reqs_to_recv.values():
                pulls.append(pull)
                for block_ids in pull.local_block_ids:
                    pool.pages.index_fill_(0, pool.destination(block_ids), 3.0)

    pulls, pack = [], queue_packing(monkeypatch, overwrite)
    finish = pack if waits else lambda _: None
    monkeypatch.setattr(CompressingWorker, "_finish_earlier_steps", finish)
    # The second prompt is pulled when the first one is packed, and needs its blocks.
    with pulling(model, monkeypatch, blocks=1 + 24, max_model_len=640) as llm:
        for index in (0, 2):
            submit(llm, prefill, str(index), PROMPTS[index])
        outputs = llm.drain()
    assert len(pulls) == 2
    assert outputs["2"] == local_outputs[2]
    assert (outputs["0"] == local_outputs[0]) == waits


PARKING = settings("cake-chunk", 0.3, lookahead=M, park=0.05)
PARKING_K4V3 = settings("cake-chunk", 0.3, lookahead=M, park=0.05, packed_dtype="k4v3")
parking_engines = pytest.mark.parametrize(
    ("config", "is_async"),
    [
        pytest.param(PARKING, False, marks=model_runner_v1_only),
        (PARKING, True),
        pytest.param(PARKING_K4V3, False, marks=model_runner_v1_only),
        pytest.param(PARKING_K4V3, True, marks=model_runner_v1_only),
    ],
    ids=["sync", "async", "k4v3", "async k4v3"],
)


@parking_engines
def test_packed_pulled_prompts_resume_from_host_memory(
    config, is_async, model, prefill, monkeypatch
):
    """A preempted request is neither pulled nor computed again: it resumes from its pages."""
    allow_async_scheduling(monkeypatch)
    with engine(model, max_model_len=1024, additional_config=config) as llm:
        expected = llm.generate(PROMPTS, OUTPUT_TOKENS)
    with pulling(model, monkeypatch, config=config, async_scheduling=is_async) as llm:
        assert isinstance(llm.scheduler, AsyncScheduler) == is_async
        free, parking, connector = llm.free_blocks, llm.scheduler.parking, llm.scheduler.connector
        allocated, resume, schedule = (
            connector.update_state_after_alloc,
            parking.resume,
            llm.scheduler.schedule,
        )
        pulled, resumed, preempted, computed = [], [], [], []

        def allocating(request, blocks, tokens):
            pulled.extend([request.request_id] if tokens else [])
            allocated(request, blocks, tokens)

        def resuming(state):
            resumed.append(state.request_id)
            resume(state)

        def scheduling(*args, **kwargs):
            output = schedule(*args, **kwargs)
            computed.append(output.total_num_scheduled_tokens)
            return output

        connector.update_state_after_alloc, parking.resume = allocating, resuming
        llm.scheduler.schedule = scheduling
        for index, prompt in enumerate(PROMPTS):
            submit(llm, prefill, str(index), prompt)
        outputs = {}
        while llm.llm.llm_engine.has_unfinished_requests():
            for request in llm.running():
                times = preempted.count(request.request_id)
                if times < 2 and request.num_output_tokens >= M + 3 + 3 * times:
                    preempted.append(request.request_id)
                    llm.preempt(request)
            outputs |= {name: [*each.outputs[0].token_ids] for name, each in llm.step().items()}
        assert [outputs[str(index)] for index in range(len(PROMPTS))] == expected
        assert sorted(resumed) == sorted(preempted)
        assert len(resumed) == 2 * len(PROMPTS)
        assert sorted(pulled) == sorted({*preempted})
        if not is_async:
            # each resumption computes the token that decoding would have computed
            assert sum(computed) == len(PROMPTS) * (16 + OUTPUT_TOKENS - 1)
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free
        assert not len(llm.compressor.host_pages)


@parking_engines
@model_runner_v1_only
def test_a_pulled_request_aborted_while_parked_frees_its_slots(
    config, is_async, model, prefill, monkeypatch
):
    allow_async_scheduling(monkeypatch)
    with pulling(model, monkeypatch, config=config, async_scheduling=is_async) as llm:
        free, parking = llm.free_blocks, llm.scheduler.parking
        slots = parking.num_free_slots
        submit(llm, prefill, "gone", PROMPTS[0])
        while not llm.running() or llm.running()[0].num_output_tokens < M + 4:
            llm.step()
        (request,) = llm.running()
        llm.preempt(request)
        taken = llm.pool.get_new_blocks(llm.free_blocks)  # so that it stays parked
        llm.step()
        assert parking.num_free_slots < slots
        assert len(llm.compressor.host_pages) == 1
        llm.llm.llm_engine.abort_request([request.request_id], internal=True)
        assert parking.num_free_slots == slots
        llm.pool.free_blocks(taken)
        submit(llm, prefill, "next", PROMPTS[2])
        llm.drain()
        llm.finish_in_flight_steps()
        assert parking.num_free_slots == slots
        assert llm.free_blocks == free
        assert not len(llm.compressor.host_pages)
        assert not len(llm.scheduler.states)


@model_runner_v1_only
def test_a_request_aborted_during_its_pull_returns_its_blocks(
    model, prefill, local_outputs, monkeypatch
):
    from vllm.v1.request import RequestStatus

    with pulling(model, monkeypatch) as llm:
        free = llm.free_blocks
        submit(llm, prefill, "gone", PROMPTS[0])
        llm.step()
        (request,) = llm.scheduler.requests.values()
        assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        assert llm.free_blocks < free
        # no compression is planned yet: the request holds only its prompt's blocks
        assert llm.num_blocks_held(request.request_id) == -(-LENGTH // 32)
        assert not llm.scheduler.lookaheads
        assert not llm.lookahead_slots_in_use
        llm.llm.llm_engine.abort_request([request.request_id], internal=True)
        submit(llm, prefill, "next", PROMPTS[2])
        assert list(llm.drain().values()) == local_outputs[2:]
        wait_for(lambda: (llm.finish_in_flight_steps(), llm.free_blocks == free)[1], seconds=60)
        assert not len(llm.scheduler.states)
        assert not llm.lookahead_slots_in_use


@model_runner_v1_only
def test_pulled_prompts_support_a_decode_budget(model, prefill, monkeypatch):
    config = settings("cake", 0.3, lookahead=M, decode_budget=96, decode_interval=32)
    with engine(model, max_model_len=1024, additional_config=config) as llm:
        expected = llm.generate(PROMPTS[:1], 120)
    with pulling(model, monkeypatch, config=config) as llm:
        repacked = llm.watch_repacking()
        submit(llm, prefill, "r", PROMPTS[0], 120)
        assert list(llm.drain().values()) == expected
        assert repacked


@model_runner_v1_only
def test_on_model_runner_v2(model, prefill, tmp_path):
    """Run this file on Model Runner V2, which CUDA uses, against the same prefill server."""
    file = str(Path(__file__).relative_to(pytest_process.ROOT))
    environment = {"VLLM_USE_V2_MODEL_RUNNER": "1", URL: prefill.url, MODEL: model}
    result = pytest_process.run([file], environment, tmp_path)
    assert result.ok, result.output
    assert result.passed[file] == 2
