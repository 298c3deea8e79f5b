"""vLLM's OffloadingConnector beside compression: prompts are stored whole, and loaded again.

The worker copies blocks as late as vLLM allows (`late_offloading`). Every stored chunk is compared
with the one that vLLM alone stores for the same prompt.
"""

import random
from contextlib import contextmanager
from functools import partialmethod

import pytest

import late_offloading
from checkpoints import make, tokens
from engines import engine, settings
from late_offloading import LateSpec, StoredChunks, transfer
from vllm_kvcompress.engine.scheduling.offloading import OffloadingConnector

SEED = 20
MAX_LENGTH = 640
OPTIONS = {"max_model_len": 1024, "max_num_batched_tokens": 256, "max_num_seqs": 8, "scheduling_policy": "priority"}
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


PROMPTS = make_prompts(40, SEED)
SNAPKV, AHEAD = settings("snapkv", 0.2), settings("cake-chunk", 0.3, lookahead=8)
# Settings of compression, and options of the engine.
SCENARIOS = {
    "prompts": (SNAPKV, {}),
    "look-ahead": (AHEAD, {}),
    "k4v3": (settings("snapkv", 0.5, packed_dtype="k4v3"), {}),
    "groups": (settings("snapkv", 1.0, packed_dtype="k4v3", decode_interval=128), {}),
    "outputs": (settings("snapkv", 0.3, decode_budget=96, decode_interval=32), {}),
    "async": (SNAPKV, {"async_scheduling": True}),
    "async look-ahead": (AHEAD, {"async_scheduling": True}),
    "pairs of blocks": (SNAPKV, transfer(blocks_per_chunk=2)),
    "a full host": (SNAPKV, transfer(2, eviction_policy="arc")),
    "second offers": (SNAPKV, transfer(store_threshold=2)),
    "no prefix cache": (SNAPKV, {"enable_prefix_caching": False}),
}


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make("llama-mqa", checkpoints_folder)


@pytest.fixture(autouse=True)
def _late_workers(monkeypatch):
    late_offloading.install(monkeypatch, SEED)


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


def expected_chunks(model, prompts=PROMPTS, **options):
    """Return the chunks that vLLM alone stores for `prompts`, computed once per chunk size."""
    pairs = "blocks_per_chunk" in str(options)
    key = pairs, len(prompts)
    if key not in _expected:
        keys = {"blocks_per_chunk": 2} if pairs else {}
        with offloading(model, blocks=1 + 512, **transfer(**keys)) as (llm, stored):
            for start in range(0, len(prompts), 8):
                llm.generate(prompts[start : start + 8], 1)
            finish(llm)
        _expected[key] = dict(stored.contents)
    return _expected[key]


def run(llm, prompts, seed, *, disturbed=True, output_tokens=24):
    """Serve the prompts, and abort, preempt and forget at random; return the outputs by prompt."""
    rng, waiting, outputs = random.Random(seed), list(enumerate(prompts)), {}
    while waiting or llm.llm.llm_engine.has_unfinished_requests():
        while waiting and len(llm.scheduler.requests) < 8:
            index, prompt = waiting.pop(0)
            llm.submit(str(index), prompt, output_tokens, priority=rng.randrange(3))
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


def chunks_of(model, name):
    """Run a scenario; return the number of stored chunks and of differing ones."""
    config, options = SCENARIOS[name]
    expected = expected_chunks(model, **options)
    with offloading(model, blocks=SMALL, additional_config=config, **options) as (llm, stored):
        free, preemptions = llm.free_blocks, llm.watch_preemptions()
        run(llm, PROMPTS, SEED)
        assert llm.free_blocks == free
        assert llm.compressor.compressed > 10
    w = LateSpec.workers[-1]
    print("CHUNKS", name, len(preemptions), stored.compare(expected), w.waits, w.loaded_blocks, stored.refused)
    return stored.compare(expected)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.usefixtures("async_scheduling_allowed")
def test_every_stored_chunk_is_what_vllm_alone_stores(model, name):
    chunks, differing = chunks_of(model, name)
    assert differing == 0
    assert chunks > 100


def without_fences(self, request_id, freed, destinations, plan):
    return plan(self, request_id, set(), destinations)


def without_finished_stores(self, request_id, freed, destinations, plan):
    plan(self, request_id, freed, destinations)
    return set()


def with_later_stores(self, request_id, freed, destinations, plan):
    job_ids = plan(self, request_id, freed, destinations)
    self.scheduler._req_status[request_id].max_offload_tokens = None
    return job_ids


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (without_fences, "prompts"),
        (without_fences, "look-ahead"),
        (without_finished_stores, "prompts"),
        (without_finished_stores, "look-ahead"),
        (with_later_stores, "a full host"),
    ],
)
def test_without_a_rule_other_tokens_are_stored(model, monkeypatch, rule, name):
    plan = OffloadingConnector.plan_packing
    monkeypatch.setattr(
        OffloadingConnector, "plan_packing", partialmethod(rule, plan=plan)
    )
    chunks, differing = chunks_of(model, name)
    assert differing > 0
