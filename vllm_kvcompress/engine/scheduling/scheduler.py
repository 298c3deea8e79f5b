"""Seam `scheduler`: vLLM's schedulers, with the step's compressions on their output.

Both of vLLM's schedulers are subclassed, because one that is not an `AsyncScheduler` would lose
async scheduling. Nothing of their bodies is repeated.

A plan's blocks are free as soon as it is handed out. Outputs come back in the order of their
steps, so a plan that was lost on its way, or whose step failed, is noticed before a token that was
computed after it could be delivered: the engine stops there.
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
from vllm_kvcompress.engine.messages.counts import attach_counts
from vllm_kvcompress.engine.messages.step import StepPlan, StepReport, attach_plan, report_of
from vllm_kvcompress.engine.messages.stop_strings import stopped_ids
from vllm_kvcompress.engine.scheduling.admission import ABORTED, ANSWERED, FAILED
from vllm_kvcompress.engine.scheduling.coordination import Coordination
from vllm_kvcompress.engine.scheduling.fence import Fence
from vllm_kvcompress.engine.scheduling.next_step import NextStep
from vllm_kvcompress.engine.scheduling.usage_notes import UsageNotes
from vllm_kvcompress.errors import SeamError
from vllm_kvcompress.planning.pieces import EveryPiece

logger = init_logger("vllm.kvcompress")


class _Compressing:
    """Mixin before a vLLM scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.coordination = Coordination(self.kv_cache_manager)  # type: ignore[attr-defined]
        self.compressed_manager = self.coordination.manager
        others = other_layers_of(self.vllm_config)  # type: ignore[attr-defined]
        self.compressed_manager.fence = Fence(self.compressed_manager.block_pool, self)
        self.compressed_manager.connect(self.requests, others)  # type: ignore[attr-defined]
        self.next_step = NextStep(self, self.coordination)
        self.usage_notes = UsageNotes()
        # Steps whose outputs have not come back yet, in their order, each with its plan.
        self._handed_out: deque[tuple[SchedulerOutput, StepPlan | None]] = deque()
        # The error to raise once a plan was not carried out.
        self._lost: str | None = None
        # Of the requests that are being aborted, those that a stop string has ended.
        self._stopped: frozenset[str] = frozenset()
        self._log_concurrency()

    def _log_concurrency(self) -> None:
        config = self.vllm_config  # type: ignore[attr-defined]
        settings, tokens = self.compressed_manager.settings, config.model_config.max_model_len
        if not settings.enabled:
            return
        admissions = self.compressed_manager.planner.admissions
        plan = admissions.plan(settings, tokens - 1)
        if plan is None:
            return
        blocks = config.cache_config.num_gpu_blocks - 1
        whole, tail = plan.full_blocks + int(plan.tail > 0), int(plan.tail > 0)
        pieces = admissions.pieces(settings, tokens - 1)
        logger.info(
            "a prompt of %d tokens takes %d of %d KV blocks while it is computed, %d afterwards",
            plan.tokens,
            whole if pieces is None else pieces.most_blocks,
            blocks,
            plan.blocks + tail,
        )
        if pieces is not None and pieces.roomy > (settings.max_whole or 0):
            logger.warning(
                "between its pieces a prompt of %d tokens holds %d in each layer, and keeps %d at"
                " its end: what a piece drops before the answer asks for it is lost. A smaller"
                " --kv-piece than %d, or a longer --kv-max-whole than %d, holds more",
                *(plan.tokens, pieces.held_pages * plan.block_size // plan.num_layers),
                plan.pages * plan.block_size // plan.num_layers + plan.tail,
                *(settings.piece, settings.max_whole),
            )

    def add_request(self, request: Request) -> None:
        """Take a request, unless the pool cannot hold its prompt: then it ends with an error.

        Servers refuse those earlier (`frontend.api`); without a guard one would wait for ever, and
        every request behind it.
        """
        super().add_request(request)  # type: ignore[misc]
        manager = self.compressed_manager
        if manager.settings.max_whole is None or request.sampling_params is None:
            return
        most, blocks = manager.planner.most_blocks(request), manager.planner.admissions.room
        if most > blocks:
            reason = (
                f"its prompt of {request.num_tokens} tokens takes {most} KV blocks while it is"
                f" computed, and there are {blocks}"
            )
            logger.error("request %s is ended: %s", request.request_id, reason)
            self._end_with_error(request.request_id, reason)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """End requests from outside, as vLLM does; note which of them a stop string has ended."""
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
        """Count a request that ends before anything of it was counted, by how it ends."""
        # vLLM adds a request that was refused only to abort it, so that its connector hears of it.
        if not request.abort_immediately:
            self.compressed_manager.tally.skip(request, self._end_of(request))
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _end_of(self, request: Request) -> str:
        """Return the reason to count for a request that ended uncompressed."""
        if request.status == RequestStatus.FINISHED_ERROR:
            return FAILED
        aborted = request.status == RequestStatus.FINISHED_ABORTED
        return ABORTED if aborted and request.request_id not in self._stopped else ANSWERED

    def _end_with_error(self, request_id: str, reason: str) -> None:
        """Let the next step's outputs say that it failed, as of one whose grammar is wrong."""
        errors: Any = self.grammar_compile_error_reqs  # type: ignore[attr-defined]
        if isinstance(errors, set):
            errors.add(request_id)
        else:  # since 0.33, which passes the reason on
            error = vllm.outputs.RequestError(code="validation_error", message=reason)
            errors[request_id] = error

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        """A prompt was pulled: what its method reads the queries of is computed here."""
        super()._update_waiting_for_remote_kv(request)  # type: ignore[misc]
        planner = self.compressed_manager.planner
        tokens = planner.pulled(request)
        if tokens:
            # nothing that a server does not send holds a slot for a look-ahead
            admitted = planner.admit(request.request_id, tokens)
            self.compressed_manager.tally.admitted(request, *admitted)
        elif request.num_computed_tokens:
            self.kv_cache_manager.free(request)  # type: ignore[attr-defined]
        request.num_computed_tokens = tokens

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """How many rows of a request are scheduled, a probe's among them."""
        tokens, probe = self.step_of(request, num_computed_tokens, num_new_tokens)
        self.compressed_manager.probes.note(request.request_id, probe)
        return tokens + probe

    def step_of(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> tuple[int, int]:
        """How long a request's step is, of so many tokens at most, and the rows of its probe.

        That of a prompt in pieces ends at a boundary, with the probe behind it, and no draft goes
        beyond the end of a look-ahead. Nothing is noted: steps that are only guessed ask too.
        """
        tokens: int = super()._reserve_prefill_lookahead(  # type: ignore[misc]
            request, num_computed_tokens, num_new_tokens
        )
        schedule, probe = self.compressed_manager.planner.schedule_of(request), 0
        if schedule.prefilled:
            ahead = schedule.lookahead
            end = None if ahead is None else ahead.next_end(num_computed_tokens)
            tokens = tokens if end is None else min(tokens, end - num_computed_tokens)
        elif isinstance(pieces := schedule.prefill, EveryPiece):
            tokens, probe = pieces.chunk(schedule.holding, num_computed_tokens, tokens)
        return tokens, probe

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Rows of a probe were scheduled, and are not computed: their place is the next tokens'."""
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]
        probes = self.compressed_manager.probes
        for request_id in scheduler_output.num_scheduled_tokens:
            if probe := probes.rows(request_id):
                self.requests[request_id].num_computed_tokens -= probe  # type: ignore[attr-defined]
        probes.clear()

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """vLLM's step, with its plan.

        Raises:
            SeamError: an earlier plan was lost; nothing may run on the blocks that it freed.
        """
        if self._lost is not None:
            raise SeamError(self._lost)
        output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        plan = self.compressed_manager.take_step(self.next_step)
        attach_plan(output, plan)
        self._handed_out.append((output, plan))
        if self.compressed_manager.settings.usage:
            self.usage_notes.plan(plan)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Also hear what the workers have carried out and packed, and let the answers know.

        Raises:
            SeamError: not what this step's plan says, or an earlier step with a plan failed; none
                of the step's tokens is delivered.
        """
        report = report_of(model_runner_output)
        self._check_report(scheduler_output, report)
        outputs = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        if self.compressed_manager.settings.usage:
            self.usage_notes.report(() if report is None else report.packed)
            for client in outputs.values():
                self.usage_notes.send(client.outputs)
            self.usage_notes.forget(self.requests)  # type: ignore[attr-defined]
        return outputs

    def _check_report(self, scheduler_output: SchedulerOutput, report: StepReport | None) -> None:
        """Compare the report with the plan, which our own record tells, not the step's output."""
        plan: StepPlan | None = None
        if any(output is scheduler_output for output, _ in self._handed_out):
            output, plan = self._handed_out.popleft()
            while output is not scheduler_output:
                # that step failed, and whoever asked the engine has asked again
                if plan is not None:
                    self._stop(
                        f"the step with plan {plan.number}, for {list(plan.request_ids)}, failed",
                        "start it again",
                    )
                output, plan = self._handed_out.popleft()
        expected = None if plan is None else plan.number
        acknowledged = None if report is None else report.carried_out
        if acknowledged != expected:
            self._stop_lost(plan, acknowledged)
        if report is not None:
            self.compressed_manager.tally.report(report.packed)

    def _stop_lost(self, plan: StepPlan | None, acknowledged: int | None) -> NoReturn:
        parallel = self.vllm_config.parallel_config  # type: ignore[attr-defined]
        if plan is None:
            happened = f"a step without a plan came back as plan {acknowledged}"
        else:
            answer = "none" if acknowledged is None else f"plan {acknowledged}"
            happened = (
                f"the step with plan {plan.number}, for {list(plan.request_ids)}, came back with"
                f" {answer} acknowledged"
            )
        self._stop(
            happened,
            f"let the executor {parallel.distributed_executor_backend!r} run execute_model and"
            f" sample_tokens of {parallel.worker_cls} and hand their outputs back as they are, or"
            " serve without --kv-compress",
        )

    def _stop(self, happened: str, cure: str) -> NoReturn:
        self._lost = (
            f"workers must carry out every compression, but {happened}, so the engine stops before"
            f" it reads blocks that were freed and not packed; {cure}"
        )
        raise SeamError(self._lost)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """vLLM's statistics, and ours beside a KV connector's; `metrics` takes them off."""
        stats: SchedulerStats | None = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        counts = self.compressed_manager.tally.take()
        if stats is not None and counts is not None:
            attach_counts(stats, counts)
        return stats


class CompressingScheduler(_Compressing, Scheduler):
    """vLLM's synchronous scheduler."""


class CompressingAsyncScheduler(_Compressing, AsyncScheduler):
    """vLLM's async scheduler."""
