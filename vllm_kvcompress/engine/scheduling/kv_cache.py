"""VllmHook `kv_cache`: the block manager of a compressed layer group.

The manager plans a packing when it allocates the blocks of the chunk that ends a prefill, because
blocks for the packing can still be requested then. The number of kept pages depends only on lengths
(`page_plan`), so the scheduler waits for nothing from the workers. Decisions that concern the
model's other layer groups too go through vLLM's coordinator, which calls this manager
(`coordination`).

A packed request has null blocks in place of the full blocks of its prompt, the ordinary blocks
behind them, and destination blocks that are not in ``req_to_blocks``. So vLLM's arithmetic on that
list (positions, slots, blocks still needed) stays right.
"""

import itertools
from collections.abc import ItemsView, Mapping, Sequence
from typing import Any, Protocol

import torch
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from vllm_kvcompress.engine.layers import OtherLayers
from vllm_kvcompress.engine.messages.step import (
    HALF,
    AttentionAddition,
    PackRequest,
    StepPlan,
)
from vllm_kvcompress.engine.scheduling.admission import FULL_POOL
from vllm_kvcompress.engine.scheduling.compression_stats import CompressionStats
from vllm_kvcompress.engine.scheduling.deferred_free import DeferredFree
from vllm_kvcompress.engine.scheduling.destinations import (
    NO_DESTINATIONS,
    DestinationBlocks,
    PendingPack,
    last_unshared_blocks,
)
from vllm_kvcompress.engine.scheduling.lookaheads import LookAheads, NextStepDemand
from vllm_kvcompress.engine.scheduling.planning import Planner
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.planning.group_pieces import GroupPieceSchedule
from vllm_kvcompress.planning.kv_footprint import KVFootprint
from vllm_kvcompress.planning.pieces import PiecewiseSchedule
from vllm_kvcompress.planning.schedules import RequestSchedule
from vllm_kvcompress.settings.config import CompressionConfig


class _CompressedSpecFields(Protocol):
    """The fields used of `CompressedSpec`, whose module imports this one."""

    num_compressed_layers: int
    settings: CompressionConfig
    ring_slots: int
    dtype: torch.dtype


class StepProbes:
    """Number of probe tokens behind each request's chunk in this step.

    Probe tokens score the chunk. They do not belong to the request, but vLLM counts them as part of
    its chunk until the step is scheduled.
    """

    def __init__(self) -> None:
        self._num_tokens: dict[str, int] = {}

    def set(self, request_id: str, num_tokens: int) -> None:
        """Record the number of probe tokens of a request in this step, possibly 0."""
        if num_tokens or request_id in self._num_tokens:
            self._num_tokens[request_id] = num_tokens

    def items(self) -> ItemsView[str, int]:
        """Return the requests with probe tokens in this step, and how many they have."""
        return self._num_tokens.items()

    def count(self, request_id: str) -> int:
        """Return the number of probe tokens of a request in this step."""
        return self._num_tokens.get(request_id, 0)

    def subtract(self, request_id: str, num_tokens: int) -> int:
        """Return vLLM's token count of a request without its probe tokens."""
        return num_tokens - self.count(request_id)

    def clear(self) -> None:
        """Forget all probes, once the step is scheduled."""
        self._num_tokens.clear()


class CompressedManager(FullAttentionManager):
    """Allocates destination blocks for packings and frees the blocks that packings read.

    Not thread-safe, like every vLLM manager. It runs in the scheduler's loop.
    """

    def __init__(self, kv_cache_spec: _CompressedSpecFields, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._requests: Mapping[str, Request] | None = None
        self._num_layers = kv_cache_spec.num_compressed_layers
        self._ring_slots = kv_cache_spec.ring_slots
        self._itemsize = kv_cache_spec.dtype.itemsize
        self._other_layers: OtherLayers | None = None
        self.replace_settings(kv_cache_spec.settings)
        self.compression_stats = CompressionStats()
        self.deferred_free = DeferredFree(self.block_pool)
        # Destination blocks of each packed request.
        self._packed: dict[str, list[KVCacheBlock]] = {}
        # Requests whose destination blocks hold groups in k4v3.
        self._with_groups: set[str] = set()
        # Freed blocks that held groups, and those of them that are still to be freed.
        self._zero: list[int] = []
        self._unfreed: list[KVCacheBlock] = []
        # Maximum tokens of each packed request that may enter the prefix cache.
        self._cacheable: dict[str, int] = {}
        self.probes = StepProbes()
        # The plan of the step that is being scheduled, see `StepPlan`.
        self._observe: dict[str, CompressionConfig] = {}
        self._keep_output_queries: list[str] = []
        self._keep_prompt_queries: list[str] = []
        self._add_attention: dict[str, AttentionAddition] = {}
        self._pending: dict[str, PendingPack] = {}
        self._plan_numbers = itertools.count(1)

    def replace_settings(self, settings: CompressionConfig) -> None:
        """Set the engine's settings. Benchmarks change them while there are no requests."""
        self.settings = settings
        self.lookaheads = LookAheads(self, settings.lookahead_on_pressure)
        self.planner = Planner(
            settings,
            self._num_layers,
            self.block_size,
            self.block_pool,
            other_layers=self._other_layers,
            requests=self._requests,
            ring_slots=self._ring_slots,
            itemsize=self._itemsize,
        )

    def connect(self, requests: Mapping[str, Request], other_layers: OtherLayers | None) -> None:
        """Give the manager access to the scheduler's requests.

        Args:
            requests: the scheduler's requests by id.
            other_layers: blocks that the uncompressed layers use. None if all are compressed.
        """
        self._requests, self._other_layers = requests, other_layers
        self.replace_settings(self.settings)

    @property
    def has_positionally_stable_blocks(self) -> bool:
        """Return False: a block after a compressed prompt does not match its tokens' hash."""
        return False

    def num_blocks_held(self, request_id: str) -> int:
        """Return the number of blocks that a request holds, including shared blocks."""
        request_blocks = self.req_to_blocks.get(request_id, ())
        unpacked = sum(not block.is_null for block in request_blocks)
        return unpacked + self.num_packed_blocks(request_id)

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
        """Return the blocks to allocate, without destination blocks (`coordination` adds them)."""
        needed: int = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            *args,
            apply_admission_cap=apply_admission_cap,
            **kwargs,
        )
        if not apply_admission_cap or self.settings.max_whole is None:
            return needed
        planner = self.planner
        if planner.has_prefilled(request_id) or planner.waits_pulled(request_id):
            return needed
        # vLLM asks whether the prompt can ever fit. In-place packing needs no further block, and a
        # prompt in pieces never holds more than its schedule's maximum.
        prefill = planner.schedule_of(planner.request(request_id)).prefill
        if isinstance(prefill, PiecewiseSchedule):
            return min(needed, prefill.max_blocks)
        return needed

    def destination_blocks(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock]
    ) -> DestinationBlocks:
        """Return the destinations of a prompt's first packing, if `num_tokens` trigger it."""
        planner = self.planner
        if request_id in planner.nothing_to_pack or planner.has_prefilled(request_id):
            return NO_DESTINATIONS
        request = planner.request(request_id)
        schedule = planner.schedule_of(request)
        if schedule.footprint.pages or (schedule.prefill is None and schedule.lookahead is None):
            return NO_DESTINATIONS
        # Tokens beyond this are drafts of speculative decoding, not part of the prompt.
        num_tokens = min(num_tokens, int(request.num_tokens))
        plan, packs_later = schedule.plan(num_tokens), num_tokens < int(request.num_tokens)
        if plan is None and schedule.lookahead is not None and num_tokens >= request.num_tokens:
            # Reserved from now on, and allocated when the look-ahead is packed (`lookaheads`).
            full_blocks = num_tokens // self.block_size
            unshared = self._unshared_blocks(request_id, full_blocks, new_computed_blocks)
            packs_later = self.settings.lookahead_on_pressure != "never"
            # If no block is shared, the prompt is packed in place and needs no reservation.
            if packs_later and unshared < full_blocks:
                plan = schedule.lookahead.plan_at(schedule.footprint, num_tokens)
        if plan is None:
            return NO_DESTINATIONS
        full_blocks = plan.packed_end // self.block_size
        unshared = self._unshared_blocks(request_id, full_blocks, new_computed_blocks)
        must_be_fresh = max(plan.blocks - unshared, 0)
        return DestinationBlocks(must_be_fresh, 0 if packs_later else plan.blocks - must_be_fresh)

    def _unshared_blocks(
        self, request_id: str, full_blocks: int, new_computed_blocks: Sequence[KVCacheBlock]
    ) -> int:
        """Return how many of a prompt's first blocks no other request shares."""
        prompt_blocks = self.req_to_blocks.get(request_id, [])[:full_blocks]
        unshared: int = sum(block.ref_cnt == 1 for block in prompt_blocks)
        unshared += sum(block.ref_cnt == 0 for block in new_computed_blocks)
        return unshared + max(full_blocks - len(prompt_blocks) - len(new_computed_blocks), 0)

    def plan_step(self, request_id: str, num_tokens: int) -> None:
        """Plan this step for a request whose blocks for `num_tokens` are allocated in all groups.

        If the request is packed after the step, this takes the destination blocks.
        """
        if self.planner.has_prefilled(request_id):
            self._plan_decode(request_id, num_tokens)
            return
        cached_tokens = self.num_cached_block.get(request_id, 0) * self.block_size
        request = self.planner.request(request_id)
        self.compression_stats.admitted(request, *self.planner.admit(request_id, cached_tokens))
        if request_id in self.planner.nothing_to_pack:
            return
        tokens = min(self.probes.subtract(request_id, num_tokens), int(request.num_tokens))
        schedule = self.planner.schedule_of(request)
        plan, ends_prefill = schedule.plan(tokens), tokens >= int(request.num_tokens)
        if plan is not None and schedule.prefill is not None:
            settings = schedule.prefill.settings
            adds_groups = isinstance(schedule.prefill, GroupPieceSchedule)
            if not self._plan_pack(
                request_id,
                schedule,
                plan,
                plan.packed_end if adds_groups and not ends_prefill else tokens,
                settings,
                prefill=True,
                completes_prompt=ends_prefill,
                adds_groups=adds_groups,
            ):
                # Only a pulled prompt can find no blocks here.
                self.compression_stats.skip(request, FULL_POOL)
                plan = None
        if ends_prefill:
            self.planner.end_prefill(request, schedule, plan)
            is_scored = schedule.output is not None and schedule.output.scored
            if is_scored or schedule.lookahead is not None:
                self._keep_output_queries.append(request_id)
            self.lookaheads.note_step(request_id, schedule, tokens)
        elif schedule.lookahead is not None and schedule.lookahead.keeps_queries(tokens):
            self._keep_prompt_queries.append(request_id)
        self._observe.pop(request_id, None)
        if plan is None:
            settings_to_observe = self.planner.observation_settings(request, schedule)
            if settings_to_observe is not None:
                self._observe[request_id] = settings_to_observe

    def _plan_decode(self, request_id: str, tokens: int) -> None:
        """Plan a decode step: pack the request again, or add up its queries' attention."""
        schedule = self.planner.schedules[request_id]
        output, footprint = schedule.output, schedule.footprint
        if schedule.lookahead is not None:
            # Drafts do not count: how many are accepted is known only after the step.
            request = self.planner.request(request_id)
            known_tokens = int(request.num_tokens + request.num_output_placeholders)
            self.lookaheads.note_step(request_id, schedule, min(tokens, known_tokens))
            return
        if output is None:
            return
        plan = output.plan(footprint, tokens)
        packs = plan is not None and self._plan_pack(
            request_id,
            schedule,
            plan,
            tokens if output.scored else plan.packed_end,
            output.settings,
            prefill=False,
            completes_prompt=False,
            adds_groups=not output.scored,
        )
        if num_queries := output.advance_sums(tokens, self.block_size, packs=packs):
            self._add_attention[request_id] = AttentionAddition(
                request_id=request_id,
                tokens=tokens,
                num_queries=num_queries,
                max_tokens=footprint.max_layer_tokens(tokens),
            )

    def pack_lookahead(
        self,
        request_id: str,
        schedule: RequestSchedule,
        plan: PagePlan,
        tokens: int,
        early_target: str,
    ) -> bool:
        """Plan to pack a prompt with a look-ahead.

        Args:
            request_id: vLLM's request id.
            schedule: the request's schedule.
            plan: pages to keep.
            tokens: tokens computed when the step ends.
            early_target: as in `PackRequest`.

        Returns:
            False if the pool has too few blocks. Nothing is planned then.
        """
        lookahead = schedule.lookahead
        assert lookahead is not None, request_id
        return self._plan_pack(
            request_id,
            schedule,
            plan,
            tokens,
            lookahead.settings,
            prefill=True,
            completes_prompt=early_target != HALF,
            output_tokens=lookahead.output_tokens(tokens),
            early_target=early_target,
        )

    def _plan_pack(
        self,
        request_id: str,
        schedule: RequestSchedule,
        plan: PagePlan,
        tokens: int,
        settings: CompressionConfig,
        *,
        prefill: bool,
        completes_prompt: bool,
        output_tokens: int | None = None,
        adds_groups: bool = False,
        early_target: str = "",
    ) -> bool:
        """Plan a packing and take its destination blocks.

        A prompt takes blocks from the pool if enough are free beside those reserved for
        look-aheads; it needs twice as many free blocks if it is packed again later. Otherwise it
        takes its own unshared blocks, last ones first. Its admission counted the destinations,
        unless it has a look-ahead or was pulled from another server. A decoding request takes its
        own blocks first, and so does a prompt that adds groups to packed ones.

        Args:
            request_id, schedule, plan, tokens: as in `pack_lookahead`.
            settings: the settings that choose which tokens to keep.
            prefill, completes_prompt, output_tokens, early_target: as in `PackRequest`.
            adds_groups: whether the packing adds groups to the request's packed groups.

        Returns:
            False if the pool has too few blocks. Nothing is planned then.
        """
        footprint, full_blocks = schedule.footprint, tokens // self.block_size
        packed = self._packed.get(request_id, [])
        free_blocks = self.block_pool.get_num_free_blocks()
        missing = max(plan.blocks - len(packed), 0)
        reusable: list[tuple[int, KVCacheBlock]] = []
        needed = (1 if completes_prompt or early_target else 2) * missing
        needed += self.lookaheads.reserved_blocks(free_blocks - missing)
        adds_to_packed = adds_groups and footprint.pages > 0
        if missing and (not prefill or adds_to_packed or free_blocks < needed):
            reusable = last_unshared_blocks(
                self.req_to_blocks[request_id], footprint.first_block, full_blocks, missing
            )
        if missing - len(reusable) > free_blocks:
            return False
        self._cacheable.setdefault(request_id, full_blocks * self.block_size)
        if plan.packed_page_tokens is not None:
            self._with_groups.add(request_id)
        reused = self._reuse_blocks(request_id, reusable)
        num_fresh = missing - len(reused)
        fresh = self.block_pool.get_new_blocks(num_fresh) if num_fresh else []
        self._packed[request_id] = packed + fresh
        first_destination = len(packed) if adds_groups else 0
        destination = (self._packed[request_id] + reused)[first_destination : plan.blocks]
        block_ids = tuple(block.block_id for block in destination)
        is_piecewise = isinstance(schedule.prefill, PiecewiseSchedule)
        pack = PackRequest(
            request_id=request_id,
            settings=settings,
            plan=plan,
            tokens=tokens,
            destination=None if footprint.frozen else block_ids,
            prefill=prefill,
            output_tokens=output_tokens,
            nothing_dropped=prefill and (adds_groups or not (footprint.pages or is_piecewise)),
            completes_prompt=completes_prompt,
            in_place=bool(reused or footprint.pages) or not prefill,
            added_tokens=plan.packed_end - footprint.first_block * self.block_size
            if adds_groups
            else None,
            early_target=early_target,
        )
        self._pending[request_id] = PendingPack(pack, footprint, reused)
        return True

    def unpacked_blocks(
        self, request_id: str, footprint: KVFootprint, tokens: int
    ) -> Sequence[KVCacheBlock]:
        """Return a request's full blocks that were not packed before. Packing reads them."""
        blocks: list[KVCacheBlock] = self.req_to_blocks[request_id]
        return blocks[footprint.first_block : tokens // self.block_size]

    def num_packed_blocks(self, request_id: str) -> int:
        """Return the number of blocks that hold a request's packed pages."""
        return len(self._packed.get(request_id, ()))

    def _reuse_blocks(
        self, request_id: str, indexed_blocks: Sequence[tuple[int, KVCacheBlock]]
    ) -> list[KVCacheBlock]:
        """Evict the request's own destination blocks from the prefix cache.

        This happens before another request can find them. No later block of the request may enter
        the prefix cache either.
        """
        blocks = [block for _, block in indexed_blocks]
        self.block_pool.evict_blocks({block.block_id for block in blocks})
        if indexed_blocks:
            first_index, _ = indexed_blocks[0]
            limit = first_index * self.block_size
            self._cacheable[request_id] = min(self._cacheable[request_id], limit)
        return blocks

    # -- handing over the plan, once the step is scheduled -------------------------------------

    def free_blocks_now(self) -> int:
        """Return the number of blocks that packings of this step may still take."""
        return int(self.block_pool.get_num_free_blocks())

    def free_blocks_after_step(self) -> int:
        """Return the number of free blocks after this step's packings.

        Shared blocks that the packings release are not counted.
        """
        free_blocks = self.block_pool.get_num_free_blocks() + self.deferred_free.deferred_blocks()
        free_blocks += len(self._unfreed)
        for request_id, (pack, footprint, _) in self._pending.items():
            read_blocks = self.unpacked_blocks(request_id, footprint, pack.tokens)
            free_blocks += sum(block.ref_cnt == 1 for block in read_blocks)
            free_blocks += self.num_packed_blocks(request_id) - pack.plan.blocks
        return int(free_blocks)

    def take_step_plan(self, next_step: NextStepDemand | None = None) -> StepPlan | None:
        """Return this step's plan, and free the blocks that only this step still reads.

        Freeing them this early is safe, because the device runs steps in order: a new owner writes
        such a block in a later step, after this step has read it. It is safe even if the workers
        lose the plan, because outputs arrive in order: the scheduler notices the loss before any
        tokens of a later step.

        Args:
            next_step: demand of the following step, for which look-aheads are compressed early.
        """
        self.lookaheads.plan_packs(next_step)
        parts: tuple[list[str] | list[int] | dict[str, Any], ...] = (
            self._observe,
            self._keep_output_queries,
            self._keep_prompt_queries,
            self._add_attention,
            self._pending,
            self._zero,
        )
        if not any(parts):
            return None
        plan = StepPlan(
            number=next(self._plan_numbers),
            observe=tuple(self._observe.items()),
            keep_output_queries=tuple(self._keep_output_queries),
            keep_prompt_queries=tuple(self._keep_prompt_queries),
            add_attention=tuple(self._add_attention.values()),
            pack=tuple(map(self._apply_pack, self._pending.values())),
            zero_blocks=tuple(self._zero),
        )
        for part in parts:
            part.clear()
        self.deferred_free.free(self._unfreed)
        self._unfreed = []
        return plan

    def _apply_pack(self, pending: PendingPack) -> PackRequest:
        """Update the request's blocks for a packing, and free those that it no longer holds."""
        pack, footprint, reused = pending
        request_id, plan = pack.request_id, pack.plan
        first_block, full_blocks = footprint.first_block, pack.tokens // self.block_size
        request_blocks = self.req_to_blocks[request_id]
        reused_ids = {block.block_id for block in reused}
        unpacked = request_blocks[first_block:full_blocks]
        freed = [block for block in reversed(unpacked) if block.block_id not in reused_ids]
        request_blocks[first_block:full_blocks] = [self._null_block] * len(unpacked)
        destinations = self._packed[request_id] + reused
        # The tokens in the tail count towards the budget, so a prompt's last packing may need one
        # destination less than the packing before.
        self._packed[request_id] = destinations[: plan.blocks]
        freed += destinations[plan.blocks :]
        is_first = not footprint.pages
        footprint.pack(plan, full_blocks, freeze=not (pack.prefill or pack.adds_groups))
        returned_blocks = self.deferred_free.free(freed)
        prefill_schedule = self.planner.schedules[request_id].prefill
        is_piecewise = isinstance(prefill_schedule, PiecewiseSchedule)
        self.compression_stats.pack(
            pack,
            returned_blocks,
            request=self.planner.request(request_id),
            is_first=is_first,
            reused_blocks=len(reused),
            is_piecewise=is_piecewise,
        )
        if pack.output_tokens is not None and pack.completes_prompt:
            self.planner.release_lookahead_slot(request_id)
        return pack

    # -- the prefix cache ---------------------------------------------------------------------

    @property
    def limits_caching(self) -> bool:
        """Return whether any request has tokens that must not enter the prefix cache."""
        return bool(self._cacheable)

    def cacheable_tokens(self, request_id: str, num_tokens: int) -> int:
        """Return how many of a request's tokens may enter the prefix cache, in any layer group.

        Blocks computed from a compressed context must not.
        """
        return min(num_tokens, self._cacheable.get(request_id, num_tokens))

    # -- the end of a request -----------------------------------------------------------------

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget the request and return all its blocks, including the destinations."""
        self.planner.forget(request_id)
        self.lookaheads.forget(request_id)
        self._cacheable.pop(request_id, None)
        self._observe.pop(request_id, None)
        self._add_attention.pop(request_id, None)
        self._pending.pop(request_id, None)
        for request_ids in (self._keep_output_queries, self._keep_prompt_queries):
            if request_id in request_ids:
                request_ids.remove(request_id)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        packed = self._packed.pop(request_id, [])
        if request_id in self._with_groups:
            self._with_groups.discard(request_id)
            # As floats, the bytes of groups may be NaN, and attention multiplies what it masks by
            # 0. The workers zero these blocks before their next owner writes to them.
            self._zero += [block.block_id for block in packed]
            if self.deferred_free.has_connector:
                # A connector writes whenever it likes, so they are freed once they are zero.
                self._unfreed += packed
                packed = []
        return blocks + packed
