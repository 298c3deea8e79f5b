"""vLLM's offloading connectors beside compression: prompts are stored whole, and loaded again.

The worker copies blocks as late as vLLM allows (`benchmarks.late_offloading`). Every stored chunk
is compared with the one that vLLM alone stores for the same tokens. "Lazy" tests run
SimpleCPUOffloadConnector, the others OffloadingConnector.
"""

import os
import random
from contextlib import contextmanager
from functools import partialmethod
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from benchmarks import late_offloading
from benchmarks.late_offloading import LateSpec, StoredChunks, install, transfer
from benchmarks.origin import commit, machine
from checkpoints import make, tokens
from engines import engine, model_runner_v1_only, settings
from queued_packing import queue_packing
from vllm_kvcompress.engine.scheduling.offloading import (
    OffloadingConnector,
    SimpleCPUOffloadConnector,
)
from vllm_kvcompress.engine.scheduling.request_state import RequestStates
from vllm_kvcompress.engine.scheduling.scheduler import _CompressingMixin

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


FEW = 20
# `make soak` sets this to run many more requests.
TIMES = int(os.environ.get("SOAK_TIMES", "1"))
# Only the scenario with uncompressed requests serves all prompts.
PROMPTS = make_prompts(28 * TIMES, SEED)
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
SIMPLE = "SimpleCPUOffloadConnector"
# It stores blocks only of the prefix cache, and knows neither chunks nor a threshold.
LAZY_SCENARIOS = [
    name
    for name in SCENARIOS
    if name not in ("pairs of blocks", "second offers", "no prefix cache")
]


def lazy(mebibytes=512):
    return transfer(mebibytes, SIMPLE, lazy_offload=True)


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make("llama-two-layers-d64", checkpoints_folder)


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
    connector = llm.scheduler.connector
    is_simple = hasattr(connector, "scheduler_manager")
    for step in range(200):
        if is_simple and step and not connector.has_pending_push_work():
            break
        if not is_simple and not connector.connector_scheduler._jobs:
            break
        llm.llm.llm_engine.step()
    else:
        raise AssertionError("stores are pending")
    assert is_simple or not connector.connector_scheduler._block_id_to_pending_jobs


_expected = {}


def expected_chunks(model, **options):
    """Return the chunks that vLLM alone stores, by their keys, computed once per chunk size."""
    pairs = "blocks_per_chunk" in str(options)
    if pairs not in _expected:
        keys = {"blocks_per_chunk": 2} if pairs else {}
        _expected[pairs] = stored_alone(model, PROMPTS, **transfer(2048, **keys))
    return _expected[pairs]


def stored_alone(model, sequences, **options):
    """Return what vLLM alone stores for sequences of tokens, by its keys."""
    options |= {"blocks": 1 + 512, "max_num_batched_tokens": 4096}
    with offloading(model, **options) as (llm, stored):
        llm.generate(sequences, 1)
        finish(llm)
    return dict(stored.contents)


def run(llm, prompts, seed, *, disturbed=True, output_tokens=24, uncompressed=False):
    """Serve the prompts, and abort, preempt and forget at random; return the outputs by prompt.

    `llm.sequences` gets the tokens of each request with its output so far.
    """
    rng, waiting, outputs = random.Random(seed), list(enumerate(prompts)), {}
    llm.sequences = {}
    while waiting or llm.llm.llm_engine.has_unfinished_requests():
        while waiting and len(llm.scheduler.requests) < 8:
            index, prompt = waiting.pop(0)
            grows = uncompressed and rng.random() < 0.5
            options = {"extra_args": {"kv_compress": "off"}} if grows else {}
            length = 120 if grows else output_tokens
            llm.submit(str(index), prompt, length, priority=rng.randrange(3), **options)
        for request_id, output in llm.step().items():
            outputs[int(request_id)] = list(output.outputs[0].token_ids)
            llm.sequences[request_id] = prompts[int(request_id)] + outputs[int(request_id)]
        for request_id, request in llm.scheduler.requests.items():
            llm.sequences[request_id] = [*request.all_token_ids]
        if not disturbed:
            continue
        chance = rng.random()
        if chance < 0.01 and llm.scheduler.requests:
            llm.llm.llm_engine.abort_request([rng.choice([*llm.scheduler.requests])], internal=True)
        elif chance < 0.015:
            llm.llm.reset_prefix_cache(reset_connector=True)
    if llm.scheduler.connector is not None:
        finish(llm)
    return outputs


def chunks_of(model, name, times=1, seed=SEED, output_tokens=24, *, is_lazy=False):
    """Run a scenario; return the number of stored chunks and of differing ones."""
    config, options = SCENARIOS[name]
    is_full, grows = name == "a full host", name == "preemptions"
    prompts = PROMPTS if grows else PROMPTS[: FEW * times]
    options = options | lazy(2 if is_full else 512) if is_lazy else options
    expected = None if is_lazy else expected_chunks(model, **options)
    with offloading(model, blocks=SMALL, additional_config=config, **options) as (llm, stored):
        free, preemptions = llm.free_blocks, llm.watch_preemptions()
        run(llm, prompts, seed, output_tokens=output_tokens, uncompressed=grows)
        llm.generate([PROMPTS[0][:40]], 1)  # its step zeroes and frees blocks that held groups
        if is_lazy:
            finish(llm)
        assert llm.free_blocks == free
        assert llm.compressor.compressed > 10
        assert isinstance(llm.scheduler, AsyncScheduler) == name.startswith("async")
        assert bool(stored.evicted if is_lazy else stored.refused) == is_full
        assert preemptions or not grows
        sequences = [*llm.sequences.values()]
    expected = expected or stored_alone(model, sequences, **transfer(2048, SIMPLE))
    chunks, differing = stored.compare(expected)
    assert chunks > 60
    return chunks, differing


# Model Runner V2 calls the connector in another order, and handles packing alike.
def scenarios(names):
    return [
        pytest.param(name, marks=() if name == "async look-ahead" else model_runner_v1_only)
        for name in names
    ]


@pytest.mark.parametrize("name", scenarios(SCENARIOS))
@pytest.mark.usefixtures("async_scheduling_allowed")
def test_trap_10_every_stored_chunk_is_what_vllm_alone_stores(model, name, record_property):
    chunks, differing = chunks_of(model, name, TIMES)
    record_property("chunks", chunks)
    assert differing == 0


@pytest.mark.parametrize("name", scenarios(LAZY_SCENARIOS))
@pytest.mark.usefixtures("async_scheduling_allowed")
def test_trap_10_every_lazily_stored_block_is_what_vllm_alone_stores(model, name, record_property):
    chunks, differing = chunks_of(model, name, TIMES, is_lazy=True)
    record_property("chunks", chunks)
    assert differing == 0


@model_runner_v1_only
@pytest.mark.parametrize("name", ["look-ahead", "outputs"])
@pytest.mark.parametrize("owner", [RequestStates, BlockPool])
def test_without_a_rule_of_the_prefix_cache_other_tokens_are_stored(
    model, monkeypatch, owner, name
):
    """Blocks that packing writes to, and blocks computed behind it, must not have a hash."""
    if owner is RequestStates:
        monkeypatch.setattr(RequestStates, "limit_caching", lambda *_: None)
    else:
        monkeypatch.setattr(BlockPool, "evict_blocks", lambda self, block_ids: None)
    _, differing = chunks_of(model, name, is_lazy=True)
    assert differing > 0


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
    _, differing = chunks_of(model, name, **load)
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
@pytest.mark.parametrize("is_lazy", [False, True])
def test_only_tokens_that_need_no_query_are_loaded(model, config, computed, is_lazy):
    """Loads and vLLM's metrics agree, and the loaded prompt is compressed again."""
    blocks, stored_blocks = (len(SHORT) - computed) // 32, len(SHORT) // 32
    # In so small a pool, vLLM soon needs each free block, so the lazy connector stores them.
    options = {"blocks": 1 + 32, **lazy()} if is_lazy else {}
    with offloading(model, additional_config=config, **options) as (llm, stored):
        first = llm.generate([SHORT], 24)
        finish(llm)
        assert len(stored.contents) == stored_blocks
        compressed = llm.compressor.compressed
        assert llm.llm.reset_prefix_cache()
        assert llm.generate([SHORT], 24) == first
        assert llm.compressor.compressed == 2 * compressed
        assert LateSpec.workers[-1].copies.loaded_blocks == blocks
        assert metric(llm, HITS) == 32 * blocks
        if is_lazy:
            assert metric(llm, "vllm:simple_kv_offload_load_blocks") == blocks
            return
        for name in ("load", "store"):
            transferred = blocks if name == "load" else stored_blocks
            size = transferred * llm.scheduler._block_bytes
            assert metric(llm, f"vllm:kv_offload_{name}_bytes") == size


@pytest.mark.parametrize(
    ("config", "blocks", "options"),
    [
        (SNAPKV, 1 + 56, {}),
        pytest.param(SNAPKV, SMALL, {"enable_prefix_caching": False}, marks=model_runner_v1_only),
        pytest.param(AHEAD, 1 + 192, {}, marks=model_runner_v1_only),
        pytest.param(SNAPKV, 1 + 96, lazy(), marks=model_runner_v1_only),
        (AHEAD, 1 + 192, lazy()),
    ],
)
def test_a_second_pass_loads_prompts_and_gives_equal_outputs(model, config, blocks, options):
    """Outputs are those of an engine without a connector.

    In a small pool, look-aheads end early at other times, which changes outputs.
    """
    prompts = PROMPTS[:12]
    with engine(model, **OPTIONS, blocks=blocks, additional_config=config) as llm:
        expected = run(llm, prompts, SEED, disturbed=False)
    with offloading(model, blocks=blocks, additional_config=config, **options) as (llm, _):
        assert run(llm, prompts, SEED, disturbed=False) == expected
        assert llm.llm.reset_prefix_cache()
        compressed, copies = llm.compressor.compressed, LateSpec.workers[-1].copies
        loaded = copies.loaded_blocks
        assert run(llm, prompts, SEED, disturbed=False) == expected
        assert llm.compressor.compressed == 2 * compressed
        assert copies.loaded_blocks - loaded > 100


@model_runner_v1_only
@pytest.mark.parametrize("is_last", [True, False])
def test_look_aheads_take_blocks_before_the_lazy_connector(model, monkeypatch, is_last):
    """Without our rule, look-aheads find too few free blocks, end early, and outputs differ."""
    monkeypatch.setattr(late_offloading, "MAX_POLLS", 1)
    if not is_last:
        monkeypatch.delattr(_CompressingMixin, "_build_kv_connector_meta")
    options, prompts = {"blocks": 1 + 96, "additional_config": AHEAD}, PROMPTS[:12]
    with engine(model, **OPTIONS, **options) as llm:
        expected = run(llm, prompts, SEED, disturbed=False)
    with offloading(model, **options, **lazy()) as (llm, _):
        if not is_last:
            llm.scheduler._lazy_connector = None
        outputs = run(llm, prompts, SEED, disturbed=False)
        assert LateSpec.workers[-1].copies.stored_blocks > 30
    assert (outputs == expected) == is_last


@model_runner_v1_only
@pytest.mark.parametrize("waits", [True, False])
def test_lazy_loads_wait_for_packing(model, monkeypatch, waits):
    """Loads start while the packing of the step before is still queued, as on a GPU.

    Without our rule, they overwrite freed blocks that packing reads, and outputs differ.
    """

    def load_first(scheduler_output):
        metadata, connector = scheduler_output.kv_connector_metadata, get_kv_transfer_group()
        if metadata.load_cpu_blocks:
            handler = connector.worker_handler
            handler.load_stream = SimpleNamespace(wait_stream=pack)
            connector.bind_connector_metadata(metadata)
            connector.start_load_kv(None)
            handler.load_stream = None
            handler.copies.wait((False, metadata.load_event))
            metadata.load_cpu_blocks = []  # do not load again

    with engine(model, **OPTIONS, blocks=SMALL, additional_config=SNAPKV) as llm:
        expected = llm.generate(PROMPTS[:FEW], 24)
    pack = queue_packing(monkeypatch, load_first)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    if not waits:
        monkeypatch.delattr(SimpleCPUOffloadConnector, "start_load_kv")
    with offloading(model, blocks=SMALL, additional_config=SNAPKV, **lazy()) as (llm, _):
        run(llm, PROMPTS[:FEW], SEED, disturbed=False)
        outputs = run(llm, PROMPTS[:FEW], SEED, disturbed=False)
        assert LateSpec.workers[-1].copies.loaded_blocks > 100
    differing = sum(outputs[index] != expected[index] for index in outputs)
    assert (differing == 0) == waits


@model_runner_v1_only
@pytest.mark.parametrize("limit", [None, 64])
def test_a_packed_request_that_starts_again_is_stored_again(model, limit):
    """After a reset of the host memory, up to the request's own limit of stored tokens."""
    params = {} if limit is None else {"kv_transfer_params": {"max_offload_tokens": limit}}
    with offloading(model, additional_config=SCENARIOS["outputs"][0]) as (llm, stored):
        repacked = llm.watch_repacking()
        llm.submit("r", SHORT, 200, extra_args=params)
        while not repacked:
            llm.step()
        finish(llm)
        first = dict(stored.contents)
        assert len(first) == (limit or len(SHORT)) // 32
        assert llm.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        llm.drain()
        finish(llm)
        assert not llm.scheduler.connector._store_limits
        assert llm.compressor.compressed == 2
        again = dict(stored.contents[len(first) :])
        assert again.keys() == first.keys()
        for key, chunk in first.items():
            assert all(map(torch.equal, chunk, again[key]))
