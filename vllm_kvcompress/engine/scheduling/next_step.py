"""What the step after this one will take of the pool, before anybody knows how this one ends.

From lengths, and never too little: a request that turns out to have ended needs nothing, and gives
back more than its share of the next step lets another's chunk take.
"""

from collections.abc import Collection, Iterable
from typing import Any

from vllm.v1.request import Request

from vllm_kvcompress.engine.scheduling.coordination import Coordination
from vllm_kvcompress.planning.pieces import EveryPiece


class NextStep:
    """Goes through the requests that run as vLLM's scheduler will.

    Args:
        scheduler: vLLM's, ours on top of it.
        coordination: of its groups of blocks.
    """

    def __init__(self, scheduler: Any, coordination: Coordination) -> None:
        self._scheduler, self._coordination = scheduler, coordination
        self._manager = coordination.manager
        config = scheduler.vllm_config
        self._stages = int(config.parallel_config.pipeline_parallel_size)
        if self._manager.deferred_free.holds:
            # what this step frees is there for the step after the next one
            self._stages = max(self._stages, 2)
        self.pipelined = self._stages > 1
        self.overlaps = bool(config.scheduler_config.async_scheduling) or self.pipelined

    def blocks(self, looking: Collection[str]) -> int:
        """Blocks that running requests take until each of `looking` has been in a step again.

        That is the next step, unless chunks of older prompts leave it no room, or steps of other
        requests are under way in a pipeline. Only then may one be packed.
        """
        running: list[Request] = self._scheduler.running
        ends = {request.request_id: int(request.num_computed_tokens) for request in running}
        rows = dict(ends)
        waiting = {name for name in looking if name in ends}
        destinations, steps = 0, 0
        while steps < self._stages or waiting:
            destinations += self._go_through(running, ends, rows, waiting)
            steps += 1
        return destinations + sum(
            self._coordination.missing(request_id, most, steps) for request_id, most in rows.items()
        )

    def _go_through(
        self,
        running: Iterable[Request],
        ends: dict[str, int],
        rows: dict[str, int],
        waiting: set[str],
    ) -> int:
        """Take every request a step further; returns destination blocks of what is packed then.

        Args:
            ends: by request, tokens computed by then.
            rows: by request, those that it has had blocks for, a probe's rows among them.
            waiting: those that were in no step yet.
        """
        scheduler, destinations = self._scheduler, 0
        room = int(scheduler.max_num_scheduled_tokens)
        cap = self._longest_chunk(room)
        for request in running:
            request_id = request.request_id
            computed = ends[request_id]
            known = int(request.num_tokens) + int(request.num_output_placeholders)
            # the last token of an answer is not computed
            last = int(request.num_prompt_tokens + request.max_tokens) - 1
            longest = min(last, int(scheduler.max_model_len) - 1) - computed
            if longest <= 0:
                waiting.discard(request_id)
                continue
            new, probe = min(max(known - computed, 1), longest, cap, room), 0
            if new > 1:
                # vLLM may end it earlier, where a state is to be kept; it takes no more for that
                new, probe = scheduler.step_of(request, computed, new)
            if new <= 0:
                continue
            ends[request_id] = computed + self._with_drafts(request, computed, new, known)
            rows[request_id] = max(rows[request_id], ends[request_id] + probe)
            waiting.discard(request_id)
            taken = self._manager.destination_blocks(request_id, computed + new, ())
            destinations += taken.too_few + taken.others
            # a limit per chunk depends on who waits, so what it leaves to others is not known
            room -= self._scheduled(request, computed, new) + probe if cap >= room else 1
        return destinations

    def _scheduled(self, request: Request, computed: int, new: int) -> int:
        """So many of its tokens at least: what vLLM leaves of a chunk is other requests' room.

        It ends chunks where a state is to be kept. Then a request behind it may come to a block's
        end, and take a state of each group that this one does not.
        """
        scheduler = self._scheduler
        if new <= 1 or not scheduler.need_mamba_block_aligned_split:
            return new
        further = computed - int(request.num_computed_tokens)
        return int(scheduler._mamba_block_aligned_split(request, new, further))

    def _with_drafts(self, request: Request, computed: int, new: int, known: int) -> int:
        """So many tokens of a request, and the drafts that vLLM may put behind the last known one.

        They take blocks, though they may be taken back. A look-ahead bounds them, but not once it
        has given way. What they leave of the step's room to others is not known: there may be none.
        """
        drafts = int(self._scheduler.num_spec_tokens)
        if not drafts or computed + new < known:
            return new
        longest = int(self._scheduler.max_model_len) - 1 - computed
        return max(min(new + drafts, longest), new)

    def _longest_chunk(self, room: int) -> int:
        """Tokens of a prompt that one step computes at most."""
        config = self._scheduler.scheduler_config
        limit = int(config.long_prefill_token_threshold)
        if limit <= 0 or len(self._scheduler.running) <= 1:
            return room
        return min(room, max(limit, room // len(self._scheduler.running)))

    def admitted(self, request_id: str, tokens: int) -> int:
        """Blocks that a request takes behind its first chunk, while steps of others are under way.

        Args:
            tokens: computed once its first chunk is.
        """
        request = self._manager.planner.request(request_id)
        steps = self._stages - 1
        chunks = steps * self._longest_chunk(int(self._scheduler.max_num_scheduled_tokens))
        end = tokens + min(chunks, max(int(request.num_tokens) - tokens, steps))
        prefill = self._manager.planner.schedule_of(request).prefill
        # it is packed for the first time at its end, or where one in pieces holds too much
        first = min(prefill.first_end, end) if isinstance(prefill, EveryPiece) else end
        taken = self._manager.destination_blocks(request_id, max(first, tokens), ())
        more = self._coordination.missing(request_id, end, 1 + steps)
        return more - self._coordination.missing(request_id, tokens) + taken.too_few + taken.others

    def waiting(self) -> int:
        """Blocks that the next request takes to be admitted; 0 where none is."""
        scheduler = self._scheduler
        if not scheduler.waiting or len(scheduler.running) >= scheduler.max_num_running_reqs:
            return 0
        request = scheduler.waiting.peek_request()
        planner, cache = self._manager.planner, scheduler.kv_cache_manager
        most = planner.most_blocks(request)
        schedule = planner.schedule_of(request)
        if not isinstance(schedule.prefill, EveryPiece):
            # blocks of others that it would share
            most -= self._coordination.shared_hit(request)
        others = planner.admissions.other_blocks(int(request.num_tokens))
        return max(most, 1) + others + int(cache.watermark_blocks)
