"""Prompts that their answers are to judge: which of them are packed after a step, due or early.

A look-ahead holds a whole prompt that would have been packed at its prefill's end. When the pool is
short it gives way, by what `--kv-lookahead-yields` says: then its prompt is packed early, to half
of it if that is enough, else to its budget. A packing runs behind a step that the request takes
part in, and what it frees can be given out in the next step. So it is decided once a step is
scheduled, by what the next one will take (`next_step`).

What such a packing needs in blocks of the pool, where a prompt's own are shared, is promised to it
from its prefill's end on. Without a look-ahead it would have been taken by then.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_kvcompress.engine.messages.step import BUDGET, HALF
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.spans import count_before
from vllm_kvcompress.planning.kv_footprint import KVFootprint
from vllm_kvcompress.planning.schedules import LookAhead, RequestSchedule
from vllm_kvcompress.settings.method_of import lookahead_window

NOTHING: frozenset[int] = frozenset()


class Next(Protocol):
    """What the next step will take of the pool (`next_step.NextStep`)."""

    def blocks(self, looking: Collection[str]) -> int:
        """Of requests that run, until each of `looking` has taken part in a step."""

    def waiting(self) -> int:
        """Of the request that is the next to be admitted; 0 where none is."""

    def admitted(self, request_id: str, tokens: int) -> int:
        """Of one that is admitted with so many tokens, in the steps that follow in a pipeline."""

    @property
    def overlaps(self) -> bool:
        """Whether it is scheduled before the outputs of this one are known."""

    @property
    def pipelined(self) -> bool:
        """Whether steps are under way before which nothing that this one frees is there."""


class Holder(Protocol):
    """The manager of the blocks (`kv_cache.CompressedManager`), as far as this file asks it."""

    def free_now(self) -> int:
        """Blocks that packings of this step may still take."""

    def free_after(self) -> int:
        """Blocks that are free once this step's plan is handed over, but for shared ones."""

    def ordinary(
        self, request_id: str, footprint: KVFootprint, tokens: int
    ) -> Sequence[KVCacheBlock]:
        """The full blocks that packing reads, without those that were packed before."""

    def packed_blocks(self, request_id: str) -> int:
        """Blocks that a request has packed pages in."""

    def pack_prompt(
        self, request_id: str, schedule: RequestSchedule, plan: PagePlan, tokens: int, cut: str
    ) -> bool:
        """Plan to pack a prompt that looks ahead; returns whether the pool has what that takes."""


@dataclass(slots=True)
class _Ahead:
    """A request whose prefill has ended, and whose answer is to judge its prompt.

    Args:
        schedule: the request's.
        lookahead: the part of it that packs the prompt.
        tokens: computed once the last step that it took part in ends.
        here: it takes part in the step that is being scheduled.
    """

    schedule: RequestSchedule
    lookahead: LookAhead
    tokens: int
    here: bool = True


class _Choice(NamedTuple):
    """One way to pack a prompt early."""

    request_id: str
    plan: PagePlan
    to: str


class _Candidate(NamedTuple):
    """A prompt that can be packed behind this step.

    Args:
        half: None where half of it is no less than what it may keep, or it was packed to it.
        packed: blocks that it has packed pages in.
        promised: blocks of the pool that are promised to it.
        alone: blocks of its own that nobody else reads.
        returning: blocks that go back with it and with the candidates before it, if all are packed.
    """

    request_id: str
    half: PagePlan | None
    kept: PagePlan
    packed: int
    promised: int
    alone: int
    returning: int

    def fresh(self, plan: PagePlan) -> int:
        """Blocks of the pool that packing it takes before anything goes back."""
        return max(plan.blocks - self.packed - self.alone, 0)

    def most(self) -> _Choice:
        """As little as it may keep."""
        return _Choice(self.request_id, self.kept, BUDGET)

    def least(self) -> _Choice:
        """As much as it may keep for now."""
        if self.half is None:
            return self.most()
        return _Choice(self.request_id, self.half, HALF)


class LookAheads:
    """The look-aheads of one scheduler, oldest first.

    Args:
        holder: has the blocks.
        yields: when they give way, one of `YIELDS`.
    """

    def __init__(self, holder: Holder, yields: str) -> None:
        self._holder, self._yields = holder, yields
        self._all: dict[str, _Ahead] = {}
        # A bound on what is promised, so that nothing is counted while the pool has as much.
        self._most_promised = 0
        # Where steps of other requests are under way: what the next ones take.
        self._pipeline: Next | None = None

    def __len__(self) -> int:
        return len(self._all)

    def take_part(self, request_id: str, schedule: RequestSchedule, tokens: int) -> None:
        """A request that looks ahead is in the step that is being scheduled."""
        known = self._all.get(request_id)
        if known is not None:
            known.tokens, known.here = tokens, True
        elif schedule.lookahead is not None:
            self._all[request_id] = _Ahead(schedule, schedule.lookahead, tokens)
            self._most_promised += _most_kept(schedule.lookahead)

    def forget(self, request_id: str) -> None:
        """It is packed for good, or ended, or was preempted; unknown ones may be named."""
        gone = self._all.pop(request_id, None)
        if gone is not None:
            self._most_promised -= _most_kept(gone.lookahead)

    def promised(self, free: int, touched: Collection[int] = NOTHING) -> int:
        """Blocks of the pool that packing these prompts needs: their own are others' too.

        Args:
            free: blocks that may be given out; where those are many, nobody needs to know.
            touched: block ids that one more request is about to share.
        """
        if self._yields == "never" or free >= self._most_promised:
            return 0
        return sum(self._promised(name, ahead, touched) for name, ahead in self._all.items())

    def withheld(self, request_id: str, tokens: int) -> int:
        """Blocks that a waiting request must leave beside those that are promised.

        In a pipeline, running requests, those that this step admits, and the rest of its own prompt
        need blocks before a look-ahead of an earlier step can give any back.

        Args:
            tokens: of the request, once the step has computed its first chunk.
        """
        if not self._all or self._pipeline is None:
            return 0
        return self._pipeline.blocks(self._all) + self._pipeline.admitted(request_id, tokens)

    def _promised(self, request_id: str, ahead: _Ahead, touched: Collection[int] = NOTHING) -> int:
        # what it takes behind the step that is being scheduled, or once one is behind the next
        tokens = ahead.tokens if ahead.here else ahead.tokens + 1
        plan = ahead.lookahead.kept(ahead.schedule.footprint, tokens)
        if plan is None:
            return 0
        missing = plan.blocks - self._holder.packed_blocks(request_id)
        # shared blocks are a prompt's first ones, so the last ones tell soonest
        for block in reversed(
            self._holder.ordinary(request_id, ahead.schedule.footprint, ahead.tokens)
        ):
            if missing <= 0:
                break
            missing -= block.ref_cnt == 1 and block.block_id not in touched
        return max(missing, 0)

    # -- once a step is scheduled --------------------------------------------------------------

    def pack(self, following: Next | None) -> None:
        """Plan to pack the prompts that are due after this step, and early what must give way.

        Args:
            following: None where no scheduler of ours is there.
        """
        here = {name: ahead for name, ahead in self._all.items() if ahead.here}
        for request_id, ahead in here.items():
            ahead.here = False
            plan = ahead.lookahead.plan(ahead.schedule.footprint, ahead.tokens)
            # where the pool has no block for that, the next step tries again
            if plan is not None:
                self._pack(_Choice(request_id, plan, ""))
        left = {name: ahead for name, ahead in here.items() if name in self._all}
        if left and following is not None and self._yields != "never":
            self._give_way(left, following)

    def _pack(self, choice: _Choice) -> bool:
        request_id, plan, to = choice
        ahead = self._all[request_id]
        if not self._holder.pack_prompt(request_id, ahead.schedule, plan, ahead.tokens, to):
            return False
        if to != HALF:
            ahead.schedule.lookahead = None
            self.forget(request_id)
        return True

    def _give_way(self, left: dict[str, _Ahead], following: Next) -> None:
        """Pack some of the prompts in this step early, if the next step would be short."""
        free, needed = self._holder.free_after(), following.blocks(self._all)
        self._pipeline = following if following.pipelined else None
        admit = self._yields == "waiting"
        head = following.waiting() if admit and free >= needed else 0
        if free >= needed + head + self._most_promised:
            return
        candidates = list(self._candidates(left, overlaps=following.overlaps))
        others = self.promised(0) - sum(each.promised for each in candidates)
        now = self._holder.free_now() - others
        chosen, enough = choose(candidates, now, free, needed + others)
        if admit and enough and (head := following.waiting()):
            for_both, fits = choose(candidates, now, free, needed + head + others)
            chosen = for_both if fits else chosen
        for choice in chosen:
            if not self._pack(choice) and choice.to == HALF:
                kept = next(each for each in candidates if each.request_id == choice.request_id)
                self._pack(kept.most())

    def _candidates(self, left: dict[str, _Ahead], *, overlaps: bool) -> Iterator[_Candidate]:
        """What can be packed behind this step, oldest first.

        A request that ends with this step returns its blocks by itself, but where the next one is
        scheduled before that.
        """
        released: dict[int, int] = {}
        returning = 0
        for request_id, ahead in left.items():
            lookahead, footprint, tokens = ahead.lookahead, ahead.schedule.footprint, ahead.tokens
            if tokens + 1 >= lookahead.last and not overlaps:
                continue
            kept, half = lookahead.kept(footprint, tokens), lookahead.half(footprint, tokens)
            if kept is None:
                continue
            if half is not None and half.blocks <= kept.blocks:
                half = None
            alone = 0
            for block in self._holder.ordinary(request_id, footprint, tokens):
                alone += block.ref_cnt == 1
                count = released[block.block_id] = released.get(block.block_id, 0) + 1
                returning += block.ref_cnt == count
            yield _Candidate(
                request_id,
                half=half,
                kept=kept,
                packed=self._holder.packed_blocks(request_id),
                promised=self._promised(request_id, ahead),
                alone=alone,
                returning=returning,
            )


def choose(
    candidates: Sequence[_Candidate], now: int, free: int, needed: int
) -> tuple[list[_Choice], bool]:
    """Which prompts to pack, oldest first, so that so many blocks are free; and whether they are.

    To half of what they are as long as that is enough, else the oldest to what they may keep.

    Args:
        now: blocks that these packings may take, before anything goes back.
        free: those that are free then, without them.
        needed: blocks beside those that are promised to the candidates.
    """
    least, most = [each.least() for each in candidates], [each.most() for each in candidates]
    ways = [least[:count] for count in range(len(least) + 1)]
    ways += [most[:count] + least[count:] for count in range(1, len(most) + 1)]
    for chosen in ways:
        count = len(chosen)
        then = free + (candidates[count - 1].returning if count else 0)
        pairs = list(zip(candidates, chosen, strict=False))
        then += sum(each.packed - choice.plan.blocks for each, choice in pairs)
        left = sum(each.promised for each in candidates[count:])
        fresh = sum(each.fresh(choice.plan) for each, choice in pairs)
        # what is packed to half may not take what is promised to another
        if then >= needed + left and (not chosen or now >= fresh + left):
            return chosen, True
    return most, False


def _most_kept(lookahead: LookAhead) -> int:
    """Blocks that no packing of a prompt to its budget exceeds, if it is no later than due."""
    tokens = lookahead.settings.prompt(lookahead.num_layers, lookahead.prompt).budget
    if protected := count_before(lookahead.spans, lookahead.prompt):
        # a budget that cannot hold it is raised, to hold others beside it
        others = lookahead_window(lookahead.settings) + lookahead.block_size
        tokens = protected + max(others, tokens)
    return -(-(tokens + lookahead.settings.resolved_lookahead) // lookahead.block_size) + 2
