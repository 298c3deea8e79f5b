"""A plan that no worker carried out: its blocks are free already, so the engine stops."""

import copy
import dataclasses

import pytest
import torch

from checkpoints import make, tokens
from engines import V2, engine, first_runner, leave_async_scheduling, settings
from vllm_kvcompress.errors import VllmHookError

PROMPT, SHORT = tokens(300, seed=1), tokens(20, seed=2)
CHUNK, AHEAD = 128, 8
STEP = CHUNK + 8
AT_END = {"kv_lookahead": 0}


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, marks=first_runner), True],
    ids=["sync", "async"],
)
def llm(request, checkpoints_folder):
    """Takes prompts in chunks; async, a step is always in flight."""
    overlapped = request.param
    with pytest.MonkeyPatch.context() as patch:
        leave_async_scheduling(patch)
        opened = engine(
            make("llama-one-layer", checkpoints_folder),
            additional_config=settings(
                "snapkv",
                0.3,
                lookahead=AHEAD,
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
    """A copy as a transport makes it that knows the fields it was written for."""
    thing = copy.copy(thing)
    vars(thing).pop(name, None)
    return thing


def past_the_worker(executor, worker):
    """As Ray's legacy executor does."""
    run = executor.collective_rpc

    def rpc(method, args=(), **how):
        if method in ("execute_model", "sample_tokens"):
            method = getattr(worker.model_runner, method)
            return run(lambda _, *given: method(*given), args=args, **how)
        return run(method, args=args, **how)

    return rpc


def _sending(executor, change):
    run = executor.collective_rpc

    def rpc(method, args=(), **how):
        if method == "execute_model":
            args = (change(args[0]),)
        return run(method, args=args, **how)

    return rpc


def plan_dropped(executor, worker):
    return _sending(executor, lambda output: without(output, "kvcompress"))


def plan_taken_off(executor, worker):
    """From the scheduler's own object."""

    def change(output):
        output.kvcompress = None
        return output

    return _sending(executor, change)


def _answering(executor, change):
    run = executor.collective_rpc

    def rpc(method, args=(), **how):
        if method != "sample_tokens":
            return run(method, args=args, **how)
        sample = executor.driver_worker.worker.sample_tokens

        def sampling(_, *given):
            output = sample(*given)
            if hasattr(output, "get_output"):
                wait = output.get_output
                output.get_output = lambda: change(wait())
                return output
            return change(output)

        return run(sampling, args=args, **how)

    return rpc


def acknowledgement_dropped(executor, worker):
    return _answering(executor, lambda output: without(output, "kvcompress"))


def another_plan_acknowledged(executor, worker):
    def change(output):
        report = getattr(output, "kvcompress", None)
        if report is not None and report.carried_out is not None:
            output.kvcompress = dataclasses.replace(report, carried_out=report.carried_out - 1)
        return output

    return _answering(executor, change)


FAULTS = [
    past_the_worker,
    acknowledgement_dropped,
    # what is altered is the message, whatever the runner
    *(
        pytest.param(altered, marks=first_runner)
        for altered in (plan_dropped, plan_taken_off, another_plan_acknowledged)
    ),
]


def delivered(llm, seen, steps=1):
    """Some steps; what clients have been given is kept in `seen`."""
    for _ in range(steps):
        for output in llm.llm.llm_engine.step():
            seen[output.request_id] = list(output.outputs[0].token_ids)


def test_every_plan_is_acknowledged_in_its_own_step_and_others_carry_nothing(llm):
    heard, update = [], llm.scheduler.update_from_output

    def updating(scheduler_output, output):
        plan, report = scheduler_output.kvcompress, getattr(output, "kvcompress", None)
        heard.append((plan and plan.number, report and report.carried_out))
        return update(scheduler_output, output)

    llm.scheduler.update_from_output = updating
    llm.submit("a", PROMPT, 12, extra_args=AT_END)
    llm.submit("b", PROMPT[::-1], 12, extra_args=AT_END)
    llm.submit("c", PROMPT[1:], 12)
    llm.drain()
    llm.settle()
    llm.scheduler.update_from_output = update
    assert not llm.scheduler._handed_out
    plans = [number for number, _ in heard if number is not None]
    assert plans == list(range(plans[0], plans[0] + len(plans)))
    assert len(plans) >= 2 * len(PROMPT) // STEP  # chunks that are only watched, too
    assert all(told == number for number, told in heard)
    assert sum(number is None for number, _ in heard) >= AHEAD


def revive(llm, own, schedule):
    """What no operator can do: another engine start is spared."""
    llm.core.model_executor.collective_rpc, llm.scheduler.schedule = own, schedule
    llm.scheduler._lost = None
    llm.scheduler._handed_out.clear()
    while llm.core.batch_queue:
        llm.core.batch_queue.pop()
    for request_id in list(llm.scheduler.requests):
        llm.llm.llm_engine.abort_request([request_id], internal=True)
    llm.settle()


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_that_was_computed_after_it_is_delivered(llm, fault):
    """It is lost in a step that only watches a chunk: even that one counts."""
    executor, scheduler = llm.core.model_executor, llm.scheduler
    right, free = llm.generate([SHORT], 60)[0], llm.free_blocks
    own, schedule = executor.collective_rpc, scheduler.schedule
    steps, seen = [], {}

    def scheduling(*args, **kwargs):
        output = schedule(*args, **kwargs)
        steps.append(output.kvcompress is not None)
        return output

    scheduler.schedule = scheduling
    llm.submit("short", SHORT, 60)
    delivered(llm, seen, steps=5)
    executor.collective_rpc = fault(executor, llm.worker)
    llm.submit("long", PROMPT, 8, extra_args=AT_END)
    with pytest.raises(VllmHookError, match=r"came back with .* acknowledged") as stop:
        delivered(llm, seen, steps=20)
    said = str(stop.value)
    assert "\n" not in said
    assert "['long-" in said, said
    assert "serve without --kv-compress" in said
    lost = steps.index(True, 5)  # the first plan says that the short answer is bounded
    in_flight = llm.core.batch_queue_size - 1
    assert len(steps) - lost - 1 == in_flight, "steps that ran on the freed blocks"
    given = {name.split("-")[0]: answer for name, answer in seen.items()}
    assert list(given) == ["short"]
    assert given["short"] == right[: len(given["short"])]
    assert 3 <= len(given["short"]) <= lost  # a token of each step before, and of none after
    for _ in range(2):  # whoever calls again gets nothing
        with pytest.raises(VllmHookError, match="came back with"):
            delivered(llm, seen)
    revive(llm, own, schedule)
    assert llm.free_blocks == free
    assert llm.generate([SHORT], 60)[0] == right


WHAT = {  # what of a step's plan is lost, and the prompt, in how many chunks, that it is of
    "an answer that is packed": (SHORT, 1, lambda plan: any(not x.prefill for x in plan.pack)),
    "queries of a chunk": (PROMPT[: 2 * STEP + 4], 3, lambda plan: plan.keep),
    "queries of a prefill's end": (PROMPT, 3, lambda plan: plan.grow),
    "a prompt that its answer judged": (PROMPT, 3, lambda plan: any(x.prefill for x in plan.pack)),
}


@first_runner
@pytest.mark.parametrize("what", WHAT)
def test_a_lost_plan_is_noticed_whatever_it_says(llm, what):
    """Nothing is delivered of its step, nor of later ones."""
    prompt, chunks, is_it = WHAT[what]
    executor, scheduler = llm.core.model_executor, llm.scheduler
    right, free = llm.generate([prompt], 100)[0], llm.free_blocks
    own, schedule = executor.collective_rpc, scheduler.schedule
    plans, seen = [], {}

    def scheduling(*args, **kwargs):
        output = schedule(*args, **kwargs)
        plans.append(output.kvcompress)
        if plans[-1] is not None and is_it(plans[-1]):
            executor.collective_rpc = plan_dropped(executor, llm.worker)
        return output

    scheduler.schedule = scheduling
    llm.submit("r", prompt, 100)
    with pytest.raises(VllmHookError, match=r"\['r-.*'\], came back with none acknowledged"):
        delivered(llm, seen, steps=100)
    (lost,) = (step for step, plan in enumerate(plans) if plan is not None and is_it(plan))
    said = plans[lost]
    assert sum(map(bool, (said.observe, said.grow, said.keep, said.add, said.pack))) == 1
    given = next(iter(seen.values()), [])
    assert given == right[: len(given)]
    assert len(given) <= max(lost - chunks + 1, 0)
    revive(llm, own, schedule)
    assert llm.free_blocks == free
    assert llm.generate([prompt], 100)[0] == right


@pytest.mark.parametrize(
    "asks",
    [pytest.param(AT_END, id="at its prefill's end"), pytest.param({}, id="after its look-ahead")],
)
def test_whoever_goes_on_after_a_packing_that_failed_gets_nothing(llm, asks, monkeypatch):
    """As one may who asks the engine in his own process, once there is memory again.

    The prompt's blocks are free, and its layers would read what was never packed.
    """
    own, schedule = llm.core.model_executor.collective_rpc, llm.scheduler.schedule
    prompts, new, free = {"short": SHORT, "long": PROMPT}, 20, llm.free_blocks
    right = {name: llm.generate([ids], new, extra_args=asks)[0] for name, ids in prompts.items()}
    seen: dict[str, list[int]] = {}

    def out_of_memory(*_):
        raise torch.OutOfMemoryError("no memory for scores")

    for name, prompt in prompts.items():
        llm.submit(name, prompt, new, extra_args=asks)
    with monkeypatch.context() as patch:
        patch.setattr(llm.compressor.packer, "_observe", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            delivered(llm, seen, steps=20)
    # vLLM's older runner stops by itself
    stops = RuntimeError if not V2 else VllmHookError
    for _ in range(3):
        with pytest.raises(stops, match=r"State error|step with plan .*'long-.* failed, so the en"):
            delivered(llm, seen, steps=5)
    given = {name.split("-")[0]: answer for name, answer in seen.items()}
    assert all(answer == right[name][: len(answer)] for name, answer in given.items())
    in_flight = llm.core.batch_queue_size - 1
    before = 0 if asks else AHEAD
    assert max(before - in_flight, 0) <= len(given.get("long", [])) <= before
    llm.worker.model_runner.execute_model_state = None
    revive(llm, own, schedule)
    assert llm.free_blocks == free
    assert llm.generate([PROMPT], new, extra_args=asks)[0] == right["long"]
