"""Look-aheads that give way when the pool is short: none is left when a request is preempted.

Seeded random loads in pools of many sizes. Without a look-ahead a prompt is packed at the end of
its prefill. So when vLLM preempts a request, no request whose prefill ended in an earlier step may
hold more than it would then.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import methods_reference as ref
from checkpoints import HYBRIDS, SHAPES, make, tokens
from deferred_frees import defer_frees
from engines import BLOCK, V2, Engine, engine, first_runner, settings
from test_lookahead import AHEAD, BUDGET, Ahead, ahead
from test_ngram import FEW, NGRAM
from vllm_kvcompress.engine.messages.step import BUDGET as TO_BUDGET
from vllm_kvcompress.engine.messages.step import HALF
from vllm_kvcompress.settings.config import CompressionConfig

M = 24
# of fifty, two in which requests are preempted whatever the engine, and what is promised matters
SEEDS = (6,) if V2 else (6, 30)
LONGEST = 400
ASKS: list[dict[str, Any] | None] = [
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
class Kind:
    """An engine for many loads.

    Args:
        pool: blocks; one request needs fewer.
        small: blocks that a load leaves it at least.
        more: settings.
        options: of the engine.
        asks: of every request, beside what the load gives it.
        seeds: of its loads.
        deferred: what is freed waits for the steps under way, as where a connector pulls.
    """

    model: str = "llama-two-layers"
    pool: int = 60
    small: int = 16
    more: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    asks: dict[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = SEEDS
    deferred: bool = False


KINDS = {
    "sync": Kind(),
    "async": Kind(options={"async_scheduling": True}),
    # seeds for which one is left if only the next step is looked at
    "deferred": Kind(options={"async_scheduling": True}, deferred=True, seeds=(13, 22)),
    "hybrid": Kind(model="gpt-oss", pool=90, small=34, options={"async_scheduling": True}),
    # a chunk has room for a probe, whatever its limit
    "pieces": Kind(
        more={"max_whole": 256, "piece": 96, "probe": 14, "probe_first": 10, "window": 8}
    ),
    "bounded": Kind(more={"decode_budget": 96, "decode_interval": BLOCK}),
    "priority": Kind(options={"scheduling_policy": "priority"}),
    # out of four tokens, or hardly a draft would be made
    "drafts": Kind(options=NGRAM, asks=FEW, seeds=(7, 17)),
}


def config(yields="preemption", **more):
    own = dict(lookahead=M, lookahead_yields=yields, allow_override="off,snapkv")
    return settings("cake", 0.3, **(own | more))


class Watched:
    """What happens to look-aheads in one engine.

    left: at each preemption, the requests that could have been packed before it and were not.
    cuts: what prompts that were packed early were packed to.
    """

    def __init__(self, llm: Engine) -> None:
        self.llm, scheduler = llm, llm.scheduler
        self.left: list[str] = []
        self.preempted: list[str] = []
        self.cuts: list[str] = []
        preempt, schedule = scheduler._preempt_request, scheduler.schedule
        ran: set[str] = set()

        def preempting(request: Any, *args: Any, **kwargs: Any) -> None:
            self.preempted.append(request.request_id)
            running = {each.request_id for each in scheduler.running} | {request.request_id}
            self.left += [each for each in running & ran if self.holds_more(each)]
            preempt(request, *args, **kwargs)

        def scheduling(*args: Any, **kwargs: Any) -> Any:
            ran.clear()
            ran.update(llm.manager.lookaheads._all)
            output = schedule(*args, **kwargs)
            plan = output.kvcompress
            self.cuts += [
                pack_request.cut
                for pack_request in (plan.pack if plan is not None else ())
                if pack_request.cut
            ]
            return output

        scheduler._preempt_request, scheduler.schedule = preempting, scheduling

    def holds_more(self, request_id: str) -> bool:
        """Whether it looks ahead and holds blocks that it would not, had it been packed."""
        manager = self.llm.manager
        ahead = manager.lookaheads._all.get(request_id)
        if ahead is None:
            return False
        # in a step that is being scheduled it may be counted with that step already
        kept = ahead.lookahead.kept(ahead.schedule.footprint, ahead.tokens)
        if kept is None:
            return False
        full = len(manager.ordinary(request_id, ahead.schedule.footprint, ahead.tokens))
        return full + manager.packed_blocks(request_id) > kept.blocks


def requests(seed: int):
    """Prompts, some of which begin alike; answers that end before, with or after a look-ahead."""
    rng = random.Random(seed)
    stem = tokens(LONGEST, seed=seed)
    alike = rng.choice([0.0, 0.3, 0.9])
    for index in range(rng.randint(10, 16)):
        length = rng.randint(140, LONGEST - 80)
        shared = length if rng.random() < alike / 2 else rng.randint(0, length)
        shared *= rng.random() < alike
        prompt = stem[:shared] + tokens(length - shared, seed=1000 * seed + index)
        new = rng.choice([2, 8, M, M + 2, 40, 70])
        yield prompt, new, rng.choice([0, 0, 1, 3]), rng.choice(ASKS), rng.randint(0, 2)


def run(llm: Engine, kind: Kind, seed: int) -> dict[str, list[int]]:
    """Send a load to a pool and in chunks whose sizes are the seed's; returns the answers."""
    rng, scheduler = random.Random(seed + 7), llm.scheduler
    free = llm.free_blocks
    taken = llm.pool.get_new_blocks(free - rng.randint(kind.small, kind.small + 16))
    scheduler.max_num_scheduled_tokens = rng.choice([48, 100, 256])
    threshold = rng.choice([0, 0, 32])
    scheduler.scheduler_config.long_prefill_token_threshold = threshold
    done: dict[str, list[int]] = {}
    for index, (prompt, new, wait, ask, priority) in enumerate(requests(seed)):
        llm.submit(str(index), prompt, new, extra_args=ask, priority=priority, **kind.asks)
        for _ in range(wait):
            done |= {key: list(each.outputs[0].token_ids) for key, each in llm.step().items()}
    done |= llm.drain(limit=5000)
    llm.settle()
    llm.pool.free_blocks(taken)
    assert llm.free_blocks == free
    assert not llm.manager.lookaheads
    assert llm.manager.lookaheads._most_promised == 0
    assert not llm.manager.planner._looking
    llm.scheduler.reset_prefix_cache()
    return {key.split("-")[0]: answer for key, answer in done.items()}


def started(name: str, folder: Any) -> Any:
    kind = KINDS[name]
    return engine(
        make(kind.model, folder),
        additional_config=config(**kind.more),
        blocks=1 + kind.pool,
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        **kind.options,
    )


@pytest.mark.filterwarnings("ignore:(?s).*reflected list")  # of the compiler of vLLM's drafter
@pytest.mark.parametrize("name", ["async"] if V2 else KINDS)
def test_no_request_is_preempted_while_another_looks_ahead(
    name, checkpoints_folder, keep_async_scheduling
):
    """However prompts begin, whatever chunks they have and whichever share of the pool is there."""
    with started(name, checkpoints_folder) as llm:
        watched = Watched(llm)
        if KINDS[name].deferred:
            defer_frees(llm)
        for seed in KINDS[name].seeds:
            done = run(llm, KINDS[name], seed)
            assert {key: len(answer) for key, answer in done.items()} == {
                str(index): new for index, (_, new, *_) in enumerate(requests(seed))
            }
    assert watched.preempted, "pools were meant to be too small"
    assert watched.cuts, "look-aheads were meant to give way"
    assert not watched.left


@first_runner
def test_what_the_words_say(checkpoints_folder, keep_async_scheduling):
    """One that waits is enough for `waiting`, and nothing for `never`: others are preempted."""
    name, left, cuts, preempted = "async", {}, {}, {}
    with started(name, checkpoints_folder) as llm:
        watched = Watched(llm)
        for word in ("preemption", "waiting", "never", "preemption, m = 0"):
            own = config(word.partition(",")[0])["kvcompress"]
            if word.endswith("m = 0"):
                own["lookahead"] = 0
            llm.manager.replace_settings(CompressionConfig.parse(own))
            for seen in (watched.left, watched.preempted, watched.cuts):
                seen.clear()
            for seed in SEEDS:
                run(llm, KINDS[name], seed)
            left[word], cuts[word] = len(watched.left), len(watched.cuts)
            preempted[word] = len(watched.preempted)
    assert left["preemption"] == left["waiting"] == 0 < left["never"]
    assert cuts["never"] == 0 < cuts["preemption"] < cuts["waiting"]
    # Requests are admitted at other steps, so that no two runs preempt the same ones.
    assert preempted["preemption"] <= preempted["preemption, m = 0"]


# -- what an early packing leaves -----------------------------------------------------------------


class Early(Ahead):
    """A prompt that is packed after some steps, each time to so many of its tokens."""

    def __init__(self, method, shape, seen, prompt, cuts) -> None:
        super().__init__(method, shape, seen, prompt, AHEAD)
        self.cuts = cuts

    def after(self, computed: int) -> None:
        if computed in self.cuts:
            self.budget, self.m = self.cuts[computed], computed - self.prompt
            if self.method in ref.BY_ANSWER:
                self.w = self.m + 16
            self.judge(computed)


LENGTH, ANSWER = 417, AHEAD + 20
CASES = [  # a shortage after so many tokens, of how many blocks
    *(("llama-gqa", "cake", answered, HALF) for answered in (0, 5)),
    ("llama-gqa", "cake", 5, TO_BUDGET),
    ("llama-gqa", "snapkv", 0, TO_BUDGET),
    ("llama-gqa", "cake-chunk", 3, HALF),
    ("gpt-oss", "snapkv", 3, HALF),
]


@pytest.mark.parametrize(("name", "method", "answered", "to"), CASES[1:2] if V2 else CASES)
def test_every_step_reads_what_the_reference_holds(
    name, method, answered, to, checkpoints_folder, watched
):
    """Half of the prompt and then what it may keep, or that at once; from its latest queries."""
    with engine(
        make(name, checkpoints_folder),
        additional_config=ahead(method),
        max_num_batched_tokens=150,
        max_num_seqs=4,
        max_model_len=1024,
    ) as llm:
        seen, free, packed = llm.record_attention(), llm.free_blocks, []
        llm.compressor.packer.observers.append(lambda pack_request, *_: packed.append(pack_request))

        def short(looking):
            (request,) = llm.scheduler.running
            missing = 3 if to == HALF else free
            return (llm.free_blocks + missing) * (request.num_computed_tokens == LENGTH + answered)

        llm.scheduler.next_step.blocks = short
        llm.submit("r", tokens(LENGTH, seed=33), ANSWER)
        llm.drain()
        assert llm.free_blocks == free
    own, cut = int(LENGTH * BUDGET), LENGTH + answered
    cuts = {cut: own} if to == TO_BUDGET else {cut: LENGTH // 2, LENGTH + AHEAD: own}
    assert [(pack_request.tokens, pack_request.cut) for pack_request in packed] == [
        (at, to if at == cut else "") for at in cuts
    ]
    assert watched("cut_lookaheads") == {to: 1}
    assert watched("planned") == {method: 1}
    assert not watched("pieces")
    shape = replace({**SHAPES, **HYBRIDS}[name], layers=len(seen))  # those with full attention
    replay = Early(method, shape, seen, LENGTH, cuts).whole()
    replay.after(LENGTH)
    for position in range(LENGTH, LENGTH + ANSWER - 1):
        replay.step(position)
    assert replay.packed_at == list(cuts)
