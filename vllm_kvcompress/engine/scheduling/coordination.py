"""VllmHook `coordination`: wrap vLLM's methods that decide about the blocks of all layer groups.

Everything that uncompressed layers compute after a compressed prompt depends on its kept tokens.
So the number of blocks, and which of them may be shared with other requests, must be decided for
all groups together.

We wrap methods of the scheduler's one coordinator and of the `KVCacheManager` that owns it.
"""

from collections.abc import Sequence, Set
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from vllm_kvcompress.engine.scheduling.kv_cache import CompressedManager, GroupBlocks
from vllm_kvcompress.engine.scheduling.next_step import NextStep
from vllm_kvcompress.engine.scheduling.request_state import RequestState
from vllm_kvcompress.engine.scheduling.step_builder import NO_DESTINATIONS, StepBuilder


class Coordination:
    """Wraps one scheduler's `KVCacheManager` and its coordinator.

    Args:
        cache: vLLM's `KVCacheManager`.
        groups: its block managers.
        step_builder: plans packings as blocks are allocated.
        next_step: estimates the blocks that the next steps take.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        groups: GroupBlocks,
        step_builder: StepBuilder,
        next_step: NextStep,
    ) -> None:
        self._step_builder, self._next_step = step_builder, next_step
        self._states, self._schedules = step_builder.states, step_builder.schedules
        self._admissions, self._lookaheads = step_builder.admissions, step_builder.lookaheads
        self._parking = step_builder.parking
        self._groups, self._manager = groups, groups.compressed
        # The waiting request whose prefix vLLM is looking up.
        self._looked_up: Request | None = None
        self._in_allocate_slots = False
        # Whether this `allocate_slots` call is for a prompt that is pulled from another server.
        self._is_pulling = False
        coordinator: Any = cache.coordinator
        self._vllm_get_computed_blocks = cache.get_computed_blocks
        self._vllm_allocate_slots = cache.allocate_slots
        self._vllm_find_longest_cache_hit = coordinator.find_longest_cache_hit
        self._vllm_allocate_new_computed_blocks = coordinator.allocate_new_computed_blocks
        self._vllm_get_num_blocks_to_allocate = coordinator.get_num_blocks_to_allocate
        self._vllm_allocate_new_blocks = coordinator.allocate_new_blocks
        self._vllm_cache_blocks = coordinator.cache_blocks
        wrapped: Any = cache
        wrapped.get_computed_blocks = self._get_computed_blocks
        coordinator.find_longest_cache_hit = self._find_longest_cache_hit
        if step_builder.packed_prefixes is not None:
            coordinator.allocate_new_computed_blocks = self._allocate_new_computed_blocks
        self._cache, self._coordinator = wrapped, coordinator
        self._set_allocation_wrapped(wrapped=True)
        self._set_caching_wrapped(wrapped=True)

    def begin_step(self, request_ids: Set[str]) -> None:
        """Unwrap vLLM's methods if this step has nothing to plan; wrap them again if it has.

        Args:
            request_ids: the scheduler's requests, including those that wait.
        """
        states = self._states
        is_idle = states.ids_without_packing == request_ids and not self._lookaheads
        if is_idle == self._wraps_allocation:
            self._set_allocation_wrapped(wrapped=not is_idle)
        # A step that may plan a packing needs the wrapper: packed tokens must not be cached.
        limits_caching = not is_idle or bool(self._groups.others or states.limited_ids)
        if limits_caching != self._wraps_caching:
            self._set_caching_wrapped(wrapped=limits_caching)

    def _set_allocation_wrapped(self, *, wrapped: bool) -> None:
        self._wraps_allocation = wrapped
        cache, coordinator = self._cache, self._coordinator
        manager: Any = self._manager
        if not wrapped:
            vllm_manager: Any = super(CompressedManager, manager)
            manager.get_num_blocks_to_allocate = vllm_manager.get_num_blocks_to_allocate
        elif "get_num_blocks_to_allocate" in vars(manager):
            del manager.get_num_blocks_to_allocate
        cache.allocate_slots = self._allocate_slots if wrapped else self._vllm_allocate_slots
        coordinator.get_num_blocks_to_allocate = (
            self._get_num_blocks_to_allocate if wrapped else self._vllm_get_num_blocks_to_allocate
        )
        coordinator.allocate_new_blocks = (
            self._allocate_new_blocks if wrapped else self._vllm_allocate_new_blocks
        )

    def _set_caching_wrapped(self, *, wrapped: bool) -> None:
        self._wraps_caching = wrapped
        self._coordinator.cache_blocks = self._cache_blocks if wrapped else self._vllm_cache_blocks

    def _get_computed_blocks(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        state = self._states.of(request)
        self._admissions.refresh_decision(state)
        self._looked_up, state.packed_hit = request, []
        try:
            found = self._vllm_get_computed_blocks(request, *args, **kwargs)
        finally:
            self._looked_up = None
        if state.parked is not None:
            return found[0], self._parking.computed_tokens(request), *found[2:]
        if not self._groups.others or len(found) < 3 or found[2]:
            return found
        # The third value is a boundary at which vLLM keeps window blocks and states for later hits,
        # as it does at the last possible end of a hit. Hits of a compressed prompt end earlier.
        return *found[:2], self._last_hit_end(request)

    def _last_hit_end(self, request: Request) -> int:
        """Return the block boundary where another request's longest hit for this prompt ends."""
        longest = self._longest_prefix_hit(request, int(request.num_tokens) - 1)
        return longest - longest % int(self._manager.block_size)

    def _longest_prefix_hit(self, request: Request, max_tokens: int) -> int:
        state = self._states.of(request)
        # A parked request has its own pages.
        if state.parked is not None:
            return 0
        return self._schedules.longest_prefix_hit(state, max_tokens)

    def _find_longest_cache_hit(
        self, block_hashes: Any, max_cache_hit_length: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Return vLLM's longest hit, limited by the request's schedule, or a longer packed one.

        vLLM passes only hashes. `_get_computed_blocks` has recorded the request that they are of.
        For packed tokens, the result has null blocks, and the request's state the packed ones.
        """
        request, max_tokens = self._looked_up, max_cache_hit_length
        if request is not None:
            max_tokens = self._longest_prefix_hit(request, max_cache_hit_length)
        found = self._vllm_find_longest_cache_hit(block_hashes, max_tokens, *args, **kwargs)
        packed_prefixes = self._step_builder.packed_prefixes
        if request is None or packed_prefixes is None:
            return found
        state = self._states.of(request)
        if not state.reuses_pages:
            return found
        hit = packed_prefixes.find(block_hashes, max_cache_hit_length)
        if hit is None:
            return found
        block_size = int(self._manager.block_size)
        num_packed = packed_prefixes.tokens(len(hit.packed)) // block_size - len(hit.leading)
        blocks = hit.leading + [self._manager.block_pool.null_block] * num_packed + hit.tail
        tokens = len(blocks) * block_size
        if tokens <= found[1]:
            return found
        state.packed_hit = hit.packed
        return (blocks,), tokens, *found[2:]

    def _get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Sequence[KVCacheBlock]],
        *args: Any,
        **kwargs: Any,
    ) -> int:
        """Return the number of blocks that all groups need together.

        If the pool has enough blocks, this includes a block from the pool for every destination.
        """
        needed = int(
            self._vllm_get_num_blocks_to_allocate(
                request_id, num_tokens, new_computed_blocks, *args, **kwargs
            )
        )
        if request_id in self._states.ids_without_packing and not self._lookaheads:
            return needed
        # Behind these tokens, vLLM allocates slots for drafts that a draft model will write.
        num_tokens = min(num_tokens, kwargs.get("num_tokens_main_model", num_tokens))
        step_builder, parked = self._step_builder, self._parked(request_id)
        if parked is not None:
            needed += self._parking.extra_blocks(parked)
        needed += sum(int(block.ref_cnt) == 0 for block in self._packed_hit(request_id))
        hit_blocks = new_computed_blocks[self._groups.compressed_index]
        tokens = num_tokens - self._probe_tokens(request_id)
        destinations = NO_DESTINATIONS
        if not kwargs.get("apply_admission_cap"):
            destinations = step_builder.destination_blocks(request_id, tokens, hit_blocks)
            if not step_builder.waits_after_pull(request_id):
                needed += destinations.must_be_fresh
        if self._in_allocate_slots and self._lookaheads:
            # Only inside `allocate_slots`: vLLM also calls this method for other prompts, which are
            # pulled or computed, and adds up the results.
            needed += self._reserved_blocks(request_id, tokens, needed, hit_blocks)
        if not destinations.may_be_fresh:
            return needed
        with_fresh = needed + destinations.may_be_fresh
        return with_fresh if step_builder.free_blocks_now() >= with_fresh else needed

    def _parked(self, request_id: str) -> RequestState | None:
        """Return the state of a parked request; None if the request is not parked."""
        state = self._states.get(request_id)
        return None if state is None or state.parked is None else state

    def _packed_hit(self, request_id: str) -> Sequence[KVCacheBlock]:
        state = self._states.get(request_id)
        return () if state is None else state.packed_hit

    def _allocate_new_computed_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        """Take the packed blocks of a hit from the pool's queue before anything is allocated."""
        self._manager.block_pool.touch(self._packed_hit(request_id))
        self._vllm_allocate_new_computed_blocks(request_id, *args, **kwargs)

    def _probe_tokens(self, request_id: str) -> int:
        state = self._states.get(request_id)
        return 0 if state is None else state.probe_tokens

    def _reserved_blocks(
        self, request_id: str, tokens: int, needed: int, hit_blocks: Sequence[KVCacheBlock]
    ) -> int:
        """Return the blocks that a request must leave in the pool for packing look-aheads.

        In a pipeline, several steps are scheduled before a look-ahead can return blocks. A waiting
        request must therefore also leave the blocks that running requests and its own later chunks
        take in these steps.
        """
        lookaheads, next_step = self._lookaheads, self._next_step
        is_running = self._states.by_id(request_id).request.status == RequestStatus.RUNNING
        if not (is_running or needed):
            # A pulled prompt has its blocks already and takes no more from the pool.
            return 0
        free_blocks = self._step_builder.free_blocks_now()
        hit_ids = {block.block_id for block in hit_blocks}
        reserved = lookaheads.reserved_blocks(free_blocks - needed, hit_ids)
        if is_running or not next_step.is_pipelined:
            return reserved
        reserved += next_step.blocks_for_running(lookaheads.request_ids)
        return reserved + next_step.blocks_after_admission(request_id, tokens)

    def _allocate_slots(self, *args: Any, delay_cache_blocks: bool = False, **kwargs: Any) -> Any:
        """Allocate slots. `delay_cache_blocks` means that the prompt is pulled from a server."""
        self._in_allocate_slots, self._is_pulling = True, delay_cache_blocks
        try:
            return self._vllm_allocate_slots(*args, delay_cache_blocks=delay_cache_blocks, **kwargs)
        finally:
            self._in_allocate_slots = self._is_pulling = False

    def _allocate_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        num_tokens_main_model: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Allocate the blocks of every group, and only then the destination blocks.

        A parked request first takes the blocks for its pages.
        """
        if (parked := self._parked(request_id)) is not None:
            self._parking.resume(parked)
        new_blocks = self._vllm_allocate_new_blocks(
            request_id, num_tokens, num_tokens_main_model, *args, **kwargs
        )
        if request_id not in self._states.ids_without_packing:
            if self._is_pulling:
                # The request is in no step yet, so there is nothing to observe or pack.
                self._step_builder.finalize_decision(self._states.by_id(request_id))
            else:
                self._step_builder.add(request_id, num_tokens_main_model)
        return new_blocks

    def _cache_blocks(
        self, request: Request, num_computed_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Cache a request's blocks, except those computed from a compressed context.

        This covers all groups. A window's blocks and a state depend on the context too, and would
        be wrong for another request with the same prefix.
        """
        state, cacheable = self._states.get(request.request_id), num_computed_tokens
        if state is not None and state.cacheable_tokens is not None:
            cacheable = min(cacheable, state.cacheable_tokens)
        boundary = int(request.shared_prefix_boundary)
        cached_blocks = int(self._manager.num_cached_block.get(request.request_id, 0))
        if cached_blocks * int(self._manager.block_size) < boundary <= cacheable:
            # vLLM keeps window blocks and states at one boundary, where another prompt's prefix
            # ends. The next boundary is where hits for this prompt end. One step may compute both,
            # and must then keep both.
            self._vllm_cache_blocks(request, boundary, *args, **kwargs)
            request.shared_prefix_boundary = max(boundary, self._last_hit_end(request))
        return self._vllm_cache_blocks(request, cacheable, *args, **kwargs)
