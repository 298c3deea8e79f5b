"""Look-aheads: prompts scored by their own first output tokens.

During a look-ahead, a prompt stays uncompressed in the pool. Without one, it would have been packed
when its prefill ended.

If a prompt's blocks are shared, packing it also needs blocks from the pool. These are reserved for
it when its prefill ends. Without a look-ahead, it would have taken them at that point.

Before the short pool makes vLLM preempt a running request, prompts in their look-ahead are
compressed early: to half of the prompt if that is enough, otherwise to the budget. A prompt can
only be packed after a step that its request takes part in, and the freed blocks can be allocated in
the next step. So the decision is made once a step is scheduled, from the blocks that the next step
will need (`next_step`).
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from vllm_kvcompress.engine.messages.step import BUDGET, HALF
from vllm_kvcompress.engine.scheduling.request_state import RequestState
from vllm_kvcompress.methods.page_plan import PagePlan

_NO_BLOCK_IDS: frozenset[int] = frozenset()


class LookAheads:
    """The active look-aheads of one scheduler, oldest first, and the workers' query slots.

    A look-ahead takes a slot when its request is admitted, and is active from the end of the
    prefill until the prompt is packed.

    Args:
        num_slots: maximum number of requests whose latest queries the workers store.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_free_slots = num_slots
        self._active: dict[str, RequestState] = {}
        # Upper bound on the reserved blocks. They are counted only if fewer blocks are free.
        self.max_reserved_blocks = 0

    def __len__(self) -> int:
        return len(self._active)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._active.values())

    @property
    def request_ids(self) -> Collection[str]:
        """Return the ids of the requests with an active look-ahead."""
        return self._active.keys()

    @property
    def has_free_slot(self) -> bool:
        """Return whether another request may have a look-ahead."""
        return self.num_free_slots > 0

    def take_slot(self, state: RequestState) -> None:
        """Take a query slot for an admitted request."""
        self.num_free_slots -= 1
        state.has_lookahead_slot = True

    def note_step(self, state: RequestState, tokens: int) -> None:
        """Note that a request takes part in the step that is being scheduled.

        Args:
            state: a request whose prefill has ended, with a look-ahead.
            tokens: tokens computed when the step ends.
        """
        state.lookahead_tokens, state.is_scheduled = tokens, True
        if state.request_id not in self._active:
            self._active[state.request_id] = state
            self.max_reserved_blocks += state.lookahead.max_kept_blocks

    def end(self, state: RequestState) -> None:
        """End a look-ahead whose prompt is packed for good after this step."""
        self._deactivate(state)
        state.current_schedule.lookahead = None

    def remove(self, state: RequestState) -> None:
        """Remove a request that ended or was preempted, and release its slot."""
        self._deactivate(state)
        self.release_slot(state)

    def _deactivate(self, state: RequestState) -> None:
        if self._active.pop(state.request_id, None) is not None:
            self.max_reserved_blocks -= state.lookahead.max_kept_blocks

    def release_slot(self, state: RequestState) -> None:
        """Release the query slot of a request, if it has one, for use from the next step on."""
        if state.has_lookahead_slot:
            state.has_lookahead_slot = False
            self.num_free_slots += 1

    def reserved_blocks(
        self, free_blocks: int, newly_shared: Collection[int] = _NO_BLOCK_IDS
    ) -> int:
        """Return the blocks to leave in the pool for packing the active look-aheads.

        Other requests may share blocks of a prompt, and packing cannot overwrite those blocks.

        Args:
            free_blocks: blocks available for allocation. If they cover the upper bound, nothing is
                counted and 0 is returned.
            newly_shared: ids of blocks that another request is about to share.
        """
        if free_blocks >= self.max_reserved_blocks:
            return 0
        return sum(reserved_for(state, newly_shared) for state in self._active.values())

    def choose_early(
        self,
        in_step: Sequence[RequestState],
        free_now: int,
        free_after: int,
        needed: int,
        *,
        overlaps: bool,
    ) -> list[tuple["EarlyPack", "EarlyPack"]]:
        """Return the prompts to compress early, so that the next step does not run short.

        Args:
            in_step: look-aheads that take part in the step and are not packed after it.
            free_now: blocks that the packings of the step may still take.
            free_after: free blocks after the step, without these packings.
            needed: blocks that running requests take next.
            overlaps: whether the next step is scheduled before this step's outputs are known.

        Returns:
            Per prompt the packing to plan, and the one to plan if the pool has too few blocks.
        """
        candidates = list(_candidates(in_step, overlaps=overlaps))
        reserved = self.reserved_blocks(0) - sum(each.reserved_blocks for each in candidates)
        choices = choose_packs(candidates, free_now - reserved, free_after, needed + reserved)
        to_budget = [candidate.to_budget() for candidate in candidates]
        return list(zip(choices, to_budget, strict=False))


def reserved_for(state: RequestState, newly_shared: Collection[int] = _NO_BLOCK_IDS) -> int:
    """Return the blocks that packing one look-ahead to its budget needs from the pool."""
    # It is packed after the step being scheduled, or after the next one that it takes part in.
    plan = state.budget_plan(state.lookahead_tokens + (not state.is_scheduled))
    if plan is None:
        return 0
    missing = plan.blocks - len(state.packed_blocks)
    # Shared blocks come first in a prompt, so counting from the end stops soonest.
    for block in reversed(state.unpacked_blocks(min(plan.packed_end, state.lookahead_tokens))):
        if missing <= 0:
            break
        missing -= block.ref_cnt == 1 and block.block_id not in newly_shared
    return max(missing, 0)


class EarlyPack(NamedTuple):
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

    def to_budget(self) -> EarlyPack:
        """Return the choice to pack the prompt to its budget."""
        return EarlyPack(self.state, self.budget_plan, BUDGET)

    def to_half(self) -> EarlyPack:
        """Return the choice to pack the prompt to half, or to its budget if it has no half plan."""
        if self.half_plan is None:
            return self.to_budget()
        return EarlyPack(self.state, self.half_plan, HALF)


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
        for block in state.unpacked_blocks(budget_plan.packed_end):
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
) -> list[EarlyPack]:
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
