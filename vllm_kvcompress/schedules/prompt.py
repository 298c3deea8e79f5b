"""The schedule of a prompt without pieces: pack it when its prefill ends."""

from dataclasses import dataclass

from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.schedules.base import PrefillSchedule
from vllm_kvcompress.schedules.kv_footprint import KVFootprint
from vllm_kvcompress.settings.config import CompressionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSchedule(PrefillSchedule):
    """The schedule of a prompt that stays uncompressed until its prefill ends.

    Args:
        settings: settings of the method.
        page_plan: the plan to apply at the end.
    """

    settings: CompressionConfig
    page_plan: PagePlan

    @property
    def leading_blocks(self) -> int:
        """Return the ordinary blocks before the packed tokens, which are never packed."""
        return self.page_plan.leading_blocks

    def plan(self, footprint: KVFootprint, tokens: int) -> PagePlan | None:
        """Return the page plan to apply after a step that ends with `tokens` computed, or None."""
        return self.page_plan if tokens >= self.page_plan.tokens else None

    @property
    def max_blocks(self) -> int:
        """Return the maximum blocks of the prompt until its end is packed, if packed in place."""
        return -(-self.page_plan.tokens // self.page_plan.block_size)

    @property
    def blocks_at_end(self) -> int:
        """Return the blocks that the prompt holds when its prefill ends, if packed in place."""
        return self.max_blocks

    @property
    def first_end(self) -> int:
        """Return how many tokens are computed by the first packing."""
        return self.page_plan.tokens

    @property
    def keeps_all_tokens(self) -> bool:
        """Return whether packing drops no token, so that none has to be scored."""
        return self.page_plan.keeps_all

    def before_lookahead(self) -> None:
        """Return None: a look-ahead packs the prompt, and nothing is packed before it."""

    def longest_prefix_hit(self, max_tokens: int) -> int:
        """Return how many tokens may come from the prefix cache.

        The queries that the method reads must be computed: those of its window, or of all tokens
        for a method that sums the attention of all queries. Keys and values can come from the
        prefix cache.
        """
        if self.keeps_all_tokens:
            return max_tokens
        reads = self.settings.method.reads
        if Reads.COLUMN_SUMS in reads:
            return 0
        window = self.settings.resolved_window if Reads.WINDOW in reads else 0
        return min(self.page_plan.tokens - window, max_tokens)
