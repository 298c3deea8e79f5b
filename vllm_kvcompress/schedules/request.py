"""The schedules of one request."""

from dataclasses import dataclass, field

from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.schedules.base import PrefillSchedule, Schedule
from vllm_kvcompress.schedules.kv_footprint import KVFootprint
from vllm_kvcompress.schedules.lookahead import LookaheadSchedule
from vllm_kvcompress.schedules.outputs import OutputGroupSchedule, OutputSchedule


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
    def reads_page_tables(self) -> bool:
        """Return whether packing reads the prompt through page tables, not its own block ids.

        It does for a prompt in pieces, and for one that was packed before.
        """
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

    def step_limit(self, computed: int, max_tokens: int, unverified: int = 0) -> tuple[int, int]:
        """Return `Schedule.step_limit` of the current schedule; no limit if there is none."""
        schedule = self.current
        if schedule is None:
            return max_tokens, 0
        return schedule.step_limit(self.plan, computed, max_tokens, unverified)

    def longest_prefix_hit(self, max_tokens: int) -> int:
        """Return how many tokens of the prompt, at most `max_tokens`, may come from the cache."""
        if self.prefill is not None:
            max_tokens = self.prefill.longest_prefix_hit(max_tokens)
        return (
            max_tokens if self.lookahead is None else self.lookahead.longest_prefix_hit(max_tokens)
        )
