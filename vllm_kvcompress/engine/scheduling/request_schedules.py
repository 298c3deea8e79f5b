"""Schedules of requests: which prompts are packed, after which step, and to how many pages.

Schedules depend on lengths alone, so nothing here touches a block.
"""

from dataclasses import replace

from vllm.logger import init_logger

from vllm_kvcompress.engine.scheduling.admission import Admissions
from vllm_kvcompress.engine.scheduling.lookaheads import LookAheads
from vllm_kvcompress.engine.scheduling.request_state import RequestState
from vllm_kvcompress.errors import quoted_id
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.schedules.base import PrefillSchedule
from vllm_kvcompress.schedules.groups import GroupSchedule
from vllm_kvcompress.schedules.kv_footprint import KVFootprint
from vllm_kvcompress.schedules.lookahead import LookaheadSchedule
from vllm_kvcompress.schedules.outputs import OutputGroupSchedule, OutputSchedule
from vllm_kvcompress.schedules.prompt import PromptSchedule
from vllm_kvcompress.schedules.request import RequestSchedule, lookahead_tokens_of
from vllm_kvcompress.settings.config import CompressionConfig

logger = init_logger("vllm.kvcompress")


class RequestSchedules:
    """Makes the schedules of one scheduler's requests.

    Args:
        admissions: decides which requests are compressed.
        lookaheads: has the free look-ahead slots.
        num_layers: layers that share the page pool, L.
        block_size: tokens in a block.
    """

    def __init__(
        self, admissions: Admissions, lookaheads: LookAheads, num_layers: int, block_size: int
    ) -> None:
        self._admissions, self._lookaheads = admissions, lookaheads
        self._num_layers, self._block_size = num_layers, block_size
        # The schedule of requests that never pack anything. It never changes.
        self._empty_schedule = RequestSchedule(footprint=self._footprint(), prefill=None)

    def _footprint(self, leading_blocks: int = 0) -> KVFootprint:
        return KVFootprint(
            num_layers=self._num_layers,
            block_size=self._block_size,
            leading_blocks=leading_blocks,
            draft_layers=self._admissions.draft_layers,
        )

    def of(self, state: RequestState) -> RequestSchedule:
        """Return a request's fixed schedule, or the one that it would get if it were admitted now.

        The schedule covers a prefill of all tokens that the request has now. After a preemption
        these are the prompt and the output so far, as for a new request with the same tokens. With
        a decode budget, however, the budget is still computed from the prompt alone; otherwise each
        preemption would raise it. Whether to compress at all was decided at admission.
        """
        if state.has_fixed_schedule:
            return state.current_schedule
        decision, request = state.decision, state.request
        if decision.never_packs:
            return self._empty_schedule
        # The options, which the decision and the schedule also depend on, never change.
        inputs = (
            decision.settings is None,
            decision.output_settings is None,
            request.num_prompt_tokens,
            request.num_tokens,
            request.max_tokens,
            self._lookaheads.has_free_slot,
        )
        if state.schedule is None or state.schedule_inputs != inputs:
            state.schedule, state.schedule_inputs = self.new(state), inputs
        return state.schedule

    def new(self, state: RequestState) -> RequestSchedule:
        """Return a new schedule of a request."""
        prefill, lookahead = self._prefill_schedule(state), None
        if prefill is not None and self._lookaheads.has_free_slot:
            lookahead = self._lookahead_schedule(state, prefill)
        if prefill is not None and lookahead is not None:
            # Pieces are packed during the prefill, and the look-ahead packs the prompt's end.
            prefill = prefill.before_lookahead()
        first_schedule = lookahead or prefill
        if first_schedule is None:
            output_settings = state.decision.output_settings
            leading_blocks = int(
                output_settings is not None
                and self._admissions.packed_page_tokens(output_settings) is not None
            )
        else:
            leading_blocks = first_schedule.leading_blocks
        footprint = self._footprint(leading_blocks)
        return RequestSchedule(footprint=footprint, prefill=prefill, lookahead=lookahead)

    def fix_schedule(self, state: RequestState, cached_tokens: int) -> bool:
        """Take a look-ahead slot, and fix the schedule if the prompt has pieces or a look-ahead.

        A prompt that found no free slot also keeps its schedule. The schedules of all other prompts
        are fixed when their prefill ends.

        Args:
            state: the request, which was admitted.
            cached_tokens: its tokens found in the prefix cache, if this is its first chunk.

        Returns:
            Whether the request would have had a look-ahead but found no free slot.
        """
        if state.has_fixed_schedule:
            return False
        schedule, slotless = self.of(state), False
        prefill = schedule.prefill
        if schedule.lookahead is not None:
            schedule.lookahead = replace(schedule.lookahead, cached=cached_tokens)
            self._lookaheads.take_slot(state)
        elif prefill is not None:
            slotless = self._lookahead_schedule(state, prefill) is not None
        has_lookahead = schedule.lookahead is not None
        if slotless or has_lookahead or schedule.in_pieces or state.packed_hit:
            state.schedule_inputs = None
        return slotless

    def end_prefill(self, state: RequestState, plan: PagePlan | None) -> None:
        """Record that a prefill ends in this step, and that `plan`, if given, packs it."""
        schedule = self.of(state)
        schedule.output = self._output_schedule(state, schedule.footprint, plan)
        schedule.prefilled = True
        state.schedule_inputs, state.was_pulled = None, False

    def _lookahead_schedule(
        self, state: RequestState, prefill: PrefillSchedule
    ) -> LookaheadSchedule | None:
        """Return the look-ahead of a prompt, or None if it is packed when its prefill ends.

        That is the case if the settings have no look-ahead, if nothing will be dropped, if a
        preempted request already has enough output tokens, or if the pool cannot hold the
        uncompressed prompt until its look-ahead is over.
        """
        if not lookahead_tokens_of(prefill):
            return None
        request = state.request
        lookahead = LookaheadSchedule(
            settings=prefill.settings,
            num_layers=self._num_layers,
            block_size=self._block_size,
            prompt=int(request.num_prompt_tokens),
            max_tokens=int(request.num_prompt_tokens + request.max_tokens),
            prefilled=int(request.num_tokens),
            spans=state.options.spans,
            page_tokens=self._admissions.packed_page_tokens(prefill.settings),
            draft_layers=self._admissions.draft_layers,
        )
        max_blocks = max(prefill.max_blocks, lookahead.blocks_when_due(prefill.blocks_at_end))
        if lookahead.due <= request.num_tokens or max_blocks > self._admissions.max_request_blocks:
            return None
        return lookahead

    def _prefill_schedule(self, state: RequestState) -> PrefillSchedule | None:
        """Return the schedule that packs a request's current prefill, or None if none does."""
        decision = state.decision
        request, spans = state.request, state.options.spans
        tokens = int(request.num_tokens)
        settings = budget_settings = decision.settings
        if (
            settings is not None
            and settings.decode.budget is not None
            and request.num_output_tokens
        ):
            prompt_budget = settings.tokens_per_layer(request.num_prompt_tokens)
            budget_settings = settings.variant(budget=prompt_budget)
        piece_settings = budget_settings
        if piece_settings is None and request.num_output_tokens:
            # The prompt stayed uncompressed. But if its output's cache was bounded, prompt and
            # output together may not fit the pool.
            piece_settings = decision.recompute_settings
        has_embeddings = request.prompt_token_ids is None or bool(request.mm_features)
        if (
            piece_settings is not None
            and piece_settings.pieces.max_whole is not None
            and has_embeddings
        ):
            # Embeddings cannot be computed as probe tokens behind a piece.
            piece_settings = piece_settings.with_values(probe=0, probe_first=0)
        if piece_settings is not None:
            pieces = self._admissions.piece_schedule(piece_settings, tokens, spans)
            if pieces is not None:
                return pieces
        if settings is None or budget_settings is None:
            return None
        remaining_tokens = request.max_tokens - request.num_output_tokens
        if remaining_tokens <= 1 and not settings.reuses_pages:
            # With one output token left, no step would read the compressed prompt.
            return None
        plan = self._admissions.plan(budget_settings, tokens, spans)
        if plan is None:
            return None
        if plan.cell is not None:
            return GroupSchedule(settings=settings, page_plan=plan)
        return PromptSchedule(settings=settings, page_plan=plan)

    def _output_schedule(
        self, state: RequestState, footprint: KVFootprint, plan: PagePlan | None
    ) -> OutputSchedule | OutputGroupSchedule | None:
        """Return the schedule that packs the cache during decoding, or None if it may grow.

        Args:
            state: the request.
            footprint: its footprint when the prefill ends.
            plan: plan to pack the prefill. None if it is not packed.
        """
        settings, request = state.decision.output_settings, state.request
        if settings is None:
            return None
        prefilled = int(request.num_tokens)
        max_tokens = int(request.num_prompt_tokens + request.max_tokens)
        page_tokens = self._admissions.packed_page_tokens(settings)
        if page_tokens is not None:
            return OutputGroupSchedule(
                settings=settings, max_tokens=max_tokens, page_tokens=page_tokens
            )
        output = OutputSchedule(
            settings=settings,
            prefilled=prefilled,
            max_tokens=max_tokens,
            summed_tokens=prefilled if settings.method.sums_output_attention else None,
            spans=state.options.spans,
        )
        if not output.may_pack(self._packed_footprint(footprint, plan)):
            # Nothing will read the sums. They would also lie in blocks that other requests share.
            output.summed_tokens = None
        return output

    @staticmethod
    def _packed_footprint(footprint: KVFootprint, plan: PagePlan | None) -> KVFootprint:
        """Return the footprint once a prefill has been packed by `plan`."""
        packed = replace(footprint)
        if plan is not None:
            packed.pack(plan, plan.packed_end // footprint.block_size)
        return packed

    def observation_settings(self, state: RequestState) -> CompressionConfig | None:
        """Return the settings for observing a prefill chunk after which nothing is packed.

        None means that nothing needs to be observed. If the method sums the attention of all
        queries, an uncompressed prompt is also observed when its output's cache is bounded, because
        packing during decoding needs its sums.
        """
        schedule = self.of(state)
        if schedule.prefill is not None:
            if schedule.prefill.keeps_all_tokens:
                return None
            # After the last chunk of a prompt with a look-ahead, its output's queries score it.
            is_last_chunk = schedule.prefilled and schedule.lookahead is not None
            return None if is_last_chunk else schedule.prefill.settings
        settings = state.decision.output_settings
        if settings is None or not settings.method.sums_output_attention:
            return None
        output = self._output_schedule(state, schedule.footprint, None)
        return None if output is None or output.summed_tokens is None else settings

    # -- limits ---------------------------------------------------------------------------------

    def max_prefill_blocks(self, state: RequestState) -> int:
        """Return the maximum number of blocks that a request holds during its prefill."""
        schedule = self.of(state)
        if schedule.prefill is not None and not schedule.prefilled:
            return schedule.prefill.max_blocks
        return -(-int(state.request.num_tokens) // self._block_size)

    def limit_output_to_pool(self, state: RequestState) -> None:
        """Lower a request's `max_tokens` to what the pool can hold.

        With prompts in pieces, sequences may be longer than the pool, so vLLM's own check no longer
        ensures that one request fits. A decode budget can make any output fit.
        """
        request, max_blocks = state.request, self._admissions.max_request_blocks
        schedule, tokens = self.of(state), int(request.num_tokens)
        plan = None
        if schedule.lookahead is not None:
            tokens = schedule.lookahead.due
            plan = schedule.lookahead.plan_at(schedule.footprint, tokens)
        elif schedule.prefill is not None:
            plan = schedule.prefill.plan(schedule.footprint, tokens)
        packed_blocks = 0 if plan is None else plan.blocks
        output = self._output_schedule(state, schedule.footprint, plan)
        packed = self._packed_footprint(schedule.footprint, plan)
        if output is None:
            unpacked = max_blocks - packed_blocks - packed.leading_blocks
            cached = (unpacked + packed.first_block) * self._block_size
        else:
            needed = output.max_blocks(packed, packed=packed_blocks, tokens=output.max_tokens)
            if needed <= max_blocks:
                return
            cached = output.max_cached_tokens(packed, packed=packed_blocks, blocks=max_blocks)
        # The last output token is never computed and takes no slot, hence + 1.
        max_output = max(cached - tokens + 1, 1)
        if max_output < request.max_tokens:
            logger.info(
                "request %s: max_tokens was lowered from %d to %d, the most that the KV cache can"
                " hold",
                quoted_id(request.request_id),
                request.max_tokens,
                max_output,
            )
            request.max_tokens = max_output

    def longest_prefix_hit(self, state: RequestState, max_tokens: int) -> int:
        """Return how many tokens of a waiting prompt may come from the prefix cache.

        Args:
            state: the waiting request.
            max_tokens: maximum that vLLM allows.
        """
        schedule = self.of(state)
        is_packed = schedule.prefill is not None or schedule.lookahead is not None
        if not is_packed and self.observation_settings(state) is not None:
            # Its output's cache is bounded by the attention of all queries.
            return 0
        return schedule.longest_prefix_hit(max_tokens)
