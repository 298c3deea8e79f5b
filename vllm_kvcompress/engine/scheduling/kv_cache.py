"""Seam `kv_cache`: the manager of a compressed group's blocks.

The manager plans a compression once the chunk that ends a prefill has its blocks, because that
is the moment at which more can still be asked for. How much is kept depends on lengths
alone (`page_plan`), so nothing is heard back from the workers. What concerns a model's other
groups of layers too is asked of vLLM's coordinator, which calls this one (`coordination`).

A compressed request holds: null blocks for the full blocks of its prompt, the ordinary blocks
of its tail, and the destination blocks, which never enter ``req_to_blocks``. vLLM's own
arithmetic on that list (positions, slots, blocks still needed) therefore stays right.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from vllm_kvcompress.engine.layers import OtherLayers
from vllm_kvcompress.engine.messages.step import HALF, Addition, Pack, StepPlan
from vllm_kvcompress.engine.scheduling.admission import FULL_POOL
from vllm_kvcompress.engine.scheduling.destinations import DestinationBlocks, Pending, unshared
from vllm_kvcompress.engine.scheduling.fence import Fence
from vllm_kvcompress.engine.scheduling.lookaheads import LookAheads, Next
from vllm_kvcompress.engine.scheduling.planning import Planner
from vllm_kvcompress.engine.scheduling.step_probes import StepProbes
from vllm_kvcompress.engine.scheduling.tally import Tally
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.planning.holding import Holding
from vllm_kvcompress.planning.pieces import EveryPiece
from vllm_kvcompress.planning.schedules import RequestSchedule
from vllm_kvcompress.settings.config import CompressionConfig


class _Spec(Protocol):
    """What a `CompressedSpec` says: its module registers this one's manager."""

    num_compressed_layers: int
    settings: CompressionConfig
    ring_slots: int


class CompressedManager(FullAttentionManager):
    """Allocates destination blocks for what is packed, and frees the blocks that were read for it.

    Not thread-safe, like every vLLM manager: it lives in the scheduler's loop.
    """

    def __init__(self, kv_cache_spec: _Spec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._requests: Mapping[str, Request] | None = None
        self._num_layers = kv_cache_spec.num_compressed_layers
        self._ring_slots = kv_cache_spec.ring_slots
        self._others: OtherLayers | None = None
        self.replace_settings(kv_cache_spec.settings)
        self.tally, self.fence = Tally(), Fence(self.block_pool)
        # The destination blocks of each packed request.
        self._packed: dict[str, list[KVCacheBlock]] = {}
        # How many tokens of a packed request may enter the prefix cache.
        self._cacheable: dict[str, int] = {}
        self.probes = StepProbes()
        # Of this step: prefills that are watched, requests whose answers judge from it on, those
        # that come to their prefill's last queries, those whose latest attention is added up after
        # it, and those that are packed.
        self._observe: dict[str, CompressionConfig] = {}
        self._grow: list[str] = []
        self._keep: list[str] = []
        self._add: dict[str, Addition] = {}
        self._pending: dict[str, Pending] = {}
        self._plan_numbers = itertools.count(1)

    def replace_settings(self, settings: CompressionConfig) -> None:
        """Set the engine's settings; benchmarks change them, while no request is there."""
        self.settings = settings
        self.lookaheads = LookAheads(self, settings.lookahead_yields)
        self.planner = Planner(
            *(settings, self._num_layers, self.block_size, self.block_pool),
            others=self._others,
            requests=self._requests,
            ring_slots=self._ring_slots,
        )

    def connect(self, requests: Mapping[str, Request], others: OtherLayers | None) -> None:
        """Let the manager look up the requests whose blocks it allocates.

        Args:
            requests: the scheduler's.
            others: blocks of the pool that layers which are not compressed take; None without any.
        """
        self._requests, self._others = requests, others
        self.replace_settings(self.settings)

    @property
    def has_positionally_stable_blocks(self) -> bool:
        """False: a block after a compressed prompt does not hold what its tokens' hash says."""
        return False

    def num_blocks_held(self, request_id: str) -> int:
        """Blocks that the request keeps out of the pool, shared ones included."""
        own = self.req_to_blocks.get(request_id, ())
        return sum(not block.is_null for block in own) + len(self._packed.get(request_id, ()))

    # -- planning, while a step's blocks are allocated -----------------------------------------

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *args: Any,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        """Count also the destination blocks for which the prompt's own are too few."""
        needed: int = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            *args,
            apply_admission_cap=apply_admission_cap,
            **kwargs,
        )
        if self.planner.has_prefilled(request_id) or self.planner.waits_pulled(request_id):
            return needed
        if apply_admission_cap:
            # Does the prompt fit at all? In place it always does, and piecewise while it grows.
            prefill = self.planner.schedule_of(self.planner.request(request_id)).prefill
            return min(needed, prefill.most_blocks) if isinstance(prefill, EveryPiece) else needed
        tokens = self.probes.without(request_id, num_tokens)
        return needed + self.destination_blocks(request_id, tokens, new_computed_blocks).too_few

    def destination_blocks(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock]
    ) -> DestinationBlocks:
        """What the first packing of a prompt takes, if it is packed once `num_tokens` are there."""
        if self.planner.has_prefilled(request_id):
            return DestinationBlocks(0, 0)
        request = self.planner.request(request_id)
        # beyond these are drafts, which are not of the prompt
        num_tokens = min(num_tokens, int(request.num_tokens))
        schedule = self.planner.schedule_of(request)
        plan, later = schedule.plan(num_tokens), num_tokens < int(request.num_tokens)
        if plan is None and schedule.lookahead is not None and num_tokens >= request.num_tokens:
            # promised from now on, and taken when it is packed (`lookaheads`)
            later = self.settings.lookahead_yields != "never"
            plan = schedule.lookahead.kept(schedule.holding, num_tokens) if later else None
        if plan is None or schedule.holding.pages:
            return DestinationBlocks(0, 0)
        full_blocks = num_tokens // self.block_size
        prompt_blocks = self.req_to_blocks.get(request_id, [])[:full_blocks]
        alone = sum(block.ref_cnt == 1 for block in prompt_blocks)
        alone += sum(block.ref_cnt == 0 for block in new_computed_blocks)
        alone += max(full_blocks - len(prompt_blocks) - len(new_computed_blocks), 0)
        too_few = max(plan.blocks - alone, 0)
        return DestinationBlocks(too_few, 0 if later else plan.blocks - too_few)

    def plan_step(self, request_id: str, num_tokens: int) -> None:
        """Plan this step of a request that has blocks for `num_tokens`, in every group of layers.

        Where the step is followed by packing, this takes the destination blocks.
        """
        if self.planner.has_prefilled(request_id):
            self._plan_answer(request_id, num_tokens)
            return
        cached = self.num_cached_block.get(request_id, 0) * self.block_size
        request = self.planner.request(request_id)
        self.tally.admitted(request, *self.planner.admit(request_id, cached))
        tokens = min(self.probes.without(request_id, num_tokens), int(request.num_tokens))
        schedule = self.planner.schedule_of(request)
        plan, ends = schedule.plan(tokens), tokens >= int(request.num_tokens)
        if plan is not None and schedule.prefill is not None:
            settings = schedule.prefill.settings
            if not self._reserve(
                request_id, schedule, plan, tokens, settings, prefill=True, ends=ends
            ):
                # only a prompt that was pulled finds no blocks
                self.tally.skip(request, FULL_POOL)
                plan = None
        if ends:
            self.planner.end_prefill(request, schedule, plan)
            if schedule.answer is not None or schedule.lookahead is not None:
                self._grow.append(request_id)
            self.lookaheads.take_part(request_id, schedule, tokens)
        elif schedule.lookahead is not None and schedule.lookahead.begins(tokens):
            self._keep.append(request_id)
        self._observe.pop(request_id, None)
        if plan is None and (watched := self.planner.watched_for(request, schedule)) is not None:
            self._observe[request_id] = watched

    def _plan_answer(self, request_id: str, tokens: int) -> None:
        """Plan to pack what an answer holds, or to add up its attention, by this step's length."""
        schedule = self.planner.schedules[request_id]
        answer, holding = schedule.answer, schedule.holding
        if schedule.lookahead is not None:
            # drafts do not count: which of them are taken is known when the step has ended
            request = self.planner.request(request_id)
            known = int(request.num_tokens + request.num_output_placeholders)
            self.lookaheads.take_part(request_id, schedule, min(tokens, known))
            return
        if answer is None:
            return
        plan = answer.plan(holding, tokens)
        packs = plan is not None and self._reserve(
            request_id, schedule, plan, tokens, answer.settings, prefill=False, ends=False
        )
        if latest := answer.add_up(tokens, self.block_size, packs=packs):
            self._add[request_id] = Addition(
                request_id=request_id,
                tokens=tokens,
                latest=latest,
                most=holding.most_tokens(tokens),
            )

    def pack_prompt(
        self, request_id: str, schedule: RequestSchedule, plan: PagePlan, tokens: int, cut: str
    ) -> bool:
        """Plan to pack a prompt that looks ahead; returns whether the pool has what that takes.

        Args:
            cut: as in `Pack`.
        """
        lookahead = schedule.lookahead
        assert lookahead is not None, request_id
        return self._reserve(
            *(request_id, schedule, plan, tokens, lookahead.settings),
            prefill=True,
            ends=cut != HALF,
            answered=lookahead.answered(tokens),
            cut=cut,
        )

    def _reserve(
        self,
        request_id: str,
        schedule: RequestSchedule,
        plan: PagePlan,
        tokens: int,
        settings: CompressionConfig,
        *,
        prefill: bool,
        ends: bool,
        answered: int | None = None,
        cut: str = "",
    ) -> bool:
        """Take the destination blocks that packing needs; returns whether the pool has them.

        A prompt takes fresh ones, if more are free than are promised to others (twice as many if it
        goes on), else its own unshared ones, the latest first. It was admitted with them counted,
        unless its answer judges it or it was pulled. An answer takes its own first.
        """
        holding, last = schedule.holding, tokens // self.block_size
        packed, free = self._packed.get(request_id, []), self.block_pool.get_num_free_blocks()
        missing = max(plan.blocks - len(packed), 0)
        mine: list[tuple[int, KVCacheBlock]] = []
        needed = (1 if ends or cut else 2) * missing + self.lookaheads.promised(free - missing)
        if missing and (not prefill or free < needed):
            mine = unshared(self.req_to_blocks[request_id], holding.first_block, last, missing)
        if missing - len(mine) > free:
            return False
        self._cacheable.setdefault(request_id, last * self.block_size)
        own = self._claim(request_id, mine)
        fresh = missing - len(own)
        self._packed[request_id] = packed + (self.block_pool.get_new_blocks(fresh) if fresh else [])
        destination = (self._packed[request_id] + own)[: plan.blocks]
        pack = Pack(
            request_id=request_id,
            settings=settings,
            plan=plan,
            tokens=tokens,
            destination=None if holding.frozen else tuple(block.block_id for block in destination),
            prefill=prefill,
            answered=answered,
            whole=prefill and not holding.pages and not isinstance(schedule.prefill, EveryPiece),
            ends=ends,
            in_place=bool(own or holding.pages) or not prefill,
            cut=cut,
        )
        self._pending[request_id] = Pending(pack, holding, own)
        return True

    def ordinary(self, request_id: str, holding: Holding, tokens: int) -> Sequence[KVCacheBlock]:
        """The full blocks that packing reads, without those that were packed before."""
        blocks: list[KVCacheBlock] = self.req_to_blocks[request_id]
        return blocks[holding.first_block : tokens // self.block_size]

    def packed_blocks(self, request_id: str) -> int:
        """Blocks that a request has packed pages in."""
        return len(self._packed.get(request_id, ()))

    def _claim(
        self, request_id: str, mine: Sequence[tuple[int, KVCacheBlock]]
    ) -> list[KVCacheBlock]:
        """Make destinations of a request's own blocks: they leave the prefix cache now.

        Before any other request can find them; nor does any later block of it enter.
        """
        own = [block for _, block in mine]
        self.block_pool.evict_blocks({block.block_id for block in own})
        if mine:
            limit = mine[0][0] * self.block_size
            self._cacheable[request_id] = min(self._cacheable[request_id], limit)
        return own

    # -- handing over, once the step is scheduled ---------------------------------------------

    def free_now(self) -> int:
        """Blocks that packings of this step may still take."""
        return int(self.block_pool.get_num_free_blocks())

    def free_after(self) -> int:
        """Blocks that are free once this step's plan is handed over, but for shared ones."""
        free = self.block_pool.get_num_free_blocks() + self.fence.held()
        for request_id, (pack, holding, _) in self._pending.items():
            read = self.ordinary(request_id, holding, pack.tokens)
            free += sum(block.ref_cnt == 1 for block in read)
            free += self.packed_blocks(request_id) - pack.plan.blocks
        return int(free)

    def take_step(self, following: Next | None = None) -> StepPlan | None:
        """This step's plan; also frees the blocks that only this step still reads.

        Args:
            following: the step after it, for which look-aheads may give way.

        Stream order makes the early free safe: whoever is given such a block writes it in a
        later step, after this step has read it. So does the order of outputs, if the workers
        lose the plan: the scheduler hears of it before any later step's tokens.
        """
        self.lookaheads.pack(following)
        if not any((self._observe, self._grow, self._keep, self._add, self._pending)):
            return None
        plan = StepPlan(
            number=next(self._plan_numbers),
            observe=tuple(self._observe.items()),
            grow=tuple(self._grow),
            keep=tuple(self._keep),
            add=tuple(self._add.values()),
            pack=tuple(map(self._hand_over, self._pending.values())),
        )
        for done in (self._observe, self._grow, self._keep, self._add, self._pending):
            done.clear()
        return plan

    def _hand_over(self, pending: Pending) -> Pack:
        """Free what the request holds no longer: ordinary blocks, and destinations left over."""
        pack, holding, own = pending
        request_id, plan, last = pack.request_id, pack.plan, pack.tokens // self.block_size
        blocks, kept = self.req_to_blocks[request_id], {block.block_id for block in own}
        ordinary = blocks[holding.first_block : last]
        freed = [block for block in reversed(ordinary) if block.block_id not in kept]
        blocks[holding.first_block : last] = [self._null_block] * len(ordinary)
        packed = self._packed[request_id] + own
        # A tail leaves less for the pages before it: a prompt's end may need a block less.
        self._packed[request_id] = packed[: plan.blocks]
        freed += packed[plan.blocks :]
        first = not holding.pages
        holding.pack(plan, last, freeze=not pack.prefill)
        returned = self.fence.free(freed)
        piecewise = isinstance(self.planner.schedules[request_id].prefill, EveryPiece)
        self.tally.pack(
            *(pack, returned),
            request=self.planner.request(request_id),
            first=first,
            own=len(own),
            piecewise=piecewise,
        )
        if pack.answered is not None and pack.ends:
            self.planner.looked_ahead(request_id)
        return pack

    # -- the prefix cache ---------------------------------------------------------------------

    def cacheable(self, request_id: str, num_tokens: int) -> int:
        """Of so many tokens, those that may enter the prefix cache, of any group of layers.

        A block that was computed against a compressed context must not.
        """
        return min(num_tokens, self._cacheable.get(request_id, num_tokens))

    # -- the end ------------------------------------------------------------------------------

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget the request and give its destination blocks back with the others."""
        self.planner.forget(request_id)
        self.lookaheads.forget(request_id)
        self._cacheable.pop(request_id, None)
        self._observe.pop(request_id, None)
        self._add.pop(request_id, None)
        self._pending.pop(request_id, None)
        for named in (self._grow, self._keep):
            if request_id in named:
                named.remove(request_id)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return blocks + self._packed.pop(request_id, [])
