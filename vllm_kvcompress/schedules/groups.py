"""Schedules that pack all tokens of a request in k4v3, and add pages as it grows.

Here, to pack tokens is to quantise them in groups of 64 (`kvcompress_kernels.k4v3`). No token is
dropped, and no group is quantised twice: each packing adds pages for the tokens since the last one.
So lengths alone decide everything, and nothing is scored.

The request's first block stays an ordinary block in 16 bits. It holds the attention sinks, whose
keys are far from all others and stretch the scales of their groups. Only whole pages are packed, so
a packed block holds the same tokens in all layers and is never written again.
"""

from dataclasses import dataclass
from typing import ClassVar

from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.schedules.base import PrefillSchedule
from vllm_kvcompress.schedules.kv_footprint import KVFootprint, PlanAt
from vllm_kvcompress.settings.config import CompressionConfig


def added_pages_plan(
    footprint: KVFootprint, tokens: int, page_tokens: int, recent_tokens: int
) -> PagePlan | None:
    """Return the plan that packs the unpacked tokens that fill whole pages, or None if none do.

    The rest of them stays in ordinary blocks.

    Args:
        footprint: footprint of the request.
        tokens: tokens computed so far.
        page_tokens: tokens in a packed page.
        recent_tokens: minimum of the last tokens that stay unpacked.
    """
    start = footprint.first_block * footprint.block_size
    pages = (tokens - start - recent_tokens) // page_tokens
    added = pages * page_tokens
    if pages <= 0:
        return None
    return PagePlan(
        num_layers=footprint.num_layers,
        tokens=added,
        block_size=footprint.block_size,
        window=0,
        budget=added,
        pages=footprint.pages + footprint.num_layers * pages,
        computed=start + added,
        packed_page_tokens=page_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSchedule(PrefillSchedule):
    """The schedule of a prompt that is packed in k4v3 with all its tokens.

    With an `interval`, boundaries lie at its multiples behind the first block and the blocks of the
    plan's `recent_tokens`, whatever chunks the scheduler makes. At each boundary, and when the
    prefill ends, the tokens that fill whole pages, or whole cells of `page_plan`, are packed,
    except the recent ones. Later tokens are computed from the quantised ones.

    Args:
        settings: settings of the method, with a budget that keeps every token.
        page_plan: tokens and pages of the entire prompt.
        interval: tokens between two boundaries; None to pack only when the prefill ends.
    """

    settings: CompressionConfig
    page_plan: PagePlan
    interval: int | None = None

    adds_groups: ClassVar[bool] = True
    keeps_all_tokens: ClassVar[bool] = True
    boundary_limit: ClassVar[None] = None
    """None: packing between pieces drops no token, so no page limit applies."""

    @property
    def leading_blocks(self) -> int:
        """Return the ordinary blocks before the packed tokens, which are never packed."""
        return self.page_plan.leading_blocks

    @property
    def in_pieces(self) -> bool:
        """Return whether the prompt is packed before its prefill ends."""
        return self.first_end < self.tokens

    @property
    def tokens(self) -> int:
        """Return the tokens of the entire prefill, S."""
        return self.page_plan.tokens

    @property
    def first_end(self) -> int:
        """Return the tokens computed when the first packing runs; at most the whole prompt."""
        if self.interval is None:
            return self.tokens
        intervals = -(-self.page_plan.page_tokens // self.interval)
        return min(self._start + intervals * self.interval, self.tokens)

    def longest_prefix_hit(self, max_tokens: int) -> int:
        """Return how many tokens may come from ordinary blocks of the prefix cache.

        Tokens after the first packing are computed from quantised ones. Blocks that this packing
        leaves unpacked must not be shared, because a later packing may overwrite them.
        """
        if not self.in_pieces:
            return max_tokens
        page_tokens = self.page_plan.page_tokens
        packed_tokens = (self.first_end - self._start) // page_tokens * page_tokens
        packed_end = self.page_plan.leading_tokens + packed_tokens
        return min(packed_end, self.first_end - 1, max_tokens)

    def next_end(self, computed: int) -> int:
        """Return where a chunk that starts after `computed` tokens must end at the latest."""
        if self.interval is None:
            return self.tokens
        intervals = max(computed - self._start, 0) // self.interval + 1
        return min(self._start + intervals * self.interval, self.tokens)

    def step_limit(
        self, plan_at: PlanAt, computed: int, max_tokens: int, unverified: int = 0
    ) -> tuple[int, int]:
        """Return the tokens of a chunk that starts after `computed` tokens, and 0 probe tokens."""
        if not self.in_pieces:
            return max_tokens, 0
        return min(self.next_end(computed) - computed, max_tokens), 0

    def before_lookahead(self) -> "GroupSchedule":
        """Return this schedule: no look-ahead packs the end of a prompt that keeps all tokens."""
        return self

    def plan(self, footprint: KVFootprint, tokens: int) -> PagePlan | None:
        """Return the page plan to apply after a step that ends with `tokens` computed, or None.

        The plan for the prompt's end has the tokens and pages of the entire prompt. Any other plan
        has the tokens that it adds.
        """
        if tokens >= self.tokens:
            return self.page_plan
        if self.interval is None or (tokens - self._start) % self.interval:
            return None
        recent_tokens = self.page_plan.recent_tokens
        return added_pages_plan(footprint, tokens, self.page_plan.page_tokens, recent_tokens)

    @property
    def max_blocks(self) -> int:
        """Return the maximum blocks of the prompt until its end is packed, if packed in place."""
        if self.interval is None:
            return self.blocks_at_end
        # A page has the tokens of `ratio` blocks. After so many boundaries, the number of unpacked
        # blocks repeats with more packed pages, so the last boundaries hold the most blocks.
        ratio = -(-self.page_plan.page_tokens // self.page_plan.block_size)
        last = max(self.tokens - 1 - self._start, 0) // self.interval
        ends = (
            self._start + index * self.interval
            for index in range(max(last - ratio, 0) + 1, last + 1)
        )
        return max([self.blocks_at_end, *map(self._blocks_at, ends)])

    @property
    def blocks_at_end(self) -> int:
        """Return the blocks that the prompt holds when its prefill ends, if packed in place."""
        return self._blocks_at(self.tokens)

    def _blocks_at(self, tokens: int) -> int:
        """Return the blocks held when `tokens` are computed, before they are packed."""
        pages, page_tokens = 0, self.page_plan.page_tokens
        if self.interval is not None:
            computed = max(tokens - 1 - self._start, 0)
            pages = computed // self.interval * self.interval // page_tokens
        return pages - (-(tokens - pages * page_tokens) // self.page_plan.block_size)

    @property
    def _start(self) -> int:
        """Return where the first interval starts."""
        plan = self.page_plan
        recent_blocks = -(-plan.recent_tokens // plan.block_size)
        return plan.leading_tokens + recent_blocks * plan.block_size
