"""Packing plans: which prompts are packed, after which step, and to how many pages.

Plans depend on lengths alone. The block manager asks for them; nothing here touches a block. This
module is not thread-safe: it runs in the scheduler's loop.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request, RequestStatus

from vllm_kvcompress.engine.layers import OtherLayers
from vllm_kvcompress.engine.scheduling.admission import Admissions, Decision
from vllm_kvcompress.errors import VllmHookError
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.planning.group_pieces import GroupPieceSchedule
from vllm_kvcompress.planning.kv_footprint import KVFootprint
from vllm_kvcompress.planning.pieces import PieceSchedule, PiecewiseSchedule
from vllm_kvcompress.planning.schedules import (
    LookaheadSchedule,
    OutputGroupSchedule,
    OutputSchedule,
    PrefillSchedule,
    PromptSchedule,
    RequestSchedule,
    keeps_all_tokens,
    lookahead_of,
)
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.method_of import method_of, sums_output_attention

logger = init_logger("vllm.kvcompress")


class _TentativeSchedule(NamedTuple):
    """The schedule that a request would get if it were admitted now.

    Args:
        inputs: everything that the schedule depends on (`Planner._schedule_inputs`).
        decision: the decision behind the schedule. Holding it keeps its settings alive, so the ids
            in `inputs` stay unique.
        schedule: the schedule, not modified since it was computed.
    """

    inputs: tuple[object, ...]
    decision: Decision
    schedule: RequestSchedule


class Planner:
    """Plans the packings of one scheduler's requests.

    Args:
        settings: the engine's settings.
        num_layers: layers that share the page pool, L.
        block_size: tokens in a block.
        pool: vLLM's block pool, for admissions that depend on the blocks in use.
        other_layers: blocks that the uncompressed layers use. None if all are compressed.
        requests: the scheduler's requests by id. None if there is no compressing scheduler.
        ring_slots: maximum number of requests whose latest queries the workers store.
        itemsize: bytes of a cached number.
    """

    def __init__(
        self,
        settings: CompressionConfig,
        num_layers: int,
        block_size: int,
        pool: BlockPool,
        other_layers: OtherLayers | None = None,
        requests: Mapping[str, Request] | None = None,
        ring_slots: int = 0,
        itemsize: int = 2,
    ) -> None:
        self.admissions = Admissions(settings, num_layers, block_size, pool, other_layers, itemsize)
        self._settings = settings
        self._num_layers, self._block_size = num_layers, block_size
        self._requests = requests
        # Fixed schedules: those of requests whose prefill has ended, of prompts in pieces, and of
        # prompts with a look-ahead, even if no slot was free for it.
        self.schedules: dict[str, RequestSchedule] = {}
        # The schedule of requests that never pack anything. It never changes.
        self._empty_schedule = RequestSchedule(
            footprint=KVFootprint(num_layers=num_layers, block_size=block_size), prefill=None
        )
        # Schedules of other requests, computed again once their inputs change.
        self._tentative: dict[str, _TentativeSchedule] = {}
        # Requests that need no packing until they end or are preempted. Steps do not plan them.
        self.nothing_to_pack: set[str] = set()
        # Requests that hold one of the workers' query slots for their look-ahead.
        self._lookahead_ids: set[str] = set()
        self._ring_slots = ring_slots
        # Requests whose prompt was pulled from another server, until their prefill ends.
        self._pulled: set[str] = set()

    def request(self, request_id: str) -> Request:
        """Return a request of the scheduler.

        Raises:
            VllmHookError: there is no compressing scheduler.
        """
        if self._requests is None:
            raise VllmHookError(
                "CompressedManager knows no scheduler; select the scheduler through"
                " --kv-compress, not by hand"
            )
        return self._requests[request_id]

    def admit(self, request_id: str, cached_tokens: int) -> tuple[str, bool]:
        """Make the decision about a request final, when it gets its first blocks.

        Args:
            request_id: vLLM's request id.
            cached_tokens: its tokens found in the prefix cache, if this is its first chunk.

        Returns:
            Why its prompt stays uncompressed, empty in the same cases as in `Admissions.admit`; and
            whether it would have had a look-ahead but found no free slot.
        """
        request = self.request(request_id)
        skip_reason = self._make_final(request)
        if self.admissions.decision_of(request).never_packs:
            self._pulled.discard(request_id)
            self.nothing_to_pack.add(request_id)
            return skip_reason, False
        if request_id in self.schedules:
            return skip_reason, False
        schedule, slotless = self.schedule_of(request), False
        if schedule.lookahead is not None:
            schedule.lookahead = replace(schedule.lookahead, cached=cached_tokens)
            self._lookahead_ids.add(request_id)
        elif schedule.prefill is not None:
            slotless = self._lookahead_schedule(request, schedule.prefill) is not None
        is_piecewise = isinstance(schedule.prefill, PiecewiseSchedule)
        if slotless or schedule.lookahead is not None or is_piecewise:
            self._keep_schedule(request_id, schedule)
        return skip_reason, slotless

    def _keep_schedule(self, request_id: str, schedule: RequestSchedule) -> None:
        """Keep a schedule until the request ends or is preempted, and let callers change it."""
        self._tentative.pop(request_id, None)
        self.schedules[request_id] = schedule

    def admit_pulled(self, request: Request) -> str:
        """Make the decision final for a prompt that is going to be pulled from another server.

        Returns:
            Why its prompt stays uncompressed, empty in the same cases as in `Admissions.admit`.
        """
        return self._make_final(request)

    def _make_final(self, request: Request) -> str:
        was_final = self.admissions.decision_of(request).is_final
        skip_reason = self.admissions.admit(request)
        if not was_final and self._settings.max_whole is not None:
            self._limit_output_to_pool(request)
        return skip_reason

    def note_pulled(self, request: Request) -> int:
        """Note that a prompt's KV cache has arrived from another server.

        Returns:
            How many tokens count as computed. As after a prefix-cache hit, tokens whose queries the
            method reads must still be computed here. If that is all of them, the result is 0: the
            caller then frees the blocks, and the prompt is computed like any other.
        """
        longest_hit = self.longest_hit(request, int(request.num_tokens) - 1)
        tokens = min(int(request.num_computed_tokens), max(longest_hit, 0))
        if tokens:
            self._pulled.add(request.request_id)
        return tokens

    def waits_pulled(self, request_id: str) -> bool:
        """Return whether a request's prompt was pulled and still waits for its first step.

        Such a prompt must not wait for destination blocks: the requests that hold them may be
        waiting for destination blocks too.
        """
        running = RequestStatus.RUNNING
        return request_id in self._pulled and self.request(request_id).status != running

    def release_lookahead_slot(self, request_id: str) -> None:
        """Release the query slot of a packed prompt, for use from the next step on."""
        self._lookahead_ids.discard(request_id)
        if self.schedules[request_id].output is None:
            self.nothing_to_pack.add(request_id)

    def schedule_of(self, request: Request) -> RequestSchedule:
        """Return a request's fixed schedule, or the one that it would get if it were admitted now.

        The schedule covers a prefill of all tokens that the request has now. After a preemption
        these are the prompt and the output so far, as for a new request with the same tokens. With
        a decode budget, however, the budget is still computed from the prompt alone; otherwise each
        preemption would raise it. Whether to compress at all was decided at admission.
        """
        fixed = self.schedules.get(request.request_id)
        if fixed is not None:
            return fixed
        decision = self.admissions.decision_of(request)
        if decision.never_packs:
            return self._empty_schedule
        inputs = self._schedule_inputs(request, decision)
        tentative = self._tentative.get(request.request_id)
        if tentative is None or tentative.inputs != inputs:
            tentative = _TentativeSchedule(inputs, decision, self._new_schedule(request, decision))
            self._tentative[request.request_id] = tentative
        return tentative.schedule

    def _schedule_inputs(self, request: Request, decision: Decision) -> tuple[object, ...]:
        return (
            id(decision.settings),
            id(decision.output_settings),
            decision.spans,
            request.num_prompt_tokens,
            request.num_tokens,
            request.max_tokens,
            len(self._lookahead_ids) < self._ring_slots,
        )

    def _new_schedule(self, request: Request, decision: Decision) -> RequestSchedule:
        footprint = KVFootprint(num_layers=self._num_layers, block_size=self._block_size)
        prefill = self._prefill_schedule(request, decision)
        lookahead = None
        if prefill is not None and len(self._lookahead_ids) < self._ring_slots:
            lookahead = self._lookahead_schedule(request, prefill)
        if lookahead is not None:
            # Pieces are packed during the prefill, and the look-ahead packs the prompt's end.
            if isinstance(prefill, PieceSchedule):
                prefill = replace(prefill, packs_end=False)
            else:
                prefill = None
        return RequestSchedule(footprint=footprint, prefill=prefill, lookahead=lookahead)

    def _lookahead_schedule(
        self, request: Request, prefill: PrefillSchedule
    ) -> LookaheadSchedule | None:
        """Return the look-ahead of a prompt, or None if it is packed when its prefill ends.

        That is the case if the settings have no look-ahead, if nothing will be dropped, if a
        preempted request already has enough output tokens, or if the pool cannot hold the
        uncompressed prompt until its look-ahead is over.
        """
        if not lookahead_of(prefill):
            return None
        lookahead = LookaheadSchedule(
            settings=prefill.settings,
            num_layers=self._num_layers,
            block_size=self._block_size,
            prompt=int(request.num_prompt_tokens),
            max_tokens=int(request.num_prompt_tokens + request.max_tokens),
            prefilled=int(request.num_tokens),
            spans=self.admissions.decision_of(request).spans,
            page_tokens=self.admissions.packed_page_tokens(prefill.settings),
        )
        max_blocks = max(prefill.max_blocks, lookahead.blocks_when_due(prefill.blocks_at_end))
        if lookahead.due <= request.num_tokens or max_blocks > self.admissions.max_request_blocks:
            return None
        return lookahead

    def _prefill_schedule(self, request: Request, decision: Decision) -> PrefillSchedule | None:
        """Return the schedule that packs a request's current prefill, or None if none does."""
        tokens = int(request.num_tokens)
        settings = budget_settings = decision.settings
        if (
            settings is not None
            and settings.decode_budget is not None
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
        if piece_settings is not None and piece_settings.max_whole is not None and has_embeddings:
            # Embeddings cannot be computed as probe tokens behind a piece.
            piece_settings = piece_settings.model_copy(update={"probe": 0, "probe_first": 0})
        spans = decision.spans
        if piece_settings is not None:
            pieces = self.admissions.piece_schedule(piece_settings, tokens, spans)
            if pieces is not None:
                return pieces
        remaining_tokens = request.max_tokens - request.num_output_tokens
        if settings is None or budget_settings is None or remaining_tokens <= 1:
            # With one output token left, no step would read the compressed prompt.
            return None
        plan = self.admissions.plan(budget_settings, tokens, spans)
        return None if plan is None else PromptSchedule(settings=settings, page_plan=plan)

    def has_prefilled(self, request_id: str) -> bool:
        """Return whether a request's prefill has ended, packed or not."""
        schedule = self.schedules.get(request_id)
        return schedule is not None and schedule.prefilled

    def end_prefill(
        self, request: Request, schedule: RequestSchedule, plan: PagePlan | None
    ) -> None:
        """Record that a prefill ends in this step, and that `plan`, if given, packs it."""
        schedule.output = self._output_schedule(request, schedule.footprint, plan)
        schedule.prefilled = True
        self._pulled.discard(request.request_id)
        self._keep_schedule(request.request_id, schedule)
        if schedule.lookahead is None and schedule.output is None:
            self.nothing_to_pack.add(request.request_id)

    def _output_schedule(
        self, request: Request, footprint: KVFootprint, plan: PagePlan | None
    ) -> OutputSchedule | OutputGroupSchedule | None:
        """Return the schedule that packs the cache during decoding, or None if it may grow.

        Args:
            request: the request.
            footprint: its footprint when the prefill ends.
            plan: plan to pack the prefill. None if it is not packed.
        """
        decision = self.admissions.decision_of(request)
        settings = decision.output_settings
        if settings is None:
            return None
        prefilled = int(request.num_tokens)
        max_tokens = int(request.num_prompt_tokens + request.max_tokens)
        page_tokens = self.admissions.packed_page_tokens(settings)
        if page_tokens is not None:
            return OutputGroupSchedule(
                settings=settings, max_tokens=max_tokens, page_tokens=page_tokens
            )
        output = OutputSchedule(
            settings=settings,
            prefilled=prefilled,
            max_tokens=max_tokens,
            summed_tokens=prefilled if sums_output_attention(settings) else None,
            spans=decision.spans,
        )
        if not output.may_pack(self._packed_footprint(footprint, plan, prefilled)):
            # Nothing will read the sums. They would also lie in blocks that other requests share.
            output.summed_tokens = None
        return output

    @staticmethod
    def _packed_footprint(
        footprint: KVFootprint, plan: PagePlan | None, tokens: int
    ) -> KVFootprint:
        """Return the footprint once a prefill of `tokens` tokens has been packed by `plan`."""
        packed = replace(footprint)
        if plan is not None:
            packed.pack(plan, tokens // footprint.block_size)
        return packed

    def observation_settings(
        self, request: Request, schedule: RequestSchedule
    ) -> CompressionConfig | None:
        """Return the settings for observing a prefill chunk after which nothing is packed.

        None means that nothing needs to be observed. If the method sums the attention of all
        queries, an uncompressed prompt is also observed when its output's cache is bounded, because
        packing during decoding needs its sums.
        """
        if schedule.prefill is not None:
            if keeps_all_tokens(schedule.prefill):
                return None
            # After the last chunk of a prompt with a look-ahead, its output's queries score it.
            is_last_chunk = schedule.prefilled and schedule.lookahead is not None
            return None if is_last_chunk else schedule.prefill.settings
        return self._uncompressed_observation(request, schedule.footprint)

    def _uncompressed_observation(
        self, request: Request, footprint: KVFootprint
    ) -> CompressionConfig | None:
        settings = self.admissions.decision_of(request).output_settings
        if settings is None or not sums_output_attention(settings):
            return None
        output = self._output_schedule(request, footprint, None)
        is_summed = isinstance(output, OutputSchedule) and output.summed_tokens is not None
        return settings if is_summed else None

    def forget(self, request_id: str) -> None:
        """Forget a request that ended or was preempted, if it is known."""
        self.schedules.pop(request_id, None)
        self._tentative.pop(request_id, None)
        self.nothing_to_pack.discard(request_id)
        self._lookahead_ids.discard(request_id)
        self._pulled.discard(request_id)

    # -- blocks that requests need, and prefixes that they share ------------------------------

    def max_prefill_blocks(self, request: Request) -> int:
        """Return the maximum number of blocks that a request holds during its prefill."""
        schedule = self.schedule_of(request)
        if schedule.prefill is not None and not schedule.prefilled:
            return schedule.prefill.max_blocks
        return -(-int(request.num_tokens) // self._block_size)

    def _limit_output_to_pool(self, request: Request) -> None:
        """Lower a request's `max_tokens` to what the pool can hold.

        With prompts in pieces, sequences may be longer than the pool, so vLLM's own check no longer
        ensures that one request fits. A decode budget can make any output fit.
        """
        block_size, tokens = self._block_size, int(request.num_tokens)
        max_blocks = self.admissions.max_request_blocks
        schedule = self.schedule_of(request)
        plan = schedule.plan(tokens)
        if schedule.lookahead is not None:
            tokens = schedule.lookahead.due
            plan = schedule.lookahead.plan_at(schedule.footprint, tokens)
        packed_blocks = 0 if plan is None else plan.blocks
        output = self._output_schedule(request, schedule.footprint, plan)
        packed = self._packed_footprint(schedule.footprint, plan, tokens)
        if output is not None:
            needed = output.max_blocks(packed, packed=packed_blocks, tokens=output.max_tokens)
            if needed <= max_blocks:
                return
        if isinstance(output, OutputGroupSchedule):
            cached = output.max_cached_tokens(packed, packed=packed_blocks, blocks=max_blocks)
        else:
            cached = (max_blocks - packed_blocks + packed.first_block) * block_size
        # The last output token is never computed and takes no slot, hence + 1.
        max_output = max(cached - tokens + 1, 1)
        if max_output < request.max_tokens:
            logger.info(
                "request %s: max_tokens was lowered from %d to %d, the most that the KV cache can"
                " hold",
                request.request_id,
                request.max_tokens,
                max_output,
            )
            request.max_tokens = max_output

    def longest_hit(self, request: Request, max_length: int) -> int:
        """Return how many tokens of a waiting prompt may come from the prefix cache.

        The queries that the method reads must be computed: those of its window, or of all tokens
        for a method that sums the attention of all queries. Keys and values can come from the
        prefix cache.

        Args:
            request: the waiting request.
            max_length: maximum length that vLLM allows, in tokens.
        """
        decision = self.admissions.decision_of(request)
        if decision.never_packs:
            return max_length
        schedule = self.schedule_of(request)
        if schedule.lookahead is not None and schedule.prefill is None:
            # Few of the prompt's queries score it, or none.
            return min(schedule.lookahead.longest_hit, max_length)
        if isinstance(schedule.prefill, GroupPieceSchedule):
            return min(schedule.prefill.longest_hit, max_length)
        if isinstance(pieces := schedule.prefill, PieceSchedule):
            reads = method_of(pieces.settings).reads
            if Reads.COLUMN_SUMS in reads:
                return 0
            # Tokens after the first packing are computed from a compressed context.
            window = pieces.settings.resolved_window if Reads.WINDOW in reads else 0
            to_compute = 1 if pieces.probe(pieces.first_end) else max(window, 1)
            if schedule.lookahead is not None:
                max_length = min(schedule.lookahead.longest_hit, max_length)
            return min(pieces.first_end - to_compute, pieces.tokens - max(window, 1), max_length)
        settings = decision.settings
        if self._uncompressed_observation(request, schedule.footprint) is not None:
            return 0
        # vLLM always computes the last token, so its maximum is one token less.
        tokens = max_length + 1
        if settings is None:
            return max_length
        prefill = schedule.prefill
        if isinstance(prefill, PromptSchedule) and prefill.page_plan.tokens == tokens:
            plan: PagePlan | None = prefill.page_plan
        else:
            plan = self.admissions.plan(settings, tokens, decision.spans)
        if plan is None or plan.keeps_all:
            return max_length
        reads = method_of(settings).reads
        if Reads.COLUMN_SUMS in reads:
            return 0
        return tokens - settings.resolved_window if Reads.WINDOW in reads else max_length
