"""Seam `coordination`: what compression asks of all groups of a model's layers at once.

vLLM keeps a manager of blocks for each group, and a coordinator that asks one after the other.
Layers with a sliding window, and those that keep a state, are groups of their own, which stay
vLLM's. But their blocks come from the same pool, and what they compute after a compressed prompt
follows from what that left: so how many blocks there are, and what may be shared with other
requests, is decided over all groups.

The coordinator's methods are wrapped, on the one instance of a scheduler.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SlidingWindowManager
from vllm.v1.request import Request, RequestStatus

from vllm_kvcompress.engine.scheduling.kv_cache import CompressedManager
from vllm_kvcompress.errors import SeamError

# The managers of other groups that may stand beside ours.
_KNOWN = (SlidingWindowManager, MambaManager)


class Coordination:
    """Stands between one scheduler's `KVCacheManager` and its coordinator.

    Raises:
        SeamError: no manager is ours, or there are others than those of sliding windows and states.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        coordinator: Any = cache.coordinator
        managers = coordinator.single_type_managers
        ours = [manager for manager in managers if isinstance(manager, CompressedManager)]
        others = [manager for manager in managers if type(manager) in _KNOWN]
        if len(ours) != 1 or len(ours) + len(others) != len(managers):
            names = [type(manager).__name__ for manager in managers]
            raise SeamError(
                "compression needs one KV cache group managed by CompressedManager, and none beside"
                f" it but those of sliding windows and states; got {names}"
            )
        self.manager: CompressedManager = ours[0]
        self._group = managers.index(ours[0])
        self._others = others
        self._looked_up: Request | None = None
        self._lookup = cache.get_computed_blocks
        self._slots = cache.allocate_slots
        self._allocates = self._pulling = False
        self._longest_hit = coordinator.find_longest_cache_hit
        self._count = coordinator.get_num_blocks_to_allocate
        self._allocate = coordinator.allocate_new_blocks
        self._cache_blocks = coordinator.cache_blocks
        wrapped: Any = cache
        wrapped.get_computed_blocks = self._looking_up
        wrapped.allocate_slots = self._allocating_slots
        coordinator.find_longest_cache_hit = self._hit
        coordinator.get_num_blocks_to_allocate = self._counting
        coordinator.allocate_new_blocks = self._allocating
        coordinator.cache_blocks = self._caching

    def other_blocks_held(self, request_id: str) -> int:
        """Blocks that the layers which are not compressed hold of a request."""
        held = (each.req_to_blocks.get(request_id, ()) for each in self._others)
        return sum(not block.is_null for blocks in held for block in blocks)

    @contextmanager
    def looking_up(self, request: Request) -> Iterator[None]:
        """While vLLM looks up the prefix of a request that waits: this one."""
        self.manager.planner.admissions.consider(request)
        self._looked_up = request
        try:
            yield
        finally:
            self._looked_up = None

    def _looking_up(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        with self.looking_up(request):
            found = self._lookup(request, *args, **kwargs)
        if not self._others or len(found) < 3 or found[2]:
            return found
        # Of a window, and of states, vLLM keeps what stands before the last boundary that a hit can
        # end at, and one more that it is told of. A compressed prompt's hits end earlier.
        return *found[:2], self._last_hit(request)

    def _last_hit(self, request: Request) -> int:
        """Where the longest hit of another request for the same prompt ends, at a block; or 0."""
        longest = self.manager.planner.longest_hit(request, int(request.num_tokens) - 1)
        return longest - longest % int(self.manager.block_size)

    def _hit(self, block_hashes: Any, max_cache_hit_length: int, *args: Any, **kwargs: Any) -> Any:
        """The longest hit of one request, cut by `Planner.longest_hit`.

        The coordinator is told of hashes alone; whose they are is known from the look-up.
        """
        if self._looked_up is not None:
            max_cache_hit_length = self.manager.planner.longest_hit(
                self._looked_up, max_cache_hit_length
            )
        return self._longest_hit(block_hashes, max_cache_hit_length, *args, **kwargs)

    def _counting(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Sequence[KVCacheBlock]],
        *args: Any,
        **kwargs: Any,
    ) -> int:
        """Blocks that all groups need, with fresh destinations if the pool has them too."""
        needed = int(self._count(request_id, num_tokens, new_computed_blocks, *args, **kwargs))
        own = new_computed_blocks[self._group]
        if self._allocates:
            # vLLM counts other prompts that are pulled or computed, too, and adds all of them up
            needed += self._promised(request_id, num_tokens, needed, own)
        if kwargs.get("apply_admission_cap"):
            return needed
        tokens = self.manager.probes.without(request_id, num_tokens)
        with_fresh = needed + self.manager.destination_blocks(request_id, tokens, own).others
        free = int(self.manager.block_pool.get_num_free_blocks())
        return with_fresh if free >= with_fresh else needed

    def _promised(
        self, request_id: str, tokens: int, needed: int, touched: Sequence[KVCacheBlock]
    ) -> int:
        """Blocks that a request must leave in the pool, for look-aheads that end."""
        lookaheads = self.manager.lookaheads
        runs = self.manager.planner.request(request_id).status == RequestStatus.RUNNING
        if not lookaheads or not (runs or needed):
            # one that was pulled has its blocks, and takes none from anybody
            return 0
        free = int(self.manager.block_pool.get_num_free_blocks())
        promised = lookaheads.promised(free - needed, {block.block_id for block in touched})
        if runs:
            return promised
        own = self.manager.probes.without(request_id, tokens)
        return promised + lookaheads.withheld(request_id, own)

    def missing(self, request_id: str, tokens: int, steps: int = 1) -> int:
        """Blocks that a running request takes at most, of all groups, to have `tokens` computed.

        A state is written where a step ends, so that a step takes one block for it, however many
        blocks its tokens fill.

        Args:
            steps: that the request takes part in until then.
        """
        missing = 0
        for manager in (self.manager, *self._others):
            held = len(manager.req_to_blocks.get(request_id, ()))
            taken = max(-(-tokens // int(manager.block_size)) - held, 0)
            missing += min(taken, steps) if isinstance(manager, MambaManager) else taken
        return missing

    def shared_hit(self, request: Request) -> int:
        """Blocks of a waiting prompt that others hold, which it would take no room for."""
        if not request.block_hashes:
            return 0
        with self.looking_up(request):
            found = self._hit(request.block_hashes, int(request.num_tokens) - 1)
        return sum(block.ref_cnt > 0 for block in found[0][self._group])

    def _allocating_slots(self, *args: Any, delay_cache_blocks: bool = False, **kwargs: Any) -> Any:
        """While a prompt is pulled from another server, its blocks are not to be cached yet."""
        self._allocates, self._pulling = True, delay_cache_blocks
        try:
            return self._slots(*args, delay_cache_blocks=delay_cache_blocks, **kwargs)
        finally:
            self._allocates = self._pulling = False

    def _allocating(
        self,
        request_id: str,
        num_tokens: int,
        num_tokens_main_model: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Every group takes its blocks before destinations are taken from what is left."""
        new = self._allocate(request_id, num_tokens, num_tokens_main_model, *args, **kwargs)
        if self._pulling:
            # it takes part in no step: nothing is there yet that could be watched or packed
            planner = self.manager.planner
            request = planner.request(request_id)
            self.manager.tally.admitted(request, planner.decide(request), slotless=False)
        else:
            self.manager.plan_step(request_id, num_tokens_main_model)
        return new

    def _caching(
        self, request: Request, num_computed_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Register no block, of any group, that was computed against a compressed context.

        A window's blocks, and states, follow from it too: beside another request's own prefix they
        would be another prompt's.
        """
        tokens = self.manager.cacheable(request.request_id, num_computed_tokens)
        told = int(request.shared_prefix_boundary)
        cached = int(self.manager.num_cached_block.get(request.request_id, 0))
        if cached * int(self.manager.block_size) < told <= tokens:
            # What stands before the place where another prompt parts from this one is kept, and
            # vLLM knows of one such place alone: the next is where hits for this prompt end. A step
            # that computes both, as with windows, has to keep both.
            self._cache_blocks(request, told, *args, **kwargs)
            request.shared_prefix_boundary = max(told, self._last_hit(request))
        return self._cache_blocks(request, tokens, *args, **kwargs)
