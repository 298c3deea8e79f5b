"""Look-aheads: prompts scored by their own first output tokens.

During a look-ahead, a prompt stays uncompressed in the pool. Without one, it would have been packed
when its prefill ended.

If a prompt's blocks are shared, packing it also needs blocks from the pool. These are reserved for
it when its prefill ends. Without a look-ahead, it would have taken them at that point.
"""

from collections.abc import Collection, Iterator

from vllm_kvcompress.engine.scheduling.request_state import RequestState

_NO_BLOCK_IDS: frozenset[int] = frozenset()


class LookAheads:
    """The active look-aheads of one scheduler, oldest first, and the workers' query slots.

    A look-ahead takes a slot when its request is admitted, and is active from the end of the
    prefill until the prompt is packed.

    Args:
        num_slots: maximum number of requests whose latest queries the workers store.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_free_slots = num_slots
        self._active: dict[str, RequestState] = {}
        # Upper bound on the reserved blocks. They are counted only if fewer blocks are free.
        self.max_reserved_blocks = 0

    def __len__(self) -> int:
        return len(self._active)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._active.values())

    @property
    def request_ids(self) -> Collection[str]:
        """Return the ids of the requests with an active look-ahead."""
        return self._active.keys()

    @property
    def has_free_slot(self) -> bool:
        """Return whether another request may have a look-ahead."""
        return self.num_free_slots > 0

    def take_slot(self, state: RequestState) -> None:
        """Take a query slot for an admitted request."""
        self.num_free_slots -= 1
        state.has_lookahead_slot = True

    def note_step(self, state: RequestState, tokens: int) -> None:
        """Note that a request takes part in the step that is being scheduled.

        Args:
            state: a request whose prefill has ended, with a look-ahead.
            tokens: tokens computed when the step ends.
        """
        state.lookahead_tokens, state.is_scheduled = tokens, True
        if state.request_id not in self._active:
            self._active[state.request_id] = state
            self.max_reserved_blocks += state.lookahead.max_kept_blocks

    def end(self, state: RequestState) -> None:
        """End a look-ahead whose prompt is packed for good after this step."""
        self._deactivate(state)
        state.current_schedule.lookahead = None

    def remove(self, state: RequestState) -> None:
        """Remove a request that ended or was preempted, and release its slot."""
        self._deactivate(state)
        self.release_slot(state)

    def _deactivate(self, state: RequestState) -> None:
        if self._active.pop(state.request_id, None) is not None:
            self.max_reserved_blocks -= state.lookahead.max_kept_blocks

    def release_slot(self, state: RequestState) -> None:
        """Release the query slot of a request, if it has one, for use from the next step on."""
        if state.has_lookahead_slot:
            state.has_lookahead_slot = False
            self.num_free_slots += 1

    def reserved_blocks(
        self, free_blocks: int, newly_shared: Collection[int] = _NO_BLOCK_IDS
    ) -> int:
        """Return the blocks to leave in the pool for packing the active look-aheads.

        Other requests may share blocks of a prompt, and packing cannot overwrite those blocks.

        Args:
            free_blocks: blocks available for allocation. If they cover the upper bound, nothing is
                counted and 0 is returned.
            newly_shared: ids of blocks that another request is about to share.
        """
        if free_blocks >= self.max_reserved_blocks:
            return 0
        return sum(reserved_for(state, newly_shared) for state in self._active.values())


def reserved_for(state: RequestState, newly_shared: Collection[int] = _NO_BLOCK_IDS) -> int:
    """Return the blocks that packing one look-ahead to its budget needs from the pool."""
    # It is packed after the step being scheduled, or after the next one that it takes part in.
    plan = state.budget_plan(state.lookahead_tokens + (not state.is_scheduled))
    if plan is None:
        return 0
    missing = plan.blocks - len(state.packed_blocks)
    # Shared blocks come first in a prompt, so counting from the end stops soonest.
    for block in reversed(state.unpacked_blocks(state.lookahead_tokens)):
        if missing <= 0:
            break
        missing -= block.ref_cnt == 1 and block.block_id not in newly_shared
    return max(missing, 0)
