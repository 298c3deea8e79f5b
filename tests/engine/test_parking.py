"""Parked requests: a preempted compressed request resumes from its pages in host memory."""

import copy
import random
from types import SimpleNamespace

import pytest
import torch

from checkpoints import make, tokens, write_adapter
from engines import (
    BLOCK,
    V2,
    allow_async_scheduling,
    engine,
    model_runner_v1_only,
    settings,
    v2_drafts,
)
from processor import needs_avx512
from test_metrics import samples
from vllm_kvcompress.engine.pages.host_pages import pin
from vllm_kvcompress.engine.scheduling.compression_stats import CompressionStats
from vllm_kvcompress.errors import ConfigError, VllmHookError

COUNT = 24 if V2 else 40
LENGTHS = (390, 463, 288, 417)
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
GROWING = {
    "auto": [tokens(150 + 13 * number, seed=number) for number in range(8)],
    "k4v3": [tokens(350 + 13 * number, seed=number) for number in range(8)],
}
AT_END = {"kv_lookahead": 0}
AUTO = {**AT_END, "kv_packed_dtype": "auto"}
COUNTED = ("resumed_requests", "resumed_tokens", "unparked_requests")
CHOICES = {
    "auto": AUTO,
    "per layer": {**AUTO, "kv_compress": "pyramidkv", "kv_budget": 0.3},
    "k4v3": AT_END,
    "k4v3, everything": {**AT_END, "kv_budget": 1.0},
    "k4v3, protected": {**AT_END, "kv_protect": [[40, 90]]},
    "look-ahead": {},
    "merging": {**AUTO, "kv_compress": "d2o"},
}


def parking_settings(**options):
    """Return settings under which each request chooses how it is compressed."""
    defaults = dict(packed_dtype="k4v3", lookahead=12, park=0.05, allow_override="all")
    return settings("cake", 0.5, **defaults | options)


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make("llama-two-layers-d64", checkpoints_folder)


def parking_engine(model, **options):
    defaults = dict(
        max_num_seqs=8,
        max_model_len=1024,
        max_num_batched_tokens=256,
        additional_config=parking_settings(),
    )
    return engine(model, **defaults | options)


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, marks=model_runner_v1_only), True],
    ids=["sync", "async"],
)
def shared(request, model):
    with pytest.MonkeyPatch.context() as patch:
        allow_async_scheduling(patch)
        with parking_engine(model, async_scheduling=request.param) as llm:
            yield llm


@pytest.fixture
def llm(shared):
    with shared.lent():
        yield shared
        shared.llm.llm_engine.abort_request([*shared.scheduler.requests], internal=True)
        shared.finish_in_flight_steps()
        assert_nothing_is_parked(shared)


@pytest.fixture(scope="module")
def unpreempted():
    """Return a function that computes the outputs of requests once, without preemption."""
    known = {}

    def outputs(llm, name, prompts, override, count=COUNT):
        if name not in known:
            preempted = llm.watch_preemptions()
            known[name] = run(llm, prompts, override, tokens=count)
            assert not preempted
        return known[name]

    return outputs


def assert_nothing_is_parked(llm):
    parking = llm.scheduler.parking
    assert sorted(parking._free_slots) == list(range(len(llm.compressor.host_pages._host)))
    assert not parking.copies
    assert not len(llm.compressor.host_pages)
    assert not llm.compressor.pool._slots
    assert not len(llm.scheduler.states)


def packed(llm):
    """Return the running requests whose packing is over."""
    finished = llm.scheduler.states.ids_without_packing
    return [each for each in llm.running() if each.request_id in finished]


def run(llm, prompts, override, each_step=lambda: None, tokens=COUNT, adapter=None):
    """Return the outputs of requests submitted together; call `each_step` before each step."""
    for number, prompt in enumerate(prompts):
        llm.submit(str(number), prompt, tokens, adapter=adapter, extra_args=override)
    outputs = {}
    while llm.llm.llm_engine.has_unfinished_requests():
        each_step()
        outputs |= {name: [*done.outputs[0].token_ids] for name, done in llm.step().items()}
    return [outputs.get(str(number)) for number in range(len(prompts))]


@pytest.mark.parametrize("choice", ["auto", "k4v3"] if V2 else CHOICES)
def test_output_equals_a_run_without_preemption(choice, llm, unpreempted, watched):
    """Every request is preempted several times, alone and together with others."""
    rng, override = random.Random(7), CHOICES[choice]
    expected = unpreempted(llm, choice, PROMPTS, override)
    preempted = 0

    def preempt():
        nonlocal preempted
        ready = packed(llm)
        if ready and rng.random() < 0.2:
            victims = rng.sample(ready, rng.randint(1, len(ready)))
            preempted += len(victims)
            for victim in victims:
                llm.preempt(victim)

    assert run(llm, PROMPTS, override, preempt) == expected
    assert preempted > 5
    # A request may be preempted again, or end, before it resumes.
    assert 5 < watched("resumed_requests")[""] <= preempted
    assert not watched("unparked_requests")
    assert not watched("parked_requests")
    assert not watched("parked_bytes")
    assert watched("resumed_tokens")[""] > min(LENGTHS) * watched("resumed_requests")[""]


@model_runner_v1_only
@pytest.mark.parametrize("choice", ["auto", "k4v3"])
def test_tight_pool_recomputes_no_packed_request(choice, llm, unpreempted, watched):
    override, prompts, num_output = CHOICES[choice], GROWING[choice], 3 * BLOCK + 10
    expected = unpreempted(llm, f"{choice}, growing", prompts, override, num_output)
    packed_before, preemptions = llm.compressor.compressed, llm.watch_preemptions()
    gauges = []

    def watch_gauges():
        values = samples()
        gauges.append((values["parked_requests",], values["parked_bytes",]))

    for _ in llm.in_smaller_pools([32, 26]):
        assert run(llm, prompts, override, watch_gauges, tokens=num_output) == expected
    assert watched("resumed_requests")[""] >= 2
    # Only prefills were computed again.
    assert not any(count for counts in preemptions.values() for count in counts)
    slot_bytes = llm.scheduler.parking._slot_bytes
    assert gauges[0] == (0, 0)
    assert len({*gauges}) > 1
    assert all(count * slot_bytes <= used <= 4 * count * slot_bytes for count, used in gauges)
    assert llm.compressor.compressed == packed_before + 2 * len(prompts)


def test_aborted_while_parked(llm, unpreempted, watched):
    expected = unpreempted(llm, "auto", PROMPTS, AUTO)

    def preempt_and_abort():
        ready = packed(llm)
        if len(ready) == 3 and not aborted:
            for request in ready:
                llm.preempt(request)
            aborted.append(ready[0].request_id)
            llm.llm.llm_engine.abort_request([ready[0].request_id], internal=True)
            assert llm.scheduler.parking.num_free_slots < len(llm.compressor.host_pages._host)

    aborted: list[str] = []
    outputs = run(llm, PROMPTS[:3], AUTO, preempt_and_abort)
    assert aborted
    assert outputs[0] is None
    assert outputs[1:] == expected[1:3]
    assert watched("resumed_requests")[""] == 2


def test_full_host_memory(llm, unpreempted, watched):
    """Requests without free slots are computed again, and go on like new ones."""
    parking = llm.scheduler.parking
    taken, parking._free_slots = parking._free_slots, parking._free_slots[:3]
    resumed_at = llm.watch_preemptions()

    before = samples()

    def preempt():
        ready = packed(llm)
        if len(ready) == 3 and not resumed_at:
            for request in ready:
                llm.preempt(request)

    outputs = run(llm, PROMPTS[:3], AUTO, preempt)
    assert watched("unparked_requests")[""] == 2
    after = samples()
    grown = {name: after[f"{name}_total",] - before[f"{name}_total",] for name in COUNTED}
    assert grown == {name: watched(name)[""] for name in COUNTED}
    assert watched("resumed_requests")[""] == 1
    assert len(parking._free_slots) == 3
    parking._free_slots = taken
    expected = unpreempted(llm, "auto", PROMPTS, AUTO)[:3]
    equal = [output == each for output, each in zip(outputs, expected, strict=True)]
    assert sum(equal) >= 1
    # A parked request continues as if it had not been preempted.
    cuts = [[] if same else resumed_at[str(number)] for number, same in enumerate(equal)]
    llm.assert_match_solo_runs(zip(PROMPTS[:3], outputs, cuts, [AUTO] * 3, strict=True), COUNT)


def test_requests_that_will_be_packed_again_or_were_never_packed_are_not_parked(llm, watched):
    preempted: list[str] = []

    def preempt():
        for request in llm.running():
            name = request.request_id
            if name not in preempted and request.num_output_tokens >= 2:
                preempted.append(name)
                llm.preempt(request)
                assert llm.scheduler.states.get(name).parked is None

    run(llm, PROMPTS[:2], {"kv_compress": "off"}, preempt)
    run(llm, PROMPTS[:2], {}, preempt)
    run(llm, [tokens(60, seed=3)], {}, preempt)
    assert len(preempted) == 5
    assert not watched("resumed_requests")
    assert not watched("unparked_requests")


def test_reset_of_the_prefix_cache_drops_parked_pages(llm, watched):
    """The caller may have changed the model's weights."""
    rest = []

    def preempt_and_reset():
        ready = packed(llm)
        if len(ready) == 3 and not rest:
            rest.extend(ready)
            llm.preempt(ready[0])
            assert llm.scheduler.reset_prefix_cache(reset_running_requests=True)
            assert llm.scheduler.parking.num_free_slots == len(llm.compressor.host_pages._host)

    outputs = run(llm, PROMPTS[:3], AUTO, preempt_and_reset)
    assert rest
    assert all(len(output) == COUNT for output in outputs)
    assert not watched("resumed_requests")
    assert llm.compressor.compressed == 6


def test_a_reset_that_vllm_refuses_keeps_parked_pages(llm, unpreempted, watched):
    resets = []

    def preempt_and_reset():
        ready = packed(llm)
        if len(ready) == 3 and not resets:
            llm.preempt(ready[0])
            resets.append(llm.scheduler.reset_prefix_cache())
            assert llm.scheduler.parking.num_free_slots < len(llm.compressor.host_pages._host)

    expected = unpreempted(llm, "auto", PROMPTS, AUTO)[:3]
    assert run(llm, PROMPTS[:3], AUTO, preempt_and_reset) == expected
    assert resets == [False]
    assert watched("resumed_requests")[""] == 1


@pytest.mark.skipif(V2, reason="the model runner has no part in it")
def test_memory_that_cannot_be_pinned_is_an_error(monkeypatch):
    error = SimpleNamespace(value=2)
    cudart = SimpleNamespace(cudaHostRegister=lambda address, num_bytes, flags: error)
    monkeypatch.setattr("torch.cuda.cudart", lambda: cudart)
    with pytest.raises(ConfigError, match=r"for 0\.5 GiB; lower --kv-park, or raise .*ulimit -l"):
        pin(torch.empty(2**29, dtype=torch.uint8))
    error.value = 0
    pin(torch.empty(1))


@pytest.mark.skipif(V2, reason="the model runner has no part in it")
def test_parked_bytes_are_sent_if_as_many_requests_are_parked_as_before():
    stats = CompressionStats(parked_bytes=-3)
    assert stats.take()["parked_bytes"] == -3
    assert stats.take() is None


def test_a_lost_plan_stops_the_engine(model, async_scheduling_allowed):
    """The pages would be lost: the request's blocks have new owners."""
    with parking_engine(model, async_scheduling=True) as llm:
        llm.submit("r", PROMPTS[0], COUNT, extra_args=AUTO)
        while not packed(llm):
            llm.step()
        llm.preempt(llm.running()[0])
        execute = llm.worker.execute_model

        def losing_the_plan(output):
            output = copy.copy(output)
            output.kvcompress = None
            return execute(output)

        llm.worker.execute_model = losing_the_plan
        with pytest.raises(VllmHookError, match=r"with plan \d+, for .*r-.*so the engine stops"):
            llm.drain()


@model_runner_v1_only
def test_priority_scheduling_resumes_parked_requests(model, async_scheduling_allowed, watched):
    """Requests with a higher priority take the blocks of running ones."""
    prompts, num_output = GROWING["auto"], 3 * BLOCK + 10
    options = dict(scheduling_policy="priority", async_scheduling=True)
    with parking_engine(model, **options) as llm:
        expected = run(llm, prompts, AUTO, tokens=num_output)
        for _ in llm.in_smaller_pools([32]):
            for number, prompt in enumerate(prompts):
                llm.submit(str(number), prompt, num_output, len(prompts) - number, extra_args=AUTO)
                for _ in range(6):
                    llm.step()
            outputs = llm.drain()
        assert [outputs[str(number)] for number in range(len(prompts))] == expected
        assert watched("resumed_requests")[""] >= 2
        llm.finish_in_flight_steps()
        assert_nothing_is_parked(llm)


DRAFTS = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
PLAIN = dict(packed_dtype="auto", allow_override="off")
PIECES = parking_settings(max_whole=256, piece=96, probe=16, **PLAIN)
FEATURES = {
    "drafts": dict(speculative_config=DRAFTS),
    "fp8": dict(kv_cache_dtype="fp8_e5m2", additional_config=parking_settings(**PLAIN)),
    "LoRA": dict(enable_lora=True, max_lora_rank=8, max_loras=1),
    "pieces": dict(additional_config=PIECES),
}
MARKS = {
    "drafts": [
        pytest.mark.skipif(V2 and not v2_drafts(), reason="this vLLM has no ngram on V2"),
        # from the compiler of V1's drafter
        pytest.mark.filterwarnings("ignore:(?s).*reflected list"),
    ],
    "fp8": [model_runner_v1_only, needs_avx512],
}


@pytest.mark.parametrize(
    "feature",
    [pytest.param(name, marks=MARKS.get(name, [model_runner_v1_only])) for name in FEATURES],
)
def test_requests_resume_beside_other_features(feature, model, watched, tmp_path):
    """A request's computed tokens may include drafts that were rejected.

    With LoRA, all requests use the adapter: vLLM's outputs on a CPU depend on others without it.
    """
    from vllm.lora.request import LoRARequest

    rng, adapter = random.Random(5), None
    if feature == "LoRA":
        adapter = LoRARequest("adapter", 1, write_adapter(tmp_path, layers=2, hidden=256))
    with parking_engine(model, **FEATURES[feature]) as llm:
        repacked = llm.watch_repacking()
        expected = run(llm, PROMPTS, AUTO, adapter=adapter)
        assert bool(repacked) == (feature == "pieces")

        def preempt():
            for request in packed(llm):
                if rng.random() < 0.1:
                    llm.preempt(request)

        compressed = llm.compressor.compressed
        assert run(llm, PROMPTS, AUTO, preempt, adapter=adapter) == expected
        assert watched("resumed_requests")[""] >= 3
        assert llm.compressor.compressed == 2 * compressed
        if adapter:
            assert run(llm, PROMPTS, AUTO) != expected
        llm.finish_in_flight_steps()
        assert_nothing_is_parked(llm)


@model_runner_v1_only
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_random_loads_lose_and_leak_nothing(seed, shared, watched):
    """Random requests in a random pool and host memory: outputs equal those of a large pool.

    A request that is preempted before its packing is over, or finds no free slots, is compressed
    again with its output so far, and a short pool ends look-aheads early. So only the length of
    these outputs is checked.
    """
    rng, llm, changed, aborted = random.Random(seed), shared, set(), set()
    requests = [
        (tokens(rng.randint(20, 400), seed=50 * seed + number), rng.choice([AUTO, AT_END, {}]))
        for number in range(12)
    ]
    lengths = [rng.randint(40, 110) for _ in requests]

    def submit(number):
        prompt, override = requests[number]
        llm.submit(str(number), prompt, lengths[number], extra_args=override)

    with llm.lent():
        for number in range(len(requests)):
            submit(number)
        expected = llm.drain()
        llm.finish_in_flight_steps()
        parking = llm.scheduler.parking
        park, all_slots = parking.park, parking._free_slots
        kept_slots = parking._free_slots = all_slots[: rng.choice([9, 12, 100])]

        def parking_or_changed(request):
            park(request)
            state = llm.scheduler.states.of(request)
            if state.parked is None and request.num_computed_tokens >= request.num_prompt_tokens:
                changed.add(request.request_id.split("-")[0])

        def packed_early(pack_request, kept, counts):
            if pack_request.early_target:
                changed.add(pack_request.request_id.split("-")[0])

        parking.park = parking_or_changed
        llm.compressor.packer.observers.append(packed_early)
        outputs = {}

        def step():
            outputs.update({k: [*v.outputs[0].token_ids] for k, v in llm.step().items()})
            running = packed(llm) if rng.random() < 0.7 else llm.running()
            if running and rng.random() < 0.15:
                llm.preempt(rng.choice(running))

        for _ in llm.in_smaller_pools([rng.randint(16, 30)]):
            for number in range(len(requests)):
                submit(number)
                for _ in range(rng.randint(0, 3)):
                    step()
                if rng.random() < 0.2:
                    name = rng.choice([*llm.scheduler.requests] or [""])
                    aborted.add(name.split("-")[0])
                    llm.llm.llm_engine.abort_request([name], internal=True)
            while llm.llm.llm_engine.has_unfinished_requests():
                step()
            llm.finish_in_flight_steps()
            assert sorted(parking._free_slots) == sorted(kept_slots)
        parking._free_slots = all_slots
        del parking.park
        assert_nothing_is_parked(llm)
        finished = expected.keys() - aborted
        assert finished <= outputs.keys()
        for name in finished:
            if name not in changed:
                assert outputs[name] == expected[name], name
            assert len(outputs[name]) == lengths[int(name)]
        assert watched("resumed_requests")
