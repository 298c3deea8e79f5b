"""Pack prompts whose look-ahead is over, and compress others early if the KV pool is short.

Before the short pool makes vLLM preempt a running request, prompts in their look-ahead are
compressed early: to half of the prompt if that is enough, otherwise to the budget. A prompt can
only be packed after a step that its request takes part in, and the freed blocks can be allocated in
the next step. So the decision is made once a step is scheduled, from the blocks that the next step
will need (`next_step`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vllm_kvcompress.engine.messages.step import BUDGET, HALF
from vllm_kvcompress.engine.scheduling.lookaheads import reserved_for
from vllm_kvcompress.engine.scheduling.next_step import NextStep
from vllm_kvcompress.engine.scheduling.request_state import RequestState
from vllm_kvcompress.engine.scheduling.step_builder import StepBuilder
from vllm_kvcompress.methods.page_plan import PagePlan


def pack_lookaheads(step_builder: StepBuilder, next_step: NextStep) -> None:
    """Plan to pack prompts whose look-ahead is over, and others early if the pool is short.

    Args:
        step_builder: plans the packings.
        next_step: estimates the blocks that the next step takes.
    """
    lookaheads = step_builder.lookaheads
    if not lookaheads:
        return
    remaining = []
    for state in [state for state in lookaheads if state.is_scheduled]:
        state.is_scheduled = False
        plan = state.current_schedule.plan(state.lookahead_tokens)
        # If the pool has too few blocks, the next step tries again.
        if plan is None or not step_builder.pack_lookahead(state, plan, ""):
            remaining.append(state)
    if remaining:
        _pack_early(remaining, step_builder, next_step)


def _pack_early(
    in_step: Sequence[RequestState], step_builder: StepBuilder, next_step: NextStep
) -> None:
    """Pack some of the prompts in this step early if the next step would run short."""
    lookaheads = step_builder.lookaheads
    free_blocks = step_builder.free_blocks_after_step()
    needed = next_step.blocks_for_running(lookaheads.request_ids)
    if free_blocks >= needed + lookaheads.max_reserved_blocks:
        return
    candidates = list(_candidates(in_step, overlaps=next_step.overlaps))
    reserved_for_others = lookaheads.reserved_blocks(0) - sum(
        candidate.reserved_blocks for candidate in candidates
    )
    free_now = step_builder.free_blocks_now() - reserved_for_others
    needed += reserved_for_others
    for choice in choose_packs(candidates, free_now, free_blocks, needed):
        if not step_builder.pack_lookahead(*choice) and choice.early_target == HALF:
            candidate = next(each for each in candidates if each.state is choice.state)
            step_builder.pack_lookahead(*candidate.to_budget())


class _PackChoice(NamedTuple):
    """A prompt to pack after this step, and the plan for it.

    Args:
        state: the request.
        plan: pages to keep.
        early_target: HALF or BUDGET.
    """

    state: RequestState
    plan: PagePlan
    early_target: str


class _Candidate(NamedTuple):
    """A prompt that can be compressed early, after this step.

    Args:
        state: the request.
        half_plan: plan to keep half of the prompt. None if that keeps no more than `budget_plan`,
            or if the prompt was packed before.
        budget_plan: plan to keep the budget.
        reserved_blocks: blocks of the pool that are reserved for it.
        unshared_blocks: its unpacked full blocks that no other request shares.
        returning_blocks: unpacked blocks that go back to the pool if this candidate and all
            candidates before it are packed.
    """

    state: RequestState
    half_plan: PagePlan | None
    budget_plan: PagePlan
    reserved_blocks: int
    unshared_blocks: int
    returning_blocks: int

    def fresh_blocks(self, plan: PagePlan) -> int:
        """Return the blocks that packing takes from the pool before it returns any."""
        return max(plan.blocks - len(self.state.packed_blocks) - self.unshared_blocks, 0)

    def to_budget(self) -> _PackChoice:
        """Return the choice to pack the prompt to its budget."""
        return _PackChoice(self.state, self.budget_plan, BUDGET)

    def to_half(self) -> _PackChoice:
        """Return the choice to pack the prompt to half, or to its budget if it has no half plan."""
        if self.half_plan is None:
            return self.to_budget()
        return _PackChoice(self.state, self.half_plan, HALF)


def _candidates(in_step: Sequence[RequestState], *, overlaps: bool) -> Iterator[_Candidate]:
    """Yield the prompts that can be packed after this step, oldest first.

    A request that ends with this step returns its blocks anyway, unless the next step is scheduled
    before that (`overlaps`).
    """
    releases: dict[int, int] = {}
    returning_blocks = 0
    for state in in_step:
        tokens, lookahead = state.lookahead_tokens, state.lookahead
        if tokens + 1 >= lookahead.max_tokens and not overlaps:
            continue
        budget_plan = state.budget_plan(tokens)
        half_plan = lookahead.early_plan(state.current_schedule.footprint, tokens)
        if budget_plan is None:
            continue
        if half_plan is not None and half_plan.blocks <= budget_plan.blocks:
            half_plan = None
        unshared_blocks = 0
        for block in state.unpacked_blocks(tokens):
            unshared_blocks += block.ref_cnt == 1
            count = releases[block.block_id] = releases.get(block.block_id, 0) + 1
            returning_blocks += block.ref_cnt == count
        yield _Candidate(
            state,
            half_plan=half_plan,
            budget_plan=budget_plan,
            reserved_blocks=reserved_for(state),
            unshared_blocks=unshared_blocks,
            returning_blocks=returning_blocks,
        )


def choose_packs(
    candidates: Sequence[_Candidate], free_now: int, free_after: int, needed: int
) -> list[_PackChoice]:
    """Return the prompts to compress early so that `needed` blocks are free after the step.

    First choice: pack as few of the oldest prompts as possible, each to half. If packing all
    prompts to half does not free enough, pack the oldest ones to the budget, again as few as
    possible, and all others to half. If that does not free enough either, pack all of them to the
    budget.

    Args:
        candidates: prompts that can be packed, oldest first.
        free_now: blocks that the packings may take before they return any.
        free_after: free blocks after the step, without these packings.
        needed: blocks needed after the step, in addition to those reserved for candidates.
    """
    to_half = [candidate.to_half() for candidate in candidates]
    to_budget = [candidate.to_budget() for candidate in candidates]
    options = [to_half[:count] for count in range(len(to_half) + 1)]
    options += [to_budget[:count] + to_half[count:] for count in range(1, len(to_budget) + 1)]
    for choices in options:
        count = len(choices)
        pairs = list(zip(candidates, choices, strict=False))
        free_blocks = free_after + (candidates[count - 1].returning_blocks if count else 0)
        free_blocks += sum(
            len(candidate.state.packed_blocks) - choice.plan.blocks for candidate, choice in pairs
        )
        still_reserved = sum(candidate.reserved_blocks for candidate in candidates[count:])
        fresh_blocks = sum(candidate.fresh_blocks(choice.plan) for candidate, choice in pairs)
        # A prompt packed to half must not take blocks that are reserved for another prompt.
        can_start = not choices or free_now >= fresh_blocks + still_reserved
        if free_blocks >= needed + still_reserved and can_start:
            return choices
    return to_budget
