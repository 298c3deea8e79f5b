"""How the engine packs one request, and the blocks that the request holds.

Computed from lengths alone with the engine's own schedules and page plans, so the blocks equal the
engine's. ``kvcompress plan`` prints the result, and ``kvcompress doctor`` compares an engine to it.
"""

from dataclasses import dataclass
from functools import cached_property

from vllm_kvcompress.methods.page_plan import PagePlan, mostly_protected
from vllm_kvcompress.methods.spans import Spans
from vllm_kvcompress.planning.packed_pages import mean_layer_tokens
from vllm_kvcompress.schedules.base import PrefillSchedule
from vllm_kvcompress.schedules.kv_footprint import KVFootprint
from vllm_kvcompress.schedules.lookahead import LookaheadSchedule
from vllm_kvcompress.schedules.outputs import OutputGroupSchedule, OutputSchedule
from vllm_kvcompress.schedules.pieces import PiecewiseSchedule, piece_schedule
from vllm_kvcompress.schedules.prompt import PromptSchedule
from vllm_kvcompress.schedules.request import lookahead_tokens_of
from vllm_kvcompress.settings.config import CompressionConfig

_ON_REQUEST = "only requests that choose a method are compressed"


@dataclass(frozen=True, kw_only=True)
class PlannedRequest:
    """One request under some settings, and how the engine packs it.

    Args:
        settings: settings of the request; not enabled if its prompt stays uncompressed by choice.
        num_layers: layers that share the page pool, L.
        block_size: tokens in a block.
        page_tokens: tokens in a packed page; None if it holds the tokens of an ordinary page.
        prompt: tokens of the prompt.
        output: maximum output tokens.
        spans: protected spans of the prompt.
        draft_layers: layers of a draft model, which keep every token.
    """

    settings: CompressionConfig
    num_layers: int
    block_size: int
    page_tokens: int | None
    prompt: int
    output: int
    spans: Spans = ()
    draft_layers: int = 0

    @property
    def cached(self) -> int:
        """Return the tokens in the KV cache when the output ends. The last token is not cached."""
        return self.prompt + self.output - 1

    @cached_property
    def pieces(self) -> PiecewiseSchedule | None:
        """Return the schedule of the prompt in pieces; None if nothing is packed before its end."""
        if not self.settings.enabled or (self.settings.reuses_pages and self._is_too_short):
            return None
        return piece_schedule(
            self.settings,
            self.num_layers,
            self.block_size,
            self.prompt,
            self.spans,
            self.page_tokens,
        )

    @cached_property
    def prefill(self) -> PrefillSchedule | None:
        """Return the schedule that packs the prompt, a look-ahead aside; None if nothing does."""
        if self.pieces is not None or self._prompt_plan is None:
            return self.pieces
        return PromptSchedule(settings=self.settings, page_plan=self._prompt_plan)

    @cached_property
    def lookahead(self) -> LookaheadSchedule | None:
        """Return the schedule of the look-ahead that compression waits for; None without one."""
        if self.left_whole is not None or self._prompt_plan is None or not self._awaited_tokens:
            return None
        return LookaheadSchedule(
            settings=self.settings,
            num_layers=self.num_layers,
            block_size=self.block_size,
            prompt=self.prompt,
            max_tokens=self.prompt + self.output,
            prefilled=self.prompt,
            spans=self.spans,
            page_tokens=self.page_tokens,
            draft_layers=self.draft_layers,
        )

    @cached_property
    def output_schedule(self) -> OutputSchedule | OutputGroupSchedule | None:
        """Return the schedule that packs the output; None if its cache grows."""
        settings, max_tokens = self.settings, self.prompt + self.output
        if settings.packs_outputs and self.page_tokens is not None:
            return OutputGroupSchedule(
                settings=settings, max_tokens=max_tokens, page_tokens=self.page_tokens
            )
        if settings.decode.budget is None or not settings.enabled:
            return None
        return OutputSchedule(
            settings=settings, prefilled=self.prompt, max_tokens=max_tokens, spans=self.spans
        )

    @cached_property
    def plan(self) -> PagePlan | None:
        """Return the page plan of the prompt, with the output tokens of its look-ahead.

        None if the prompt is not compressed.
        """
        if self.left_whole is not None:
            return None
        if self.lookahead is None:
            return self._prompt_plan
        return self.lookahead.plan_at(self._footprint(0), self.lookahead.due)

    @cached_property
    def left_whole(self) -> str | None:
        """Return why the prompt is not compressed; None if it is."""
        settings, awaited = self.settings, self._awaited_tokens
        if not settings.enabled:
            return _ON_REQUEST
        if self.prefill is not None and self.prefill.in_pieces:
            return None
        if self.prompt < settings.resolved_min_prompt:
            return f"it is shorter than --kv-min-prompt {settings.resolved_min_prompt}"
        if self.output < settings.resolved_min_output:
            return f"its output is shorter than --kv-min-output {settings.resolved_min_output}"
        if self.output < awaited + 2 and not settings.reuses_pages:
            return f"its output ends within the look-ahead of {awaited} tokens"
        if self._prompt_plan is None and mostly_protected(self.spans, self.prompt):
            return "more than half of it is protected"
        if self._prompt_plan is None:
            return "compressing it to this budget would free no block"
        return None

    @property
    def lookahead_tokens(self) -> int:
        """Return the output tokens that are packed with the prompt."""
        return 0 if self.plan is None else self.plan.tokens - self.prompt

    @property
    def kept_tokens(self) -> float:
        """Return the prompt tokens that a layer keeps, mean over layers."""
        if self.plan is None:
            return self.prompt
        return mean_layer_tokens(self.plan) - self.lookahead_tokens

    @property
    def first_packed_at(self) -> int:
        """Return the tokens that may enter the prefix cache before the request is packed.

        They are all tokens computed before the first packing, or all tokens if nothing is packed. A
        prompt is packed into fresh blocks, an output into the request's own last blocks, which
        leave the cache.
        """
        if self.pieces is not None:
            return self.pieces.first_end
        if self.plan is not None:
            return self.plan.packed_end
        if self.output_schedule is None:
            return self.cached
        footprint = self._footprint(int(not self.output_schedule.scored))
        for tokens in range(self.prompt + 1, self.cached + 1):
            if (packing := self.output_schedule.plan(footprint, tokens)) is not None:
                return max(packing.packed_end - packing.blocks * self.block_size, 0)
        return self.cached

    @property
    def end_blocks(self) -> int:
        """Return the maximum blocks of compressed layers while the output is written."""
        plan, output = self.plan, self.output_schedule
        if output is None:
            freed = 0 if plan is None else plan.freed_blocks
            return -(-self.cached // self.block_size) - freed
        if plan is None:
            footprint = self._footprint(int(not output.scored))
            return output.max_blocks(footprint, packed=0, tokens=self.cached)
        footprint = self._packed_footprint(plan)
        return output.max_blocks(footprint, packed=plan.blocks, tokens=self.cached)

    def blocks_held(self, computed: int) -> int:
        """Return the blocks of compressed layers once `computed` tokens are computed."""
        if self.plan is None or computed < self.plan.tokens:
            footprint = self._before_packing(computed)
        else:
            footprint, _ = self._after_packing(self.plan, computed)
        unpacked_blocks = -(-computed // self.block_size) - footprint.first_block
        return footprint.leading_blocks + footprint.packed_blocks + unpacked_blocks

    def added_blocks(self, computed: int, slots: int) -> int:
        """Return the blocks that `slots` draft tokens add behind `computed` tokens."""
        return -(-(computed + slots) // self.block_size) - -(-computed // self.block_size)

    @property
    def times_repacked(self) -> int:
        """Return how often a decode budget packs the output after the prompt was packed."""
        if self.plan is None:
            return 0
        return self._after_packing(self.plan, self.plan.tokens + self.output)[1]

    @property
    def _is_too_short(self) -> bool:
        settings = self.settings
        return (
            self.prompt < settings.resolved_min_prompt or self.output < settings.resolved_min_output
        )

    @cached_property
    def _prompt_plan(self) -> PagePlan | None:
        """Return the page plan of the prompt without a look-ahead."""
        if not self.settings.enabled:
            return None
        return self.settings.page_plan(
            self.num_layers,
            self.prompt,
            self.block_size,
            self.spans,
            self.page_tokens,
            self.draft_layers,
        )

    @property
    def _awaited_tokens(self) -> int:
        """Return the output tokens that compressing the prompt waits for."""
        return 0 if self.prefill is None else lookahead_tokens_of(self.prefill)

    def _footprint(self, leading_blocks: int) -> KVFootprint:
        """Return the footprint of the request before its first packing."""
        return KVFootprint(
            num_layers=self.num_layers,
            block_size=self.block_size,
            leading_blocks=leading_blocks,
            draft_layers=self.draft_layers,
        )

    def _packed_footprint(self, plan: PagePlan) -> KVFootprint:
        """Return the footprint right after the prompt is packed."""
        footprint = self._footprint(plan.leading_blocks)
        footprint.pack(plan, plan.full_blocks)
        return footprint

    def _before_packing(self, computed: int) -> KVFootprint:
        """Return the footprint of `computed` tokens before the end of the prompt is packed.

        A look-ahead delays packing the end of the prompt, but not the pieces before it.
        """
        footprint = self._footprint(0 if self.plan is None else self.plan.leading_blocks)
        if self.pieces is None:
            return footprint
        pieces, tokens = self.pieces.before_lookahead(), 0
        while (tokens := pieces.next_end(tokens)) <= computed and tokens < self.prompt:
            plan = pieces.plan(footprint, tokens)
            if plan is not None:
                footprint.pack(plan, plan.packed_end // self.block_size)
        return footprint

    def _after_packing(self, plan: PagePlan, computed: int) -> tuple[KVFootprint, int]:
        """Return the footprint of `computed` tokens, and how often their output was packed."""
        footprint, times, schedule = self._packed_footprint(plan), 0, self.output_schedule
        if not isinstance(schedule, OutputSchedule):
            return footprint, 0
        for blocks in range(plan.full_blocks + 1, computed // self.block_size + 1):
            output_plan = schedule.plan(footprint, blocks * self.block_size)
            if output_plan is not None:
                footprint.pack(output_plan, blocks, freeze=True)
                times += 1
        return footprint, times
