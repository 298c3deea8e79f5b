"""The schedules of an output: pack the request again while it decodes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import ClassVar

from vllm_kvcompress.methods.page_plan import PagePlan, round_up_to_blocks
from vllm_kvcompress.methods.spans import Spans, count_before
from vllm_kvcompress.schedules.base import Schedule
from vllm_kvcompress.schedules.groups import added_pages_plan
from vllm_kvcompress.schedules.kv_footprint import KVFootprint
from vllm_kvcompress.settings.config import CompressionConfig


@dataclass(slots=True, kw_only=True)
class OutputSchedule(Schedule):
    """The schedule that bounds a request's KV cache while its output is generated.

    Args:
        settings: settings of the method, with `decode_budget`.
        prefilled: tokens when the prefill ended. The queries of later tokens are kept.
        max_tokens: maximum tokens of the prompt and its output.
        summed_tokens: tokens whose attention the workers have summed, for a method that ranks by
            the sum over all queries; None for other methods.
        spans: protected spans of the prompt.
    """

    settings: CompressionConfig
    prefilled: int
    max_tokens: int
    summed_tokens: int | None = None
    spans: Spans = ()

    @property
    def scored(self) -> bool:
        """Return True: the latest queries score the tokens."""
        return True

    def cap(self, footprint: KVFootprint) -> int:
        """Return how many pages, over all layers, are held once the output is packed again, P."""
        budget, size = self.settings.decode.budget, footprint.block_size
        assert budget is not None
        layers, protected = footprint.num_layers, count_before(self.spans, self.prefilled)
        # Every layer needs the pages of its window and of the protected tokens, at least one.
        floor = max(-(-(self.settings.resolved_decode_window + protected) // size), 1)
        budget_pages = layers * budget // size
        extra_pages = int(protected > 0 and budget_pages < layers * floor)
        if size > 1:
            budget_pages = round_up_to_blocks(budget_pages, layers)
        return max(footprint.pages, budget_pages, layers * (floor + extra_pages))

    def plan(self, footprint: KVFootprint, tokens: int) -> PagePlan | None:
        """Return the page plan to apply after a step that ends with `tokens` computed, or None.

        Four conditions must hold: the step fills a block; it ends at least `decode_interval` tokens
        after the last packing and a window after the prefill; another step follows and reads the
        packed cache; and the request holds more pages than its cap.
        """
        size, settings, layers = footprint.block_size, self.settings, footprint.num_layers
        blocks, partial = divmod(tokens, size)
        window = settings.resolved_decode_window
        if partial or (blocks - footprint.first_block) * size < settings.decode.interval:
            return None
        # The step samples the next token. Another step must follow to read the packed cache.
        if tokens - self.prefilled < window or tokens + 1 >= self.max_tokens:
            return None
        cap = self.cap(footprint)
        if footprint.pages_at(blocks) <= cap:
            return None
        return PagePlan(
            num_layers=layers,
            tokens=footprint.max_layer_tokens(tokens),
            block_size=size,
            window=window,
            budget=max(cap * size // layers, window + 1),
            pages=cap,
            total=cap * size,
            spans=self.spans,
            computed=tokens,
        )

    def may_pack(self, footprint: KVFootprint) -> bool:
        """Return whether the longest possible output exceeds the cap before its last step."""
        size, settings = footprint.block_size, self.settings
        end = (self.max_tokens - 2) // size
        if (end - footprint.first_block) * size < settings.decode.interval:
            return False
        if end * size - self.prefilled < max(settings.resolved_decode_window, 1):
            return False
        return footprint.pages_at(end) > self.cap(footprint)

    def advance_sums(self, tokens: int, block_size: int, *, packs: bool) -> int:
        """Return the number of queries to sum after a step that ends with `tokens` computed.

        These queries count as summed from then on.

        Args:
            packs: whether the request is packed after that step. All queries must then score the
                tokens before any is dropped.
        """
        if self.summed_tokens is None:
            return 0
        num_queries = tokens - self.summed_tokens
        # Queries are kept for one interval, and sums are stored per block once it is full.
        block_is_full = tokens % block_size == 0
        if packs or (block_is_full and num_queries + block_size > self.settings.decode.interval):
            self.summed_tokens = tokens
            return num_queries
        return 0

    def max_blocks(self, footprint: KVFootprint, *, packed: int, tokens: int) -> int:
        """Return the maximum blocks that the request holds until `tokens` of its tokens are cached.

        Args:
            footprint: footprint of the request when its prefill has ended; not modified.
            packed: blocks that its prompt was packed into, 0 if it was not packed.
        """
        size, max_blocks, footprint = footprint.block_size, 0, replace(footprint)
        for blocks in range(self.prefilled // size, tokens // size + 1):
            max_blocks = max(max_blocks, packed + blocks - footprint.first_block)
            in_output = blocks * size > self.prefilled
            plan = self.plan(footprint, blocks * size) if in_output else None
            if plan is not None:
                packed = plan.blocks
                footprint.pack(plan, blocks, freeze=True)
        return max(max_blocks, packed + -(-tokens // size) - footprint.first_block)

    def max_cached_tokens(self, footprint: KVFootprint, *, packed: int, blocks: int) -> int:
        """Return the tokens that the request can cache before it needs more than `blocks` blocks.

        This does not count on packing during decoding.

        Args:
            footprint, packed: as in `max_blocks`.
        """
        return (blocks - packed + footprint.first_block) * footprint.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputGroupSchedule(Schedule):
    """The schedule that packs a request's tokens in k4v3 while its output is generated.

    No token is dropped, and no group is quantised twice: each packing adds pages for the tokens
    since the last one.

    Args:
        settings: settings of the method, which pack outputs (`CompressionConfig.packs_outputs`).
        max_tokens: maximum tokens of the prompt and its output.
        page_tokens: tokens in a packed page.
    """

    settings: CompressionConfig
    max_tokens: int
    page_tokens: int

    summed_tokens: ClassVar[None] = None

    @property
    def scored(self) -> bool:
        """Return False: no query scores the tokens, since all are kept."""
        return False

    @property
    def interval(self) -> int:
        """Return the tokens between two packings, a multiple of a packed page's."""
        return self.settings.output_interval(self.page_tokens)

    def plan(self, footprint: KVFootprint, tokens: int) -> PagePlan | None:
        """Return the page plan to apply after a step that ends with `tokens` computed, or None.

        The step must fill a block and hold an interval of unpacked tokens before the recent ones.
        The plan packs as many of them as fill whole pages. After the last step, only later requests
        can read the pages.
        """
        size, recent = footprint.block_size, self.settings.recent_tokens
        unpacked = tokens - footprint.first_block * size
        if tokens % size or unpacked < self.interval + recent:
            return None
        if tokens + 1 >= self.max_tokens and not self.settings.reuses_pages:
            return None
        return added_pages_plan(footprint, tokens, self.page_tokens, recent)

    def advance_sums(self, tokens: int, block_size: int, *, packs: bool) -> int:
        """Return 0: no attention is summed."""
        return 0

    def max_blocks(self, footprint: KVFootprint, *, packed: int, tokens: int) -> int:
        """Return the maximum blocks that the request holds until `tokens` of its tokens are cached.

        Args:
            footprint: footprint of the request when its prefill has ended; not modified.
            packed: blocks that its prompt was packed into, 0 if it was not packed.
        """
        blocks = -(-tokens // footprint.block_size)
        return max(self._held_blocks(footprint, packed, blocks))

    def max_cached_tokens(self, footprint: KVFootprint, *, packed: int, blocks: int) -> int:
        """Return the tokens that the request can cache before it needs more than `blocks` blocks.

        Args:
            footprint, packed: as in `max_blocks`.
        """
        size = footprint.block_size
        held = self._held_blocks(footprint, packed, -(-self.max_tokens // size))
        fitting = sum(1 for _ in takewhile(lambda count: count <= blocks, held))
        return (footprint.first_block + max(fitting - 1, 0)) * size

    def _held_blocks(self, footprint: KVFootprint, packed: int, blocks: int) -> Iterator[int]:
        """Yield the blocks held with the first unpacked block and each further one, up to `blocks`.

        Blocks are counted before the step that fills the last one packs it.
        """
        size, footprint = footprint.block_size, replace(footprint)
        for filled in range(footprint.first_block, blocks + 1):
            yield packed + footprint.leading_blocks + filled - footprint.first_block
            if (plan := self.plan(footprint, filled * size)) is not None:
                packed += (plan.pages - footprint.pages) // plan.num_layers
                footprint.pack(plan, plan.packed_end // size)
