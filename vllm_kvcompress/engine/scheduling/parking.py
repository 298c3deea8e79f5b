"""Parks preempted requests: their pages wait in host memory, and the requests resume from them.

Only a request that needs no more packing is parked: its pages, page counts and tokens suffice to
go on. vLLM frees its blocks as in any preemption. Before vLLM takes blocks for it again, it asks
the prefix cache for computed tokens, and `coordination` reports all of the request's but the last.
"""

from vllm.v1.request import Request

from vllm_kvcompress.engine.messages.step import ParkPages, ResumePages
from vllm_kvcompress.engine.scheduling.compression_stats import CompressionStats
from vllm_kvcompress.engine.scheduling.kv_cache import CompressedManager
from vllm_kvcompress.engine.scheduling.request_state import HostCopy, RequestState, RequestStates
from vllm_kvcompress.planning.memory import HOST_SLOT_BLOCKS


class Parking:
    """The slots of host memory, and the copies that the step being scheduled makes.

    Args:
        num_slots: slots of host memory. Each holds the pages of HOST_SLOT_BLOCKS blocks.
        slot_bytes: bytes of a slot.
        manager: vLLM's manager of the compressed layers' blocks.
        states: the scheduler's requests.
        stats: counts for the metrics.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        manager: CompressedManager,
        states: RequestStates,
        stats: CompressionStats,
    ) -> None:
        self._manager, self._states, self._stats = manager, states, stats
        self._block_size, self._pool = int(manager.block_size), manager.block_pool
        self._free_slots, self._slot_bytes = list(range(num_slots)), slot_bytes
        self.is_enabled = num_slots > 0
        """Whether requests that are preempted now are parked."""
        # Slots whose pages the step being scheduled copies back.
        self._resumed_slots: list[int] = []
        self.copies: list[ParkPages | ResumePages] = []
        """Copies of the step being scheduled."""

    @property
    def num_free_slots(self) -> int:
        """Return the number of free slots."""
        return len(self._free_slots)

    def park(self, request: Request) -> None:
        """Let the next step copy a request's pages to host memory, if it can resume from them.

        Args:
            request: a running request that is being preempted. vLLM has not freed its blocks yet.
        """
        if not self.is_enabled or request.request_id not in self._states.ids_without_packing:
            return
        state = self._states.of(request)
        # A request with an entry would have been packed in this step. Prompt log-probabilities
        # need the logits of all prompt tokens, and streamed input may replace tokens.
        skips_cache = request.resumable or request.get_skip_reading_prefix_cache()
        if not state.packed_blocks or state.entry is not None or skips_cache:
            return
        footprint = state.current_schedule.footprint
        leading, first = footprint.leading_blocks, footprint.first_block
        end = -(-int(request.num_computed_tokens) // self._block_size)
        blocks = state.blocks[:leading] + state.blocks[first:end]
        pages = footprint.pages + footprint.num_layers * len(blocks)
        needed = -(-pages // (HOST_SLOT_BLOCKS * footprint.num_layers))
        if needed > len(self._free_slots):
            self._stats.unparked_requests += 1
            return
        slots = tuple(self._free_slots.pop() for _ in range(needed))
        state.parked = HostCopy(slots, len(state.packed_blocks))
        self._count(1, needed)
        self.copies.append(
            ParkPages(
                request_id=state.request_id,
                packed_pages=footprint.pages,
                max_layer_pages=footprint.max_layer_pages,
                blocks=tuple(block.block_id for block in blocks),
                slots=slots,
            )
        )

    def computed_tokens(self, request: Request) -> int:
        """Return how many tokens of a parked request need not be computed again.

        These are all but the last, whose logits give the next token.
        """
        return int(request.num_tokens) - 1

    def extra_blocks(self, state: RequestState) -> int:
        """Return how many more blocks a parked request takes than its tokens fill."""
        assert state.parked is not None, state.request_id
        footprint = state.current_schedule.footprint
        return state.parked.packed_blocks + footprint.leading_blocks - footprint.first_block

    def resume(self, state: RequestState) -> None:
        """Take the blocks of a parked request, and let the step copy its pages into them."""
        assert state.parked is not None, state.request_id
        copy, footprint = state.parked, state.current_schedule.footprint
        request_id = state.request_id
        tokens = self.computed_tokens(state.request)
        leading, first = footprint.leading_blocks, footprint.first_block
        num_ordinary = leading + -(-tokens // self._block_size) - first
        taken = self._pool.get_new_blocks(copy.packed_blocks + num_ordinary)
        state.packed_blocks, ordinary = taken[: copy.packed_blocks], taken[copy.packed_blocks :]
        nulls = [self._pool.null_block] * (first - leading)
        state.blocks = ordinary[:leading] + nulls + ordinary[leading:]
        self._manager.req_to_blocks[request_id] = state.blocks
        # The workers park before they resume, so a request parked in this step gets other slots.
        self._resumed_slots += copy.slots
        self._count(-1, -len(copy.slots))
        state.parked = None
        self._states.ids_without_packing.add(request_id)
        # vLLM would cache blocks from the first one on, and some of them are null.
        self._states.limit_caching(state, 0)
        self._stats.resumed_requests += 1
        self._stats.resumed_tokens += tokens
        self.copies.append(
            ResumePages(
                request_id=request_id,
                packed_pages=footprint.pages,
                destination=tuple(block.block_id for block in state.packed_blocks),
                first_block=first,
                leading_blocks=leading,
                blocks=tuple(block.block_id for block in ordinary),
                slots=copy.slots,
            )
        )

    def drop(self, state: RequestState) -> None:
        """Free the slots of a request; do nothing if it is not parked."""
        if state.parked is not None:
            self._free_slots += state.parked.slots
            self._count(-1, -len(state.parked.slots))
            state.parked = None

    def drop_all(self) -> None:
        """Free the slots of all parked requests, which then start again."""
        for state in [state for state in self._states if state.parked is not None]:
            self.drop(state)
            self._states.pop(state.request_id)

    def _count(self, requests: int, slots: int) -> None:
        self._stats.parked_requests += requests
        self._stats.parked_bytes += slots * self._slot_bytes

    def take_copies(self) -> tuple[tuple[ParkPages, ...], tuple[ResumePages, ...]]:
        """Return and forget the copies of this step: to host memory, and then from it."""
        park = tuple(copy for copy in self.copies if isinstance(copy, ParkPages))
        resume = tuple(copy for copy in self.copies if isinstance(copy, ResumePages))
        self.copies.clear()
        self._free_slots += self._resumed_slots
        self._resumed_slots.clear()
        return park, resume
