"""How the engine packs one request, and the blocks that the request holds.

Computed once per request and settings, from lengths alone with the engine's own schedules and page
plans, so the blocks equal the engine's.
"""

from dataclasses import dataclass

from vllm_kvcompress.commands.plan.forecast import RequestBlocks, Workload
from vllm_kvcompress.methods.page_plan import PagePlan, mostly_protected
from vllm_kvcompress.planning.memory import Sizes
from vllm_kvcompress.planning.packed_pages import mean_layer_tokens, packed_page_tokens
from vllm_kvcompress.schedules.base import PrefillSchedule
from vllm_kvcompress.schedules.kv_footprint import KVFootprint
from vllm_kvcompress.schedules.lookahead import LookaheadSchedule
from vllm_kvcompress.schedules.outputs import OutputGroupSchedule, OutputSchedule
from vllm_kvcompress.schedules.pieces import PiecewiseSchedule, piece_schedule
from vllm_kvcompress.schedules.prompt import PromptSchedule
from vllm_kvcompress.schedules.request import lookahead_tokens_of
from vllm_kvcompress.settings.config import CompressionConfig

_ON_REQUEST = "only requests that choose a method are compressed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request of a workload under some settings.

    Args:
        settings: settings of the request; not enabled if its prompt stays uncompressed by choice.
        sizes: sizes of one rank.
        load: the workload.
        page_tokens: tokens in a packed page; None if it holds the tokens of an ordinary page.
        pieces: schedule of the prompt in pieces; None if it is not compressed before its end.
        lookahead: schedule of the look-ahead that the compression waits for; None without one.
        output: schedule that packs the output; None if its cache grows.
        plan: page plan of the prompt, with the output tokens of its look-ahead; None if the prompt
            is not compressed.
        left_whole: why the prompt is not compressed; None if it is.
    """

    settings: CompressionConfig
    sizes: Sizes
    load: Workload
    page_tokens: int | None = None
    pieces: PiecewiseSchedule | None = None
    lookahead: LookaheadSchedule | None = None
    output: OutputSchedule | OutputGroupSchedule | None = None
    plan: PagePlan | None = None
    left_whole: str | None = None

    @property
    def kept_tokens(self) -> float:
        """Return the prompt tokens that a layer keeps, without the output tokens in the plan."""
        if self.plan is None:
            return self.load.prompt
        return mean_layer_tokens(self.plan) - self.lookahead_tokens

    @property
    def lookahead_tokens(self) -> int:
        """Return the output tokens that are packed with the prompt."""
        return 0 if self.plan is None else self.plan.tokens - self.load.prompt

    def unpacked_footprint(self, leading_blocks: int) -> KVFootprint:
        """Return the footprint of the request before its first packing."""
        return KVFootprint(
            num_layers=self.sizes.layers,
            block_size=self.sizes.block_size,
            leading_blocks=leading_blocks,
        )

    def blocks(self) -> RequestBlocks:
        """Return the blocks that the request holds."""
        load, sizes, plan, block = self.load, self.sizes, self.plan, self.sizes.block_size
        freed = 0 if plan is None else plan.freed_blocks
        prefill, end = -(-load.prompt // block), -(-load.cached // block) - freed
        packed_at = load.prompt if plan is None else plan.tokens
        looking = decoding = -(-packed_at // block) - freed
        prefill_end = prefill
        if self.pieces is not None:
            prefill, prefill_end = self.pieces.max_blocks, self.pieces.blocks_at_end
        if self.lookahead is not None:
            looking = self.lookahead.blocks_when_due(prefill_end)
            prefill = max(prefill, looking)
        if self.output is not None:
            end = self._end_blocks(self.output)
        decode_steps = load.output - self.lookahead_tokens
        mean = (self.lookahead_tokens * looking + decode_steps * (decoding + end) / 2) / load.output
        return RequestBlocks(
            prefill=prefill + sizes.other_blocks(load.prompt, sizes.in_flight),
            looking=looking + sizes.other_blocks(load.prompt),
            decoding=decoding + sizes.other_blocks(load.prompt),
            end=end + sizes.other_blocks(load.cached),
            mean=mean + sizes.other_blocks(load.cached),
        )

    def _end_blocks(self, output: OutputSchedule | OutputGroupSchedule) -> int:
        """Return the maximum blocks while it decodes and its output is packed."""
        plan = self.plan
        leading_blocks = int(not output.scored) if plan is None else plan.leading_blocks
        footprint = self.unpacked_footprint(leading_blocks)
        if plan is not None:
            footprint.pack(plan, plan.full_blocks)
        packed = 0 if plan is None else plan.blocks
        return output.max_blocks(footprint, packed=packed, tokens=self.load.cached)


def plan_request(settings: CompressionConfig, sizes: Sizes, load: Workload) -> PlannedRequest:
    """Return how the engine packs a request of a workload.

    Args:
        settings: settings of the request.
        sizes: sizes of one rank.
        load: the workload.
    """
    if not settings.enabled:
        return PlannedRequest(settings=settings, sizes=sizes, load=load, left_whole=_ON_REQUEST)
    page_tokens = packed_page_tokens(settings, sizes.block_size, sizes.key_itemsize)
    plan = _prompt_plan(settings, sizes, load, page_tokens)
    pieces = _piece_schedule(settings, sizes, load, page_tokens)
    prefill = _prefill(settings, plan, pieces)
    lookahead_tokens = 0 if prefill is None else lookahead_tokens_of(prefill)
    reason: str | None = None
    lookahead: LookaheadSchedule | None = None
    if prefill is None or not prefill.in_pieces:
        reason = _uncompressed_reason(settings, load, plan, lookahead_tokens)
    if reason is not None:
        plan = None
    elif plan is not None and lookahead_tokens:
        schedule = LookaheadSchedule(
            settings=settings,
            num_layers=sizes.layers,
            block_size=sizes.block_size,
            prompt=load.prompt,
            max_tokens=load.prompt + load.output,
            prefilled=load.prompt,
            spans=load.spans,
            page_tokens=page_tokens,
        )
        footprint = KVFootprint(num_layers=sizes.layers, block_size=sizes.block_size)
        plan = schedule.plan_at(footprint, schedule.due)
        lookahead = None if plan is None else schedule
    return PlannedRequest(
        settings=settings,
        sizes=sizes,
        load=load,
        page_tokens=page_tokens,
        pieces=pieces,
        lookahead=lookahead,
        output=_output_schedule(settings, load, page_tokens),
        plan=plan,
        left_whole=reason,
    )


def prefill_schedule(
    settings: CompressionConfig, sizes: Sizes, load: Workload, page_tokens: int | None
) -> PrefillSchedule | None:
    """Return the schedule that packs the prompt, a look-ahead aside; None if nothing does."""
    pieces = _piece_schedule(settings, sizes, load, page_tokens)
    plan = None if pieces is not None else _prompt_plan(settings, sizes, load, page_tokens)
    return _prefill(settings, plan, pieces)


def _prefill(
    settings: CompressionConfig, plan: PagePlan | None, pieces: PiecewiseSchedule | None
) -> PrefillSchedule | None:
    if pieces is not None:
        return pieces
    return None if plan is None else PromptSchedule(settings=settings, page_plan=plan)


def _prompt_plan(
    settings: CompressionConfig, sizes: Sizes, load: Workload, page_tokens: int | None
) -> PagePlan | None:
    return settings.page_plan(sizes.layers, load.prompt, sizes.block_size, load.spans, page_tokens)


def _piece_schedule(
    settings: CompressionConfig, sizes: Sizes, load: Workload, page_tokens: int | None
) -> PiecewiseSchedule | None:
    if settings.reuses_pages and (
        load.prompt < settings.resolved_min_prompt or load.output < settings.resolved_min_output
    ):
        return None
    return piece_schedule(
        settings, sizes.layers, sizes.block_size, load.prompt, load.spans, page_tokens
    )


def _output_schedule(
    settings: CompressionConfig, load: Workload, page_tokens: int | None
) -> OutputSchedule | OutputGroupSchedule | None:
    max_tokens = load.prompt + load.output
    if settings.packs_outputs and page_tokens is not None:
        return OutputGroupSchedule(
            settings=settings, max_tokens=max_tokens, page_tokens=page_tokens
        )
    if settings.decode.budget is None:
        return None
    return OutputSchedule(
        settings=settings, prefilled=load.prompt, max_tokens=max_tokens, spans=load.spans
    )


def _uncompressed_reason(
    settings: CompressionConfig, load: Workload, plan: PagePlan | None, lookahead: int
) -> str | None:
    """Return why the prompt is not compressed, or None if it is.

    Args:
        plan: page plan of the prompt without its look-ahead.
        lookahead: output tokens that compressing it waits for.
    """
    if load.prompt < settings.resolved_min_prompt:
        return f"it is shorter than --kv-min-prompt {settings.resolved_min_prompt}"
    if load.output < settings.resolved_min_output:
        return f"its output is shorter than --kv-min-output {settings.resolved_min_output}"
    if load.output < lookahead + 2 and not settings.reuses_pages:
        return f"its output ends within the look-ahead of {lookahead} tokens"
    if plan is None and mostly_protected(load.spans, load.prompt):
        return "more than half of it is protected"
    if plan is None:
        return "compressing it to this budget would free no block"
    return None
