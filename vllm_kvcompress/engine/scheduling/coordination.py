"""VllmHook `coordination`: decisions about the blocks of all layer groups of a model.

vLLM keeps one block manager per layer group, and a coordinator that calls them in turn. Layers with
a sliding window and layers that keep a state form groups of their own, which vLLM manages. Their
blocks come from the same pool as ours, and everything they compute after a compressed prompt
depends on its kept tokens. So the number of blocks, and which of them may be shared with other
requests, must be decided for all groups together.

We wrap methods of the scheduler's one coordinator and of the `KVCacheManager` that owns it.
"""

from collections.abc import Callable, Sequence, Set
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SlidingWindowManager
from vllm.v1.request import Request, RequestStatus

from vllm_kvcompress.engine.scheduling.destinations import NO_DESTINATIONS
from vllm_kvcompress.engine.scheduling.kv_cache import CompressedManager
from vllm_kvcompress.errors import VllmHookError

# Managers of the uncompressed layer groups that we support.
_OTHER_MANAGERS = (SlidingWindowManager, MambaManager)


class Coordination:
    """Wraps one scheduler's `KVCacheManager` and its coordinator.

    Raises:
        VllmHookError: there is no `CompressedManager`, more than one, or a manager that is neither
            ours nor for sliding windows or states.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        coordinator: Any = cache.coordinator
        managers = coordinator.single_type_managers
        compressed = [manager for manager in managers if isinstance(manager, CompressedManager)]
        others = [manager for manager in managers if type(manager) in _OTHER_MANAGERS]
        if len(compressed) != 1 or len(compressed) + len(others) != len(managers):
            names = [type(manager).__name__ for manager in managers]
            raise VllmHookError(
                "compression needs exactly one KV cache group managed by CompressedManager, and"
                f" only sliding-window and state groups besides, got {names}"
            )
        self.manager: CompressedManager = compressed[0]
        self._group_index = managers.index(compressed[0])
        self._other_managers = others
        # The waiting request whose prefix vLLM is looking up.
        self._looked_up: Request | None = None
        # Whether vLLM is inside `allocate_slots`, and whether that is for a prompt that will be
        # pulled from another server.
        self._in_allocate_slots = self._is_pulling = False
        self._vllm_get_computed_blocks = cache.get_computed_blocks
        self._vllm_allocate_slots = cache.allocate_slots
        self._vllm_find_longest_cache_hit = coordinator.find_longest_cache_hit
        self._vllm_get_num_blocks_to_allocate = coordinator.get_num_blocks_to_allocate
        self._vllm_allocate_new_blocks = coordinator.allocate_new_blocks
        self._vllm_cache_blocks = coordinator.cache_blocks
        wrapped: Any = cache
        wrapped.get_computed_blocks = self._get_computed_blocks
        coordinator.find_longest_cache_hit = self._find_longest_cache_hit
        self._cache, self._coordinator = wrapped, coordinator
        self._set_allocation_wrapped(wrapped=True)
        self._set_caching_wrapped(wrapped=True)

    def begin_step(self, request_ids: Set[str]) -> None:
        """Unwrap vLLM's methods if this step has nothing to plan; wrap them again if it has.

        Args:
            request_ids: the scheduler's requests, including those that wait.
        """
        manager = self.manager
        is_idle = manager.planner.nothing_to_pack == request_ids and not manager.lookaheads
        if is_idle == self._wraps_allocation:
            self._set_allocation_wrapped(wrapped=not is_idle)
        # A step that may plan a packing needs the wrapper: packed tokens must not be cached.
        limits_caching = not is_idle or bool(self._other_managers) or manager.limits_caching
        if limits_caching != self._wraps_caching:
            self._set_caching_wrapped(wrapped=limits_caching)

    def _set_allocation_wrapped(self, *, wrapped: bool) -> None:
        self._wraps_allocation = wrapped
        cache, coordinator = self._cache, self._coordinator
        manager: Any = self.manager
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

    def other_layer_blocks(self, request_id: str) -> int:
        """Return the number of blocks that a request holds in the uncompressed layers."""
        held = (manager.req_to_blocks.get(request_id, ()) for manager in self._other_managers)
        return sum(not block.is_null for blocks in held for block in blocks)

    def _look_up(
        self, request: Request, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function that looks up a request's prefix, and return its result."""
        self.manager.planner.admissions.consider(request)
        self._looked_up = request
        try:
            return function(*args, **kwargs)
        finally:
            self._looked_up = None

    def _get_computed_blocks(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        found = self._look_up(request, self._vllm_get_computed_blocks, request, *args, **kwargs)
        if not self._other_managers or len(found) < 3 or found[2]:
            return found
        # The third value is a boundary at which vLLM keeps window blocks and states for later hits,
        # as it does at the last possible end of a hit. Hits of a compressed prompt end earlier.
        return *found[:2], self._last_hit_end(request)

    def _last_hit_end(self, request: Request) -> int:
        """Return the block boundary where another request's longest hit for this prompt ends."""
        longest = self.manager.planner.longest_hit(request, int(request.num_tokens) - 1)
        return longest - longest % int(self.manager.block_size)

    def _find_longest_cache_hit(
        self, block_hashes: Any, max_cache_hit_length: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Return vLLM's longest hit, limited by `Planner.longest_hit`.

        vLLM passes only hashes. `_look_up` has recorded the request that they belong to.
        """
        if self._looked_up is not None:
            max_cache_hit_length = self.manager.planner.longest_hit(
                self._looked_up, max_cache_hit_length
            )
        return self._vllm_find_longest_cache_hit(
            block_hashes, max_cache_hit_length, *args, **kwargs
        )

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
        manager = self.manager
        if request_id in manager.planner.nothing_to_pack and not manager.lookaheads:
            return int(
                self._vllm_get_num_blocks_to_allocate(
                    request_id, num_tokens, new_computed_blocks, *args, **kwargs
                )
            )
        needed = int(
            self._vllm_get_num_blocks_to_allocate(
                request_id, num_tokens, new_computed_blocks, *args, **kwargs
            )
        )
        hit_blocks = new_computed_blocks[self._group_index]
        destinations = NO_DESTINATIONS
        if not kwargs.get("apply_admission_cap"):
            tokens = manager.probes.subtract(request_id, num_tokens)
            destinations = manager.destination_blocks(request_id, tokens, hit_blocks)
            if not manager.planner.waits_pulled(request_id):
                needed += destinations.must_be_fresh
        if self._in_allocate_slots:
            # Only inside `allocate_slots`: vLLM also calls this method for other prompts, which are
            # pulled or computed, and adds up the results.
            needed += self._reserved_blocks(request_id, num_tokens, needed, hit_blocks)
        if not destinations.may_be_fresh:
            return needed
        with_fresh = needed + destinations.may_be_fresh
        free_blocks = int(manager.block_pool.get_num_free_blocks())
        return with_fresh if free_blocks >= with_fresh else needed

    def _reserved_blocks(
        self, request_id: str, num_tokens: int, needed: int, hit_blocks: Sequence[KVCacheBlock]
    ) -> int:
        """Return the blocks that a request must leave in the pool for packing look-aheads."""
        lookaheads = self.manager.lookaheads
        if not lookaheads:
            return 0
        request = self.manager.planner.request(request_id)
        is_running = request.status == RequestStatus.RUNNING
        if not (is_running or needed):
            # A pulled prompt has its blocks already and takes no more from the pool.
            return 0
        free_blocks = int(self.manager.block_pool.get_num_free_blocks())
        hit_ids = {block.block_id for block in hit_blocks}
        reserved = lookaheads.reserved_blocks(free_blocks - needed, hit_ids)
        if is_running:
            return reserved
        tokens = self.manager.probes.subtract(request_id, num_tokens)
        return reserved + lookaheads.pipeline_blocks(request_id, tokens)

    def missing_blocks(self, request_id: str, num_tokens: int, num_steps: int = 1) -> int:
        """Return the maximum number of blocks that a running request still takes in all groups.

        A state is written at the end of a step, so a step takes at most one block for it, however
        many tokens it computes.

        Args:
            request_id: the running request.
            num_tokens: computed tokens to reach.
            num_steps: steps of the request until then.
        """
        missing = 0
        for manager in (self.manager, *self._other_managers):
            held = len(manager.req_to_blocks.get(request_id, ()))
            needed = max(-(-num_tokens // int(manager.block_size)) - held, 0)
            missing += min(needed, num_steps) if isinstance(manager, MambaManager) else needed
        return missing

    def shared_prefix_blocks(self, request: Request) -> int:
        """Return how many blocks of a waiting prompt's prefix are held by running requests."""
        if not request.block_hashes:
            return 0
        found = self._look_up(
            request,
            self._find_longest_cache_hit,
            request.block_hashes,
            int(request.num_tokens) - 1,
        )
        return sum(block.ref_cnt > 0 for block in found[0][self._group_index])

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
        """Allocate the blocks of every group, and only then the destination blocks."""
        new_blocks = self._vllm_allocate_new_blocks(
            request_id, num_tokens, num_tokens_main_model, *args, **kwargs
        )
        if request_id in self.manager.planner.nothing_to_pack:
            return new_blocks
        if self._is_pulling:
            # The request is in no step yet, so there is nothing to observe or pack.
            planner = self.manager.planner
            request = planner.request(request_id)
            self.manager.compression_stats.admitted(
                request, planner.admit_pulled(request), slotless=False
            )
        else:
            self.manager.plan_step(request_id, num_tokens_main_model)
        return new_blocks

    def _cache_blocks(
        self, request: Request, num_computed_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Cache a request's blocks, except those computed from a compressed context.

        This covers all groups. A window's blocks and a state depend on the context too, and would
        be wrong for another request with the same prefix.
        """
        cacheable = self.manager.cacheable_tokens(request.request_id, num_computed_tokens)
        boundary = int(request.shared_prefix_boundary)
        cached_blocks = int(self.manager.num_cached_block.get(request.request_id, 0))
        if cached_blocks * int(self.manager.block_size) < boundary <= cacheable:
            # vLLM keeps window blocks and states at one boundary, where another prompt's prefix
            # ends. The next boundary is where hits for this prompt end. One step may compute both,
            # and must then keep both.
            self._vllm_cache_blocks(request, boundary, *args, **kwargs)
            request.shared_prefix_boundary = max(boundary, self._last_hit_end(request))
        return self._vllm_cache_blocks(request, cacheable, *args, **kwargs)
