"""Long outputs with a decode budget, in pools that could not hold their uncompressed cache.

`test_decode_budgets` computes from lengths when an output is packed, and to how many pages.
"""

from collections import Counter

import pytest

from checkpoints import make, tokens
from engines import BLOCK, engine, settings

LAYERS = 2
BUDGET, INTERVAL = 80, 64  # 80 tokens in two layers are 5 pages, rounded up to 3 blocks
CAP = LAYERS * -(-BUDGET // BLOCK)
NUM_OUTPUT, POOL = 1000, 48
PROMPTS = {  # shorter than a block and one block; compressed to fewer and to more pages than CAP
    str(length): tokens(length, seed=length) for length in (45, 32, 200, 500)
}


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make("llama-two-layers", checkpoints_folder)


def metric(name):
    """Return the value of a metric in ``/metrics``."""
    from prometheus_client import REGISTRY

    (family,) = REGISTRY._names_to_collectors[name].collect()
    return sum(sample.value for sample in family.samples if sample.name == name)


def watch_peaks(llm):
    """Record, from now on, the maximum blocks that each request holds while a step runs."""
    builder, peaks = llm.scheduler.step_builder, {}
    build = builder.build

    def recording():
        for request in llm.running():
            held = llm.num_blocks_held(request.request_id)
            peaks[request.request_id] = max(peaks.get(request.request_id, 0), held)
        return build()

    builder.build = recording
    return peaks


def test_decode_budget_bounds_the_blocks_of_long_outputs(model):
    """Four requests run without preemption, in a pool for one uncompressed output.

    The blocks of all requests are those that vLLM's pool and its gauge count, after every step.
    """
    config = settings("snapkv", 0.3, decode_budget=BUDGET, decode_interval=INTERVAL)
    with engine(
        model,
        additional_config=config,
        blocks=1 + POOL,
        max_model_len=POOL * BLOCK,
        max_num_seqs=len(PROMPTS),
        enable_prefix_caching=False,
    ) as llm:
        free_before = llm.free_blocks
        peaks, preemptions = watch_peaks(llm), llm.watch_preemptions()
        bounds, max_blocks, num_done, packed_ids = {}, {}, 0, llm.watch_repacking()
        for name, prompt in PROMPTS.items():
            llm.submit(name, prompt, NUM_OUTPUT)
        while llm.llm.llm_engine.has_unfinished_requests():
            num_done += len(llm.step())
            total = 0
            for request in llm.running():
                request_id, computed = request.request_id, request.num_computed_tokens
                held = llm.num_blocks_held(request_id)
                total += held
                if computed < request.num_prompt_tokens:
                    continue
                schedule = llm.scheduler.states.get(request_id).schedule
                if request_id not in bounds:
                    most = max(schedule.footprint.pages, CAP)
                    bounds[request_id] = -(-most // LAYERS) + INTERVAL // BLOCK + 1
                    max_blocks[request_id] = schedule.output.max_blocks(
                        schedule.footprint,
                        packed=len(llm.packed_blocks(request_id)),
                        tokens=schedule.output.max_tokens - 1,
                    )
                    peaks[request_id] = 0  # forget the prompt's peak
                assert held <= bounds[request_id] or not schedule.footprint.frozen
            assert free_before - llm.free_blocks == total
            assert metric("vllm:kv_cache_usage_perc") == pytest.approx(total / POOL)
        assert (num_done, llm.free_blocks, preemptions) == (len(PROMPTS), free_before, {})
        assert peaks == max_blocks
        packings = Counter(packed_ids)
        assert packings.keys() == bounds.keys()
        assert min(packings.values()) >= NUM_OUTPUT // INTERVAL - 3


def test_outputs_longer_than_the_pool_finish(model):
    """Ten times the decode budget, and longer than the pool, which prompts in pieces allow."""
    bounds = {"decode_budget": BUDGET, "decode_interval": INTERVAL, "max_whole": 128, "piece": 64}
    config = settings("snapkv", 0.3, probe=16, probe_first=16, **bounds)
    with engine(
        model,
        additional_config=config,
        blocks=1 + 14,
        max_model_len=1024,
        max_num_seqs=2,
    ) as llm:
        free_before = llm.free_blocks
        for index, length in enumerate((45, 200)):
            llm.submit(str(index), tokens(length, seed=length), 10 * BUDGET)
        outputs = llm.drain()
        assert [len(output) for output in outputs.values()] == [10 * BUDGET] * 2
        assert metric("vllm:kv_compress_repacked_answers_total") > 2 * 10
        assert free_before * BLOCK < 10 * BUDGET
        assert llm.free_blocks == free_before


def test_budgets_that_keep_everything_do_not_change_outputs(model):
    """For a prompt that is long enough to be compressed, and for a short one."""
    prompts = [PROMPTS["500"], PROMPTS["45"]]
    options = {"max_model_len": POOL * BLOCK, "max_num_seqs": 2}
    with engine(model, **options) as llm:
        expected = llm.generate(prompts, 3 * INTERVAL)
    config = settings("cake", 1.0, decode_budget=1024, decode_interval=INTERVAL)
    with engine(model, additional_config=config, **options) as llm:
        assert llm.generate(prompts, 3 * INTERVAL) == expected
        assert metric("vllm:kv_compress_repacked_answers_total") == 0
        assert metric("vllm:kv_compress_planned_requests_total") == 0
