"""Builds the plan of the step that vLLM's scheduler is scheduling.

Prompts and outputs are packed as part of vLLM's block allocation, so that one check covers all
blocks. Look-aheads are packed once the step is scheduled (`lookaheads`). The number of kept
pages depends only on lengths (`methods.page_plan`), so the scheduler waits for no worker.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import RequestStatus

from vllm_kvcompress.engine.messages.step import (
    HALF,
    AddGroups,
    AdoptedPages,
    AttentionAddition,
    PackLookahead,
    PackOutput,
    PackPiece,
    PackPrompt,
    PackRequest,
    StepPlan,
)
from vllm_kvcompress.engine.scheduling.admission import FULL_POOL, Admissions
from vllm_kvcompress.engine.scheduling.compression_stats import CompressionStats
from vllm_kvcompress.engine.scheduling.deferred_free import DeferredFree
from vllm_kvcompress.engine.scheduling.kv_cache import CompressedManager
from vllm_kvcompress.engine.scheduling.lookaheads import LookAheads
from vllm_kvcompress.engine.scheduling.packed_prefixes import PackedPrefixes
from vllm_kvcompress.engine.scheduling.parking import Parking
from vllm_kvcompress.engine.scheduling.request_schedules import RequestSchedules
from vllm_kvcompress.engine.scheduling.request_state import (
    RequestState,
    RequestStates,
    StepEntry,
)
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.schedules.base import PrefillSchedule
from vllm_kvcompress.schedules.outputs import OutputGroupSchedule, OutputSchedule

if TYPE_CHECKING:
    from vllm_kvcompress.engine.scheduling.offloading import OffloadingConnector


class DestinationBlocks(NamedTuple):
    """Destination blocks of a prompt's first packing."""

    must_be_fresh: int
    """Destinations that must come from the pool, because the prompt has too few unshared blocks."""
    may_be_fresh: int
    """Destinations that can come from the pool or be blocks of the prompt."""


NO_DESTINATIONS = DestinationBlocks(0, 0)


class StepBuilder:
    """Adds requests to the step that is being scheduled, and produces its `StepPlan`.

    Not thread-safe: it runs in the scheduler's loop.

    Args:
        manager: vLLM's manager of the compressed layers' blocks.
        states: the scheduler's requests.
        admissions: decides which requests are compressed.
        schedules: says when they are packed.
        lookaheads: prompts that wait for output tokens.
        deferred_free: frees blocks that the step still reads.
        stats: counts for the metrics.
        parking: copies the pages of preempted requests to host memory.
        packed_prefixes: packed pages in the prefix cache; None if pages are not reused.
        unverified_drafts: returns how many draft tokens of a request are in steps in flight.
        offloading: the connector that stores prompts in host memory; None without it.
    """

    def __init__(
        self,
        manager: CompressedManager,
        states: RequestStates,
        admissions: Admissions,
        schedules: RequestSchedules,
        lookaheads: LookAheads,
        deferred_free: DeferredFree,
        stats: CompressionStats,
        parking: Parking,
        packed_prefixes: PackedPrefixes | None = None,
        unverified_drafts: Callable[[str], int] = lambda request_id: 0,
        offloading: "OffloadingConnector | None" = None,
    ) -> None:
        self.packed_prefixes, self.unverified_drafts = packed_prefixes, unverified_drafts
        self._manager, self.states, self.admissions = manager, states, admissions
        self.schedules, self.lookaheads, self.stats = schedules, lookaheads, stats
        self._deferred_free, self.parking, self._offloading = deferred_free, parking, offloading
        # Ids of the connector's stores that the workers finish before they pack.
        self._stores_to_finish: set[int] = set()
        self._block_size, self._pool = int(manager.block_size), manager.block_pool
        # Requests with an entry, and with a probe behind their chunk, in this step. Some may have
        # been preempted since.
        self._states_with_entry: list[RequestState] = []
        self._states_with_probe: list[RequestState] = []
        # Requests that are packed after this step, in the order in which it was planned.
        self._states_to_pack: list[RequestState] = []
        self._plan_numbers = itertools.count(1)

    # -- blocks that a packing needs, while vLLM counts a step's blocks ------------------------

    def destination_blocks(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock]
    ) -> DestinationBlocks:
        """Return the destinations of a prompt's first packing, if `num_tokens` trigger it."""
        if request_id in self.states.ids_without_packing:
            return NO_DESTINATIONS
        state = self.states.by_id(request_id)
        if state.reuses_pages and (state.has_prefilled or state.packed_hit or state.packed_blocks):
            return self._added_blocks(state, num_tokens, new_computed_blocks)
        if state.has_prefilled:
            return NO_DESTINATIONS
        schedule, prompt_tokens = self.schedules.of(state), int(state.request.num_tokens)
        if schedule.footprint.pages or (schedule.prefill is None and schedule.lookahead is None):
            return NO_DESTINATIONS
        # Tokens beyond this are drafts of speculative decoding, not part of the prompt.
        num_tokens = min(num_tokens, prompt_tokens)
        plan, counts_required_only = schedule.plan(num_tokens), num_tokens < prompt_tokens
        if plan is None and schedule.lookahead is not None and num_tokens >= prompt_tokens:
            # Reserved from now on, and allocated when the look-ahead is packed.
            full_blocks, first = num_tokens // self._block_size, schedule.footprint.first_block
            unshared = self._unshared_blocks(request_id, full_blocks, new_computed_blocks, first)
            counts_required_only = True
            # If no block is shared, the prompt is packed in place and needs no reservation.
            if unshared < full_blocks - first:
                plan = state.budget_plan(num_tokens)
        if plan is None:
            return NO_DESTINATIONS
        full_blocks = plan.packed_end // self._block_size
        unshared = self._unshared_blocks(
            request_id, full_blocks, new_computed_blocks, schedule.footprint.first_block
        )
        must_be_fresh = max(plan.blocks - unshared, 0)
        return DestinationBlocks(
            must_be_fresh, 0 if counts_required_only else plan.blocks - must_be_fresh
        )

    def _added_blocks(
        self, state: RequestState, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock]
    ) -> DestinationBlocks:
        """Return the destinations of a packing that adds pages, if `num_tokens` trigger it.

        It may read blocks that other requests share, because they found them behind cached pages.
        """
        schedule, footprint = self.schedules.of(state), self.schedules.of(state).footprint
        if state.packed_hit:
            assert self.packed_prefixes is not None, state.request_id
            footprint, pages = replace(footprint), len(state.packed_hit)
            footprint.adopt(pages, self.packed_prefixes.tokens(pages))
        current = schedule.current
        plan = None if current is None else current.plan(footprint, num_tokens)
        if plan is None:
            return NO_DESTINATIONS
        added_pages = plan.blocks - footprint.pages // footprint.num_layers
        unshared = self._unshared_blocks(
            state.request_id,
            plan.packed_end // self._block_size,
            new_computed_blocks,
            footprint.first_block,
        )
        return DestinationBlocks(max(added_pages - unshared, 0), 0)

    def _unshared_blocks(
        self,
        request_id: str,
        full_blocks: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        first_block: int = 0,
    ) -> int:
        """Return how many blocks of a prompt in ``[first_block, full_blocks)`` no other shares."""
        prompt_blocks = self._manager.req_to_blocks.get(request_id, [])
        held = [block.ref_cnt == 1 for block in prompt_blocks[:full_blocks]]
        held += [block.ref_cnt == 0 for block in new_computed_blocks]
        to_allocate = max(full_blocks - max(len(held), first_block), 0)
        return int(sum(held[first_block:full_blocks])) + to_allocate

    def waits_after_pull(self, request_id: str) -> bool:
        """Return whether a request's prompt was pulled and still waits for its first step.

        Such a prompt must not wait for destination blocks: the requests that hold them may be
        waiting for destination blocks too.
        """
        state = self.states.get(request_id)
        return (
            state is not None and state.was_pulled and state.request.status != RequestStatus.RUNNING
        )

    def max_piece_blocks(self, request_id: str) -> int | None:
        """Return the maximum blocks of a prompt in pieces until its prefill ends; else None."""
        has_pieces = self.admissions.settings.pieces.max_whole is not None
        if not (has_pieces or self.packed_prefixes) or self.waits_after_pull(request_id):
            return None
        schedule = self.schedules.of(self.states.by_id(request_id))
        if schedule.prefilled or schedule.prefill is None or not schedule.prefill.in_pieces:
            return None
        return schedule.prefill.max_blocks

    # -- adding requests, once their blocks are allocated in all groups ------------------------

    def set_probe(self, state: RequestState, num_tokens: int) -> None:
        """Record the probe tokens, possibly 0, that vLLM counts as part of the request's chunk."""
        state.probe_tokens = num_tokens
        if num_tokens and state not in self._states_with_probe:
            self._states_with_probe.append(state)

    def take_probes(self) -> list[tuple[RequestState, int]]:
        """Return and forget the probes of this step, once it is scheduled."""
        probes = [(state, state.probe_tokens) for state in self._states_with_probe]
        for state in self._states_with_probe:
            state.probe_tokens = 0
        self._states_with_probe.clear()
        return probes

    def finalize_decision(self, state: RequestState) -> None:
        """Make the decision about a request final, when it gets its first blocks."""
        was_final = state.decision.is_final
        if skip_reason := self.admissions.finalize_decision(state):
            self.stats.skip(state, skip_reason)
        if not was_final and self.admissions.settings.pieces.max_whole is not None:
            self.schedules.limit_output_to_pool(state)

    def admit(self, state: RequestState, cached_tokens: int) -> None:
        """Make the decision about a request final, and take its look-ahead slot.

        Args:
            state: the request.
            cached_tokens: its tokens found in the prefix cache, if this is its first chunk.
        """
        self.finalize_decision(state)
        if state.decision.never_packs:
            state.was_pulled = False
            self.states.ids_without_packing.add(state.request_id)
        else:
            self.stats.slotless_lookaheads += self.schedules.fix_schedule(state, cached_tokens)
            if state.packed_hit:
                self._adopt(state)

    def _adopt(self, state: RequestState) -> None:
        """Let a request own the packed blocks of the prefix cache that its prompt begins with."""
        assert self.packed_prefixes is not None, state.request_id
        blocks, state.packed_hit = state.packed_hit, []
        state.packed_blocks, state.stored_pages, state.holds_groups = blocks, len(blocks), True
        tokens = self.packed_prefixes.tokens(len(blocks))
        state.current_schedule.footprint.adopt(len(blocks), tokens)
        self.states.limit_caching(state, tokens)
        self.stats.packed_hit_tokens += tokens
        self._entry(state).adopted = AdoptedPages(
            request_id=state.request_id,
            leading_blocks=tuple(
                block.block_id for block in state.blocks[: self.packed_prefixes.leading_blocks]
            ),
            blocks=tuple(block.block_id for block in blocks),
            page_tokens=self.packed_prefixes.page_tokens,
        )

    def add(self, request_id: str, num_tokens: int) -> None:
        """Add a request whose blocks for `num_tokens` tokens are allocated in all groups.

        If the request is packed after the step, this takes the destination blocks.
        """
        state = self.states.by_id(request_id)
        state.blocks = self._manager.req_to_blocks[request_id]
        if state.has_prefilled:
            self._add_decode(state, num_tokens)
            return
        cached_blocks = int(self._manager.num_cached_block.get(request_id, 0))
        self.admit(state, cached_blocks * self._block_size)
        if request_id not in self.states.ids_without_packing:
            self._add_prefill(state, num_tokens - state.probe_tokens)

    def _add_prefill(self, state: RequestState, num_tokens: int) -> None:
        """Plan a prefill chunk: pack the prompt, or observe the chunk for a later packing."""
        schedule, prompt_tokens = self.schedules.of(state), int(state.request.num_tokens)
        tokens, prefill = min(num_tokens, prompt_tokens), schedule.prefill
        plan, ends_prefill = schedule.plan(tokens), tokens >= prompt_tokens
        if plan is not None and prefill is not None:
            request = _prefill_request(state, prefill, plan, tokens)
            if not self.pack(state, request):
                # Only a pulled prompt can find no blocks here.
                self.stats.skip(state, FULL_POOL)
                plan, state.left_grid = None, True
        if ends_prefill:
            self._end_prefill(state, plan, tokens)
        elif schedule.lookahead is not None and schedule.lookahead.keeps_queries(tokens):
            self._entry(state).keep_prompt_queries = True
        if plan is None and (settings := self.schedules.observation_settings(state)) is not None:
            self._entry(state).observe = settings

    def _end_prefill(self, state: RequestState, plan: PagePlan | None, tokens: int) -> None:
        self.schedules.end_prefill(state, plan)
        schedule = self.schedules.of(state)
        if schedule.lookahead is not None:
            self.lookaheads.note_step(state, tokens)
        elif schedule.output is None:
            self.states.ids_without_packing.add(state.request_id)
            return
        if schedule.lookahead is not None or (schedule.output and schedule.output.scored):
            self._entry(state).keep_output_queries = True

    def _add_decode(self, state: RequestState, tokens: int) -> None:
        """Plan a decode step: pack the request again, or add up its queries' attention."""
        schedule = state.current_schedule
        output, footprint, request = schedule.output, schedule.footprint, state.request
        if schedule.lookahead is not None:
            # Drafts do not count: how many are accepted is known only after the step. vLLM counts
            # those of steps in flight as output.
            known_tokens = int(request.num_tokens + request.num_output_placeholders)
            known_tokens -= self.unverified_drafts(state.request_id)
            self.lookaheads.note_step(state, min(tokens, known_tokens))
            return
        if output is None:
            return
        plan = schedule.plan(tokens)
        packs = plan is not None and self.pack(state, _output_request(state, output, plan))
        state.left_grid |= plan is not None and not packs
        if num_queries := output.advance_sums(tokens, self._block_size, packs=packs):
            self._entry(state).addition = AttentionAddition(
                request_id=state.request_id,
                tokens=tokens,
                num_queries=num_queries,
                max_tokens=footprint.max_layer_tokens(tokens),
            )

    def _entry(self, state: RequestState) -> StepEntry:
        """Return the request's entry in this step; create it on the first call."""
        if state.entry is None:
            state.entry = StepEntry()
            self._states_with_entry.append(state)
        return state.entry

    def release(self, request_id: str, blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """Forget a request that ended or was preempted, and return the blocks to free with it.

        The last of them is evicted from the prefix cache first.

        Args:
            blocks: vLLM's blocks of the request.
        """
        state = self.states.pop(request_id)
        if state is None:
            return blocks
        self.lookaheads.remove(state)
        packed_blocks = state.packed_blocks
        if state.request.is_finished():
            self.parking.drop(state)
        elif state.parked is not None:
            state.blocks, state.packed_blocks = [], []
        if self.packed_prefixes is not None and state.reuses_pages:
            self.packed_prefixes.release(state)
            leading = self.packed_prefixes.leading_blocks
            return blocks[:leading] + packed_blocks + blocks[leading:]
        if state.holds_groups:
            packed_blocks = self._deferred_free.zero(packed_blocks)
        return blocks + packed_blocks

    # -- packing ------------------------------------------------------------------------------

    def pack_due_lookaheads(self) -> list[RequestState]:
        """Plan to pack the prompts of this step whose look-ahead is over; return the others."""
        waiting: list[RequestState] = []
        if not self.lookaheads:
            return waiting
        for state in [state for state in self.lookaheads if state.is_scheduled]:
            state.is_scheduled = False
            plan = state.current_schedule.plan(state.lookahead_tokens)
            # If the pool has too few blocks, the next step tries again.
            if plan is None or not self._pack_lookahead(state, plan):
                waiting.append(state)
        return waiting

    def pack_early(self, waiting: Sequence[RequestState], needed: int, *, overlaps: bool) -> None:
        """Plan to pack some prompts early if the next step would run short of blocks.

        Args:
            waiting: prompts of this step whose look-ahead is not over.
            needed: blocks that running requests take next.
            overlaps: whether the next step is scheduled before this step's outputs are known.
        """
        free_blocks = self.free_blocks_after_step()
        if free_blocks >= needed + self.lookaheads.max_reserved_blocks:
            return
        for choice, to_budget in self.lookaheads.choose_early(
            waiting, self.free_blocks_now(), free_blocks, needed, overlaps=overlaps
        ):
            if not self._pack_lookahead(*choice) and choice.early_target == HALF:
                self._pack_lookahead(*to_budget)

    def _pack_lookahead(self, state: RequestState, plan: PagePlan, early_target: str = "") -> bool:
        """Plan to pack a prompt with a look-ahead. Return False if the pool has too few blocks.

        Args:
            state: the request.
            plan: pages to keep.
            early_target: as in `PackRequest`.
        """
        lookahead, tokens = state.lookahead, state.lookahead_tokens
        request = PackLookahead(
            request_id=state.request_id,
            settings=lookahead.settings,
            plan=plan,
            tokens=tokens,
            reads_page_tables=state.current_schedule.reads_page_tables,
            output_tokens=lookahead.output_tokens(tokens),
            early_target=early_target,
        )
        if not self.pack(state, request):
            return False
        if request.completes_prompt:
            self.lookaheads.end(state)
        return True

    def pack(self, state: RequestState, request: PackRequest) -> bool:
        """Plan a packing and take its destination blocks.

        A prompt takes fresh blocks if enough are free in addition to the blocks reserved for
        look-aheads. A piece needs twice as many free blocks, because the prompt is packed again.
        If too few are free, the prompt takes its own unshared blocks, last ones first. An output,
        or a prompt that adds groups to packed groups, always takes its own blocks first. The
        allocation of the step has counted these blocks (`destination_blocks`), except for
        look-aheads, whose blocks are reserved (`lookaheads.reserved_for`), and pulled prompts.

        Args:
            state: the request.
            request: what to pack, without a destination.

        Returns:
            False if the pool has too few blocks. Nothing is planned then.
        """
        footprint, packed, plan = (
            state.current_schedule.footprint,
            state.packed_blocks,
            request.plan,
        )
        full_blocks = request.packed_end // self._block_size
        free_blocks = self._pool.get_num_free_blocks()
        missing = max(plan.blocks - len(packed), 0)
        reusable: list[tuple[int, KVCacheBlock]] = []
        needed = (1 if request.completes_prompt or request.early_target else 2) * missing
        needed += self.lookaheads.reserved_blocks(free_blocks - missing)
        adds_groups = isinstance(request, AddGroups)
        own_first = not request.prefill or (adds_groups and footprint.pages > 0)
        if missing and (own_first or free_blocks < needed):
            first_block = footprint.first_block
            own = enumerate(state.blocks[first_block:full_blocks], first_block)
            unshared = [(index, block) for index, block in own if block.ref_cnt == 1]
            reusable = unshared[max(len(unshared) - missing, 0) :]
        if missing - len(reusable) > free_blocks:
            return False
        if state.cacheable_tokens is None:
            self.states.limit_caching(state, full_blocks * self._block_size)
        state.holds_groups = state.holds_groups or plan.packed_page_tokens is not None
        reused = self._reuse_blocks(state, reusable)
        num_fresh = missing - len(reused)
        fresh = self._pool.get_new_blocks(num_fresh) if num_fresh else []
        state.packed_blocks = packed + fresh
        first_destination = len(packed) if adds_groups else 0
        destination = (state.packed_blocks + reused)[first_destination : plan.blocks]
        block_ids = tuple(block.block_id for block in destination)
        state.reused_blocks = reused
        self._states_to_pack.append(state)
        self._entry(state).pack = replace(
            request,
            destination=None if footprint.frozen else block_ids,
            in_place=bool(reused or footprint.pages) or not request.prefill,
        )
        return True

    def _reuse_blocks(
        self, state: RequestState, indexed_blocks: Sequence[tuple[int, KVCacheBlock]]
    ) -> list[KVCacheBlock]:
        """Evict the request's own destination blocks from the prefix cache.

        This happens before another request can find them. No later block of the request may enter
        the prefix cache either.
        """
        blocks = [block for _, block in indexed_blocks]
        self._pool.evict_blocks({block.block_id for block in blocks})
        if indexed_blocks:
            first_index, _ = indexed_blocks[0]
            self.states.limit_caching(state, first_index * self._block_size)
        return blocks

    # -- handing over the plan, once the step is scheduled -------------------------------------

    def _is_live(self, state: RequestState) -> bool:
        """Return whether a request of this step has neither ended nor been preempted since."""
        return self.states.get(state.request_id) is state

    def free_blocks_now(self) -> int:
        """Return the number of blocks that packings of this step may still take."""
        return int(self._pool.get_num_free_blocks())

    def free_blocks_after_step(self) -> int:
        """Return the number of free blocks after this step's packings.

        Shared blocks that the packings release are not counted.
        """
        free_blocks = self.free_blocks_now() + self._deferred_free.deferred_blocks()
        for state in filter(self._is_live, self._states_to_pack):
            pack = state.planned_pack
            read_blocks = state.unpacked_blocks(pack.packed_end)
            free_blocks += sum(block.ref_cnt == 1 for block in read_blocks)
            free_blocks += len(state.packed_blocks) - pack.plan.blocks
        return int(free_blocks)

    def build(self) -> StepPlan | None:
        """Return this step's plan, and free the blocks that only this step still reads.

        Freeing them this early is safe, because the device runs steps in order: a new owner writes
        such a block in a later step, after this step has read it. It is safe even if the workers
        lose the plan, because outputs arrive in order: the scheduler notices the loss before any
        tokens of a later step.
        """
        has_copies = self.parking.copies or self._deferred_free.zero_blocks
        if not self._states_with_entry and not has_copies:
            return None
        live = [
            (state.request_id, state.entry)
            for state in filter(self._is_live, self._states_with_entry)
            if state.entry is not None
        ]
        packs = [self._apply_pack(state) for state in filter(self._is_live, self._states_to_pack)]
        for state in self._states_with_entry:
            state.entry = None
        self._states_with_entry.clear()
        self._states_to_pack.clear()
        finish_stores, self._stores_to_finish = tuple(self._stores_to_finish), set()
        if not live and not has_copies and not self._deferred_free.zero_blocks:
            return None
        park, resume = self.parking.take_copies()
        return StepPlan(
            number=next(self._plan_numbers),
            observe=tuple(
                (request_id, entry.observe)
                for request_id, entry in live
                if entry.observe is not None
            ),
            keep_output_queries=tuple(
                request_id for request_id, entry in live if entry.keep_output_queries
            ),
            keep_prompt_queries=tuple(
                request_id for request_id, entry in live if entry.keep_prompt_queries
            ),
            add_attention=tuple(entry.addition for _, entry in live if entry.addition is not None),
            pack=tuple(packs),
            adopt=tuple(entry.adopted for _, entry in live if entry.adopted is not None),
            park=park,
            zero_blocks=self._deferred_free.take_zero_blocks(),
            resume=resume,
            finish_stores=finish_stores,
        )

    def _apply_pack(self, state: RequestState) -> PackRequest:
        """Update the request's blocks for a packing, and free those that it no longer holds."""
        pack, reused = state.planned_pack, state.reused_blocks
        schedule, plan = state.current_schedule, pack.plan
        footprint = schedule.footprint
        first_block, full_blocks = footprint.first_block, pack.packed_end // self._block_size
        reused_ids = {block.block_id for block in reused}
        unpacked = state.unpacked_blocks(pack.packed_end)
        if self.packed_prefixes is not None and state.reuses_pages:
            self.packed_prefixes.forget_originals(unpacked)
        freed = [block for block in reversed(unpacked) if block.block_id not in reused_ids]
        null_block = self._pool.null_block
        state.blocks[first_block:full_blocks] = [null_block] * len(unpacked)
        destinations = state.packed_blocks + reused
        # The tokens in the tail count towards the budget, so a prompt's last packing may need one
        # destination less than the packing before.
        state.packed_blocks = destinations[: plan.blocks]
        freed += destinations[plan.blocks :]
        is_first = not footprint.pages
        footprint.pack(plan, full_blocks, freeze=isinstance(pack, PackOutput))
        if self._offloading is not None:
            self._stores_to_finish |= self._offloading.plan_packing(
                state.request_id,
                freed={block.block_id for block in freed},
                destinations={block.block_id for block in destinations},
            )
        returned_blocks = self._deferred_free.free(freed)
        if self.packed_prefixes is not None and state.reuses_pages:
            self.packed_prefixes.store(state)
        self.stats.pack(state, pack, returned_blocks, is_first=is_first)
        if isinstance(pack, PackLookahead) and pack.completes_prompt:
            self.lookaheads.release_slot(state)
        if schedule.lookahead is None and schedule.output is None and schedule.prefilled:
            self.states.ids_without_packing.add(state.request_id)
        return pack


def _prefill_request(
    state: RequestState, prefill: PrefillSchedule, plan: PagePlan, tokens: int
) -> PackRequest:
    """Return the request to pack a prompt once `tokens` of its prefill are computed."""
    request_id, settings = state.request_id, prefill.settings
    ends_prefill = tokens >= int(state.request.num_tokens)
    if prefill.adds_groups:
        return AddGroups(
            request_id=request_id,
            settings=settings,
            plan=plan,
            tokens=tokens if ends_prefill else plan.packed_end,
            prefill=True,
            completes_prompt=ends_prefill,
            added_tokens=_unpacked_tokens(state, plan),
            leading_blocks=state.current_schedule.footprint.leading_blocks,
        )
    if not ends_prefill:
        return PackPiece(request_id=request_id, settings=settings, plan=plan, tokens=tokens)
    return PackPrompt(
        request_id=request_id,
        settings=settings,
        plan=plan,
        tokens=tokens,
        reads_page_tables=state.current_schedule.reads_page_tables,
    )


def _output_request(
    state: RequestState, output: OutputSchedule | OutputGroupSchedule, plan: PagePlan
) -> PackRequest:
    """Return the request to pack the tokens of a decoding request."""
    request_id, settings = state.request_id, output.settings
    if output.scored:
        return PackOutput(
            request_id=request_id, settings=settings, plan=plan, tokens=plan.packed_end
        )
    return AddGroups(
        request_id=request_id,
        settings=settings,
        plan=plan,
        tokens=plan.packed_end,
        prefill=False,
        completes_prompt=False,
        added_tokens=_unpacked_tokens(state, plan),
        leading_blocks=state.current_schedule.footprint.leading_blocks,
    )


def _unpacked_tokens(state: RequestState, plan: PagePlan) -> int:
    """Return the number of tokens that a plan packs and that were not packed before."""
    footprint = state.current_schedule.footprint
    return plan.packed_end - footprint.first_block * footprint.block_size
