"""What a worker does in its steps: watch the layers of prefills, and pack what the plan says.

Per step: `begin_step`, then `begin_batch` from the metadata builder once the batch is laid out,
`after_attention` from each layer, and `end_step` after the last one.
"""

from collections.abc import Mapping, Sequence

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_kvcompress.engine.compression.attention_adder import AttentionAdder
from vllm_kvcompress.engine.compression.mover import Mover, StridedMover
from vllm_kvcompress.engine.compression.packer import Packer, PackJob
from vllm_kvcompress.engine.compression.reports import Reports, Stopwatch
from vllm_kvcompress.engine.compression.role_counts import RoleCounts
from vllm_kvcompress.engine.compression.stages import Stages
from vllm_kvcompress.engine.compression.tiled_mover import TiledMover
from vllm_kvcompress.engine.compression.warm_up import WarmUp
from vllm_kvcompress.engine.compression.watched import Prefill, Probe, Span, Step
from vllm_kvcompress.engine.messages.step import PackRequest, plan_of
from vllm_kvcompress.engine.pages.layouts import Layout, Tiled
from vllm_kvcompress.engine.pages.pool import PagePool
from vllm_kvcompress.engine.pages.scales import Scales
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.method_of import method_of

_ATTENTION = Reads.WINDOW | Reads.COLUMN_SUMS


class PromptCompressor:
    """Packs what requests hold on one worker.

    Args:
        settings: the engine's settings, for what they say of the log and for `warm_up`.
        pool: the page pool of this worker's layers.
        layout: how keys and values lie in the pool's pages.
        scales: of each layer.
        stages: which layers of the model are compressed, L of them on this worker.
        queries: query heads, head dim and dtype of a layer's queries, for `warm_up`.
    """

    def __init__(
        self,
        settings: CompressionConfig,
        pool: PagePool,
        layout: Layout,
        *,
        scales: Scales,
        stages: Stages,
        queries: tuple[int, int, torch.dtype],
    ) -> None:
        self.pool = pool
        self.compressed = 0
        layers = len(stages.own)
        self.reports = Reports(stages, log=settings.log_requests)
        self._settings = settings
        mover: Mover = (
            TiledMover(pool, layout) if isinstance(layout, Tiled) else StridedMover(pool, layout)
        )
        self.packer = Packer(mover, scales=scales, num_layers=layers)
        self._queries, self.queries_dtype = queries, queries[2]
        self._role_counts = RoleCounts()
        self.packer.observers.append(self._role_counts.packed)
        self.adder = AttentionAdder(self.packer)
        self._prefills: dict[str, Prefill] = {}
        self._step: Step | None = None

    # -- the step -----------------------------------------------------------------------------

    def begin_step(self, output: SchedulerOutput) -> None:
        """Take the scheduler's plan, and forget requests that ended, paused or start again."""
        gone = set(output.finished_req_ids) | set(output.preempted_req_ids or ())
        gone.update(request.req_id for request in output.scheduled_new_reqs)
        gone.update(output.scheduled_cached_reqs.resumed_req_ids)
        for request_id in gone:
            self._prefills.pop(request_id, None)
            self.pool.forget(request_id)
        self.reports.stages.wait_for_sent()
        self._role_counts.begin_step(output)
        plan = plan_of(output)
        drafts = output.scheduled_spec_decode_tokens.items() if plan is not None else ()
        pack = () if plan is None else plan.pack
        probes = {
            pack_request.request_id: Probe.of(pack_request)
            for pack_request in pack
            if pack_request.plan.probe
        }
        self._step = Step(plan, {request_id: len(ids) for request_id, ids in drafts}, probes)

    def abort_step(self) -> None:
        """Drop what is left of a step that did not come to its end."""
        self._step = None

    def begin_batch(
        self, request_ids: Sequence[str], query_start: Sequence[int], block_table: torch.Tensor
    ) -> None:
        """Find the requests of the step's plan in the batch.

        Args:
            request_ids: the batch's requests, in row order.
            query_start: ``R + 1`` token offsets of the rows, on the host.
            block_table: ``[R, W]`` int32 vLLM block ids.
        """
        step = self._step
        # A step has one batch, so its plan is taken once.
        if step is None or step.plan is None or step.laid_out:
            return
        step.laid_out, plan = True, step.plan
        row_of = {request_id: row for row, request_id in enumerate(request_ids)}
        packed = [
            pack_request.request_id
            for pack_request in plan.pack
            if pack_request.prefill and not pack_request.whole
        ]
        for request_id in (*plan.grow, *plan.keep):
            self.pool.keep_queries(request_id)
        for request_id in packed:
            self.pool.admit(request_id)
        for request_id, settings in plan.observe:
            if method_of(settings).reads & _ATTENTION:
                span = self._span(step, request_id, settings, row_of[request_id], query_start)
                span.blocks = self._blocks(block_table, span.row, span.prefill.tokens)
                if request_id in plan.grow:
                    step.remembered.append((span.blocks, span.prefill))
        for pack_request in plan.pack:
            row = row_of[pack_request.request_id]
            if pack_request.uses_ring_queries:
                step.jobs.append(self._judged_by_ring(pack_request, row, block_table))
                continue
            span = self._span(
                step, pack_request.request_id, pack_request.settings, row, query_start
            )
            span.blocks = self._blocks(block_table, row, pack_request.tokens)
            step.jobs.append(self._job(step, pack_request, span))
        step.additions = [
            (pack_request, row_of[pack_request.request_id]) for pack_request in plan.add
        ]

    def _judged_by_ring(
        self, pack_request: PackRequest, row: int, block_table: torch.Tensor
    ) -> PackJob:
        """What packs an answer, or a prompt after its look-ahead."""
        method = method_of(
            pack_request.settings, scored_by_output=pack_request.plan.scored_by_output
        )
        if not pack_request.prefill:
            return PackJob(pack_request=pack_request, method=method, row=row)
        blocks = self._blocks(block_table, row, pack_request.tokens) if pack_request.whole else None
        stopwatch = Stopwatch(self.pool.pages.device)
        return PackJob(
            pack_request=pack_request, method=method, row=row, blocks=blocks, stopwatch=stopwatch
        )

    def _span(
        self,
        step: Step,
        request_id: str,
        settings: CompressionConfig,
        row: int,
        query_start: Sequence[int],
    ) -> Span:
        """Count a chunk of a prefill, and watch its layers if its method reads attention."""
        method = method_of(settings)
        start, stop = int(query_start[row]), int(query_start[row + 1])
        probe = step.probes[request_id].rows if request_id in step.probes else 0
        stop -= step.drafts.get(request_id, 0) + probe
        prefill = self._prefills.get(request_id)
        if prefill is None:
            stopwatch = Stopwatch(self.pool.pages.device)
            prefill = Prefill(method, settings.resolved_window, stopwatch)
            self._prefills[request_id] = prefill
        prefill.tokens += stop - start
        span = Span(row, start, stop, probe, self.pool.layer_offset[:0], prefill)
        if method.reads & _ATTENTION:
            step.spans.append(span)
        return span

    def _blocks(self, block_table: torch.Tensor, row: int, tokens: int) -> torch.Tensor:
        return block_table[row, : -(-tokens // self.pool.block_size)].long()

    def _job(self, step: Step, pack_request: PackRequest, span: Span) -> PackJob:
        """What packs a prompt, with what its chunks left.

        Raises:
            RuntimeError: its method reads the attention of all tokens, and some were not seen.
        """
        prefill = span.prefill
        if Reads.COLUMN_SUMS in prefill.method.reads:
            if prefill.tokens != pack_request.tokens:
                raise RuntimeError(
                    f"request {pack_request.request_id}: packing needs {pack_request.tokens}"
                    f" prefill tokens, but the worker saw {prefill.tokens}"
                )
            if prefill.source is None and pack_request.request_id in self.pool:
                step.remembered.append((span.blocks, prefill))
        return PackJob(
            pack_request=pack_request,
            method=prefill.method,
            row=span.row,
            blocks=span.blocks,
            queries=prefill.probe if pack_request.plan.probe else prefill.queries,
            sums=prefill.sums,
            stopwatch=prefill.stopwatch,
        )

    # -- what the batch's builders and layers ask -----------------------------------------------

    @property
    def running(self) -> bool:
        """Whether a step is under way."""
        return self._step is not None

    @property
    def probes(self) -> Mapping[str, Probe]:
        """By request, what stands behind its chunk of this step and judges it."""
        return {} if self._step is None else self._step.probes

    @property
    def planned(self) -> bool:
        """Whether this step's batch, not laid out yet, has requests to watch or to pack."""
        step = self._step
        return step is not None and step.plan is not None and not step.laid_out

    @property
    def must_see_layers(self) -> bool:
        """Whether this step's batch, not laid out yet, has prefills whose layers must be seen."""
        step = self._step
        if step is None or step.plan is None or step.laid_out:
            return False
        return bool(step.plan.observe) or any(
            not pack_request.uses_ring_queries for pack_request in step.plan.pack
        )

    @property
    def needs_tables(self) -> bool:
        """Whether this step's batch, laid out, is followed by work on what the tables say."""
        step = self._step
        if step is None:
            return False
        return bool(step.additions) or any(not job.pack_request.whole for job in step.jobs)

    @property
    def watching(self) -> bool:
        """Whether `after_attention` has anything to do in this step."""
        return self._step is not None and bool(self._step.spans)

    def after_attention(self, layer: int, query: torch.Tensor) -> None:
        """Keep what the end of the prefill needs of this chunk.

        Args:
            layer: index of the layer on this worker.
            query: ``[num_tokens, Hq, D]``, rotated.
        """
        step = self._step
        assert step is not None
        step.layers_watched += 1
        for span in step.spans:
            prefill = span.prefill
            reads = prefill.method.reads_of(layer)
            if Reads.WINDOW in reads:
                prefill.queries[layer] = self._latest(layer, span, query)
                if span.probe:
                    prefill.probe[layer] = query[span.stop : span.stop + span.probe].clone()
            if Reads.COLUMN_SUMS in reads:
                with prefill.stopwatch.running():
                    self._accumulate(layer, span, query)

    def _latest(self, layer: int, span: Span, query: torch.Tensor) -> torch.Tensor:
        """The last ``[<= w, Hq, D]`` queries of the prefill so far."""
        latest = query[max(span.start, span.stop - span.prefill.window) : span.stop]
        earlier = span.prefill.queries.get(layer)
        missing = span.prefill.window - len(latest)
        if earlier is not None and missing > 0:
            return torch.cat([earlier[-missing:], latest])
        # A copy, since the model goes on to write over its queries.
        return latest.clone()

    def _accumulate(self, layer: int, span: Span, query: torch.Tensor) -> None:
        """Add up what the prefill's rows so far pay to every token: a chunk's rows are final."""
        prefill, rows = span.prefill, query[span.start : span.stop]
        if prefill.source is not None:
            most, computed = prefill.source
            self.adder.add_chunk(layer, span.row, rows, most + prefill.tokens - computed)
            return
        sums = self.packer.column_sums(layer, span.blocks, rows, prefill.tokens)
        earlier = prefill.sums.get(layer)
        if earlier is not None:
            sums[:, : earlier.shape[1]] += earlier
        prefill.sums[layer] = sums

    def end_step(self) -> int | None:
        """Pack what the plan says: from the next step on it is read packed.

        Returns:
            The number of the plan that was carried out; None if this step had none.

        Raises:
            RuntimeError: the batch was never laid out, so that blocks would be freed unpacked, or
                its layers ran unseen, so that nothing could be scored.
        """
        step = self._step
        if step is None or step.plan is None:
            self._step = None
            return None
        if not step.laid_out:
            raise RuntimeError(
                f"the step ran without its compressions of {list(step.plan.request_ids)}: the"
                " attention backend's metadata builder was not called"
            )
        if step.spans and step.layers_watched != self.packer.num_layers:
            raise RuntimeError(
                f"{step.layers_watched} of {self.packer.num_layers} layers were seen in a step"
                " whose prefills are compressed: the others ran without calling their attention,"
                " as a replayed graph does"
            )
        for blocks, prefill in step.remembered:
            with prefill.stopwatch.running():
                self.adder.remember_whole(blocks, prefill.sums)
        self.adder.add(step.additions)
        kept = self.packer.run(step.jobs)
        for job in step.jobs:
            if job.pack_request.prefill:
                self._note(job, kept[job.pack_request.request_id])
        for request_id in step.plan.grow:
            self._prefills.pop(request_id, None)
        self._step = None
        return step.plan.number

    def _note(self, job: PackJob, pages: torch.Tensor) -> None:
        """Take in that a prompt was packed; one whose end that was is done."""
        pack_request = job.pack_request
        if pack_request.cut and not pack_request.ends:
            return
        if not pack_request.ends:
            prefill = self._prefills[pack_request.request_id]
            prefill.sums = {}
            prefill.source = (
                pack_request.plan.most_pages * pack_request.plan.block_size,
                pack_request.tokens,
            )
            return
        self._prefills.pop(pack_request.request_id, None)
        if pack_request.answered is not None and pack_request.settings.decode_budget is None:
            self.pool.drop_queries(pack_request.request_id)
        self.compressed += 1
        assert job.stopwatch is not None, pack_request
        counted = self._role_counts.take(pack_request.request_id)
        self.reports.add(pack_request, pages, job.stopwatch, counted)

    def warm_up(self, longest: int) -> None:
        """Pack prompts and answers of nobody, so that no request waits for a kernel's compilation.

        With every method that a request may ask for. All blocks are the null block, which no
        request reads.
        """
        longest = min(longest, self.pool.longest)
        for settings in self._settings.variants:
            WarmUp(self.packer, self.adder, settings, self._queries).run(longest)
