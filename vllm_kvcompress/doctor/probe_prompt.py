"""Prompt lengths and block counts with which the doctor can verify compression."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.spans import Spans
from vllm_kvcompress.schedules.kv_footprint import KVFootprint
from vllm_kvcompress.schedules.lookahead import LookaheadSchedule
from vllm_kvcompress.schedules.outputs import OutputSchedule
from vllm_kvcompress.schedules.pieces import PiecewiseSchedule, piece_schedule
from vllm_kvcompress.schedules.prompt import PromptSchedule
from vllm_kvcompress.schedules.request import lookahead_tokens_of
from vllm_kvcompress.settings.config import CompressionConfig

MIN_OUTPUT_TOKENS = 24
"""Minimum output tokens over which the doctor counts blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Settings and sizes that determine whether and how a prompt is compressed.

    Args:
        settings: compression settings of the request.
        layers: layers that share the page pool, L.
        block_size: tokens in a block.
        max_model_len: maximum tokens of a prompt plus its output.
        request_args: extra arguments with which a request selects `settings`; empty if they are the
            default.
        spans: protected spans of the prompt.
        page_tokens: tokens in a packed page; None if it holds the tokens of an ordinary page.
    """

    settings: CompressionConfig
    layers: int
    block_size: int
    max_model_len: int
    request_args: Mapping[str, Any] = field(default_factory=dict)
    spans: Spans = ()
    page_tokens: int | None = None

    @property
    def output_tokens(self) -> int:
        """Output tokens to request: enough to finish the look-ahead and to reach a repacking."""
        lookahead = self.settings.resolved_lookahead
        min_tokens = max(MIN_OUTPUT_TOKENS, self.settings.min_output) + lookahead
        if self.settings.decode.budget is None:
            return min_tokens
        # One interval, up to one block for alignment, and a step that reads the packed pages.
        until_repacked = self.settings.decode.interval + self.block_size + 2
        return max(min_tokens, lookahead + until_repacked)

    def plan(self, tokens: int) -> PagePlan | None:
        """Return the page plan of a prompt of `tokens` tokens after its look-ahead.

        Returns:
            None if the prompt stays uncompressed.
        """
        plan = self.settings.page_plan(
            self.layers, tokens, self.block_size, self.spans, self.page_tokens
        )
        if plan is None:
            return None
        pieces = self._piece_schedule(tokens)
        prefill = pieces or PromptSchedule(settings=self.settings, page_plan=plan)
        if not lookahead_tokens_of(prefill):
            return plan
        lookahead = LookaheadSchedule(
            settings=self.settings,
            num_layers=self.layers,
            block_size=self.block_size,
            prompt=tokens,
            max_tokens=tokens + self.output_tokens,
            prefilled=tokens,
            spans=self.spans,
            page_tokens=self.page_tokens,
        )
        return lookahead.plan_at(self._nothing_packed(plan), lookahead.due)

    def lookahead(self, plan: PagePlan) -> int:
        """Return the output tokens that a prompt waits for before `plan` is applied."""
        return self.settings.resolved_lookahead if plan.scored_by_output else 0

    def _piece_schedule(self, prompt: int) -> PiecewiseSchedule | None:
        return piece_schedule(
            self.settings, self.layers, self.block_size, prompt, self.spans, self.page_tokens
        )

    def _nothing_packed(self, plan: PagePlan) -> KVFootprint:
        return KVFootprint(
            num_layers=self.layers,
            block_size=self.block_size,
            leading_blocks=plan.leading_blocks,
        )

    def shortest(self, at_least: int = 0) -> int:
        """Return the shortest checked prompt length whose compression frees blocks.

        Lengths end in the middle of a block. Prefers a length at which layers keep at least a page
        each on average, if `max_model_len` allows it.

        Args:
            at_least: lower bound in tokens.

        Raises:
            ConfigError: no length up to `max_model_len` frees a block.
        """
        block, first_compressed = self.block_size, 0
        min_tokens = max(self.settings.resolved_min_prompt, 8 * block, at_least)
        max_tokens = self.max_model_len - self.output_tokens
        for tokens in range(-(-min_tokens // block) * block + block // 2, max_tokens + 1, block):
            plan = self.plan(tokens)
            if plan is None or plan.freed_blocks <= 0:
                continue
            first_compressed = first_compressed or tokens
            if plan.pages >= self.layers:
                return tokens
        if first_compressed:
            return first_compressed
        raise ConfigError(
            f"no prompt of {min_tokens} to {max_tokens} tokens frees a block of {block} tokens with"
            f" --kv-budget {self.settings.budget} and --kv-min-prompt {self.settings.min_prompt};"
            " lower one of them, or raise --max-model-len"
        )

    def blocks_held(self, plan: PagePlan, computed: int) -> int:
        """Return the blocks that a request holds once `computed` of its tokens are computed."""
        if computed < plan.tokens:
            prompt_tokens = plan.tokens - self.lookahead(plan)
            footprint = self._before_packing(plan, prompt_tokens, computed)
        else:
            footprint, _ = self._after_packing(plan, computed)
        unpacked_blocks = -(-computed // self.block_size) - footprint.first_block
        return footprint.leading_blocks - (-footprint.pages // self.layers) + unpacked_blocks

    def _before_packing(self, prompt_plan: PagePlan, prompt: int, computed: int) -> KVFootprint:
        """Return the footprint of `computed` tokens before the end of the prompt is packed.

        A look-ahead delays packing the end of the prompt, but not the pieces before it.
        """
        footprint = self._nothing_packed(prompt_plan)
        schedule = self._piece_schedule(prompt)
        if schedule is None:
            return footprint
        pieces, tokens = schedule.before_lookahead(), 0
        while (tokens := pieces.next_end(tokens)) <= computed and tokens < prompt:
            plan = pieces.plan(footprint, tokens)
            if plan is not None:
                footprint.pack(plan, plan.packed_end // self.block_size)
        return footprint

    def times_repacked(self, plan: PagePlan) -> int:
        """Return how often the output is packed again."""
        return self._after_packing(plan, plan.tokens + self.output_tokens)[1]

    def _after_packing(self, plan: PagePlan, computed: int) -> tuple[KVFootprint, int]:
        """Return the footprint of `computed` tokens, and how often their output was packed."""
        footprint, times = self._nothing_packed(plan), 0
        footprint.pack(plan, plan.full_blocks)
        if self.settings.decode.budget is None:
            return footprint, 0
        prompt = plan.tokens - self.lookahead(plan)
        last = prompt + self.output_tokens
        schedule = OutputSchedule(
            settings=self.settings, prefilled=prompt, max_tokens=last, spans=self.spans
        )
        for blocks in range(plan.full_blocks + 1, computed // self.block_size + 1):
            output_plan = schedule.plan(footprint, blocks * self.block_size)
            if output_plan is not None:
                footprint.pack(output_plan, blocks, freeze=True)
                times += 1
        return footprint, times
