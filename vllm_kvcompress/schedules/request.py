"""The schedules of one request, and the interface that they share."""

from dataclasses import dataclass, field
from typing import Protocol

from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.schedules.kv_footprint import KVFootprint, PlanAt
from vllm_kvcompress.schedules.lookahead import LookaheadSchedule
from vllm_kvcompress.schedules.outputs import OutputGroupSchedule, OutputSchedule
from vllm_kvcompress.settings.config import CompressionConfig


class Schedule(Protocol):
    """Interface of all schedules of a request."""

    @property
    def settings(self) -> CompressionConfig:
        """Return the settings of the request's method."""

    def plan(self, footprint: KVFootprint, tokens: int) -> PagePlan | None:
        """Return the page plan to apply after a step that ends with `tokens` computed, or None."""

    def step_limit(self, plan_at: PlanAt, computed: int, max_tokens: int) -> tuple[int, int]:
        """Return how many tokens the next step computes, and how many probe tokens follow them.

        Args:
            plan_at: returns the plan after a step that ends with this many tokens computed.
            computed: computed tokens of the request.
            max_tokens: maximum tokens of the step, the probe included.
        """


class PrefillSchedule(Schedule, Protocol):
    """The schedule of a prefill, at once or in pieces."""

    @property
    def in_pieces(self) -> bool:
        """Return whether the prompt is packed before its prefill ends."""

    @property
    def adds_groups(self) -> bool:
        """Return whether each packing adds groups in k4v3 to the packed ones."""

    @property
    def keeps_all_tokens(self) -> bool:
        """Return whether packing drops no token, so that none has to be scored."""

    @property
    def first_end(self) -> int:
        """Return how many tokens are computed by the first packing."""

    @property
    def max_blocks(self) -> int:
        """Return the maximum blocks of the prompt until its end is packed, if packed in place."""

    @property
    def blocks_at_end(self) -> int:
        """Return the blocks that the prompt holds when its prefill ends, if packed in place."""

    def before_lookahead(self) -> "PrefillSchedule | None":
        """Return the schedule of a prompt whose end a look-ahead packs; None if it packs all."""

    def longest_prefix_hit(self, max_tokens: int) -> int:
        """Return how many tokens, at most `max_tokens`, may come from the prefix cache."""


def lookahead_tokens_of(prefill: PrefillSchedule) -> int:
    """Return how many output tokens a prompt waits for before it is compressed; 0 for no wait.

    A prompt that keeps all its tokens needs no output tokens to score them.
    """
    return 0 if prefill.keeps_all_tokens else prefill.settings.resolved_lookahead


@dataclass(slots=True, kw_only=True)
class RequestSchedule:
    """The footprint of one request and the schedules that pack it.

    Args:
        footprint: pages and blocks that the request holds.
        prefill: the schedule until the prefill ends; None if it packs nothing.
        lookahead: the schedule from the end of the prefill until the prompt is packed; None without
            a look-ahead.
        output: the schedule of all later steps; None if they pack nothing.
        prefilled: whether the prefill has ended.
    """

    footprint: KVFootprint
    prefill: PrefillSchedule | None
    lookahead: LookaheadSchedule | None = None
    output: OutputSchedule | OutputGroupSchedule | None = None
    prefilled: bool = False
    _latest: tuple[object, int, int, int, PagePlan | None] | None = field(
        default=None, compare=False, repr=False
    )

    @property
    def current(self) -> Schedule | None:
        """Return the schedule that decides about the next step; None if nothing is left to pack."""
        return (self.lookahead or self.output) if self.prefilled else self.prefill

    @property
    def in_pieces(self) -> bool:
        """Return whether the prompt is packed before its prefill ends."""
        return self.prefill is not None and self.prefill.in_pieces

    @property
    def is_partly_packed(self) -> bool:
        """Return whether the prompt is in pieces, or some of it was packed before."""
        return self.in_pieces or self.footprint.pages > 0

    def plan(self, tokens: int) -> PagePlan | None:
        """Return the page plan to apply after a step that ends with `tokens` computed, or None.

        The result is cached, because a step asks twice: to count its blocks and to take them.
        """
        schedule, footprint = self.current, self.footprint
        if schedule is None:
            return None
        latest = self._latest
        if (
            latest is None
            or latest[0] is not schedule
            or latest[1:4] != (footprint.pages, footprint.first_block, tokens)
        ):
            plan = schedule.plan(footprint, tokens)
            latest = (schedule, footprint.pages, footprint.first_block, tokens, plan)
            self._latest = latest
        return latest[4]

    def step_limit(self, computed: int, max_tokens: int) -> tuple[int, int]:
        """Return `Schedule.step_limit` of the current schedule; no limit if there is none."""
        schedule = self.current
        if schedule is None:
            return max_tokens, 0
        return schedule.step_limit(self.plan, computed, max_tokens)

    def longest_prefix_hit(self, max_tokens: int) -> int:
        """Return how many tokens of the prompt, at most `max_tokens`, may come from the cache."""
        if self.prefill is not None:
            max_tokens = self.prefill.longest_prefix_hit(max_tokens)
        return (
            max_tokens if self.lookahead is None else self.lookahead.longest_prefix_hit(max_tokens)
        )
