"""VllmHook `scheduler`: vLLM's schedulers, with a compression plan attached to each step's output.

Both of vLLM's schedulers are subclassed, because vLLM switches async scheduling off for a scheduler
that is not an `AsyncScheduler`. We override methods without copying their bodies.

The blocks that a plan frees can be allocated as soon as the plan is sent. Outputs arrive in the
order of their steps. So if a plan is lost or its step fails, the scheduler notices before it
delivers any token that was computed after that step, and stops the engine.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any, NoReturn

import vllm.outputs
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_kvcompress.engine.layers import other_layers_of
from vllm_kvcompress.engine.messages.outputs import attach_counts, stopped_ids
from vllm_kvcompress.engine.messages.step import StepPlan, StepReport, attach_plan, report_of
from vllm_kvcompress.engine.scheduling.admission import ABORTED, ANSWERED, FAILED, Admissions
from vllm_kvcompress.engine.scheduling.compression_stats import CompressionStats, UsageNotes
from vllm_kvcompress.engine.scheduling.coordination import Coordination
from vllm_kvcompress.engine.scheduling.deferred_free import DeferredFree
from vllm_kvcompress.engine.scheduling.kv_cache import CompressedManager, GroupBlocks
from vllm_kvcompress.engine.scheduling.lookaheads import LookAheads
from vllm_kvcompress.engine.scheduling.next_step import NextStep
from vllm_kvcompress.engine.scheduling.packed_prefixes import PackedPrefixes
from vllm_kvcompress.engine.scheduling.parking import Parking
from vllm_kvcompress.engine.scheduling.request_schedules import RequestSchedules
from vllm_kvcompress.engine.scheduling.request_state import RequestStates
from vllm_kvcompress.engine.scheduling.step_builder import StepBuilder
from vllm_kvcompress.errors import VllmHookError, quoted_id, shorten
from vllm_kvcompress.planning.memory import HOST_SLOT_BLOCKS, host_slots
from vllm_kvcompress.refusals.tested import (
    OFFLOADING_CONNECTOR,
    OFFLOADING_KEYS,
    SIMPLE_CONNECTOR,
)

logger = init_logger("vllm.kvcompress")


class _CompressingMixin:
    """Mixin that adds compression to a vLLM scheduler, which must come after it in the bases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scheduler: Any = self
        cache, vllm_config = scheduler.kv_cache_manager, scheduler.vllm_config
        self.groups = GroupBlocks(cache)
        manager = self.groups.compressed
        spec, block_size = manager.kv_cache_spec, int(manager.block_size)
        num_layers = spec.num_compressed_layers
        self.admissions = Admissions(
            spec.settings,
            num_layers,
            block_size,
            manager.block_pool,
            other_layers_of(vllm_config),
            spec.dtype.itemsize,
            spec.num_draft_layers,
        )
        self.states = RequestStates(scheduler.requests, self.admissions.new_state)
        self.lookaheads = LookAheads(spec.ring_slots)
        self.schedules = RequestSchedules(self.admissions, self.lookaheads, num_layers, block_size)
        deferred_free, stats = DeferredFree(manager.block_pool, self), CompressionStats()
        block_bytes = num_layers * int(spec.page_size_bytes)
        self.parking = Parking(
            host_slots(spec.settings.park, block_bytes),
            HOST_SLOT_BLOCKS * block_bytes,
            manager,
            self.states,
            stats,
        )
        connector, transfer = scheduler.connector, vllm_config.kv_transfer_config
        connector_name = None if transfer is None else transfer.kv_connector
        if connector_name in OFFLOADING_KEYS:
            connector.bind(self._longest_prefix_hit)
        # The connector that takes references to free blocks; None without it.
        self._lazy_connector = connector if connector_name == SIMPLE_CONNECTOR else None
        self.step_builder = StepBuilder(
            manager,
            self.states,
            self.admissions,
            self.schedules,
            self.lookaheads,
            deferred_free,
            stats,
            self.parking,
            self._packed_prefixes(manager, deferred_free),
            self._unverified_drafts,
            connector if connector_name == OFFLOADING_CONNECTOR else None,
        )
        manager.bind(self.step_builder.release, self.step_builder.max_piece_blocks)
        self.next_step = NextStep(self, self.groups, self.step_builder)
        self.coordination = Coordination(cache, self.groups, self.step_builder, self.next_step)
        self.usage_notes = UsageNotes(self._block_bytes)
        # Scheduled steps whose outputs have not arrived, in order, each with its plan.
        self._steps_in_flight: deque[tuple[SchedulerOutput, StepPlan | None]] = deque()
        # Message of the error that stops the engine; None unless a plan was not executed.
        self._stop_message: str | None = None
        # While requests are being aborted: ids of those that ended at a stop string.
        self._stopped: frozenset[str] = frozenset()
        self._log_concurrency()

    def _packed_prefixes(
        self, manager: CompressedManager, deferred_free: DeferredFree
    ) -> PackedPrefixes | None:
        """Return the packed pages of the prefix cache; None if no settings reuse them."""
        for variant in self.admissions.settings.variants:
            page_tokens = self.admissions.packed_page_tokens(variant)
            if variant.reuses_pages and page_tokens is not None:
                return PackedPrefixes(
                    manager.block_pool,
                    int(manager.kv_cache_group_id),
                    int(manager.block_size),
                    page_tokens,
                    variant.grid_cell(page_tokens),
                    variant.recent_tokens,
                    deferred_free.zero_blocks,
                )
        return None

    @property
    def _block_bytes(self) -> int:
        """Return the bytes of a KV block on all GPUs, which have caches of one size."""
        cache = self.kv_cache_config  # type: ignore[attr-defined]
        parallel = self.vllm_config.parallel_config  # type: ignore[attr-defined]
        rank_bytes = sum(tensor.size for tensor in cache.kv_cache_tensors) // cache.num_blocks
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        return int(rank_bytes * ranks)

    def _log_concurrency(self) -> None:
        config = self.vllm_config  # type: ignore[attr-defined]
        settings, tokens = self.admissions.settings, config.model_config.max_model_len
        if not settings.enabled:
            return
        admissions = self.admissions
        plan = admissions.plan(settings, tokens - 1)
        if plan is None:
            return
        pool_blocks = config.cache_config.num_gpu_blocks - 1
        pieces = admissions.piece_schedule(settings, tokens - 1)
        logger.info(
            "a prompt of %d tokens takes %d of %d KV blocks while it is computed, %d afterwards",
            plan.tokens,
            -(-plan.tokens // plan.block_size) if pieces is None else pieces.max_blocks,
            pool_blocks,
            plan.held_blocks,
        )
        limit = None if pieces is None else pieces.boundary_limit
        if limit is not None and limit.recommended_max_whole > (settings.pieces.max_whole or 0):
            logger.warning(
                "between two pieces, each layer holds %d tokens of a prompt of %d tokens, and %d"
                " after the last piece. Tokens dropped between pieces cannot be recovered. To hold"
                " more, set a --kv-piece below %d or a --kv-max-whole above %d",
                limit.held_pages * plan.block_size // plan.num_layers,
                plan.tokens,
                plan.pages * plan.block_size // plan.num_layers + plan.tail,
                settings.pieces.length,
                settings.pieces.max_whole,
            )

    def add_request(self, request: Request) -> None:
        """Add a request. It ends with an error if the pool cannot hold its prompt.

        Servers refuse such requests earlier (`frontend.api`). Without this check, the request would
        wait forever, and so would every request behind it.
        """
        super().add_request(request)  # type: ignore[misc]
        # vLLM adds the next part of a streamed input to its session's request, or ends the session.
        if self.requests.get(request.request_id) is not request:  # type: ignore[attr-defined]
            return
        if self.admissions.settings.pieces.max_whole is None or request.sampling_params is None:
            return
        needed = self.schedules.max_prefill_blocks(self.states.of(request))
        available = self.admissions.max_request_blocks
        if needed > available:
            reason = (
                f"its prompt of {request.num_tokens} tokens takes {needed} KV blocks while it is"
                f" computed, and the KV cache has {available}"
            )
            shown = quoted_id(request.request_id)
            logger.error("request %s ends with an error: %s", shown, reason)
            self._end_with_error(request.request_id, reason)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """End requests from outside, as vLLM does, and note which ended at a stop string."""
        if request_ids is not None and not isinstance(request_ids, str):
            request_ids = list(request_ids)
            self._stopped = stopped_ids(request_ids)
        try:
            ended: list[Request] = super().finish_requests(  # type: ignore[misc]
                request_ids, finished_status
            )
        finally:
            self._stopped = frozenset()
        return ended

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Free a request, and count it as skipped if it ends before its prompt was counted."""
        # vLLM adds a refused request only to abort it, so that a KV connector learns about it.
        if not request.abort_immediately:
            self.step_builder.stats.skip(self.states.of(request), self._skip_reason(request))
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _skip_reason(self, request: Request) -> str:
        """Return the reason to count for a request that ended uncompressed."""
        if request.status == RequestStatus.FINISHED_ERROR:
            return FAILED
        aborted = request.status == RequestStatus.FINISHED_ABORTED
        return ABORTED if aborted and request.request_id not in self._stopped else ANSWERED

    def _end_with_error(self, request_id: str, reason: str) -> None:
        """Fail a request with the next step's outputs, as vLLM does for an invalid grammar."""
        errors: Any = self.grammar_compile_error_reqs  # type: ignore[attr-defined]
        if isinstance(errors, set):
            errors.add(request_id)
        else:  # since vLLM 0.33, which passes the reason on
            error = vllm.outputs.RequestError(code="validation_error", message=reason)
            errors[request_id] = error

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Preempt a request, and park it if it can resume from its pages."""
        self.parking.park(request)
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, *args: Any, **kwargs: Any
    ) -> bool:
        """Reset the prefix cache. Parked requests are recomputed: their K and V may be outdated.

        If vLLM does not reset it, because requests run, they go on, and so do parked requests.
        """
        enabled, self.parking.is_enabled = self.parking.is_enabled, False
        try:
            is_reset = bool(
                super().reset_prefix_cache(  # type: ignore[misc]
                    reset_running_requests, *args, **kwargs
                )
            )
        finally:
            self.parking.is_enabled = enabled
        if is_reset or reset_running_requests:
            self.parking.drop_all()
        return is_reset

    def _longest_prefix_hit(self, request: Request) -> int:
        """Return how many tokens of a waiting prompt need not be computed here."""
        return self.schedules.longest_prefix_hit(
            self.states.of(request), int(request.num_tokens) - 1
        )

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        """Accept a loaded prompt. Tokens whose queries the method reads are computed here."""
        super()._update_waiting_for_remote_kv(request)  # type: ignore[misc]
        state = self.states.of(request)
        longest_hit = self._longest_prefix_hit(request)
        tokens = min(int(request.num_computed_tokens), max(longest_hit, 0))
        if tokens:
            state.was_pulled = True
            # A look-ahead slot is taken only now: a pull may fail.
            self.step_builder.admit(state, tokens)
        elif request.num_computed_tokens:
            # All tokens must be computed, like those of any other prompt.
            self.kv_cache_manager.free(request)  # type: ignore[attr-defined]
        request.num_computed_tokens = tokens

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Return the tokens to schedule for a request, including the probe behind its chunk.

        A chunk of a prompt in pieces ends at a piece boundary, and the probe follows it. Draft
        tokens do not go beyond the end of a look-ahead.
        """
        tokens: int = super()._reserve_prefill_lookahead(  # type: ignore[misc]
            request, num_computed_tokens, num_new_tokens
        )
        if request.request_id in self.states.ids_without_packing:
            return tokens
        state = self.states.of(request)
        schedule = self.schedules.of(state)
        unverified = self._unverified_drafts(request.request_id)
        tokens, probe_tokens = schedule.step_limit(num_computed_tokens, tokens, unverified)
        self.step_builder.set_probe(state, probe_tokens)
        return tokens + probe_tokens

    def _unverified_drafts(self, request_id: str) -> int:
        """Return the number of a request's draft tokens in steps whose outputs have not arrived.

        vLLM counts them as computed, and as output (`Request.num_output_placeholders`). Each may
        still be rejected. Every other token of these steps is certain.
        """
        return sum(
            len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            for output, _ in self._steps_in_flight
        )

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Advance the requests, except for probe tokens: the next tokens take their positions."""
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]
        for state, probe_tokens in self.step_builder.take_probes():
            if state.request_id in scheduler_output.num_scheduled_tokens:
                state.request.num_computed_tokens -= probe_tokens

    def _build_kv_connector_meta(self, connector: Any, scheduler_output: SchedulerOutput) -> Any:
        """Return the connector's message to the workers; None if `schedule` builds it later."""
        if connector is self._lazy_connector:
            return None
        return super()._build_kv_connector_meta(  # type: ignore[misc]
            connector, scheduler_output
        )

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Return vLLM's next step, with a plan attached.

        Raises:
            VllmHookError: an earlier plan was lost, so no step may use the blocks that it freed.
        """
        if self._stop_message is not None:
            raise VllmHookError(self._stop_message)
        self.coordination.begin_step(self.requests.keys())  # type: ignore[attr-defined]
        output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._steps_in_flight.append((output, None))
        waiting = self.step_builder.pack_due_lookaheads()
        if waiting:
            needed = self.next_step.blocks_for_running(self.lookaheads.request_ids)
            self.step_builder.pack_early(waiting, needed, overlaps=self.next_step.overlaps)
        if self._lazy_connector is not None:
            output.kv_connector_metadata = self._lazy_connector.build_connector_meta(output)
        plan = self.step_builder.build()
        attach_plan(output, plan)
        self._steps_in_flight[-1] = output, plan
        if self.admissions.settings.usage:
            self.usage_notes.add_plan(plan)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Check that the workers executed the plan, and add compression results to the outputs.

        Raises:
            VllmHookError: the report does not match this step's plan, or an earlier step with a
                plan failed. None of the step's tokens is delivered.
        """
        report = report_of(model_runner_output)
        self._check_report(scheduler_output, report)
        outputs = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        if self.admissions.settings.usage:
            self.usage_notes.add_packed(() if report is None else report.packed)
            for client in outputs.values():
                self.usage_notes.attach_to(client.outputs)
            self.usage_notes.forget_ended(self.requests)  # type: ignore[attr-defined]
        return outputs

    def _check_report(self, scheduler_output: SchedulerOutput, report: StepReport | None) -> None:
        """Check a report against our record of the step's plan, and count what was packed."""
        plan: StepPlan | None = None
        steps = self._steps_in_flight
        is_next = bool(steps) and steps[0][0] is scheduler_output
        if is_next or any(output is scheduler_output for output, _ in steps):
            output, plan = steps.popleft()
            while output is not scheduler_output:
                # That step failed, and the engine's caller went on with a later one.
                if plan is not None:
                    ids = shorten(list(plan.request_ids), 600)
                    self._stop(
                        f"the step with plan {plan.number}, for {ids}, failed",
                        "start the engine again",
                    )
                output, plan = steps.popleft()
        expected = None if plan is None else plan.number
        acknowledged = None if report is None else report.executed_plan
        if acknowledged != expected:
            self._stop_for_mismatch(plan, acknowledged)
        if report is not None:
            self.step_builder.stats.report(report.packed)

    def _stop_for_mismatch(self, plan: StepPlan | None, acknowledged: int | None) -> NoReturn:
        parallel = self.vllm_config.parallel_config  # type: ignore[attr-defined]
        if plan is None:
            problem = f"a step without a plan came back with plan {acknowledged} acknowledged"
        else:
            received = "no plan" if acknowledged is None else f"plan {acknowledged}"
            ids = shorten(list(plan.request_ids), 600)
            problem = (
                f"the step with plan {plan.number}, for {ids}, came back with {received}"
                " acknowledged"
            )
        self._stop(
            problem,
            f"let the executor {parallel.distributed_executor_backend!r} run execute_model and"
            f" sample_tokens of {parallel.worker_cls} and return their outputs unchanged, or"
            " serve without --kv-compress",
        )

    def _stop(self, problem: str, fix: str) -> NoReturn:
        self._stop_message = (
            f"workers must carry out every compression, but {problem}, so the engine stops before"
            f" it reads blocks that were freed without being packed; {fix}"
        )
        raise VllmHookError(self._stop_message)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """Return vLLM's statistics with our counts attached. `metrics` detaches them again."""
        stats: SchedulerStats | None = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        counts = self.step_builder.stats.take()
        if stats is not None and counts is not None:
            attach_counts(stats, counts)
        return stats


class CompressingScheduler(_CompressingMixin, Scheduler):
    """vLLM's synchronous scheduler with compression."""


class CompressingAsyncScheduler(_CompressingMixin, AsyncScheduler):
    """vLLM's async scheduler with compression."""
