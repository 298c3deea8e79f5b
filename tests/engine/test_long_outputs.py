"""Long outputs with a decode budget, in pools that could not hold their uncompressed cache.

The blocks that each request holds are computed here from lengths alone, and compared with the
manager, with vLLM's pool and with vLLM's gauge.
"""

from dataclasses import dataclass

import pytest

from checkpoints import make, tokens
from engines import BLOCK, engine, settings

LAYERS, WINDOW = 2, 8
BUDGET, INTERVAL = 80, 64  # 80 tokens in two layers are 5 pages, rounded up to 3 blocks
CAP = LAYERS * -(-BUDGET // BLOCK)
NUM_OUTPUT, POOL = 1000, 48
PROMPTS = {  # shorter than a block and one block; compressed to fewer and to more pages than CAP
    str(length): tokens(length, seed=length) for length in (45, 32, 200, 500)
}


@dataclass(slots=True)
class ExpectedBlocks:
    """The blocks that one request should hold, computed from its lengths.

    Args:
        prompt: prompt tokens.
        max_tokens: tokens of prompt and output.
        packed_blocks: blocks with packed pages.
        pages: packed pages over all layers.
        first_block: index of the first ordinary block.
        num_packings: times that it was packed during decoding.
    """

    prompt: int
    max_tokens: int
    packed_blocks: int
    pages: int
    first_block: int
    num_packings: int = 0

    def after_step(self, computed: int) -> int:
        """Return the blocks after a step. Each step computes one token."""
        full_blocks, rest = divmod(computed, BLOCK)
        is_due = not rest and (full_blocks - self.first_block) * BLOCK >= INTERVAL
        is_read = computed >= self.prompt + WINDOW and computed + 1 < self.max_tokens
        cap = max(self.pages, CAP)
        pages = self.pages + LAYERS * (full_blocks - self.first_block)
        if is_due and is_read and pages > cap:
            self.packed_blocks, self.pages = -(-cap // LAYERS), cap
            self.first_block = full_blocks
            self.num_packings += 1
        return self.packed_blocks + full_blocks + bool(rest) - self.first_block

    @property
    def bound(self) -> int:
        return -(-max(self.pages, CAP) // LAYERS) + INTERVAL // BLOCK + 1


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

    Blocks match the expected ones after every step, and vLLM's gauge follows.
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
        expected, max_blocks, num_done = {}, {}, 0
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
                if request_id not in expected:
                    schedule = llm.scheduler.states.get(request_id).schedule
                    packed_blocks = len(llm.packed_blocks(request_id))
                    expected[request_id] = ExpectedBlocks(
                        prompt=request.num_prompt_tokens,
                        max_tokens=request.num_prompt_tokens + NUM_OUTPUT,
                        packed_blocks=packed_blocks,
                        pages=schedule.footprint.pages,
                        first_block=schedule.footprint.first_block,
                    )
                    output = schedule.output
                    max_blocks[request_id] = output.max_blocks(
                        schedule.footprint, packed=packed_blocks, tokens=output.max_tokens - 1
                    )
                    peaks[request_id] = 0  # forget the prompt's peak
                assert held == expected[request_id].after_step(computed), (request_id, computed)
                is_packed = expected[request_id].num_packings > 0
                assert held <= expected[request_id].bound or not is_packed
            assert free_before - llm.free_blocks == total
            assert metric("vllm:kv_cache_usage_perc") == pytest.approx(total / POOL)
        assert (num_done, llm.free_blocks, preemptions) == (len(PROMPTS), free_before, {})
        assert peaks == max_blocks
        assert all(each.num_packings >= NUM_OUTPUT // INTERVAL - 2 for each in expected.values())


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
