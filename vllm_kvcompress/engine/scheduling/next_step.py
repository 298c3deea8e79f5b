"""Upper bound on the blocks that the next step takes from the pool.

The bound depends on lengths alone, because this step's outputs are not known yet. If a request ends
in this step, other requests can use its share of the next step's token budget. The bound still
holds, because the ended request returns at least as many blocks as they then need.
"""

from collections.abc import Collection, Iterable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_kvcompress.engine.scheduling.kv_cache import GroupBlocks
from vllm_kvcompress.engine.scheduling.step_builder import StepBuilder


class NextStep:
    """Simulates how vLLM's scheduler will schedule the running requests.

    Args:
        scheduler: vLLM's scheduler.
        groups: the blocks of its layer groups.
        step_builder: counts the destination blocks of packings.
    """

    def __init__(
        self,
        scheduler: Any,
        groups: GroupBlocks,
        step_builder: StepBuilder,
    ) -> None:
        self._scheduler, self._groups, self._step_builder = scheduler, groups, step_builder
        self._states, self._schedules = step_builder.states, step_builder.schedules

        stages = int(scheduler.vllm_config.parallel_config.pipeline_parallel_size)
        # Blocks whose frees are deferred become available only one step later.
        self._num_stages = max(stages, 2) if scheduler.defer_block_free else stages

    @property
    def is_pipelined(self) -> bool:
        """Return whether steps are scheduled before the blocks freed by this one are available."""
        return self._num_stages > 1

    @property
    def overlaps(self) -> bool:
        """Return whether the next step is scheduled before this step's outputs are known."""
        return bool(self._scheduler.scheduler_config.async_scheduling) or self.is_pipelined

    def blocks_for_running(self, lookahead_ids: Collection[str]) -> int:
        """Return the blocks that running requests take until every look-ahead is scheduled again.

        That takes one step, or more if chunks of older prompts fill the token budget or steps of
        other requests are running in a pipeline. A look-ahead can only be packed when it is
        scheduled.

        Args:
            lookahead_ids: ids of the requests with a look-ahead.
        """
        running: list[Request] = self._scheduler.running
        computed_tokens = {
            request.request_id: int(request.num_computed_tokens) for request in running
        }
        allocated_tokens = dict(computed_tokens)
        unscheduled = {request_id for request_id in lookahead_ids if request_id in computed_tokens}
        destinations, num_steps = 0, 0
        while num_steps < self._num_stages or unscheduled:
            destinations += self._simulate_step(
                running, computed_tokens, allocated_tokens, unscheduled, is_next=not num_steps
            )
            num_steps += 1
        return destinations + sum(
            self._groups.missing_blocks(request_id, tokens, num_steps)
            for request_id, tokens in allocated_tokens.items()
        )

    def _simulate_step(
        self,
        running: Iterable[Request],
        computed_tokens: dict[str, int],
        allocated_tokens: dict[str, int],
        unscheduled: set[str],
        *,
        is_next: bool,
    ) -> int:
        """Advance all requests by one step, and return the destination blocks of its packings.

        Args:
            running: the running requests, in vLLM's order.
            computed_tokens: computed tokens by request id. Updated.
            allocated_tokens: tokens with allocated blocks by request id, including probes. Updated.
            unscheduled: ids of look-aheads that no step has scheduled yet. Updated.
            is_next: whether it is the next step, scheduled before the latest outputs are known.
        """
        scheduler, destinations = self._scheduler, 0
        token_budget = int(scheduler.max_num_scheduled_tokens)
        max_chunk = self._max_chunk(token_budget)
        for request in running:
            request_id = request.request_id
            computed = computed_tokens[request_id]
            known = int(request.num_tokens) + int(request.num_output_placeholders)
            # The last output token is never computed. Drafts in flight may be rejected, so the
            # request may not be as far as vLLM counts.
            last_token = int(request.num_prompt_tokens + request.max_tokens) - 1
            unverified = self._step_builder.unverified_drafts(request_id)
            last_token += unverified
            remaining = min(last_token, int(scheduler.max_model_len) - 1) - computed
            if remaining <= 0:
                unscheduled.discard(request_id)
                continue
            if is_next and unverified and request_id in unscheduled:
                schedule = self._schedules.of(self._states.of(request))
                if schedule.step_limit(computed, 1, unverified)[0] == 0:
                    continue  # It waits for its outputs.
            num_new = min(max(known - computed, 1), remaining, max_chunk, token_budget)
            probe_tokens = 0
            if num_new > 1:
                # vLLM may end the chunk earlier to save a state. That takes no more blocks.
                num_new = Scheduler._reserve_prefill_lookahead(
                    scheduler, request, computed, num_new
                )
                schedule = self._schedules.of(self._states.of(request))
                num_new, probe_tokens = schedule.step_limit(computed, num_new)
            if num_new <= 0:
                continue
            new_end = computed + self._with_drafts(request, computed, num_new, known)
            computed_tokens[request_id] = new_end
            allocated_tokens[request_id] = max(
                allocated_tokens[request_id], self._allocated(new_end + probe_tokens)
            )
            unscheduled.discard(request_id)
            taken = self._step_builder.destination_blocks(request_id, computed + num_new, ())
            destinations += taken.must_be_fresh + taken.may_be_fresh
            # A limit per chunk depends on the waiting requests, so the number of tokens left for
            # other requests is unknown. Assume that this chunk takes only 1.
            token_budget -= (
                self._min_scheduled(request, computed, num_new) + probe_tokens
                if max_chunk >= token_budget
                else 1
            )
        return destinations

    def _min_scheduled(self, request: Request, computed: int, num_new: int) -> int:
        """Return the minimum number of a chunk's tokens that vLLM schedules.

        vLLM may end a chunk early to save a state. With the tokens left over, a later request may
        reach the end of a block, where it takes a state block in each group.
        """
        scheduler = self._scheduler
        if num_new <= 1 or not scheduler.need_mamba_block_aligned_split:
            return num_new
        already_simulated = computed - int(request.num_computed_tokens)
        return int(scheduler._mamba_block_aligned_split(request, num_new, already_simulated))

    def _with_drafts(self, request: Request, computed: int, num_new: int, known: int) -> int:
        """Return the tokens of a chunk plus the draft tokens that vLLM may put behind it.

        Drafts take blocks even if they are rejected. A look-ahead limits them, unless it was
        compressed early. The token budget is charged without drafts, because there may be none.
        """
        num_drafts = int(self._scheduler.num_spec_tokens)
        if not num_drafts or computed + num_new < known:
            return num_new
        remaining = int(self._scheduler.max_model_len) - 1 - computed
        return max(min(num_new + num_drafts, remaining), num_new)

    def _allocated(self, end: int) -> int:
        """Return the tokens with allocated blocks once a step computes a request's first `end`.

        A draft model writes its drafts behind them (``num_lookahead_tokens``).
        """
        scheduler = self._scheduler
        return min(end + int(scheduler.num_lookahead_tokens), int(scheduler.max_model_len))

    def _max_chunk(self, token_budget: int) -> int:
        """Return the maximum number of tokens of one prompt that a step computes."""
        config = self._scheduler.scheduler_config
        threshold = int(config.long_prefill_token_threshold)
        num_running = len(self._scheduler.running)
        if threshold <= 0 or num_running <= 1:
            return token_budget
        return min(token_budget, max(threshold, token_budget // num_running))

    def blocks_after_admission(self, request_id: str, tokens: int) -> int:
        """Return the blocks that a request takes in `num_stages - 1` steps after its first chunk.

        Args:
            request_id: the request to admit.
            tokens: its computed tokens after the first chunk.
        """
        state = self._states.by_id(request_id)
        request, prefill = state.request, self._schedules.of(state).prefill
        num_steps = self._num_stages - 1
        max_chunk = self._max_chunk(int(self._scheduler.max_num_scheduled_tokens))
        remaining = max(int(request.num_tokens) - tokens, num_steps)
        end = tokens + min(num_steps * max_chunk, remaining)
        first_pack = end if prefill is None else min(prefill.first_end, end)
        taken = self._step_builder.destination_blocks(request_id, max(first_pack, tokens), ())
        missing = self._groups.missing_blocks(request_id, self._allocated(end), 1 + num_steps)
        missing -= self._groups.missing_blocks(request_id, self._allocated(tokens))
        return missing + taken.must_be_fresh + taken.may_be_fresh
