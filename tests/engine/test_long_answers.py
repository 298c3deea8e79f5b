"""Long answers whose memory is bounded, in pools that could not hold them.

What each request holds is counted from lengths alone, here by hand, and compared with the manager,
with vLLM's own pool and with vLLM's gauge.
"""

from dataclasses import dataclass

import pytest

from checkpoints import make, tokens
from engines import BLOCK, V2, engine, settings

pytestmark = pytest.mark.skipif(V2, reason="blocks are the scheduler's, whatever the runner")

LAYERS, WINDOW = 2, 8
BUDGET, INTERVAL = 80, 64  # 5 pages of two layers: the third block is filled
CAP = LAYERS * -(-BUDGET // BLOCK)
ANSWER, POOL = 2000, 80
PROMPTS = {  # below a block and at one; compressed to fewer pages than CAP and to more
    str(length): tokens(length, seed=length) for length in (45, 32, 200, 500)
}


@dataclass(slots=True)
class Lengths:
    """What one request holds, from its lengths.

    Args:
        prompt: its tokens.
        last: tokens of its prompt and its answer.
        blocks: that it was packed into.
        pages: packed, over all layers.
        first: its first ordinary block.
        packed: times that its answer was packed.
    """

    prompt: int
    last: int
    blocks: int
    pages: int
    first: int
    packed: int = 0

    def held(self, computed: int) -> int:
        """Blocks after a step; one token is computed in each."""
        whole, rest = divmod(computed, BLOCK)
        due = not rest and (whole - self.first) * BLOCK >= INTERVAL
        read = computed >= self.prompt + WINDOW and computed + 1 < self.last
        cap = max(self.pages, CAP)
        if due and read and self.pages + LAYERS * (whole - self.first) > cap:
            self.blocks, self.pages, self.first = -(-cap // LAYERS), cap, whole
            self.packed += 1
        return self.blocks + whole + bool(rest) - self.first

    @property
    def bound(self) -> int:
        return -(-max(self.pages, CAP) // LAYERS) + INTERVAL // BLOCK + 1


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make("llama-two-layers", checkpoints_folder)


def shown(name):
    """What ``/metrics`` would say."""
    from prometheus_client import REGISTRY

    (family,) = REGISTRY._names_to_collectors[name].collect()
    return sum(sample.value for sample in family.samples if sample.name == name)


def watch_peaks(llm):
    """From now on: the most blocks that each request holds while a step runs."""
    manager, peaks = llm.manager, {}
    take = manager.take_step

    def taking(*following):
        for request in llm.running():
            held = manager.num_blocks_held(request.request_id)
            peaks[request.request_id] = max(peaks.get(request.request_id, 0), held)
        return take(*following)

    manager.take_step = taking
    return peaks


def test_every_step_of_2000_holds_what_lengths_say_and_the_gauge_follows(model):
    """Nobody is preempted, though the pool holds one such answer and no second."""
    config = settings("snapkv", 0.3, decode_budget=BUDGET, decode_interval=INTERVAL)
    with engine(
        model,
        additional_config=config,
        blocks=1 + POOL,
        max_model_len=POOL * BLOCK,
        max_num_seqs=len(PROMPTS),
        enable_prefix_caching=False,
    ) as llm:
        free, manager = llm.free_blocks, llm.manager
        peaks, preempted = watch_peaks(llm), llm.watch_preemptions()
        by_hand, most, done = {}, {}, 0
        for name, prompt in PROMPTS.items():
            llm.submit(name, prompt, ANSWER)
        while llm.llm.llm_engine.has_unfinished_requests():
            done += len(llm.step())
            total = 0
            for request in llm.running():
                own, computed = request.request_id, request.num_computed_tokens
                held = manager.num_blocks_held(own)
                total += held
                if computed < request.num_prompt_tokens:
                    continue
                if own not in by_hand:
                    schedule = manager.planner.schedules[own]
                    blocks = len(manager._packed.get(own, ()))
                    by_hand[own] = Lengths(
                        prompt=request.num_prompt_tokens,
                        last=request.num_prompt_tokens + ANSWER,
                        blocks=blocks,
                        pages=schedule.holding.pages,
                        first=schedule.holding.first_block,
                    )
                    answer = schedule.answer
                    most[own] = answer.most_blocks(
                        schedule.holding, packed=blocks, tokens=answer.last - 1
                    )
                    peaks[own] = 0  # that of its prompt
                assert held == by_hand[own].held(computed), (own, computed)
                assert held <= by_hand[own].bound or not by_hand[own].packed
            assert free - llm.free_blocks == total
            assert shown("vllm:kv_cache_usage_perc") == pytest.approx(total / POOL)
        assert (done, llm.free_blocks, preempted) == (len(PROMPTS), free, {})
        assert peaks == most
        assert all(lengths.packed >= ANSWER // INTERVAL - 2 for lengths in by_hand.values())


def test_an_answer_that_no_pool_could_hold_ends(model):
    """Ten times its budget, and longer than the pool: piecewise prompts let sequences be so."""
    bounds = {"decode_budget": BUDGET, "decode_interval": INTERVAL, "max_whole": 128, "piece": 64}
    config = settings("snapkv", 0.3, probe=16, probe_first=16, **bounds)
    with engine(
        model,
        additional_config=config,
        blocks=1 + 14,
        max_model_len=1024,
        max_num_seqs=2,
    ) as llm:
        free = llm.free_blocks
        for index, length in enumerate((45, 200)):
            llm.submit(str(index), tokens(length, seed=length), 10 * BUDGET)
        answers = llm.drain()
        assert [len(answer) for answer in answers.values()] == [10 * BUDGET] * 2
        assert shown("vllm:kv_compress_repacked_answers_total") > 2 * 10
        assert free * BLOCK < 10 * BUDGET
        assert llm.free_blocks == free


def test_budgets_that_hold_everything_give_the_tokens_of_vllm_alone(model):
    """A prompt that is long enough to be compressed, and one that is not."""
    prompts = [PROMPTS["500"], PROMPTS["45"]]
    options = {"max_model_len": POOL * BLOCK, "max_num_seqs": 2}
    with engine(model, **options) as llm:
        want = llm.generate(prompts, 500)
    config = settings("cake", 1.0, decode_budget=1024, decode_interval=INTERVAL)
    with engine(model, additional_config=config, **options) as llm:
        assert llm.generate(prompts, 500) == want
        assert shown("vllm:kv_compress_repacked_answers_total") == 0
        assert shown("vllm:kv_compress_planned_requests_total") == 0
