"""Observes the layers of prefills and packs the requests that the scheduler's plan names.

Call order in a step: `begin_step`; `begin_batch`, from the metadata builder once the batch is laid
out; `after_attention`, from each layer; `end_step`, after the last layer.
"""

from collections.abc import Mapping, Sequence

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from kvcompress_kernels.dequantise_pages import dequantise_pages
from vllm_kvcompress.engine.compression.attention_adder import AttentionAdder
from vllm_kvcompress.engine.compression.mover import Mover, StridedMover
from vllm_kvcompress.engine.compression.packer import Packer, PackJob
from vllm_kvcompress.engine.compression.reports import Reports, Stopwatch
from vllm_kvcompress.engine.compression.stages import Stages
from vllm_kvcompress.engine.compression.step_state import (
    ObservedChunk,
    PrefillState,
    Probe,
    StepState,
)
from vllm_kvcompress.engine.compression.tiled_mover import TiledMover
from vllm_kvcompress.engine.compression.warm_up import WarmUp
from vllm_kvcompress.engine.messages.step import (
    AddGroups,
    AdoptedPages,
    PackLookahead,
    PackPiece,
    PackRequest,
    ScoredByChunks,
    StepPlan,
    plan_of,
)
from vllm_kvcompress.engine.pages.host_pages import HostPages
from vllm_kvcompress.engine.pages.layouts import Layout, Tiled
from vllm_kvcompress.engine.pages.pool import PagePool
from vllm_kvcompress.engine.pages.scales import Scales
from vllm_kvcompress.engine.pages.scratch_pages import MIN_QUERIES
from vllm_kvcompress.errors import quoted_id, shorten
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.settings.config import CompressionConfig

_ATTENTION = Reads.WINDOW | Reads.COLUMN_SUMS


class PromptCompressor:
    """Compresses the KV cache of requests on one worker.

    Args:
        settings: the engine's settings, used for logging and by `warm_up`.
        pool: the page pool of this worker's layers.
        layout: the memory layout of keys and values in a page.
        scales: scales of each layer.
        stages: the model's compressed layers by pipeline stage; L of them are on this worker.
        queries: query heads, head dim and dtype of a layer's queries, for `warm_up`.
        host_pages: copies of preempted requests' pages; None if none are made.
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
        host_pages: HostPages | None = None,
    ) -> None:
        self.host_pages = host_pages
        self.pool, self.layout = pool, layout
        self.compressed = 0
        # The page pool's slot of each request in the latest batch.
        self.batch_slots: list[int] = []
        num_layers = len(stages.own_layers)
        self.reports = Reports(stages, log=settings.log_requests)
        self._settings = settings
        mover: Mover = (
            TiledMover(pool, layout) if isinstance(layout, Tiled) else StridedMover(pool, layout)
        )
        self.packer = Packer(mover, scales=scales, num_layers=num_layers)
        self._queries, self.queries_dtype = queries, queries[2]
        self.adder = AttentionAdder(self.packer)
        self._prefills: dict[str, PrefillState] = {}
        self._step: StepState | None = None
        # FlashAttention's log-sum-exp is untested against ours with sinks or a quantised cache.
        self._uses_log_sums = scales.sinks is None and pool.elements is pool.pages

    @torch.inference_mode()
    def begin_step(self, output: SchedulerOutput) -> None:
        """Read the scheduler's plan and drop the state of finished and preempted requests.

        A request that starts or resumes also loses its state, which would be of an earlier run.
        """
        plan, host_pages = plan_of(output), self.host_pages
        ended = set(output.finished_req_ids)
        ended.update(request.req_id for request in output.scheduled_new_reqs)
        ended.update(output.scheduled_cached_reqs.resumed_req_ids)
        for parked in () if plan is None else plan.park:
            assert host_pages is not None, parked
            host_pages.park(parked)
        for request_id in ended | set(output.preempted_req_ids or ()):
            self._prefills.pop(request_id, None)
            self.pool.forget(request_id)
            self.packer.protected.forget(request_id)
        self.reports.stages.wait_for_sent()
        if plan is not None and plan.zero_blocks:
            self.pool.zero(plan.zero_blocks)
        for resumed in () if plan is None else plan.resume:
            assert host_pages is not None, resumed
            host_pages.resume(resumed)
        if host_pages is not None:
            host_pages.forget(ended)
        for adopted in () if plan is None else plan.adopt:
            self._adopt(adopted)
        drafts = output.scheduled_spec_decode_tokens.items() if plan is not None else ()
        pack = () if plan is None else plan.pack
        probes = {
            pack_request.request_id: Probe.of(pack_request)
            for pack_request in pack
            if pack_request.plan.probe
        }
        self._step = StepState(
            plan,
            {request_id: len(ids) for request_id, ids in drafts},
            probes,
            may_use_scratch=self._may_use_scratch(output),
        )

    def _may_use_scratch(self, output: SchedulerOutput) -> bool:
        """Return whether rows of the step's batch may read scratch pages."""
        queries = output.num_scheduled_tokens
        # The first condition skips the loop over requests in decode steps.
        longest = output.total_num_scheduled_tokens - len(queries) + 1
        return longest >= MIN_QUERIES and self.pool.may_use_scratch(queries)

    def _adopt(self, adopted: AdoptedPages) -> None:
        """Make a new request read packed pages of the prefix cache. No byte moves."""
        layers, size = self.packer.num_layers, self.pool.block_size
        leading_blocks = len(adopted.leading_blocks)
        blocks = self.pool.destination((*adopted.leading_blocks, *adopted.blocks))
        pages = blocks.view(-1, layers).T.int()
        self.pool.add_groups(
            adopted.request_id,
            pages[:, leading_blocks:],
            adopted.tokens,
            adopted.page_tokens,
            leading_blocks + adopted.tokens // size,
            leading=pages[:, :leading_blocks],
        )

    def abort_step(self) -> None:
        """Drop the state of a step that failed."""
        self._step = None

    def begin_batch(
        self, request_ids: Sequence[str], query_start: Sequence[int], block_table: torch.Tensor
    ) -> None:
        """Find the plan's requests in the batch and prepare their jobs.

        Args:
            request_ids: the batch's requests, in row order.
            query_start: ``R + 1`` token offsets of the rows, on the host.
            block_table: ``[R, W]`` int32 vLLM block ids.
        """
        step = self._step
        # A step has one batch, so its plan is read once.
        if step is None or step.plan is None or step.laid_out:
            return
        step.laid_out, plan = True, step.plan
        row_of = {request_id: row for row, request_id in enumerate(request_ids)}
        for request_id in (*plan.keep_output_queries, *plan.keep_prompt_queries):
            self.pool.keep_queries(request_id)
        for pack_request in plan.pack:
            if pack_request.prefill and pack_request.reads_page_tables:
                self.pool.admit(pack_request.request_id)
        for request_id, settings in plan.observe:
            if settings.method.reads & _ATTENTION:
                chunk = self._chunk(step, request_id, settings, row_of[request_id], query_start)
                chunk.blocks = self._blocks(block_table, chunk.batch_row, chunk.prefill.tokens)
                if request_id in plan.keep_output_queries:
                    step.prompt_sums.append((chunk.blocks, chunk.prefill))
        for pack_request in plan.pack:
            row = row_of[pack_request.request_id]
            if isinstance(pack_request, ScoredByChunks):
                chunk = self._chunk(
                    step,
                    pack_request.request_id,
                    pack_request.settings,
                    row,
                    query_start,
                    packs_prompt=not pack_request.reads_page_tables,
                )
                chunk.blocks = self._blocks(block_table, row, pack_request.tokens)
                job = self._job_with_chunk_queries(step, pack_request, chunk)
            elif isinstance(pack_request, AddGroups):
                job = self._group_job(pack_request, row, block_table)
            else:
                job = self._job_with_ring_queries(pack_request, row, block_table)
            job.draft_pages = self._draft_pages(pack_request, row, block_table)
            step.jobs.append(job)
        step.additions = [
            (addition, row_of[addition.request_id]) for addition in plan.add_attention
        ]

    def _draft_pages(
        self, pack_request: PackRequest, row: int, block_table: torch.Tensor
    ) -> torch.Tensor | None:
        """Return `PackJob.draft_pages` of a request."""
        if self.pool.drafts is None:
            return None
        blocks = block_table[row, : pack_request.packed_end // self.pool.block_size].long()
        (slot,) = self.pool.slots([pack_request.request_id])
        return self.pool.drafts.source(slot, blocks)

    def _group_job(self, pack_request: AddGroups, row: int, block_table: torch.Tensor) -> PackJob:
        """Return the job that adds groups for output tokens, or for a part of a prompt."""
        request_id, settings, stopwatch = pack_request.request_id, pack_request.settings, None
        if pack_request.prefill:
            stopwatch = self._prefill_state(request_id, settings).stopwatch
        size = self.pool.block_size
        return PackJob(
            pack_request=pack_request,
            method=settings.method,
            batch_row=row,
            blocks=self._blocks(block_table, row, pack_request.packed_end // size * size),
            stopwatch=stopwatch,
        )

    def _prefill_state(self, request_id: str, settings: CompressionConfig) -> PrefillState:
        """Return the state of a prefill; create it for the first chunk."""
        if request_id not in self._prefills:
            stopwatch = Stopwatch(self.pool.pages.device)
            prefill = PrefillState(settings.method, settings.resolved_window, stopwatch)
            self._prefills[request_id] = prefill
        return self._prefills[request_id]

    def _job_with_ring_queries(
        self, pack_request: PackRequest, row: int, block_table: torch.Tensor
    ) -> PackJob:
        """Return the job for output tokens, or for a prompt that queries in the ring score."""
        blocks = None
        if not pack_request.reads_page_tables:
            blocks = self._blocks(block_table, row, pack_request.tokens)
        return PackJob(
            pack_request=pack_request,
            method=pack_request.settings.method.method_for(
                scored_by_output=pack_request.plan.scored_by_output
            ),
            batch_row=row,
            blocks=blocks,
            stopwatch=Stopwatch(self.pool.pages.device) if pack_request.prefill else None,
        )

    def _chunk(
        self,
        step: StepState,
        request_id: str,
        settings: CompressionConfig,
        row: int,
        query_start: Sequence[int],
        *,
        packs_prompt: bool = False,
    ) -> ObservedChunk:
        """Return a chunk's `ObservedChunk`; observe its layers if the method reads attention.

        Args:
            packs_prompt: whether the prompt is packed after this chunk, and nothing was dropped.
        """
        method = settings.method
        start, stop = int(query_start[row]), int(query_start[row + 1])
        probe = step.probes[request_id].rows if request_id in step.probes else 0
        stop -= step.drafts.get(request_id, 0) + probe
        prefill = self._prefill_state(request_id, settings)
        prefill.tokens += stop - start
        chunk = ObservedChunk(row, start, stop, probe, self.pool.layer_offset[:0], prefill)
        if method.reads & _ATTENTION:
            step.chunks.append(chunk)
        if Reads.WINDOW in method.reads and self._uses_log_sums:
            # Only the prompt's last chunk, if it has all window queries and no other tokens.
            has_drafts = request_id in step.drafts
            is_last = packs_prompt and stop - start >= prefill.window
            chunk.keeps_log_sums = is_last and not has_drafts and not probe
            step.keeps_log_sums |= chunk.keeps_log_sums
        return chunk

    def _blocks(self, block_table: torch.Tensor, row: int, tokens: int) -> torch.Tensor:
        return block_table[row, : -(-tokens // self.pool.block_size)].long()

    def _job_with_chunk_queries(
        self, step: StepState, pack_request: PackRequest, chunk: ObservedChunk
    ) -> PackJob:
        """Return the job for a prompt, with the queries and sums that its chunks left.

        Raises:
            RuntimeError: the method needs the attention of all tokens, and this worker did not see
                all of them.
        """
        prefill = chunk.prefill
        if Reads.COLUMN_SUMS in prefill.method.reads:
            if prefill.tokens != pack_request.tokens:
                raise RuntimeError(
                    f"request {quoted_id(pack_request.request_id)}: packing needs"
                    f" {pack_request.tokens} prefill tokens, but the worker saw {prefill.tokens}"
                )
            if prefill.packed_tokens is None and pack_request.request_id in self.pool:
                step.prompt_sums.append((chunk.blocks, prefill))
        return PackJob(
            pack_request=pack_request,
            method=prefill.method,
            batch_row=chunk.batch_row,
            blocks=chunk.blocks,
            queries=prefill.probe if pack_request.plan.probe else prefill.queries,
            log_sums=prefill.log_sums if chunk.keeps_log_sums else {},
            sums=prefill.sums,
            stopwatch=prefill.stopwatch,
        )

    @property
    def running(self) -> bool:
        """Return whether a step is in progress."""
        return self._step is not None

    @property
    def plan(self) -> StepPlan | None:
        """Return the plan of the step in progress until it is executed; None without one."""
        return None if self._step is None else self._step.plan

    @property
    def probes(self) -> Mapping[str, Probe]:
        """By request, the probe after its chunk in this step."""
        return {} if self._step is None else self._step.probes

    @property
    def planned(self) -> bool:
        """Return whether this step has a plan whose batch is not laid out yet."""
        step = self._step
        return step is not None and step.plan is not None and not step.laid_out

    @property
    def must_run_layers_in_python(self) -> bool:
        """Return whether layers must be observed in the next batch, or must fill scratch pages."""
        step = self._step
        if step is not None and step.may_use_scratch:
            return True
        if step is None or step.plan is None or step.laid_out:
            return False
        return bool(step.plan.observe) or any(
            isinstance(pack_request, ScoredByChunks) for pack_request in step.plan.pack
        )

    @property
    def needs_tables(self) -> bool:
        """Return whether the work after this step reads the batch's page tables."""
        step = self._step
        if step is None:
            return False
        return bool(step.additions) or any(job.pack_request.reads_page_tables for job in step.jobs)

    @property
    def watching(self) -> bool:
        """Return whether this step has prefills that `after_attention` observes."""
        return self._step is not None and bool(self._step.chunks)

    @property
    def keeps_log_sums(self) -> bool:
        """Return whether a prefill in this step uses the log-sum-exp of its attention."""
        return self._step is not None and self._step.keeps_log_sums

    def note_log_sums(self, log_sums: torch.Tensor) -> None:
        """Note the log-sum-exp of a layer's attention, before its `after_attention`.

        Args:
            log_sums: ``[Hq, num_tokens]`` float32, the natural logarithm of each query's softmax
                sum over the scaled logits of all tokens up to its own.
        """
        assert self._step is not None
        self._step.log_sums = log_sums

    def after_attention(self, layer: int, query: torch.Tensor) -> None:
        """Keep the queries and attention sums of this chunk that packing will need.

        Args:
            layer: index of the layer on this worker.
            query: ``[num_tokens, Hq, D]``, rotated.
        """
        step = self._step
        assert step is not None
        step.layers_observed += 1
        log_sums, step.log_sums = step.log_sums, None
        for chunk in step.chunks:
            prefill = chunk.prefill
            reads = prefill.method.reads_of(layer)
            if Reads.WINDOW in reads:
                if chunk.keeps_log_sums and log_sums is not None:
                    latest = log_sums[:, chunk.stop - prefill.window : chunk.stop]
                    # Copy, because the rest of the tensor is as long as the batch.
                    prefill.log_sums[layer] = latest.clone()
                prefill.queries[layer] = self._last_queries(layer, chunk, query)
                if chunk.probe:
                    prefill.probe[layer] = query[chunk.stop : chunk.stop + chunk.probe].clone()
            if Reads.COLUMN_SUMS in reads:
                with prefill.stopwatch.running():
                    self._accumulate(layer, chunk, query)

    def _last_queries(self, layer: int, chunk: ObservedChunk, query: torch.Tensor) -> torch.Tensor:
        """Return the last ``[<= w, Hq, D]`` queries of the prefill so far."""
        latest = query[max(chunk.start, chunk.stop - chunk.prefill.window) : chunk.stop]
        earlier = chunk.prefill.queries.get(layer)
        missing = chunk.prefill.window - len(latest)
        if earlier is not None and missing > 0:
            return torch.cat([earlier[-missing:], latest])
        # Copy, because the model reuses the memory of its queries.
        return latest.clone()

    def _accumulate(self, layer: int, chunk: ObservedChunk, query: torch.Tensor) -> None:
        """Add this chunk's attention to each token's sum; attention is causal, so it is final."""
        prefill, queries = chunk.prefill, query[chunk.start : chunk.stop]
        if prefill.packed_tokens is not None:
            max_kept, computed = prefill.packed_tokens
            max_tokens = max_kept + prefill.tokens - computed
            self.adder.add_chunk(layer, chunk.batch_row, queries, max_tokens)
            return
        sums = self.packer.column_sums(layer, chunk.blocks, queries, prefill.tokens)
        earlier = prefill.sums.get(layer)
        if earlier is not None:
            sums[:, : earlier.shape[1]] += earlier
        prefill.sums[layer] = sums

    @torch.inference_mode()
    def end_step(self) -> int | None:
        """Pack the requests of the plan; attention reads the packed pages from the next step on.

        Returns:
            The number of the plan that was executed, or None if this step had none.

        Raises:
            RuntimeError: the batch was never laid out, so blocks would be freed without packing, or
                a layer ran without calling `after_attention`, so nothing could be scored.
        """
        step = self._step
        if step is None or step.plan is None:
            self._step = None
            return None
        if not step.laid_out and step.plan.compressed_ids:
            raise RuntimeError(
                "the step did not compress requests"
                f" {shorten(list(step.plan.compressed_ids), 600)}: the attention backend's metadata"
                " builder was not called"
            )
        if step.chunks and step.layers_observed != self.packer.num_layers:
            raise RuntimeError(
                f"{step.layers_observed} of {self.packer.num_layers} layers called their attention"
                " in a step whose prefills are compressed; the rest ran without Python, as in a"
                " replayed CUDA graph"
            )
        for blocks, prefill in step.prompt_sums:
            with prefill.stopwatch.running():
                self.adder.store_prompt_sums(blocks, prefill.sums)
        self.adder.add(step.additions)
        pages = self.packer.run(step.jobs)
        for job in step.jobs:
            if job.pack_request.prefill:
                self._finish_packing(job, pages)
        for request_id in step.plan.keep_output_queries:
            self._prefills.pop(request_id, None)
        self._step = None
        return step.plan.number

    def _finish_packing(self, job: PackJob, pages: Mapping[str, torch.Tensor]) -> None:
        """Update the prefill's state after packing; report the prompt if all of it is packed.

        Args:
            pages: the result of `Packer.run`.
        """
        pack_request = job.pack_request
        if isinstance(pack_request, PackPiece):
            prefill = self._prefills[pack_request.request_id]
            prefill.sums = {}
            prefill.packed_tokens = (
                pack_request.plan.max_layer_pages * pack_request.plan.block_size,
                pack_request.tokens,
            )
        if not pack_request.completes_prompt:
            return
        if isinstance(pack_request, PackLookahead) and pack_request.settings.decode.budget is None:
            self.pool.drop_queries(pack_request.request_id)
        assert job.stopwatch is not None, pack_request
        self._prefills.pop(pack_request.request_id, None)
        self.compressed += 1
        self.reports.add(pack_request, pages[pack_request.request_id], job.stopwatch)

    @torch.inference_mode()
    def warm_up(self, max_tokens: int) -> None:
        """Compile every kernel by packing dummy requests, so that no real request waits for it.

        Runs every method that a request may select. All dummy blocks are the null block, which no
        request reads.

        Args:
            max_tokens: length of the longest dummy prompt.
        """
        max_tokens = min(max_tokens, self.pool.max_layer_tokens)
        if (scratch := self.pool.scratch) is not None:
            null_page = self.pool.layer_offset[:1]
            destinations = scratch.pages[: scratch.ratio]
            dequantise_pages(self.pool.elements, self.layout.offsets, null_page, destinations)
        for settings in self._settings.variants:
            WarmUp(self.packer, self.adder, settings, self._queries).run(max_tokens)
