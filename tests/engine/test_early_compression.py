"""Early compression under memory pressure: no look-ahead is left when a request is preempted.

Seeded random loads run in pools of many sizes. Without a look-ahead, a prompt is packed when its
prefill ends. So when vLLM preempts a request, no request whose prefill ended in an earlier step may
hold more blocks than it would without a look-ahead.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import methods_reference as ref
from checkpoints import HYBRIDS, SHAPES, make, tokens
from deferred_frees import defer_frees
from draft_checkpoints import make_eagle
from drafting import limit_drafts, speculative
from engines import BLOCK, Engine, engine, settings
from test_lookahead import BUDGET, LOOKAHEAD, LookaheadReplay, lookahead_config
from test_ngram import FOUR_TOKENS, NGRAM
from vllm_kvcompress.engine.messages.step import BUDGET as TO_BUDGET
from vllm_kvcompress.engine.messages.step import HALF
from vllm_kvcompress.settings.config import CompressionConfig

M = 24
# Of fifty seeds, two for which every engine preempts requests and the reserved blocks matter.
SEEDS = (6, 30)
LONGEST = 400
OVERRIDES: list[dict[str, Any] | None] = [
    None,
    None,
    None,
    {"kv_compress": "off"},
    {"kv_lookahead": 0},
    {"kv_lookahead": 4, "kv_budget": 0.15},
    {"kv_compress": "snapkv"},
    {"kv_budget": 0.6},
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """An engine that runs many loads.

    Args:
        model: name of a test checkpoint.
        pool: blocks of the pool. One request needs fewer.
        min_pool: minimum blocks that a load leaves free in it.
        more: more compression settings.
        options: more engine options.
        sampling: sampling parameters of every request, beside the load's.
        seeds: seeds of its loads.
        drafts: drafts of an EAGLE head per step; 0 without one.
        deferred: freed blocks wait for the running steps, as with a KV connector that pulls.
    """

    model: str = "llama-two-layers"
    pool: int = 60
    min_pool: int = 16
    more: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = SEEDS
    deferred: bool = False
    drafts: int = 0
    longest: int = LONGEST


KINDS = {
    "sync": EngineKind(),
    "async": EngineKind(options={"async_scheduling": True}),
    # With these seeds a look-ahead is left if only the next step is considered.
    "deferred": EngineKind(options={"async_scheduling": True}, deferred=True, seeds=(13, 22)),
    "hybrid": EngineKind(model="gpt-oss", pool=90, min_pool=34, options={"async_scheduling": True}),
    # Every chunk limit of a load can hold the probe.
    "pieces": EngineKind(
        more={"max_whole": 256, "piece": 96, "probe": 14, "probe_first": 10, "window": 8}
    ),
    "bounded": EngineKind(more={"decode_budget": 96, "decode_interval": BLOCK}),
    # Prompts of fewer than 320 tokens are not packed.
    "packed": EngineKind(model="llama-two-layers-d64", longest=500, more={"packed_dtype": "k4v3"}),
    "priority": EngineKind(options={"scheduling_policy": "priority"}),
    # Outputs use four tokens only, or there would be hardly any drafts.
    "drafts": EngineKind(options=NGRAM, sampling=FOUR_TOKENS, seeds=(7, 17)),
    "eagle": EngineKind(drafts=5, sampling=FOUR_TOKENS, seeds=(6,)),
    "eagle, async": EngineKind(
        drafts=5, options={"async_scheduling": True}, sampling=FOUR_TOKENS, seeds=(6,)
    ),
}


def pressure_config(**more):
    return settings("cake", 0.3, **({"lookahead": M, "allow_override": "off,snapkv"} | more))


class PressureWatch:
    """Records preemptions and early compressions in one engine.

    preempted: ids of the preempted requests, in order.
    not_compressed: at each preemption, the requests that could have been compressed before it.
    early_targets: targets of the early compressions, `half` or `budget`.
    """

    def __init__(self, llm: Engine) -> None:
        self.llm, scheduler = llm, llm.scheduler
        self.not_compressed: list[str] = []
        self.preempted: list[str] = []
        self.early_targets: list[str] = []
        preempt, schedule = scheduler._preempt_request, scheduler.schedule
        active_before: set[str] = set()

        def recording_preempt(request: Any, *args: Any, **kwargs: Any) -> None:
            self.preempted.append(request.request_id)
            running = {each.request_id for each in scheduler.running} | {request.request_id}
            self.not_compressed += [
                request_id for request_id in running & active_before if self.holds_more(request_id)
            ]
            preempt(request, *args, **kwargs)

        def recording_schedule(*args: Any, **kwargs: Any) -> Any:
            active_before.clear()
            active_before.update(llm.scheduler.lookaheads.request_ids)
            output = schedule(*args, **kwargs)
            plan = output.kvcompress
            self.early_targets += [
                pack_request.early_target
                for pack_request in (plan.pack if plan is not None else ())
                if pack_request.early_target
            ]
            return output

        scheduler._preempt_request, scheduler.schedule = recording_preempt, recording_schedule

    def holds_more(self, request_id: str) -> bool:
        """Return whether a look-ahead holds more blocks than it would if it were packed."""
        if request_id not in self.llm.scheduler.lookaheads.request_ids:
            return False
        state = self.llm.scheduler.states.get(request_id)
        schedule, num_tokens = state.schedule, state.lookahead_tokens
        # While a step is being scheduled, `num_tokens` may already include that step.
        plan = schedule.lookahead.plan_at(schedule.footprint, num_tokens)
        if plan is None:
            return False
        return len(state.unpacked_blocks(num_tokens)) + len(state.packed_blocks) > plan.blocks


def load_requests(seed: int, longest: int = LONGEST):
    """Yield a load's requests: prompt, output tokens, steps to wait, overrides, priority.

    Some prompts share a prefix. Some outputs end before or with the look-ahead, others after it.
    """
    rng = random.Random(seed)
    stem = tokens(longest, seed=seed)
    share_rate = rng.choice([0.0, 0.3, 0.9])
    for index in range(rng.randint(10, 16)):
        length = rng.randint(140, longest - 80)
        shared = length if rng.random() < share_rate / 2 else rng.randint(0, length)
        shared *= rng.random() < share_rate
        prompt = stem[:shared] + tokens(length - shared, seed=1000 * seed + index)
        num_output = rng.choice([2, 8, M, M + 2, 40, 70])
        yield prompt, num_output, rng.choice([0, 0, 1, 3]), rng.choice(OVERRIDES), rng.randint(0, 2)


def run_load(llm: Engine, kind: EngineKind, seed: int) -> dict[str, list[int]]:
    """Run a load and return its outputs. The seed decides the pool and chunk sizes."""
    rng, scheduler = random.Random(seed + 7), llm.scheduler
    free_blocks = llm.free_blocks
    taken = llm.pool.get_new_blocks(free_blocks - rng.randint(kind.min_pool, kind.min_pool + 16))
    scheduler.max_num_scheduled_tokens = rng.choice([48, 100, 256])
    threshold = rng.choice([0, 0, 32])
    scheduler.scheduler_config.long_prefill_token_threshold = threshold
    outputs: dict[str, list[int]] = {}
    for index, (prompt, num_output, num_steps, override, priority) in enumerate(
        load_requests(seed, kind.longest)
    ):
        llm.submit(
            str(index),
            prompt,
            num_output,
            extra_args=override,
            priority=priority,
            **kind.sampling,
        )
        for _ in range(num_steps):
            outputs |= {key: list(done.outputs[0].token_ids) for key, done in llm.step().items()}
    outputs |= llm.drain(limit=5000)
    llm.finish_in_flight_steps()
    llm.pool.free_blocks(taken)
    assert llm.free_blocks == free_blocks
    assert not llm.scheduler.lookaheads
    assert llm.scheduler.lookaheads.max_reserved_blocks == 0
    assert not llm.lookahead_slots_in_use
    llm.scheduler.reset_prefix_cache()
    return outputs


def start_engine(name: str, folder: Any) -> Any:
    kind = KINDS[name]
    model = make(kind.model, folder)
    drafting = speculative(make_eagle(model), kind.drafts) if kind.drafts else {}
    return engine(
        model,
        additional_config=pressure_config(**kind.more),
        blocks=1 + kind.pool,
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        **kind.options,
        **drafting,
    )


@pytest.mark.filterwarnings("ignore:(?s).*reflected list")  # from the compiler of vLLM's drafter
@pytest.mark.parametrize("name", KINDS)
def test_lookaheads_are_compressed_before_a_request_is_preempted(
    name, checkpoints_folder, async_scheduling_allowed
):
    """For any shared prefixes, chunk sizes and pool size."""
    with start_engine(name, checkpoints_folder) as llm:
        watch = PressureWatch(llm)
        if KINDS[name].deferred:
            defer_frees(llm)
        if KINDS[name].drafts:
            limit_drafts(llm)
        for seed in KINDS[name].seeds:
            outputs = run_load(llm, KINDS[name], seed)
            assert {key: len(output) for key, output in outputs.items()} == {
                str(index): num_output
                for index, (_, num_output, *_) in enumerate(
                    load_requests(seed, KINDS[name].longest)
                )
            }
    assert watch.preempted, "no request was preempted: the pool is too large"
    assert watch.early_targets, "no prompt was compressed early: the pool is too large"
    assert not watch.not_compressed


def test_lookaheads_cause_no_preemption(checkpoints_folder, async_scheduling_allowed):
    """With them, no more requests are preempted than without them."""
    preempted = {}
    with start_engine("async", checkpoints_folder) as llm:
        watch = PressureWatch(llm)
        for lookahead in (M, 0):
            config = pressure_config(lookahead=lookahead)["kvcompress"]
            llm.use_settings(CompressionConfig.parse(config))
            watch.preempted.clear()
            for seed in SEEDS:
                run_load(llm, KINDS["async"], seed)
            preempted[lookahead] = len(watch.preempted)
    # Requests are admitted at different steps, so the two runs do not preempt the same requests.
    assert preempted[M] <= preempted[0]


# -- tokens kept by an early compression ----------------------------------------------------------


class EarlyReplay(LookaheadReplay):
    """Replays a prompt that is packed at given lengths, each time to a given number of tokens.

    Args:
        budgets: tokens to keep, by the computed tokens after which the prompt is packed.
    """

    def __init__(self, method, shape, seen, prompt, budgets) -> None:
        super().__init__(method, shape, seen, prompt, LOOKAHEAD)
        self.budgets = budgets

    def after(self, computed: int) -> None:
        if computed in self.budgets:
            self.budget, self.m = self.budgets[computed], computed - self.prompt
            if self.method in ref.OUTPUT_SCORERS:
                self.w = self.m + 16
            self.pack_lookahead(computed)


LENGTH, NUM_OUTPUT = 417, LOOKAHEAD + 20
CASES = [  # model, method, output tokens when blocks run short, target that is then enough
    *(("llama-gqa", "cake", output_tokens, HALF) for output_tokens in (0, 5)),
    ("llama-gqa", "cake", 5, TO_BUDGET),
    ("llama-gqa", "snapkv", 0, TO_BUDGET),
    ("llama-gqa", "cake-chunk", 3, HALF),
    ("gpt-oss", "snapkv", 3, HALF),
]


@pytest.mark.parametrize(("name", "method", "output_tokens", "target"), CASES)
def test_early_compression_keeps_the_reference_tokens(
    name, method, output_tokens, target, checkpoints_folder, watched
):
    """It keeps half of the prompt and later the budget, or the budget at once.

    The latest queries computed by then score the prompt.
    """
    with engine(
        make(name, checkpoints_folder),
        additional_config=lookahead_config(method),
        max_num_batched_tokens=150,
        max_num_seqs=4,
        max_model_len=1024,
    ) as llm:
        seen, free_blocks, packed = llm.record_attention(), llm.free_blocks, []
        llm.compressor.packer.observers.append(lambda pack_request, *_: packed.append(pack_request))

        def demand(lookahead_ids):
            """Ask for more blocks than are free, in one step."""
            (request,) = llm.scheduler.running
            missing = 3 if target == HALF else free_blocks
            is_short = request.num_computed_tokens == LENGTH + output_tokens
            return (llm.free_blocks + missing) * is_short

        llm.scheduler.next_step.blocks_for_running = demand
        llm.submit("r", tokens(LENGTH, seed=33), NUM_OUTPUT)
        llm.drain()
        assert llm.free_blocks == free_blocks
    budget, early_length = int(LENGTH * BUDGET), LENGTH + output_tokens
    budgets = {early_length: budget}
    if target == HALF:
        budgets = {early_length: LENGTH // 2, LENGTH + LOOKAHEAD: budget}
    assert [(pack_request.tokens, pack_request.early_target) for pack_request in packed] == [
        (length, target if length == early_length else "") for length in budgets
    ]
    assert watched("cut_lookaheads") == {target: 1}
    assert watched("planned") == {method: 1}
    assert not watched("packed_pieces")
    # `seen` has only the full-attention layers.
    shape = replace({**SHAPES, **HYBRIDS}[name], layers=len(seen))
    replay = EarlyReplay(method, shape, seen, LENGTH, budgets).start_after_prefill()
    replay.after(LENGTH)
    replay.steps(LENGTH, LENGTH + NUM_OUTPUT - 1)
    assert replay.packed_at == list(budgets)
