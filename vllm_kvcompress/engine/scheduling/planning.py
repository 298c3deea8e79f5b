"""Which prompts are compressed, at which step and to how many pages: from lengths alone.

The manager of the blocks asks; nothing here touches a block. Not thread-safe: it lives in the
scheduler's loop.
"""

from collections.abc import Mapping
from dataclasses import replace

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request, RequestStatus

from vllm_kvcompress.engine.layers import OtherLayers
from vllm_kvcompress.engine.scheduling.admission import Admissions
from vllm_kvcompress.errors import SeamError
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.planning.holding import Holding
from vllm_kvcompress.planning.pieces import EveryPiece
from vllm_kvcompress.planning.schedules import AtEnd, EveryInterval, LookAhead, RequestSchedule
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.method_of import adds_up, method_of

logger = init_logger("vllm.kvcompress")


class Planner:
    """Plans what one scheduler's requests are packed to.

    Args:
        settings: the engine's.
        num_layers: layers that share the page pool, L.
        block_size: tokens in a block.
        pool: vLLM's blocks, for admissions that ask how many are in use.
        others: what layers that are not compressed take of a request; None where there are none.
        requests: the scheduler's; None where no scheduler of ours is there.
        ring_slots: requests whose last queries the workers keep at once.
    """

    def __init__(
        self,
        settings: CompressionConfig,
        num_layers: int,
        block_size: int,
        pool: BlockPool,
        others: OtherLayers | None = None,
        requests: Mapping[str, Request] | None = None,
        ring_slots: int = 0,
    ) -> None:
        self.admissions = Admissions(settings, num_layers, block_size, pool, others)
        self._settings = settings
        self._num_layers, self._block_size = num_layers, block_size
        self._requests = requests
        # Of requests whose prefill ended, and of those whose prompt never stands whole or may look
        # ahead: what was decided when they were admitted.
        self.schedules: dict[str, RequestSchedule] = {}
        # Requests that look ahead, each with one of the workers' slots for its queries.
        self._looking: set[str] = set()
        self._ring_slots = ring_slots
        # Requests whose prompts were pulled, until their prefill ends.
        self._pulled: set[str] = set()

    def request(self, request_id: str) -> Request:
        """Raises SeamError where no scheduler of ours is there."""
        if self._requests is None:
            raise SeamError(
                "CompressedManager knows no scheduler; select the scheduler through"
                " --kv-compress, not by hand"
            )
        return self._requests[request_id]

    def admit(self, request_id: str, cached: int) -> tuple[str, bool]:
        """From the request's first block on, what was decided about it stays (`Admissions`).

        An answer that nothing bounds ends where the pool does.

        Args:
            cached: tokens that it found in the prefix cache, where this is its first chunk.

        Returns:
            Why its prompt is left whole, where that is decided now; and whether it would have
            looked ahead if a slot had been free.
        """
        request = self.request(request_id)
        reason = self.decide(request)
        if request_id in self.schedules:
            return reason, False
        schedule, slotless = self.schedule_of(request), False
        if schedule.lookahead is not None:
            schedule.lookahead = replace(schedule.lookahead, cached=cached)
            self._looking.add(request_id)
        elif schedule.prefill is not None:
            slotless = self._lookahead(request, schedule.prefill) is not None
        if slotless or schedule.lookahead is not None or isinstance(schedule.prefill, EveryPiece):
            self.schedules[request_id] = schedule
        return reason, slotless

    def decide(self, request: Request) -> str:
        """Let stay what is decided about a request; returns as `Admissions.admit` does."""
        final = self.admissions.of(request).final
        reason = self.admissions.admit(request)
        if not final and self._settings.max_whole is not None:
            self._end_with_the_pool(request)
        return reason

    def pulled(self, request: Request) -> int:
        """A prompt's keys and values are here that another server computed.

        Returns:
            How many of its tokens count as computed. As behind a hit in the prefix cache, those
            are computed here whose queries its method reads. 0 where all are: then it gives its
            blocks back, and is computed as any other.
        """
        longest = self.longest_hit(request, int(request.num_tokens) - 1)
        tokens = min(int(request.num_computed_tokens), max(longest, 0))
        if tokens:
            self._pulled.add(request.request_id)
        return tokens

    def waits_pulled(self, request_id: str) -> bool:
        """Whether a prompt that was pulled waits for its first step.

        It must not wait for blocks to be packed into: those who have them may wait for the same.
        """
        running = RequestStatus.RUNNING
        return request_id in self._pulled and self.request(request_id).status != running

    def looked_ahead(self, request_id: str) -> None:
        """Its prompt was packed: the slot of its queries is free from the next step on."""
        self._looking.discard(request_id)

    def schedule_of(self, request: Request) -> RequestSchedule:
        """What a request holds and when it is packed, or would be if it were admitted now.

        Of a prefill of all tokens that the request has now. After a preemption these are the
        prompt and what was generated before it: the same as a fresh request for the same tokens;
        but where answers are bounded the budget stays that of the prompt, or each preemption would
        raise it. Whether to compress at all was decided when it was admitted.
        """
        known = self.schedules.get(request.request_id)
        if known is not None:
            return known
        holding = Holding(num_layers=self._num_layers, block_size=self._block_size)
        prefill = self._prefill(request)
        free = len(self._looking) < self._ring_slots
        lookahead = self._lookahead(request, prefill) if prefill is not None and free else None
        if lookahead is not None:
            piecewise = prefill if isinstance(prefill, EveryPiece) else None
            prefill = None if piecewise is None else replace(piecewise, packs_end=False)
        return RequestSchedule(holding=holding, prefill=prefill, lookahead=lookahead)

    def _lookahead(self, request: Request, prefill: AtEnd | EveryPiece) -> LookAhead | None:
        """What packs a prompt instead when its answer has judged it; None where nothing does.

        After a preemption enough of the answer may be there: then the prompt and that are packed at
        the end of their prefill. So is a prompt that the pool has no room to hold for so long, and
        one that finds no slot for its queries.
        """
        if not prefill.settings.resolved_lookahead:
            return None
        lookahead = LookAhead(
            settings=prefill.settings,
            num_layers=self._num_layers,
            block_size=self._block_size,
            prompt=int(request.num_prompt_tokens),
            last=int(request.num_prompt_tokens + request.max_tokens),
            prefilled=int(request.num_tokens),
            spans=self.admissions.of(request).spans,
        )
        most = max(prefill.most_blocks, lookahead.held_blocks(prefill.ending))
        if lookahead.due <= request.num_tokens or most > self.admissions.room:
            return None
        return lookahead

    def _prefill(self, request: Request) -> AtEnd | EveryPiece | None:
        """What packs the prefill that a request has now; None where it is left whole."""
        decision, tokens = self.admissions.of(request), int(request.num_tokens)
        own = packing = decision.settings
        if own is not None and own.decode_budget is not None and request.num_output_tokens:
            packing = own.variant(budget=own.tokens_per_layer(request.num_prompt_tokens))
        again = packing
        if again is None and request.num_output_tokens:
            # Its answer was bounded, so it may have outgrown the pool since its prompt stood whole.
            again = decision.bound_again
        tokenless = request.prompt_token_ids is None or bool(request.mm_features)
        if again is not None and again.max_whole is not None and tokenless:
            # rows that are embeddings cannot be computed behind a piece
            again = again.model_copy(update={"probe": 0, "probe_first": 0})
        spans = decision.spans
        pieces = None if again is None else self.admissions.pieces(again, tokens, spans)
        if pieces is not None:
            return pieces
        if own is None or packing is None or request.max_tokens - request.num_output_tokens <= 1:
            # With one token of the answer left, nothing would read a compressed prompt.
            return None
        plan = self.admissions.plan(packing, tokens, spans)
        return None if plan is None else AtEnd(settings=own, whole=plan)

    def has_prefilled(self, request_id: str) -> bool:
        """Whether the prefill of a request ended: it is packed, or left whole for good."""
        schedule = self.schedules.get(request_id)
        return schedule is not None and schedule.prefilled

    def end_prefill(
        self, request: Request, schedule: RequestSchedule, plan: PagePlan | None
    ) -> None:
        """Note that a prefill ends in this step, and is packed by `plan`."""
        schedule.answer = self._answer(request, schedule.holding, plan)
        schedule.prefilled = True
        self._pulled.discard(request.request_id)
        self.schedules[request.request_id] = schedule

    def _answer(
        self, request: Request, holding: Holding, plan: PagePlan | None
    ) -> EveryInterval | None:
        """What bounds the answer behind a prefill that is packed by `plan`; None if nothing."""
        settings = self.admissions.of(request).growing
        if settings is None:
            return None
        answer = EveryInterval(
            settings=settings,
            prefilled=int(request.num_tokens),
            last=int(request.num_prompt_tokens + request.max_tokens),
            added_up=int(request.num_tokens) if adds_up(settings) else None,
            spans=self.admissions.of(request).spans,
        )
        if not answer.may_pack(self._after(holding, plan, answer.prefilled)):
            # Nobody will ask, and its blocks may be others' too, beside which their sums lie.
            answer.added_up = None
        return answer

    @staticmethod
    def _after(holding: Holding, plan: PagePlan | None, tokens: int) -> Holding:
        """What is held once a prefill of `tokens` is packed by `plan`."""
        after = replace(holding)
        if plan is not None:
            after.pack(plan, tokens // holding.block_size)
        return after

    def watched_for(self, request: Request, schedule: RequestSchedule) -> CompressionConfig | None:
        """What a chunk of a prefill is watched for after which nothing is packed; None if nothing.

        A method that ranks by the attention of all rows needs also that of a prompt of which
        nothing is dropped at its end, for when it packs the answer; what is never packed is not
        watched.
        """
        if schedule.prefill is not None:
            # after its last chunk, its answer judges it
            waits = schedule.prefilled and schedule.lookahead is not None
            return None if waits else schedule.prefill.settings
        return self._watched_whole(request, schedule.holding)

    def _watched_whole(self, request: Request, holding: Holding) -> CompressionConfig | None:
        settings = self.admissions.of(request).growing
        if settings is None or not adds_up(settings):
            return None
        answer = self._answer(request, holding, None)
        return None if answer is None or answer.added_up is None else settings

    def forget(self, request_id: str) -> None:
        """The request ended or was preempted; unknown ones may be named."""
        self.schedules.pop(request_id, None)
        self._looking.discard(request_id)
        self._pulled.discard(request_id)

    # -- how much room requests take, and what they share -------------------------------------

    def most_blocks(self, request: Request) -> int:
        """Blocks that the prefill of a request takes at most, from its first to its last."""
        schedule = self.schedule_of(request)
        if schedule.prefill is not None and not schedule.prefilled:
            return schedule.prefill.most_blocks
        return -(-int(request.num_tokens) // self._block_size)

    def _end_with_the_pool(self, request: Request) -> None:
        """Let an answer end where the pool does, as vLLM's ends with the longest sequence.

        Sequences may be longer than the pool once prompts need not stand whole, so vLLM's own
        check no longer promises that one request fits.
        """
        size, tokens, blocks = self._block_size, int(request.num_tokens), self.admissions.room
        schedule = self.schedule_of(request)
        plan = schedule.plan(tokens)
        if schedule.lookahead is not None:
            tokens = schedule.lookahead.due
            plan = schedule.lookahead.kept(schedule.holding, tokens)
        packed = 0 if plan is None else plan.blocks
        answer = self._answer(request, schedule.holding, plan)
        if answer is not None:
            after = self._after(schedule.holding, plan, tokens)
            if answer.most_blocks(after, packed=packed, tokens=answer.last) <= blocks:
                return
        behind = 0 if plan is None else tokens // size
        # the last token of an answer is never read, and takes no room
        room = max((blocks - packed + behind) * size - tokens + 1, 1)
        if room < request.max_tokens:
            logger.info(
                "request %s may write %d tokens instead of %d: the KV cache has no room for more",
                *(request.request_id, room, request.max_tokens),
            )
            request.max_tokens = room

    def longest_hit(self, request: Request, max_length: int) -> int:
        """How much of a waiting prompt may come from the prefix cache, at most `max_length`.

        A prompt that will be compressed computes what its method reads the queries of: its whole
        window, or, where that is the whole attention, all of it. Keys and values are read where
        they lie, however they came there.
        """
        schedule = self.schedule_of(request)
        if schedule.lookahead is not None and schedule.prefill is None:
            # few queries of the prompt judge it, or none
            return min(schedule.lookahead.longest_hit, max_length)
        if isinstance(pieces := schedule.prefill, EveryPiece):
            reads = method_of(pieces.settings).reads
            if Reads.COLUMN_SUMS in reads:
                return 0
            # What lies behind the first packing was computed against what that left.
            window = pieces.settings.resolved_window if Reads.WINDOW in reads else 0
            own = 1 if pieces.probe(pieces.first_end) else max(window, 1)
            if schedule.lookahead is not None:
                max_length = min(schedule.lookahead.longest_hit, max_length)
            return min(pieces.first_end - own, pieces.tokens - max(window, 1), max_length)
        decision = self.admissions.of(request)
        settings = decision.settings
        if self._watched_whole(request, schedule.holding) is not None:
            return 0
        # vLLM always recomputes the last token, so it asks for one less.
        tokens = max_length + 1
        plan = settings and self.admissions.plan(settings, tokens, decision.spans)
        if settings is None or plan is None:
            return max_length
        reads = method_of(settings).reads
        if Reads.COLUMN_SUMS in reads:
            return 0
        return tokens - settings.resolved_window if Reads.WINDOW in reads else max_length
