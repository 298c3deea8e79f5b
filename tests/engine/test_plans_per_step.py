"""Each step plans a request at most once, and cached plans are never stale.

Plans delay the first token of new requests, because the device waits for the scheduler then.
"""

import sys
from collections import Counter

import pytest

from checkpoints import make, tokens
from engines import BLOCK, V2, engine, settings
from vllm_kvcompress.schedules.groups import GroupSchedule
from vllm_kvcompress.schedules.lookahead import LookaheadSchedule
from vllm_kvcompress.schedules.outputs import OutputSchedule
from vllm_kvcompress.schedules.pieces import PieceSchedule
from vllm_kvcompress.schedules.prompt import PromptSchedule

pytestmark = pytest.mark.skipif(V2, reason="the scheduler is the same on both model runners")

LENGTHS = (300, 331, 420, 700)
LOOKAHEAD = settings("cake-chunk", lookahead=8)
PIECES = settings("snapkv", max_whole=256, piece=128, probe=16, decode_budget=160)
MAX_REQUESTS = 32
VARIANTS = {
    "prompt": settings("cake"),
    "look-ahead": LOOKAHEAD,
    "decode budget": settings("h2o", decode_budget=160),
    "pieces": PIECES,
    "pressure": settings("cake", pressure=0.01),
    "low pressure": settings("cake", pressure=1.0),
}
variants = pytest.mark.parametrize("name", VARIANTS)


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make("llama-one-layer", checkpoints_folder)


SCHEDULES = (PromptSchedule, PieceSchedule, LookaheadSchedule, OutputSchedule, GroupSchedule)


class Plans:
    """Counts an engine's schedules and plans, per step."""

    def __init__(self, llm, monkeypatch) -> None:
        import vllm_kvcompress.schedules.lookahead as lookahead
        import vllm_kvcompress.settings.config as config

        self.llm = llm
        # Since the last step: by request id, and by the tokens that the plan is for.
        self.schedules, self.page_plans = Counter(), Counter()
        # Plans of the step by schedule, pages that the request holds, and tokens.
        self.step_plans = Counter()
        self.steps = []  # and what was planned between them, as a step of its own
        schedules = llm.scheduler.schedules
        new_schedule, schedule = schedules.new, llm.scheduler.schedule

        def counting_schedules(state):
            self.schedules[state.request_id.split("-")[0]] += 1
            return new_schedule(state)

        def scheduling(*args, **kwargs):
            self._end_step()
            output = schedule(*args, **kwargs)
            self._end_step()
            return output

        monkeypatch.setattr(schedules, "new", counting_schedules)
        monkeypatch.setattr(llm.scheduler, "schedule", scheduling)
        for module in (config, lookahead):
            monkeypatch.setattr(module, "page_plan", self._counting(module.page_plan))
        for schedule_type in SCHEDULES:
            monkeypatch.setattr(schedule_type, "plan", self._counting_plans(schedule_type.plan))

    def _end_step(self) -> None:
        counted = (self.schedules, self.page_plans, self.step_plans)
        self.steps.append(tuple(Counter(counter) for counter in counted))
        for counter in counted:
            counter.clear()

    def _counting(self, page_plan):
        def counting(budget, *args, **kwargs):
            self.page_plans[budget.tokens] += 1
            return page_plan(budget, *args, **kwargs)

        return counting

    def _counting_plans(self, plan):
        def counting(schedule, footprint, tokens):
            self.step_plans[id(schedule), footprint.pages, footprint.first_block, tokens] += 1
            return plan(schedule, footprint, tokens)

        return counting

    def assert_at_most_one(self) -> None:
        """Assert that every step made at most one schedule and plan of each request."""
        assert self.steps
        for step in self.steps:
            for counted in step:
                assert not counted or max(counted.values()) == 1, self.steps

    def total(self) -> tuple[int, int]:
        """Return the schedules and page plans of all steps so far."""
        return tuple(sum(step[kind].total() for step in self.steps) for kind in (0, 1))


@variants
@pytest.mark.parametrize("chunk", [160, 2048], ids=["chunks", "whole"])
def test_a_step_plans_each_new_prompt_at_most_once(model, monkeypatch, name, chunk):
    with engine(
        model,
        additional_config=VARIANTS[name],
        max_num_batched_tokens=chunk,
        max_num_seqs=MAX_REQUESTS,
        max_model_len=2048,
    ) as llm:
        plans = Plans(llm, monkeypatch)
        llm.generate([tokens(640, seed=1)])
        plans.assert_at_most_one()
        assert any(plans.total())
        plans.steps.clear()
        llm.generate([tokens(length, seed=length) for length in LENGTHS])
        plans.assert_at_most_one()


def test_chunks_of_a_prompt_share_one_plan(model, monkeypatch):
    with engine(
        model, additional_config=settings("cake"), max_num_batched_tokens=128, max_model_len=2048
    ) as llm:
        plans = Plans(llm, monkeypatch)
        llm.generate([tokens(640, seed=1)])
        assert plans.total() == (1, 1)


@variants
def test_prompts_that_wait_are_planned_once(model, monkeypatch, name):
    """The pool is full for many steps, and the waiting prompt's plan depends on nothing new."""
    with engine(
        model, additional_config=VARIANTS[name], blocks=1 + 24, max_model_len=24 * BLOCK
    ) as llm:
        plans = Plans(llm, monkeypatch)
        llm.submit("first", tokens(12 * BLOCK, seed=1), 11 * BLOCK)
        llm.step()
        plans.steps.clear()
        llm.submit("second", tokens(23 * BLOCK, seed=2), 8)
        for _ in range(40):
            llm.step()
        assert [request.request_id.split("-")[0] for request in llm.running()] == ["first"]
        assert sum(schedules["second"] for schedules, *_ in plans.steps) <= 1
        assert sum(page_plans[23 * BLOCK] for _, page_plans, _ in plans.steps) <= 1
        llm.drain()


@variants
def test_preempted_prompts_are_planned_once_per_step(model, monkeypatch, name):
    with engine(model, additional_config=VARIANTS[name], max_model_len=2048) as llm:
        plans = Plans(llm, monkeypatch)
        for length in LENGTHS:
            llm.submit(str(length), tokens(length, seed=length), 40)
        for _ in range(3):
            for _ in range(5):
                llm.step()
            for request in llm.running()[:3]:
                llm.preempt(request)
        assert len(llm.drain()) == len(LENGTHS)
        plans.assert_at_most_one()


@pytest.mark.parametrize("options", [{"min_prompt": 1024}, {"compress": "off"}], ids=str)
def test_prompts_with_nothing_to_compress_are_not_planned(model, monkeypatch, options):
    options = {"allow_override": ("cake", "off"), **options}
    with engine(model, additional_config=settings(**options), max_model_len=2048) as llm:
        plans = Plans(llm, monkeypatch)
        llm.generate([tokens(length, seed=length) for length in LENGTHS])
        assert plans.total() == (0, 0)


def assert_never_stale(llm, monkeypatch) -> Counter:
    """Compare every remembered decision and schedule with a new one; return the counts of both."""
    schedules, compared = llm.scheduler.schedules, Counter()
    admissions = llm.scheduler.admissions
    consider, schedule_of = admissions.refresh_decision, schedules.of

    def considering(state):
        consider(state)
        if not state.decision.is_final:
            decision, new = (
                state.decision,
                admissions.decide(state.request, state.options, state.error),
            )
            assert decision.settings is new.settings
            assert decision.output_settings is new.output_settings
            assert decision.skip_reason == new.skip_reason
            compared["decisions"] += 1

    def scheduling(state):
        schedule = schedule_of(state)
        if not state.has_fixed_schedule and not state.decision.never_packs:
            assert schedule == schedules.new(state)
            compared["schedules"] += 1
        return schedule

    monkeypatch.setattr(admissions, "refresh_decision", considering)
    monkeypatch.setattr(schedules, "of", scheduling)
    return compared


@variants
def test_remembered_plans_are_not_stale(model, monkeypatch, name):
    """Prefix hits, output tokens, preemptions, resumes and aborts in a pool that is too small."""
    base = tokens(800, seed=3)
    with engine(
        model,
        additional_config=VARIANTS[name],
        blocks=1 + 40,
        max_num_batched_tokens=256,
        max_num_seqs=MAX_REQUESTS,
        max_model_len=1024,
    ) as llm:
        preemptions = llm.watch_preemptions()
        compared = assert_never_stale(llm, monkeypatch)
        for number in range(12):
            prompt = base[: 200 + 30 * number] + tokens(150, seed=number)
            llm.submit(str(number), prompt, 20 + 10 * number, extra_args={})
        for step in range(60):
            llm.step()
            if step % 12 == 5 and llm.running():
                llm.preempt(llm.running()[0])
            if step % 20 == 9:
                waiting = list(llm.scheduler.waiting)
                victims = [*waiting[:1], *llm.running()[-1:]]
                llm.llm.llm_engine.abort_request(
                    [request.request_id for request in victims], internal=True
                )
        llm.drain()
        assert preemptions
        assert compared["decisions"] > 10
        assert compared["schedules"] > 10
        assert not len(llm.scheduler.states)
        assert not llm.scheduler.states.ids_without_packing


def test_a_free_lookahead_slot_changes_the_schedule_of_a_waiting_prompt(model):
    with engine(model, additional_config=LOOKAHEAD, max_model_len=2048) as llm:
        scheduler = llm.scheduler
        llm.submit("a", tokens(300, seed=1), 20)
        state = scheduler.states.of(next(iter(scheduler.requests.values())))
        num_slots = scheduler.lookaheads.num_free_slots
        assert scheduler.schedules.of(state).lookahead is not None
        scheduler.lookaheads.num_free_slots = 0
        assert scheduler.schedules.of(state).lookahead is None
        scheduler.lookaheads.num_free_slots = num_slots
        assert scheduler.schedules.of(state).lookahead is not None
        llm.drain()


def test_new_settings_forget_all_plans(model):
    with engine(model, additional_config=settings("cake"), max_model_len=2048) as llm:
        scheduler = llm.scheduler
        llm.submit("a", tokens(300, seed=1), 20)

        def kept_pages():
            state = scheduler.states.of(next(iter(scheduler.requests.values())))
            return scheduler.schedules.of(state).prefill.page_plan.pages

        before = kept_pages()
        llm.use_settings(scheduler.admissions.settings.variant(budget=0.8))
        assert kept_pages() > before
        llm.drain()


def calls_per_decode_step(model, requests: int, **options) -> float:
    """Return the Python calls of `schedule` and `update_from_output` in a decode step."""
    steps, count, is_counting = 20, 0, True
    with engine(model, enable_prefix_caching=True, max_model_len=2048, **options) as llm:
        for number in range(requests):
            llm.submit(str(number), tokens(100, seed=number), 60)
        for _ in range(4):
            llm.step()

        def profile(_frame, event, _argument) -> None:
            nonlocal count
            count += event == "call"

        def counting(function):
            def counted(*args, **kwargs):
                sys.setprofile(profile if is_counting else None)
                try:
                    return function(*args, **kwargs)
                finally:
                    sys.setprofile(None)

            return counted

        llm.scheduler.schedule = counting(llm.scheduler.schedule)
        llm.scheduler.update_from_output = counting(llm.scheduler.update_from_output)
        for _ in range(steps):
            llm.step()
        assert len(llm.running()) == requests
        is_counting = False
        llm.drain()
    return count / steps


@pytest.mark.parametrize("config", [settings("cake"), LOOKAHEAD], ids=["cake", "look-ahead"])
def test_decode_steps_with_nothing_to_compress_run_almost_no_code_of_ours(model, config):
    added = {}
    for requests in (2, 10):
        plugin = calls_per_decode_step(model, requests, additional_config=config)
        added[requests] = plugin - calls_per_decode_step(model, requests)
    # One override in the scheduler calls vLLM's own method.
    assert added[10] - added[2] <= 8, added
    assert added[2] <= 2 + 15, added


def test_a_compressed_prompt_follows_idle_steps(model):
    """While only short prompts decode, vLLM calls its own methods; a long prompt changes that."""
    with engine(model, additional_config=settings("cake"), max_model_len=2048) as llm:
        coordinator = llm.scheduler.kv_cache_manager.coordinator
        packed = llm.watch_packing(lambda done: done.pack_request.tokens)
        llm.submit("short", tokens(100, seed=1), 30)
        for _ in range(3):
            llm.step()
        assert coordinator.allocate_new_blocks.__self__ is coordinator
        assert coordinator.cache_blocks.__self__ is coordinator
        assert "get_num_blocks_to_allocate" in vars(llm.manager)
        llm.submit("long", tokens(400, seed=2), 10)
        llm.step()
        assert coordinator.allocate_new_blocks.__self__ is llm.scheduler.coordination
        assert coordinator.cache_blocks.__self__ is llm.scheduler.coordination
        assert "get_num_blocks_to_allocate" not in vars(llm.manager)
        llm.drain()
        assert packed == [400]
