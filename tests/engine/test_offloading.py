"""vLLM's OffloadingConnector beside compression: prompts are stored whole, and loaded again.

The worker copies blocks as late as vLLM allows (`benchmarks.late_offloading`). Every stored chunk
is compared with the one that vLLM alone stores for the same prompt.
"""

import os
import random
from contextlib import contextmanager
from functools import partialmethod

import pytest
import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from benchmarks.late_offloading import LateSpec, StoredChunks, install, transfer
from benchmarks.origin import commit, machine
from checkpoints import make, tokens
from engines import engine, model_runner_v1_only, settings
from vllm_kvcompress.engine.scheduling.offloading import OffloadingConnector

SEED = 20
MAX_LENGTH = 640
OPTIONS = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "scheduling_policy": "priority",
    "async_scheduling": False,
}
ASYNC = {"async_scheduling": True}
SMALL = 1 + 44  # KV blocks: two prompts of `MAX_LENGTH` tokens and a bit


def make_prompts(number, seed):
    """Return prompts of random lengths; half of them begin like another one."""
    rng, prompts = random.Random(seed), []
    for index in range(number):
        prompt = tokens(rng.randrange(140, MAX_LENGTH), seed=1000 * seed + index)
        if prompts and rng.random() < 0.5:
            shared = rng.choice(prompts)[: rng.randrange(64, 400)]
            prompt = (shared + prompt)[:MAX_LENGTH]
        prompts.append(prompt)
    return prompts


FEW = 28
# `make soak` sets this to run many more requests.
TIMES = int(os.environ.get("SOAK_TIMES", "1"))
PROMPTS = make_prompts(FEW * TIMES, SEED)
SNAPKV, AHEAD = settings("snapkv", 0.2), settings("cake-chunk", 0.3, lookahead=8)
# Settings of compression, and options of the engine.
SCENARIOS = {
    "prompts": (SNAPKV, {}),
    "look-ahead": (AHEAD, {}),
    "preemptions": (settings("snapkv", 0.2, allow_override="off"), {}),
    "k4v3": (settings("snapkv", 0.5, packed_dtype="k4v3"), {}),
    "groups": (settings("snapkv", 1.0, packed_dtype="k4v3", decode_interval=128), {}),
    "outputs": (settings("snapkv", 0.3, decode_budget=96, decode_interval=32), {}),
    "async": (SNAPKV, ASYNC),
    "async look-ahead": (AHEAD, ASYNC),
    "pairs of blocks": (SNAPKV, transfer(blocks_per_chunk=2)),
    "a full host": (SNAPKV, transfer(1, eviction_policy="arc")),
    "second offers": (SNAPKV, transfer(store_threshold=2)),
    "no prefix cache": (SNAPKV, {"enable_prefix_caching": False}),
}


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make("llama-mqa", checkpoints_folder)


@pytest.fixture(scope="module", autouse=True)
def _origin(record_testsuite_property):
    """Name commit and machine in the report of `--junitxml`."""
    record_testsuite_property("commit", commit())
    record_testsuite_property("machine", machine())


@pytest.fixture(autouse=True)
def _late_workers(monkeypatch):
    install(monkeypatch, SEED)


@contextmanager
def offloading(model, **options):
    with engine(model, **OPTIONS | transfer() | options) as llm:
        yield llm, StoredChunks(llm)


def finish(llm):
    """Run empty steps until no store is pending."""
    scheduler = llm.scheduler.connector.connector_scheduler
    for _ in range(200):
        if not scheduler._jobs:
            break
        llm.llm.llm_engine.step()
    assert not scheduler._jobs
    assert not scheduler._block_id_to_pending_jobs


_expected = {}


def expected_chunks(model, **options):
    """Return the chunks that vLLM alone stores, by their keys, computed once per chunk size."""
    pairs = "blocks_per_chunk" in str(options)
    if pairs not in _expected:
        keys = {"blocks_per_chunk": 2} if pairs else {}
        with offloading(model, blocks=1 + 512, **transfer(2048, **keys)) as (llm, stored):
            for start in range(0, len(PROMPTS), 8):
                llm.generate(PROMPTS[start : start + 8], 1)
            finish(llm)
        _expected[pairs] = dict(stored.contents)
    return _expected[pairs]


def run(llm, prompts, seed, *, disturbed=True, output_tokens=24, uncompressed=False):
    """Serve the prompts, and abort, preempt and forget at random; return the outputs by prompt."""
    rng, waiting, outputs = random.Random(seed), list(enumerate(prompts)), {}
    while waiting or llm.llm.llm_engine.has_unfinished_requests():
        while waiting and len(llm.scheduler.requests) < 8:
            index, prompt = waiting.pop(0)
            grows = uncompressed and rng.random() < 0.5
            options = {"extra_args": {"kv_compress": "off"}} if grows else {}
            length = 120 if grows else output_tokens
            llm.submit(str(index), prompt, length, priority=rng.randrange(3), **options)
        for request_id, output in llm.step().items():
            outputs[int(request_id)] = list(output.outputs[0].token_ids)
        if not disturbed:
            continue
        chance = rng.random()
        if chance < 0.01 and llm.scheduler.requests:
            llm.llm.llm_engine.abort_request([rng.choice([*llm.scheduler.requests])], internal=True)
        elif chance < 0.015:
            llm.llm.reset_prefix_cache(reset_connector=True)
    finish(llm)
    return outputs


def chunks_of(model, name, prompts, seed=SEED, output_tokens=24):
    """Run a scenario; return the number of stored chunks and of differing ones."""
    config, options = SCENARIOS[name]
    expected = expected_chunks(model, **options)
    with offloading(model, blocks=SMALL, additional_config=config, **options) as (llm, stored):
        free, preemptions = llm.free_blocks, llm.watch_preemptions()
        run(llm, prompts, seed, output_tokens=output_tokens, uncompressed=name == "preemptions")
        llm.generate([PROMPTS[0][:40]], 1)  # its step zeroes and frees blocks that held groups
        assert llm.free_blocks == free
        assert llm.compressor.compressed > 10
        assert isinstance(llm.scheduler, AsyncScheduler) == name.startswith("async")
        assert bool(stored.refused) == (name == "a full host")
        assert preemptions or name != "preemptions"
    chunks, differing = stored.compare(expected)
    assert chunks > 60
    return chunks, differing


# Model Runner V2 calls the connector in another order, and handles packing alike.
ON_V2 = ("prompts", "async look-ahead")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ON_V2 else model_runner_v1_only) for name in SCENARIOS],
)
@pytest.mark.usefixtures("async_scheduling_allowed")
def test_trap_10_every_stored_chunk_is_what_vllm_alone_stores(model, name, record_property):
    chunks, differing = chunks_of(model, name, PROMPTS)
    record_property("chunks", chunks)
    assert differing == 0


def without_fences(self, request_id, freed, destinations, plan):
    return plan(self, request_id, set(), destinations)


def without_own_stores(self, request_id, freed, destinations, plan):
    job_ids = plan(self, request_id, freed, destinations)
    return {each for each in job_ids if self.scheduler._jobs[each].req_id != request_id}


def without_others_stores(self, request_id, freed, destinations, plan):
    job_ids = plan(self, request_id, freed, destinations)
    return {each for each in job_ids if self.scheduler._jobs[each].req_id == request_id}


def with_later_stores(self, request_id, freed, destinations, plan):
    job_ids = plan(self, request_id, freed, destinations)
    self.scheduler._req_status[request_id].max_offload_tokens = None
    return job_ids


@model_runner_v1_only
@pytest.mark.parametrize(
    ("rule", "name", "load"),
    [
        (without_fences, "prompts", {}),
        (without_fences, "look-ahead", {}),
        (without_own_stores, "prompts", {}),
        (without_own_stores, "look-ahead", {}),
        (without_others_stores, "prompts", {}),
        (without_others_stores, "look-ahead", {"seed": 21, "output_tokens": 10}),
        (with_later_stores, "a full host", {}),
    ],
)
def test_without_a_rule_other_tokens_are_stored(model, monkeypatch, rule, name, load):
    """Each rule is necessary, so the test above can fail."""
    plan = OffloadingConnector.plan_packing
    monkeypatch.setattr(OffloadingConnector, "plan_packing", partialmethod(rule, plan=plan))
    _, differing = chunks_of(model, name, PROMPTS[:FEW], **load)
    assert differing > 0


SHORT = tokens(417, seed=1)
HITS = "vllm:external_prefix_cache_hits"


def metric(llm, name):
    return sum(each.value for each in llm.llm.get_metrics() if each.name == name)


@model_runner_v1_only
@pytest.mark.parametrize(
    ("config", "computed"),
    [
        (SNAPKV, 32),  # its observation window
        (AHEAD, 16),
        (settings("h2o", 0.2), 417),  # reads attention of all queries
        (settings("snapkv", 0.2, min_prompt=1024), 1),  # stays uncompressed
    ],
    ids=["window", "look-ahead", "all", "uncompressed"],
)
def test_only_tokens_that_need_no_query_are_loaded(model, config, computed):
    """Loads and vLLM's metrics agree, and the loaded prompt is compressed again."""
    blocks = (len(SHORT) - computed) // 32
    with offloading(model, additional_config=config) as (llm, stored):
        first = llm.generate([SHORT], 24)
        finish(llm)
        assert len(stored.contents) == len(SHORT) // 32
        compressed = llm.compressor.compressed
        assert llm.llm.reset_prefix_cache()
        assert llm.generate([SHORT], 24) == first
        assert llm.compressor.compressed == 2 * compressed
        assert LateSpec.workers[-1].loaded_blocks == blocks
        assert metric(llm, HITS) == 32 * blocks
        for name in ("load", "store"):
            transferred = blocks if name == "load" else len(SHORT) // 32
            size = transferred * llm.scheduler._block_bytes
            assert metric(llm, f"vllm:kv_offload_{name}_bytes") == size


@pytest.mark.parametrize(("config", "blocks"), [(SNAPKV, SMALL), (AHEAD, 1 + 160)])
def test_a_second_pass_loads_prompts_and_gives_equal_outputs(model, config, blocks):
    """In a small pool, look-aheads end early at other times, which changes outputs."""
    prompts = PROMPTS[:12]
    with offloading(model, blocks=blocks, additional_config=config) as (llm, _):
        first = run(llm, prompts, SEED, disturbed=False)
        assert llm.llm.reset_prefix_cache()
        compressed, loaded = llm.compressor.compressed, LateSpec.workers[-1].loaded_blocks
        assert run(llm, prompts, SEED, disturbed=False) == first
        assert llm.compressor.compressed == 2 * compressed
        assert LateSpec.workers[-1].loaded_blocks - loaded > 100


@model_runner_v1_only
@pytest.mark.parametrize("limit", [None, 64])
def test_a_packed_request_that_starts_again_is_stored_again(model, limit):
    """After a reset of the host memory, up to the request's own limit of stored tokens."""
    params = {} if limit is None else {"kv_transfer_params": {"max_offload_tokens": limit}}
    with offloading(model, additional_config=SNAPKV) as (llm, stored):
        llm.submit("r", SHORT, 200, extra_args=params)
        while not llm.compressor.compressed:
            llm.step()
        finish(llm)
        first = dict(stored.contents)
        assert len(first) == (limit or len(SHORT)) // 32
        assert llm.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        llm.drain()
        finish(llm)
        assert llm.compressor.compressed == 2
        again = dict(stored.contents[len(first) :])
        assert again.keys() == first.keys()
        for key, chunk in first.items():
            assert all(map(torch.equal, chunk, again[key]))
