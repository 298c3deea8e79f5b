"""The schedule of a look-ahead: pack the prompt once its first output tokens have scored it."""

from dataclasses import dataclass, replace

from vllm_kvcompress.methods.page_plan import (
    PagePlan,
    leading_tokens,
    page_plan,
    pages_kept,
    raise_for_protected,
)
from vllm_kvcompress.methods.spans import Spans, count_before
from vllm_kvcompress.schedules.base import Schedule
from vllm_kvcompress.schedules.kv_footprint import KVFootprint, PlanAt
from vllm_kvcompress.settings.config import CompressionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadSchedule(Schedule):
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
        draft_layers: layers of a draft model, which keep every token.
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
    draft_layers: int = 0

    @property
    def due(self) -> int:
        """Return the number of computed tokens at which the request is packed."""
        return self.prompt + self.settings.resolved_lookahead

    @property
    def _leading(self) -> int:
        """Return the leading tokens of a page plan. They depend on the prompt's budget alone.

        So whenever the prompt is packed, as many stay as were reserved when it was admitted.
        """
        budget = self.settings.budget_spec(self.num_layers, self.prompt)
        return leading_tokens(budget, self.block_size, self.page_tokens)

    @property
    def leading_blocks(self) -> int:
        """Return the ordinary blocks before the packed tokens, which are never packed."""
        return self._leading // self.block_size

    def output_tokens(self, tokens: int) -> int:
        """Return how many of the request's first `tokens` tokens are output tokens."""
        return tokens - self.prompt

    def longest_prefix_hit(self, max_tokens: int) -> int:
        """Return how many tokens may come from the prefix cache.

        The tokens left to compute give the queries that the method needs at the end of the prefill,
        and all window queries when the request is due.
        """
        min_queries = max(self.settings.method.min_window, 1)
        window = self.settings.method.lookahead_window
        return min(self.prefilled - min_queries, self.due - window, max_tokens)

    def step_limit(
        self, plan_at: PlanAt, computed: int, max_tokens: int, unverified: int = 0
    ) -> tuple[int, int]:
        """Return the tokens of a step that starts after `computed` tokens, and 0 probe tokens.

        Tokens computed after the request is due read the packed cache, so no draft token may be
        among them. The number of accepted drafts is not known before a step ends, so the step in
        which the request falls due has no drafts. With async scheduling, a step is scheduled before
        the outputs of the step before it are known. If accepting all drafts of that step would make
        the next token due, the request waits for its outputs.
        """
        if computed - unverified >= self.due:
            return max_tokens, 0
        before_due = self.due - 1 - computed
        return min(max_tokens, max(before_due, 0 if unverified else 1)), 0

    def keeps_queries(self, tokens: int) -> bool:
        """Return whether a chunk that ends with `tokens` computed leaves queries that may score."""
        return tokens > self.prefilled - self.settings.method.lookahead_window

    def window(self, tokens: int) -> int:
        """Return the number of queries that score once `tokens` are computed.

        It is w when the request is due. Before that, it is limited to the queries that exist, and a
        method that scores with prompt queries as well as the output's uses no more of them than
        when the request is due.
        """
        window = self.settings.method.lookahead_window
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
        if window < self.settings.method.min_window:
            return None
        layers, size, output_tokens = self.num_layers, self.block_size, self.output_tokens(tokens)
        full_share = self.settings.protection.full_share
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
                recent_tokens=self.settings.recent_tokens,
                leading=self._leading,
                draft_layers=self.draft_layers,
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
                draft_layers=self.draft_layers,
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

    @property
    def max_kept_blocks(self) -> int:
        """Return an upper bound on the destination blocks of packing a prompt to its budget."""
        max_tokens = self.settings.budget_spec(self.num_layers, self.prompt).budget
        if protected := count_before(self.spans, self.prompt):
            # A budget too small for the protected tokens is raised to hold other tokens as well.
            unprotected = self.settings.method.lookahead_window + self.block_size
            max_tokens = protected + max(unprotected, max_tokens)
        max_tokens += self.settings.resolved_lookahead
        max_pages = -(-max_tokens // self.block_size) + 2
        draft_pages = max(-(-self.due // self.block_size), max_pages)
        layers, drafts = self.num_layers, self.draft_layers
        return -(-(layers * max_pages + drafts * draft_pages) // (layers + drafts))

    def blocks_when_due(self, blocks_at_end: int) -> int:
        """Return the blocks that prompt and output hold when they are packed, if packed in place.

        Args:
            blocks_at_end: blocks that the prompt holds when its prefill ends.
        """
        return blocks_at_end + -(-self.due // self.block_size) + self.prefilled // -self.block_size
