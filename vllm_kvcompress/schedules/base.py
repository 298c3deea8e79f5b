"""The interface of all schedules of a request."""

from abc import ABC, abstractmethod

from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.schedules.kv_footprint import KVFootprint, PlanAt
from vllm_kvcompress.settings.config import CompressionConfig


class Schedule(ABC):
    """When a request is packed, and to how many pages."""

    __slots__ = ()
    settings: CompressionConfig
    """Settings of the request's method."""

    @property
    def leading_blocks(self) -> int:
        """Return the ordinary blocks before the packed tokens, which are never packed."""
        return 0

    @abstractmethod
    def plan(self, footprint: KVFootprint, tokens: int) -> PagePlan | None:
        """Return the page plan to apply after a step that ends with `tokens` computed, or None."""

    def step_limit(
        self, plan_at: PlanAt, computed: int, max_tokens: int, unverified: int = 0
    ) -> tuple[int, int]:
        """Return how many tokens the next step computes, and how many probe tokens follow them.

        By default a step may end anywhere, and no probe tokens follow.

        Args:
            plan_at: returns the plan after a step that ends with this many tokens computed.
            computed: computed tokens of the request.
            max_tokens: maximum tokens of the step, the probe included.
            unverified: of `computed`, draft tokens in steps in flight, which may be rejected.
        """
        return max_tokens, 0


class PrefillSchedule(Schedule):
    """The schedule of a prefill, at once or in pieces."""

    __slots__ = ()

    @property
    def in_pieces(self) -> bool:
        """Return whether the prompt is packed before its prefill ends."""
        return False

    @property
    def adds_groups(self) -> bool:
        """Return whether each packing adds groups in k4v3 to the packed ones."""
        return False

    @property
    @abstractmethod
    def keeps_all_tokens(self) -> bool:
        """Return whether packing drops no token, so that none has to be scored."""

    @property
    @abstractmethod
    def first_end(self) -> int:
        """Return how many tokens are computed by the first packing."""

    @property
    @abstractmethod
    def max_blocks(self) -> int:
        """Return the maximum blocks of the prompt until its end is packed, if packed in place."""

    @property
    @abstractmethod
    def blocks_at_end(self) -> int:
        """Return the blocks that the prompt holds when its prefill ends, if packed in place."""

    @abstractmethod
    def before_lookahead(self) -> "PrefillSchedule | None":
        """Return the schedule of a prompt whose end a look-ahead packs; None if it packs all."""

    @abstractmethod
    def longest_prefix_hit(self, max_tokens: int) -> int:
        """Return how many tokens, at most `max_tokens`, may come from the prefix cache."""
