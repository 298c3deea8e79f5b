"""Plans that no worker executed: their blocks are already free, so the engine must stop."""

import copy
import dataclasses
import importlib

import pytest
import torch
from vllm.v1.worker import gpu_model_runner

from checkpoints import make, tokens
from engines import V2, allow_async_scheduling, engine, model_runner_v1_only, settings
from vllm_kvcompress.errors import VllmHookError

PROMPT, SHORT = tokens(300, seed=1), tokens(20, seed=2)
CHUNK, LOOKAHEAD = 128, 8
STEP = CHUNK + 8
AT_END = {"kv_lookahead": 0}


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, marks=model_runner_v1_only), True],
    ids=["sync", "async"],
)
def llm(request, checkpoints_folder):
    """An engine with chunked prefill; with async scheduling, one step is always in flight."""
    overlapped = request.param
    with pytest.MonkeyPatch.context() as patch:
        allow_async_scheduling(patch)
        opened = engine(
            make("llama-one-layer", checkpoints_folder),
            additional_config=settings(
                "snapkv",
                0.3,
                lookahead=LOOKAHEAD,
                allow_override="off",
                decode_budget=64,
                decode_interval=32,
            ),
            async_scheduling=overlapped,
            max_num_batched_tokens=STEP,
            long_prefill_token_threshold=CHUNK,
            max_num_seqs=4,
            max_model_len=1024,
            enable_prefix_caching=False,
        )
        with opened as llm:
            assert type(llm.scheduler).__name__ == f"Compressing{'Async' * overlapped}Scheduler"
            assert (llm.core.batch_queue_size > 1) == overlapped
            yield llm


def without(thing, name):
    """Return a copy without the field, as a transport makes that does not know the field."""
    thing = copy.copy(thing)
    vars(thing).pop(name, None)
    return thing


def past_the_worker(executor, worker):
    """Call the model runner directly, as Ray's legacy executor does."""
    run = executor.collective_rpc

    def rpc(method, args=(), **how):
        if method in ("execute_model", "sample_tokens"):
            method = getattr(worker.model_runner, method)
            return run(lambda _, *inputs: method(*inputs), args=args, **how)
        return run(method, args=args, **how)

    return rpc


def _changing_input(executor, change):
    run = executor.collective_rpc

    def rpc(method, args=(), **how):
        if method == "execute_model":
            args = (change(args[0]),)
        return run(method, args=args, **how)

    return rpc


def plan_dropped(executor, worker):
    return _changing_input(executor, lambda output: without(output, "kvcompress"))


def plan_taken_off(executor, worker):
    """Remove the plan from the scheduler's own output object."""

    def change(output):
        output.kvcompress = None
        return output

    return _changing_input(executor, change)


def _changing_output(executor, change):
    run = executor.collective_rpc

    def rpc(method, args=(), **how):
        if method != "sample_tokens":
            return run(method, args=args, **how)
        sample = executor.driver_worker.worker.sample_tokens

        def sampling(_, *inputs):
            output = sample(*inputs)
            if hasattr(output, "get_output"):
                wait = output.get_output
                output.get_output = lambda: change(wait())
                return output
            return change(output)

        return run(sampling, args=args, **how)

    return rpc


def acknowledgement_dropped(executor, worker):
    return _changing_output(executor, lambda output: without(output, "kvcompress"))


def another_plan_acknowledged(executor, worker):
    def change(output):
        report = getattr(output, "kvcompress", None)
        if report is not None and report.executed_plan is not None:
            output.kvcompress = dataclasses.replace(report, executed_plan=report.executed_plan - 1)
        return output

    return _changing_output(executor, change)


FAULTS = [
    past_the_worker,
    acknowledgement_dropped,
    # these faults only change messages, so one model runner is enough
    *(
        pytest.param(altered, marks=model_runner_v1_only)
        for altered in (plan_dropped, plan_taken_off, another_plan_acknowledged)
    ),
]


def deliver(llm, seen, steps=1):
    """Run steps and store the tokens that clients received in `seen`."""
    for _ in range(steps):
        for output in llm.llm.llm_engine.step():
            seen[output.request_id] = list(output.outputs[0].token_ids)


def test_every_plan_is_acknowledged_in_its_own_step(llm):
    acknowledged, update = [], llm.scheduler.update_from_output

    def updating(scheduler_output, output):
        plan, report = scheduler_output.kvcompress, getattr(output, "kvcompress", None)
        acknowledged.append((plan and plan.number, report and report.executed_plan))
        return update(scheduler_output, output)

    llm.scheduler.update_from_output = updating
    llm.submit("a", PROMPT, 12, extra_args=AT_END)
    llm.submit("b", PROMPT[::-1], 12, extra_args=AT_END)
    llm.submit("c", PROMPT[1:], 12)
    llm.drain()
    llm.finish_in_flight_steps()
    llm.scheduler.update_from_output = update
    assert not llm.scheduler._steps_in_flight
    plans = [number for number, _ in acknowledged if number is not None]
    assert plans == list(range(plans[0], plans[0] + len(plans)))
    assert len(plans) >= 2 * len(PROMPT) // STEP  # including chunks that are only observed
    assert all(executed == number for number, executed in acknowledged)
    assert sum(number is None for number, _ in acknowledged) >= LOOKAHEAD


def revive(llm, rpc, schedule):
    """Reset the stopped engine, which only a test can do, to save another engine start."""
    llm.core.model_executor.collective_rpc, llm.scheduler.schedule = rpc, schedule
    llm.scheduler._stop_message = None
    llm.scheduler._steps_in_flight.clear()
    while llm.core.batch_queue:
        llm.core.batch_queue.pop()
    for request_id in list(llm.scheduler.requests):
        llm.llm.llm_engine.abort_request([request_id], internal=True)
    llm.finish_in_flight_steps()


@pytest.mark.parametrize("fault", FAULTS)
def test_no_token_computed_after_a_lost_plan_is_delivered(llm, fault):
    """The lost plan belongs to a step that only observes a chunk."""
    executor, scheduler = llm.core.model_executor, llm.scheduler
    expected, free = llm.generate([SHORT], 60)[0], llm.free_blocks
    rpc, schedule = executor.collective_rpc, scheduler.schedule
    steps, seen = [], {}

    def scheduling(*args, **kwargs):
        output = schedule(*args, **kwargs)
        steps.append(output.kvcompress is not None)
        return output

    scheduler.schedule = scheduling
    llm.submit("short", SHORT, 60)
    deliver(llm, seen, steps=5)
    executor.collective_rpc = fault(executor, llm.worker)
    llm.submit("long", PROMPT, 8, extra_args=AT_END)
    with pytest.raises(VllmHookError, match=r"came back with .* acknowledged") as stop:
        deliver(llm, seen, steps=20)
    message = str(stop.value)
    assert "\n" not in message
    assert "['long-" in message, message
    assert "serve without --kv-compress" in message
    lost = steps.index(True, 5)  # an earlier plan starts the short request's decode budget
    in_flight = llm.core.batch_queue_size - 1
    assert len(steps) - lost - 1 == in_flight, "steps that ran on the freed blocks"
    assert list(seen) == ["short"]
    assert seen["short"] == expected[: len(seen["short"])]
    assert 3 <= len(seen["short"]) <= lost  # only tokens of the steps before the lost plan
    for _ in range(2):  # further calls return nothing either
        with pytest.raises(VllmHookError, match="came back with"):
            deliver(llm, seen)
    revive(llm, rpc, schedule)
    assert llm.free_blocks == free
    assert llm.generate([SHORT], 60)[0] == expected


LOST_PARTS = {  # the prompt, its number of chunks, and a test for the plan that is lost
    "output tokens that are packed": (SHORT, 1, lambda plan: any(not x.prefill for x in plan.pack)),
    "queries of a chunk": (PROMPT[: 2 * STEP + 4], 3, lambda plan: plan.keep_prompt_queries),
    "queries of a prefill's end": (PROMPT, 3, lambda plan: plan.keep_output_queries),
    "a prompt scored by its output": (PROMPT, 3, lambda plan: any(x.prefill for x in plan.pack)),
}


@model_runner_v1_only
@pytest.mark.parametrize("part", LOST_PARTS)
def test_every_kind_of_lost_plan_is_detected(llm, part):
    """No token of its step, or of later steps, is delivered."""
    prompt, chunks, is_lost = LOST_PARTS[part]
    executor, scheduler = llm.core.model_executor, llm.scheduler
    expected, free = llm.generate([prompt], 100)[0], llm.free_blocks
    rpc, schedule = executor.collective_rpc, scheduler.schedule
    plans, seen = [], {}

    def scheduling(*args, **kwargs):
        output = schedule(*args, **kwargs)
        plans.append(output.kvcompress)
        if plans[-1] is not None and is_lost(plans[-1]):
            executor.collective_rpc = plan_dropped(executor, llm.worker)
        return output

    scheduler.schedule = scheduling
    llm.submit("r", prompt, 100)
    with pytest.raises(VllmHookError, match=r"\['r-.*'\], came back with no plan acknowledged"):
        deliver(llm, seen, steps=100)
    (lost,) = (step for step, plan in enumerate(plans) if plan is not None and is_lost(plan))
    plan = plans[lost]
    parts = (
        plan.observe,
        plan.keep_output_queries,
        plan.keep_prompt_queries,
        plan.add_attention,
        plan.pack,
    )
    assert sum(map(bool, parts)) == 1
    output = next(iter(seen.values()), [])
    assert output == expected[: len(output)]
    assert len(output) <= max(lost - chunks + 1, 0)
    revive(llm, rpc, schedule)
    assert llm.free_blocks == free
    assert llm.generate([prompt], 100)[0] == expected


@pytest.mark.parametrize(
    "asks",
    [pytest.param(AT_END, id="at its prefill's end"), pytest.param({}, id="after its look-ahead")],
)
def test_engine_delivers_nothing_after_a_failed_packing(llm, asks, monkeypatch):
    """A client of an in-process engine may call it again once memory is available.

    The prompt's blocks are free by then, and its layers would read pages that were never written.
    """
    rpc, schedule = llm.core.model_executor.collective_rpc, llm.scheduler.schedule
    prompts, new, free = {"short": SHORT, "long": PROMPT}, 20, llm.free_blocks
    expected = {name: llm.generate([ids], new, extra_args=asks)[0] for name, ids in prompts.items()}
    seen: dict[str, list[int]] = {}

    def out_of_memory(*_):
        raise torch.OutOfMemoryError("no memory for scores")

    for name, prompt in prompts.items():
        llm.submit(name, prompt, new, extra_args=asks)
    with monkeypatch.context() as patch:
        patch.setattr(llm.compressor.packer, "_observe", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            deliver(llm, seen, steps=20)
    # Model Runner V1 raises its own error
    stops = RuntimeError if not V2 else VllmHookError
    for _ in range(3):
        with pytest.raises(stops, match=r"State error|step with plan .*'long-.* failed, so the en"):
            deliver(llm, seen, steps=5)
    for name, token_ids in seen.items():
        assert token_ids == expected[name][: len(token_ids)]
    in_flight = llm.core.batch_queue_size - 1
    before = 0 if asks else LOOKAHEAD
    assert max(before - in_flight, 0) <= len(seen.get("long", [])) <= before
    llm.worker.model_runner.execute_model_state = None
    revive(llm, rpc, schedule)
    assert llm.free_blocks == free
    assert llm.generate([PROMPT], new, extra_args=asks)[0] == expected["long"]


@pytest.mark.parametrize(
    "asks",
    [pytest.param(AT_END, id="at its prefill's end"), pytest.param({}, id="after its look-ahead")],
)
def test_packing_starts_after_the_copy_of_the_sampled_token(llm, asks, monkeypatch):
    """On a GPU the copy then does not wait for the packing, and neither does the first token."""
    events, runner, packer = [], llm.worker.model_runner, llm.compressor.packer

    def record(owner, name, event):
        run = getattr(owner, name)

        def recording(*args, **options):
            events.append(event)
            return run(*args, **options)

        monkeypatch.setattr(owner, name, recording)

    record(runner, "execute_model", "forward")
    record(runner, "sample" if V2 else "_sample", "sampling")
    if V2:
        record(importlib.import_module("vllm.v1.worker.gpu.model_runner"), "AsyncOutput", "copy")
    elif llm.core.batch_queue_size > 1:
        record(gpu_model_runner, "AsyncGPUModelRunnerOutput", "copy")
    else:
        record(runner, "_bookkeeping_sync", "copy")
    record(llm.worker.compressor, "end_step", "end of step")
    run = packer.run
    monkeypatch.setattr(packer, "run", lambda jobs: (events.append("packing"), run(jobs))[1])
    (output,) = llm.generate([PROMPT], 20, extra_args=asks)
    assert len(output) == 20
    steps = " ".join(events).split("forward")[1:]
    assert sum("sampling" in step for step in steps) >= 20
    packing_steps = [step.strip() for step in steps if "packing" in step]
    assert packing_steps
    assert set(packing_steps) == {"sampling copy end of step packing"}
