"""When a request is packed, and to how many pages, computed from lengths alone.

A request has one footprint and up to three schedules in sequence: `PromptSchedule`,
`PieceSchedule` or `GroupPieceSchedule` for its prefill, `LookaheadSchedule` for a prompt scored by
its first output tokens, and `OutputSchedule` or `OutputGroupSchedule` for its output. Each schedule
returns the plan, if any, to apply after a step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

from vllm_kvcompress.methods.page_plan import (
    PagePlan,
    page_plan,
    pages_kept,
    raise_for_protected,
    round_up_to_blocks,
)
from vllm_kvcompress.methods.presets import min_window
from vllm_kvcompress.methods.spans import Spans, count_before
from vllm_kvcompress.planning.group_pieces import GroupPieceSchedule, added_pages_plan
from vllm_kvcompress.planning.kv_footprint import KVFootprint
from vllm_kvcompress.planning.pieces import PiecewiseSchedule
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.method_of import lookahead_window, method_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSchedule:
    """The schedule of a prompt that stays uncompressed until its prefill ends.

    Args:
        settings: settings of the method.
        page_plan: the plan to apply at the end.
    """

    settings: CompressionConfig
    page_plan: PagePlan

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


PrefillSchedule = PromptSchedule | PiecewiseSchedule
"""The schedule of a prefill, at once or in pieces."""


def keeps_all_tokens(prefill: PrefillSchedule) -> bool:
    """Return whether compressing the prompt drops no token, so that none has to be scored."""
    if isinstance(prefill, GroupPieceSchedule):
        return True
    return isinstance(prefill, PromptSchedule) and prefill.page_plan.keeps_all


def lookahead_of(prefill: PrefillSchedule) -> int:
    """Return how many output tokens a prompt waits for before it is compressed; 0 for no wait.

    A prompt that keeps all its tokens needs no output tokens to score them.
    """
    return 0 if keeps_all_tokens(prefill) else prefill.settings.resolved_lookahead


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadSchedule:
    """The schedule of a prompt that stays uncompressed until its first output tokens score it.

    A prompt in pieces stays as its prefill left it. When the prompt is packed, the output tokens so
    far are kept in addition to its budget. The request then holds as much as if the prompt had been
    packed when its prefill ended.

    Args:
        settings: settings of the method.
        num_layers: layers that share the page pool, L.
        block_size: tokens in a block.
        prompt: tokens of the prompt, S.
        max_tokens: maximum tokens of the prompt and its output.
        prefilled: tokens when the prefill ends, including the output tokens of a preempted request.
        cached: tokens found in the prefix cache. Their queries are not available.
        spans: protected spans of the prompt.
        page_tokens: tokens in a packed page; None if it holds those of an ordinary page.
    """

    settings: CompressionConfig
    num_layers: int
    block_size: int
    prompt: int
    max_tokens: int
    prefilled: int
    cached: int = 0
    spans: Spans = ()
    page_tokens: int | None = None

    @property
    def due(self) -> int:
        """Return the number of computed tokens at which the request is packed."""
        return self.prompt + self.settings.resolved_lookahead

    def output_tokens(self, tokens: int) -> int:
        """Return how many of the request's first `tokens` tokens are output tokens."""
        return tokens - self.prompt

    @property
    def longest_hit(self) -> int:
        """Return the maximum number of tokens that may come from the prefix cache.

        The tokens left to compute give the queries that the method needs at the end of the prefill,
        and all window queries when the request is due.
        """
        min_queries = max(min_window(method_of(self.settings).reads), 1)
        return min(self.prefilled - min_queries, self.due - lookahead_window(self.settings))

    def next_end(self, computed: int) -> int | None:
        """Return the latest end of a step that starts after `computed` tokens; None for no limit.

        Tokens computed after the request is due read the packed cache, so no draft token may be
        among them. The number of accepted drafts is not known before a step ends, so the step in
        which the request falls due has no drafts.
        """
        return max(self.due - 1, computed + 1) if computed < self.due else None

    def keeps_queries(self, tokens: int) -> bool:
        """Return whether a chunk that ends with `tokens` computed leaves queries that may score."""
        return tokens > self.prefilled - lookahead_window(self.settings)

    def window(self, tokens: int) -> int:
        """Return the number of queries that score once `tokens` are computed.

        It is w when the request is due. Before that, it is limited to the queries that exist, and a
        method that scores with prompt queries as well as the output's uses no more of them than
        when the request is due.
        """
        window = lookahead_window(self.settings)
        if self.settings.parts.prompt_window:
            window -= max(self.due - tokens, 0)
        return min(window, tokens - self.cached)

    def plan(self, footprint: KVFootprint, tokens: int) -> PagePlan | None:
        """Return the page plan to apply after a step that ends with `tokens` computed, or None.

        The step samples the next token. Another step must follow, or nothing reads the packed
        cache.
        """
        if tokens < self.due or tokens + 1 >= self.max_tokens:
            return None
        return self.plan_at(footprint, tokens)

    def plan_at(self, footprint: KVFootprint, tokens: int, *, min_kept: int = 0) -> PagePlan | None:
        """Return the page plan for packing the request once `tokens` are computed, or None.

        None means that everything would be kept, or that the method cannot score with so few
        queries (`window`). `tokens` may be any number after the prefill.

        Args:
            min_kept: minimum of the mean number of prompt tokens kept per layer.
        """
        window = self.window(tokens)
        if self.spans:
            # Protected tokens that were packed before must lie before the window.
            window = min(window, tokens - footprint.intact_from)
        if window < min_window(method_of(self.settings).reads):
            return None
        layers, size, output_tokens = self.num_layers, self.block_size, self.output_tokens(tokens)
        full_share = self.settings.full_share
        prompt_budget = self.settings.budget_spec(layers, self.prompt)
        total = None if prompt_budget.total is None else max(prompt_budget.total, layers * min_kept)
        budget = replace(
            prompt_budget,
            tokens=tokens,
            window=window,
            budget=max(prompt_budget.budget, min_kept) + output_tokens,
            total=None if total is None else total + layers * output_tokens,
        )
        share_budget = prompt_budget.budget + output_tokens
        if not footprint.pages:
            plan = page_plan(
                budget,
                size,
                self.spans,
                full_share=full_share,
                share_budget=share_budget,
                page_tokens=self.page_tokens,
            )
        else:
            blocks, tail = divmod(tokens, size)
            plan = PagePlan(
                num_layers=layers,
                tokens=footprint.max_layer_tokens(blocks * size) + tail,
                block_size=size,
                window=budget.window,
                budget=budget.budget,
                pages=min(pages_kept(budget, tail, size), footprint.pages_at(blocks)),
                total=budget.total,
                spans=self.spans,
                computed=tokens,
            )
            plan = raise_for_protected(
                plan,
                footprint.pages_at(blocks),
                full_share=full_share,
                share_budget=share_budget,
            )
        if plan is None:
            return None
        scored_by_output = output_tokens > 0 and tokens >= self.due
        # The prompt's last queries are mostly the chat template's, which makes layer budgets worse.
        output_only = scored_by_output and output_tokens < window
        return replace(
            plan,
            scored_by_output=scored_by_output,
            allocator_window=output_tokens if output_only else None,
        )

    def early_plan(self, footprint: KVFootprint, tokens: int) -> PagePlan | None:
        """Return the plan for packing a prompt early, to half of it, and again later; or None.

        None in the same cases as `plan_at`, if the prompt was packed before, and if packed pages
        have a format of their own, which packing cannot read again.
        """
        if footprint.pages or self.page_tokens is not None:
            return None
        return self.plan_at(footprint, tokens, min_kept=self.prompt // 2)

    def blocks_when_due(self, blocks_at_end: int) -> int:
        """Return the blocks that prompt and output hold when they are packed, if packed in place.

        Args:
            blocks_at_end: blocks that the prompt holds when its prefill ends.
        """
        return blocks_at_end + -(-self.due // self.block_size) + self.prefilled // -self.block_size


@dataclass(slots=True, kw_only=True)
class OutputSchedule:
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
        budget, size = self.settings.decode_budget, footprint.block_size
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
        if partial or (blocks - footprint.first_block) * size < settings.decode_interval:
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
        if (end - footprint.first_block) * size < settings.decode_interval:
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
        if packs or (block_is_full and num_queries + block_size > self.settings.decode_interval):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputGroupSchedule:
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

    @property
    def scored(self) -> bool:
        """Return False: no query scores the tokens, since all are kept."""
        return False

    @property
    def interval(self) -> int:
        """Return `decode_interval`, rounded up to whole packed pages."""
        return -(-self.settings.decode_interval // self.page_tokens) * self.page_tokens

    def plan(self, footprint: KVFootprint, tokens: int) -> PagePlan | None:
        """Return the page plan to apply after a step that ends with `tokens` computed, or None.

        The step must fill a block, hold an interval of unpacked tokens, and not be the last one.
        The plan packs as many of these tokens as fill whole pages.
        """
        size = footprint.block_size
        unpacked = tokens - footprint.first_block * size
        if tokens % size or unpacked < self.interval or tokens + 1 >= self.max_tokens:
            return None
        return added_pages_plan(footprint, tokens, self.page_tokens)

    def may_pack(self, footprint: KVFootprint) -> bool:
        """Return whether the longest possible output is packed before its last step."""
        end = (self.max_tokens - 2) // footprint.block_size
        return (end - footprint.first_block) * footprint.block_size >= self.interval

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
            yield packed + filled - footprint.first_block
            if (plan := self.plan(footprint, filled * size)) is not None:
                packed += (plan.pages - footprint.pages) // plan.num_layers
                footprint.pack(plan, plan.packed_end // size)


@dataclass(slots=True, kw_only=True)
class RequestSchedule:
    """The footprint of one request and the schedules that pack it.

    Args:
        prefill: used until the prefill ends; None if nothing is packed by then.
        lookahead: used from then on until it has packed the prompt; None without a look-ahead.
        output: used from then on; None if the output stays as it is.
        prefilled: whether the prefill has ended.
    """

    footprint: KVFootprint
    prefill: PrefillSchedule | None
    lookahead: LookaheadSchedule | None = None
    output: OutputSchedule | OutputGroupSchedule | None = None
    prefilled: bool = False

    def plan(self, tokens: int) -> PagePlan | None:
        """Return the page plan to apply after a step that ends with `tokens` computed, or None."""
        schedule = (self.lookahead or self.output) if self.prefilled else self.prefill
        return None if schedule is None else schedule.plan(self.footprint, tokens)
