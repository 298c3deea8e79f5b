"""Look-aheads: prompts scored by their own first output tokens, and when each of them is packed.

During a look-ahead, a prompt stays uncompressed in the pool. Without one, it would have been packed
when its prefill ended. If the pool runs short, `--kv-lookahead-on-pressure` allows such prompts to
be compressed early: to half of the prompt if that is enough, otherwise to the budget. A prompt can
only be packed after a step that its request takes part in, and the freed blocks can be allocated in
the next step. So the decision is made once a step is scheduled, from the blocks that the next step
will need (`next_step`).

If a prompt's blocks are shared, packing it also needs blocks from the pool. These are reserved for
it when its prefill ends. Without a look-ahead, it would have taken them at that point.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_kvcompress.engine.messages.step import BUDGET, HALF
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.spans import count_before
from vllm_kvcompress.planning.kv_footprint import KVFootprint
from vllm_kvcompress.planning.schedules import LookaheadSchedule, RequestSchedule
from vllm_kvcompress.settings.method_of import lookahead_window

_NO_BLOCK_IDS: frozenset[int] = frozenset()


class NextStepDemand(Protocol):
    """Blocks that the next step will take from the pool (`next_step.NextStep`)."""

    def blocks_for_running(self, lookahead_ids: Collection[str]) -> int:
        """Return the blocks needed until every look-ahead has been scheduled again."""

    def blocks_for_waiting(self) -> int:
        """Return the blocks needed to admit the next waiting request, 0 if there is none."""

    def blocks_after_admission(self, request_id: str, tokens: int) -> int:
        """Return the blocks that a request needs in the steps that follow its first chunk."""

    @property
    def overlaps(self) -> bool:
        """Return whether the next step is scheduled before this step's outputs are known."""

    @property
    def is_pipelined(self) -> bool:
        """Return whether steps are scheduled before the blocks freed by this one are available."""


class BlockHolder(Protocol):
    """The methods of the block manager (`kv_cache.CompressedManager`) that this module uses."""

    def free_blocks_now(self) -> int:
        """Return the number of blocks that packings of this step may still take."""

    def free_blocks_after_step(self) -> int:
        """Return the number of free blocks after this step's packings."""

    def unpacked_blocks(
        self, request_id: str, footprint: KVFootprint, tokens: int
    ) -> Sequence[KVCacheBlock]:
        """Return a request's full blocks that have not been packed yet, which packing reads."""

    def num_packed_blocks(self, request_id: str) -> int:
        """Return the number of blocks that hold a request's packed pages."""

    def pack_lookahead(
        self,
        request_id: str,
        schedule: RequestSchedule,
        plan: PagePlan,
        tokens: int,
        early_target: str,
    ) -> bool:
        """Plan to pack a prompt with a look-ahead. Return False if the pool has too few blocks."""


@dataclass(slots=True)
class _ActiveLookAhead:
    """A request whose prefill has ended and whose output will score its prompt.

    Args:
        schedule: the request's schedule.
        lookahead: the part of `schedule` that packs the prompt.
        tokens: tokens computed by the end of the last step that the request takes part in.
        in_step: whether the request takes part in the step that is being scheduled.
    """

    schedule: RequestSchedule
    lookahead: LookaheadSchedule
    tokens: int
    in_step: bool = True
    _latest_plan: tuple[int, int, PagePlan | None] | None = None

    def plan_at(self, tokens: int) -> PagePlan | None:
        """Return `LookaheadSchedule.plan_at`, computed once per footprint and length."""
        footprint, latest = self.schedule.footprint, self._latest_plan
        if latest is None or latest[:2] != (footprint.first_block, tokens):
            plan = self.lookahead.plan_at(footprint, tokens)
            latest = self._latest_plan = (footprint.first_block, tokens, plan)
        return latest[2]


class _PackChoice(NamedTuple):
    """A prompt to pack after this step, and the plan for it.

    Args:
        request_id: vLLM's request id.
        plan: pages to keep.
        early_target: HALF or BUDGET for an early compression; empty once the look-ahead is over.
    """

    request_id: str
    plan: PagePlan
    early_target: str


class _Candidate(NamedTuple):
    """A prompt that can be compressed early, after this step.

    Args:
        request_id: vLLM's request id.
        half_plan: plan to keep half of the prompt. None if that keeps no more than `budget_plan`,
            or if the prompt was packed before.
        budget_plan: plan to keep the budget.
        packed_blocks: blocks that hold its packed pages.
        reserved_blocks: blocks of the pool that are reserved for it.
        unshared_blocks: its unpacked full blocks that no other request shares.
        returning_blocks: unpacked blocks that go back to the pool if this candidate and all
            candidates before it are packed.
    """

    request_id: str
    half_plan: PagePlan | None
    budget_plan: PagePlan
    packed_blocks: int
    reserved_blocks: int
    unshared_blocks: int
    returning_blocks: int

    def fresh_blocks(self, plan: PagePlan) -> int:
        """Return the blocks that packing takes from the pool before it returns any."""
        return max(plan.blocks - self.packed_blocks - self.unshared_blocks, 0)

    def to_budget(self) -> _PackChoice:
        """Return the choice to pack the prompt to its budget."""
        return _PackChoice(self.request_id, self.budget_plan, BUDGET)

    def to_half(self) -> _PackChoice:
        """Return the choice to pack the prompt to half, or to its budget if it has no half plan."""
        if self.half_plan is None:
            return self.to_budget()
        return _PackChoice(self.request_id, self.half_plan, HALF)


class LookAheads:
    """The active look-aheads of one scheduler, oldest first.

    Args:
        holder: the block manager.
        on_pressure: when prompts are compressed early, one of `ON_PRESSURE`.
    """

    def __init__(self, holder: BlockHolder, on_pressure: str) -> None:
        self._holder, self._on_pressure = holder, on_pressure
        self._by_id: dict[str, _ActiveLookAhead] = {}
        # Upper bound on the reserved blocks. They are counted only if fewer blocks are free.
        self._max_reserved_blocks = 0
        # Demand of the next steps, if they are scheduled before freed blocks are available.
        self._pipelined_demand: NextStepDemand | None = None

    def __len__(self) -> int:
        return len(self._by_id)

    def note_step(self, request_id: str, schedule: RequestSchedule, tokens: int) -> None:
        """Note that a request takes part in the step that is being scheduled.

        Args:
            request_id: vLLM's request id.
            schedule: the request's schedule.
            tokens: tokens computed when the step ends.
        """
        active = self._by_id.get(request_id)
        if active is not None:
            active.tokens, active.in_step = tokens, True
        elif schedule.lookahead is not None:
            self._by_id[request_id] = _ActiveLookAhead(schedule, schedule.lookahead, tokens)
            self._max_reserved_blocks += _max_kept_blocks(schedule.lookahead)

    def forget(self, request_id: str) -> None:
        """Remove a request that was packed for good, ended or preempted; ignore an unknown one."""
        removed = self._by_id.pop(request_id, None)
        if removed is not None:
            self._max_reserved_blocks -= _max_kept_blocks(removed.lookahead)

    def reserved_blocks(
        self, free_blocks: int, newly_shared: Collection[int] = _NO_BLOCK_IDS
    ) -> int:
        """Return the blocks that packing the active look-aheads needs from the pool.

        A look-ahead needs blocks from the pool if other requests share its own blocks.

        Args:
            free_blocks: blocks available for allocation. If they cover the upper bound, nothing is
                counted and 0 is returned.
            newly_shared: ids of blocks that another request is about to share.
        """
        if self._on_pressure == "never" or free_blocks >= self._max_reserved_blocks:
            return 0
        return sum(
            self._reserved_for(request_id, active, newly_shared)
            for request_id, active in self._by_id.items()
        )

    def pipeline_blocks(self, request_id: str, tokens: int) -> int:
        """Return the blocks that a waiting request must leave, in addition to the reserved ones.

        In a pipeline, the running requests, the requests admitted in this step and the rest of the
        request's own prompt need blocks before a look-ahead of an earlier step can return any.

        Args:
            request_id: the waiting request.
            tokens: its computed tokens after its first chunk.
        """
        demand = self._pipelined_demand
        if not self._by_id or demand is None:
            return 0
        running = demand.blocks_for_running(self._by_id)
        return running + demand.blocks_after_admission(request_id, tokens)

    def _reserved_for(
        self,
        request_id: str,
        active: _ActiveLookAhead,
        newly_shared: Collection[int] = _NO_BLOCK_IDS,
    ) -> int:
        # It is packed after the step being scheduled, or after the next one that it takes part in.
        tokens = active.tokens if active.in_step else active.tokens + 1
        plan = active.plan_at(tokens)
        if plan is None:
            return 0
        missing = plan.blocks - self._holder.num_packed_blocks(request_id)
        unpacked = self._holder.unpacked_blocks(
            request_id, active.schedule.footprint, active.tokens
        )
        # Shared blocks come first in a prompt, so counting from the end stops soonest.
        for block in reversed(unpacked):
            if missing <= 0:
                break
            missing -= block.ref_cnt == 1 and block.block_id not in newly_shared
        return max(missing, 0)

    # -- once a step is scheduled --------------------------------------------------------------

    def plan_packs(self, next_step: NextStepDemand | None) -> None:
        """Plan to pack the prompts that are due after this step, and some early if needed.

        Args:
            next_step: demand of the next step. None if there is no compressing scheduler.
        """
        if not self._by_id:
            return
        in_step = {
            request_id: active for request_id, active in self._by_id.items() if active.in_step
        }
        for request_id, active in in_step.items():
            active.in_step = False
            plan = active.lookahead.plan(active.schedule.footprint, active.tokens)
            # If the pool has too few blocks, the next step tries again.
            if plan is not None:
                self._pack(_PackChoice(request_id, plan, ""))
        remaining = {
            request_id: active
            for request_id, active in in_step.items()
            if request_id in self._by_id
        }
        if remaining and next_step is not None and self._on_pressure != "never":
            self._compress_early(remaining, next_step)

    def _pack(self, choice: _PackChoice) -> bool:
        request_id, plan, early_target = choice
        active = self._by_id[request_id]
        if not self._holder.pack_lookahead(
            request_id, active.schedule, plan, active.tokens, early_target
        ):
            return False
        if early_target != HALF:
            active.schedule.lookahead = None
            self.forget(request_id)
        return True

    def _compress_early(
        self, in_step: dict[str, _ActiveLookAhead], next_step: NextStepDemand
    ) -> None:
        """Pack some of the prompts in this step early if the next step would run short."""
        free_blocks = self._holder.free_blocks_after_step()
        needed = next_step.blocks_for_running(self._by_id)
        self._pipelined_demand = next_step if next_step.is_pipelined else None
        admits_waiting = self._on_pressure == "waiting"
        waiting_blocks = 0
        if admits_waiting and free_blocks >= needed:
            waiting_blocks = next_step.blocks_for_waiting()
        if free_blocks >= needed + waiting_blocks + self._max_reserved_blocks:
            return
        candidates = list(self._candidates(in_step, overlaps=next_step.overlaps))
        reserved_for_others = self.reserved_blocks(0) - sum(
            candidate.reserved_blocks for candidate in candidates
        )
        free_now = self._holder.free_blocks_now() - reserved_for_others
        needed += reserved_for_others
        choices, is_enough = choose_packs(candidates, free_now, free_blocks, needed)
        if admits_waiting and is_enough and (waiting_blocks := next_step.blocks_for_waiting()):
            more_choices, is_enough = choose_packs(
                candidates, free_now, free_blocks, needed + waiting_blocks
            )
            choices = more_choices if is_enough else choices
        for choice in choices:
            if not self._pack(choice) and choice.early_target == HALF:
                candidate = next(
                    candidate
                    for candidate in candidates
                    if candidate.request_id == choice.request_id
                )
                self._pack(candidate.to_budget())

    def _candidates(
        self, in_step: dict[str, _ActiveLookAhead], *, overlaps: bool
    ) -> Iterator[_Candidate]:
        """Yield the prompts that can be packed after this step, oldest first.

        A request that ends with this step returns its blocks anyway, unless the next step is
        scheduled before that (`overlaps`).
        """
        releases: dict[int, int] = {}
        returning_blocks = 0
        for request_id, active in in_step.items():
            lookahead, tokens = active.lookahead, active.tokens
            footprint = active.schedule.footprint
            if tokens + 1 >= lookahead.max_tokens and not overlaps:
                continue
            budget_plan = active.plan_at(tokens)
            half_plan = lookahead.early_plan(footprint, tokens)
            if budget_plan is None:
                continue
            if half_plan is not None and half_plan.blocks <= budget_plan.blocks:
                half_plan = None
            unshared_blocks = 0
            for block in self._holder.unpacked_blocks(request_id, footprint, tokens):
                unshared_blocks += block.ref_cnt == 1
                count = releases[block.block_id] = releases.get(block.block_id, 0) + 1
                returning_blocks += block.ref_cnt == count
            yield _Candidate(
                request_id,
                half_plan=half_plan,
                budget_plan=budget_plan,
                packed_blocks=self._holder.num_packed_blocks(request_id),
                reserved_blocks=self._reserved_for(request_id, active),
                unshared_blocks=unshared_blocks,
                returning_blocks=returning_blocks,
            )


def choose_packs(
    candidates: Sequence[_Candidate], free_now: int, free_after: int, needed: int
) -> tuple[list[_PackChoice], bool]:
    """Choose the prompts to compress early so that `needed` blocks are free after the step.

    The oldest prompts are packed to half as long as that is enough. Otherwise all are packed, the
    oldest of them to the budget.

    Args:
        candidates: prompts that can be packed, oldest first.
        free_now: blocks that the packings may take before they return any.
        free_after: free blocks after the step, without these packings.
        needed: blocks needed after the step, in addition to those reserved for candidates.

    Returns:
        The choices, and whether they free enough blocks. If not, the choices pack every candidate
        to the budget.
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
            candidate.packed_blocks - choice.plan.blocks for candidate, choice in pairs
        )
        still_reserved = sum(candidate.reserved_blocks for candidate in candidates[count:])
        fresh_blocks = sum(candidate.fresh_blocks(choice.plan) for candidate, choice in pairs)
        # A prompt packed to half must not take blocks that are reserved for another prompt.
        can_start = not choices or free_now >= fresh_blocks + still_reserved
        if free_blocks >= needed + still_reserved and can_start:
            return choices, True
    return to_budget, False


def _max_kept_blocks(lookahead: LookaheadSchedule) -> int:
    """Return an upper bound on the destination blocks of packing a prompt to its budget."""
    max_tokens = lookahead.settings.budget_spec(lookahead.num_layers, lookahead.prompt).budget
    if protected := count_before(lookahead.spans, lookahead.prompt):
        # A budget too small for the protected tokens is raised to hold other tokens as well.
        unprotected = lookahead_window(lookahead.settings) + lookahead.block_size
        max_tokens = protected + max(unprotected, max_tokens)
    max_tokens += lookahead.settings.resolved_lookahead
    return -(-max_tokens // lookahead.block_size) + 2
