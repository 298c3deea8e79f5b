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
from dataclasses import dataclass
from typing import Any, Protocol

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from vllm_kvcompress.engine.layers import Windows
from vllm_kvcompress.engine.messages.step import Addition, Compression, Repack, StepPlan
from vllm_kvcompress.engine.scheduling.planning import Planner
from vllm_kvcompress.engine.scheduling.tally import Tally
from vllm_kvcompress.growth import Growth
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.pieces import Pieces
from vllm_kvcompress.settings.config import CompressionConfig


class _Spec(Protocol):
    """What a `CompressedSpec` says: its module registers this one's manager."""

    num_compressed_layers: int
    settings: CompressionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repacking:
    """One request that is to be packed again after this step.

    Args:
        plan: how much is kept.
        held: what it holds; its prompt, if that is not over.
        tokens: computed when the step ends.
        own: its ordinary blocks that become destinations.
        settings: what chooses.
        ends: its prompt ends in this step.
    """

    plan: PagePlan
    held: Growth | Pieces
    tokens: int
    own: list[KVCacheBlock]
    settings: CompressionConfig
    ends: bool = False


class CompressedManager(FullAttentionManager):
    """Allocates destination blocks at the end of prefill and frees the prompt's blocks after.

    Not thread-safe, like every vLLM manager: it lives in the scheduler's loop.
    """

    def __init__(self, kv_cache_spec: _Spec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._requests: Mapping[str, Request] | None = None
        self._num_layers = kv_cache_spec.num_compressed_layers
        self._windows: Windows | None = None
        self.use(kv_cache_spec.settings)
        self.tally = Tally()
        # Of the request counted last: what fresh destination blocks would take beside the rest.
        self.fresh = 0
        # The destination blocks of each compressed request.
        self._packed: dict[str, list[KVCacheBlock]] = {}
        # How many tokens of a compressed request may enter the prefix cache.
        self._cacheable: dict[str, int] = {}
        self._observe: dict[str, CompressionConfig] = {}
        self._planned: dict[str, tuple[PagePlan, list[KVCacheBlock]]] = {}
        # Requests whose answers are bounded from this step on, those whose latest attention is
        # added up after it, and those packed again.
        self._grow: list[str] = []
        self._add: dict[str, Addition] = {}
        self._repacks: dict[str, _Repacking] = {}
        self._plan_numbers = itertools.count(1)

    def use(self, settings: CompressionConfig) -> None:
        """The engine's settings; benchmarks change them, while no request is there."""
        self.settings = settings
        self.planner = Planner(
            settings, self._num_layers, self.block_size, self.block_pool, self._windows
        )
        self.planner.follow(self._requests)

    def leave(self, windows: Windows) -> None:
        """Some blocks of the pool are for the windowed layers of a request."""
        self._windows = windows
        self.use(self.settings)

    def follow(self, requests: Mapping[str, Request]) -> None:
        """Let the manager look up the requests whose blocks it allocates."""
        self._requests = requests
        self.planner.follow(requests)

    @property
    def has_positionally_stable_blocks(self) -> bool:
        """False: a block after a compressed prompt does not hold what its tokens' hash says."""
        return False

    def num_blocks_held(self, request_id: str) -> int:
        """Blocks that the request keeps out of the pool, shared ones included."""
        own = self.req_to_blocks.get(request_id, ())
        return sum(not block.is_null for block in own) + len(self._packed.get(request_id, ()))

    # -- planning, in the chunk that ends the prefill ----------------------------------------

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *args: Any,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        """Also count destination blocks for which the prompt's own are too few; `fresh` others."""
        self.fresh = 0
        needed: int = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            *args,
            apply_admission_cap=apply_admission_cap,
            **kwargs,
        )
        if self.planner.is_settled(request_id):
            return needed
        request = self.planner.request(request_id)
        # beyond these are drafts, which are not of the prompt
        num_tokens = min(num_tokens, int(request.num_tokens))
        pieces = self.planner.pieces_of(request)
        if apply_admission_cap:
            # Does the prompt fit at all? In place it always does, and piecewise while it grows.
            return needed if pieces is None else min(needed, pieces.most_blocks())
        if pieces is not None:
            plan, missing = pieces.plan(num_tokens), not pieces.pages
        else:
            ends = self.planner.ends_prefill(request_id, num_tokens)
            plan, missing = self.planner.plan_of(request_id) if ends else None, True
        if plan is None or not missing:
            return needed
        full_blocks = num_tokens // self.block_size
        prompt_blocks = self.req_to_blocks.get(request_id, [])[:full_blocks]
        alone = sum(block.ref_cnt == 1 for block in prompt_blocks)
        alone += sum(block.ref_cnt == 0 for block in new_computed_blocks)
        alone += max(full_blocks - len(prompt_blocks) - len(new_computed_blocks), 0)
        too_few = max(plan.blocks - alone, 0)
        self.fresh = plan.blocks - too_few
        return int(needed + too_few)

    def plan_step(self, request_id: str, num_tokens: int) -> None:
        """Plan this step of a request that has blocks for `num_tokens`, in every group of layers.

        At the end of the prefill this takes the destination's: fresh ones, if there are any.
        """
        if self.planner.is_settled(request_id):
            self._grow_on(request_id, num_tokens)
            return
        if reason := self.planner.admit(request_id):
            self.tally.skipped[reason] += 1
        request = self.planner.request(request_id)
        num_tokens = min(num_tokens, int(request.num_tokens))
        pieces = self.planner.pieces_of(request)
        whole = None if pieces is not None else self.planner.plan_of(request_id)
        plan = whole if pieces is None else pieces.plan(num_tokens)
        ends = self.planner.ends_prefill(request_id, num_tokens)
        if ends:
            self.planner.settle(request_id, plan)
            if request_id in self.planner.growing:
                self._grow.append(request_id)
        self._observe.pop(request_id, None)
        if pieces is not None and plan is not None:
            self._pack_piece(request_id, plan, pieces, num_tokens, ends)
        elif whole is not None and ends:
            self._reserve(request_id, whole)
        elif (watching := self.planner.watching(request_id, pieces, whole)) is not None:
            self._observe[request_id] = watching

    def _reserve(self, request_id: str, plan: PagePlan) -> None:
        """Take K destination blocks: fresh ones, else the prompt's own unshared ones."""
        self._planned[request_id] = plan, self._take(request_id, plan, plan.full_blocks)

    def _take(self, request_id: str, plan: PagePlan, blocks: int) -> list[KVCacheBlock]:
        """Take the destination of the first of a request's `blocks`; returns its own among them."""
        self._cacheable[request_id] = blocks * self.block_size
        mine: list[tuple[int, KVCacheBlock]] = []
        if self.block_pool.get_num_free_blocks() < plan.blocks:
            mine = self._unshared(request_id, 0, blocks, plan.blocks)
        own = self._claim(request_id, mine)
        self._packed[request_id] = self.block_pool.get_new_blocks(plan.blocks - len(own))
        return own

    def _pack_piece(
        self, request_id: str, plan: PagePlan, pieces: Pieces, tokens: int, ends: bool
    ) -> None:
        """Plan to pack what a prompt holds at a boundary; only the first needs blocks for it."""
        blocks, own = tokens // self.block_size, list[KVCacheBlock]()
        if not pieces.pages:
            own = self._take(request_id, plan, blocks)
        self._repacks[request_id] = _Repacking(
            plan=plan, held=pieces, tokens=tokens, own=own, settings=pieces.settings, ends=ends
        )

    def _unshared(
        self, request_id: str, start: int, stop: int, count: int
    ) -> list[tuple[int, KVCacheBlock]]:
        """The last blocks from `start` to `stop` that nobody else reads: at most `count`."""
        blocks = self.req_to_blocks[request_id][start:stop]
        mine = [(at, block) for at, block in enumerate(blocks, start) if block.ref_cnt == 1]
        return mine[max(len(mine) - count, 0) :]

    def _claim(
        self, request_id: str, mine: Sequence[tuple[int, KVCacheBlock]]
    ) -> list[KVCacheBlock]:
        """A request's own blocks become destinations: they leave the prefix cache now.

        Before any other request can find them; nor does any later block of it enter.
        """
        own = [block for _, block in mine]
        self.block_pool.evict_blocks({block.block_id for block in own})
        if mine:
            limit = mine[0][0] * self.block_size
            self._cacheable[request_id] = min(self._cacheable[request_id], limit)
        return own

    def _grow_on(self, request_id: str, num_tokens: int) -> None:
        """Plan to pack what an answer holds, or to judge it, if this step's length says so."""
        growth = self.planner.growing.get(request_id)
        if growth is None:
            return
        plan = growth.plan(num_tokens)
        packs = plan is not None and self._repack(request_id, growth, plan, num_tokens)
        if latest := growth.latest(num_tokens, packs):
            most = growth.most_pages * self.block_size + num_tokens
            self._add[request_id] = Addition(
                request_id=request_id,
                tokens=num_tokens,
                latest=latest,
                most=most - growth.first_block * self.block_size,
            )

    def _repack(self, request_id: str, growth: Growth, plan: PagePlan, num_tokens: int) -> bool:
        """Take what packing an answer needs; returns whether the pool has it.

        The first time the request may need more blocks than it has packed ones: its own unshared
        ones, the latest first, and fresh ones for what is missing. Where the pool has none, it
        waits for the next block to fill.
        """
        blocks = num_tokens // self.block_size
        packed = self._packed.get(request_id, [])
        missing = plan.blocks - len(packed)
        mine: list[tuple[int, KVCacheBlock]] = []
        if missing > 0:
            mine = self._unshared(request_id, growth.first_block, blocks, missing)
            missing -= len(mine)
            if missing > self.block_pool.get_num_free_blocks():
                return False
            self._packed[request_id] = packed + self.block_pool.get_new_blocks(missing)
        self._cacheable.setdefault(request_id, blocks * self.block_size)
        own = self._claim(request_id, mine)
        self._repacks[request_id] = _Repacking(
            plan=plan, held=growth, tokens=num_tokens, own=own, settings=growth.settings
        )
        return True

    # -- handing over, once the step is scheduled ---------------------------------------------

    def take_step(self) -> StepPlan | None:
        """This step's plan; also frees the blocks that only this step still reads.

        Stream order makes the early free safe: whoever is given such a block writes it in a
        later step, after this step has read it. So does the order of outputs, if the workers
        lose the plan: the scheduler hears of it before any later step's tokens.
        """
        if not any((self._observe, self._planned, self._grow, self._add, self._repacks)):
            return None
        observe, grow = tuple(self._observe.items()), tuple(self._grow)
        compress = tuple(self._hand_over(*item) for item in self._planned.items())
        repack = tuple(self._hand_over_again(*item) for item in self._repacks.items())
        add = tuple(self._add.values())
        for done in (self._observe, self._planned, self._grow, self._add, self._repacks):
            done.clear()
        return StepPlan(
            number=next(self._plan_numbers),
            observe=observe,
            compress=compress,
            grow=grow,
            add=add,
            repack=repack,
        )

    def _hand_over(
        self, request_id: str, planned: tuple[PagePlan, list[KVCacheBlock]]
    ) -> Compression:
        plan, own = planned
        blocks = self.req_to_blocks[request_id]
        kept = {block.block_id for block in own}
        freed = [b for b in reversed(blocks[: plan.full_blocks]) if b.block_id not in kept]
        blocks[: plan.full_blocks] = [self._null_block] * plan.full_blocks
        self._packed[request_id] = self._packed[request_id] + own
        before = self.block_pool.get_num_free_blocks()
        self.block_pool.free_blocks(freed)
        settings = self.planner.settings_of(request_id)
        self.tally.planned[settings.compress] += 1
        self.tally.freed_blocks += self.block_pool.get_num_free_blocks() - before
        self.tally.packed_blocks += plan.blocks
        self.tally.in_place += bool(own)
        return Compression(
            request_id=request_id,
            settings=settings,
            plan=plan,
            destination=tuple(block.block_id for block in self._packed[request_id]),
            in_place=bool(own),
        )

    def _hand_over_again(self, request_id: str, planned: "_Repacking") -> Repack:
        plan, held, own = planned.plan, planned.held, planned.own
        last = planned.tokens // self.block_size
        blocks, kept = self.req_to_blocks[request_id], {block.block_id for block in own}
        ordinary = blocks[held.first_block : last]
        freed = [block for block in reversed(ordinary) if block.block_id not in kept]
        blocks[held.first_block : last] = [self._null_block] * len(ordinary)
        packed = self._packed.get(request_id, []) + own
        # A tail leaves less for the pages before it: a prompt's end may need a block less.
        self._packed[request_id] = packed[: plan.blocks]
        freed += packed[plan.blocks :]
        prefill, first = isinstance(held, Pieces), not held.pages
        layers_keep_theirs = isinstance(held, Growth) and held.frozen
        held.packed(plan, last)
        before = self.block_pool.get_num_free_blocks()
        self.block_pool.free_blocks(freed)
        returned = self.block_pool.get_num_free_blocks() - before
        if prefill:
            self.tally.pieces += 1
            self.tally.freed_blocks += returned
            self.tally.packed_blocks += plan.blocks * first
            self.tally.in_place += bool(own)
            if planned.ends:
                self.tally.planned[planned.settings.compress] += 1
        else:
            self.tally.repacked += 1
            self.tally.answer_blocks += returned
        destination = tuple(block.block_id for block in self._packed[request_id])
        return Repack(
            request_id=request_id,
            settings=planned.settings,
            plan=plan,
            tokens=planned.tokens,
            destination=() if layers_keep_theirs else destination,
            prefill=prefill,
            ends=planned.ends,
        )

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
        self._cacheable.pop(request_id, None)
        self._observe.pop(request_id, None)
        self._planned.pop(request_id, None)
        self._add.pop(request_id, None)
        self._repacks.pop(request_id, None)
        if request_id in self._grow:
            self._grow.remove(request_id)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return blocks + self._packed.pop(request_id, [])
