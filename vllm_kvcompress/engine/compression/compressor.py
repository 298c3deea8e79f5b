"""What a worker does in the steps of a prefill: watch its layers, and pack the prompt at its end.

Per step: `begin_step`, then `begin_batch` from the metadata builder once the batch is laid out,
`after_attention` from each layer, and `end_step` after the last one.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from kvcompress_kernels.column_sums import column_sums
from vllm_kvcompress.engine.compression.packer import Finished, Packer
from vllm_kvcompress.engine.compression.repacker import Due, Repacker
from vllm_kvcompress.engine.compression.reports import Reports, Stopwatch
from vllm_kvcompress.engine.compression.stages import Stages
from vllm_kvcompress.engine.compression.tiled_packer import TiledPacker
from vllm_kvcompress.engine.messages.step import Addition, Compression, Repack, StepPlan, plan_of
from vllm_kvcompress.engine.pages.layouts import Layout, Tiled
from vllm_kvcompress.engine.pages.pool import PagePool
from vllm_kvcompress.engine.pages.scales import Scales
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.pipeline import Method, method_of
from vllm_kvcompress.settings.config import CompressionConfig


@dataclass(slots=True)
class _Prefill:
    """What a request's earlier chunks leave for its last one.

    Args:
        method: what will compress it.
        window: its observation window w.
        stopwatch: what compressing it takes.
        tokens: tokens computed so far.
        queries: per layer, the last ``[<= w, Hq, D]`` queries.
        sums: per layer, column sums ``[Hq, tokens]`` of the chunks so far, while all tokens stand.
        held: tokens that no layer held when it was packed for the last time, and how many were
            computed then; None while all tokens stand.
    """

    method: Method
    window: int
    stopwatch: Stopwatch
    tokens: int = 0
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    held: tuple[int, int] | None = None


@dataclass(slots=True)
class _Span:
    """One watched request's tokens in this step's batch.

    Args:
        row: of the batch.
        start, stop: rows of the batch.
        blocks: ``[ceil(tokens / bs)]`` int64, vLLM block ids of all its tokens so far.
    """

    row: int
    start: int
    stop: int
    blocks: torch.Tensor
    prefill: _Prefill


class PromptCompressor:
    """Compresses prompts on one worker.

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
        layers = stages.own
        self.reports = Reports(stages, log=settings.log_requests)
        self._settings = settings
        self.packer: Packer
        if isinstance(layout, Tiled):
            self.packer = TiledPacker(pool, layout, scales=scales, num_layers=len(layers))
        else:
            self.packer = Packer(pool, layout, scales=scales, num_layers=len(layers))
        self._queries, self.queries_dtype = queries, queries[2]
        self.repacker = Repacker(self.packer, pool.ring)
        self._due: list[Due] = []
        # Attention to add up after this step, with its row; prompts whose answers grow from it on.
        self._additions: list[tuple[Addition, int]] = []
        self._growing: dict[str, torch.Tensor] = {}
        self._prefills: dict[str, _Prefill] = {}
        self._step: StepPlan | None = None
        self._plan_number: int | None = None
        self._layers_watched = 0
        self._drafts: dict[str, int] = {}
        self._spans: list[_Span] = []
        self._finished: list[tuple[Finished, Stopwatch]] = []
        self.running = False

    # -- the step -----------------------------------------------------------------------------

    def begin_step(self, output: SchedulerOutput) -> None:
        """Take the scheduler's plan, and forget requests that ended, paused or start again."""
        gone = set(output.finished_req_ids) | set(output.preempted_req_ids or ())
        gone.update(request.req_id for request in output.scheduled_new_reqs)
        gone.update(output.scheduled_cached_reqs.resumed_req_ids)
        for request_id in gone:
            self._prefills.pop(request_id, None)
            self.pool.forget(request_id)
        self.abort_step()
        self.reports.stages.settle()
        self._step = plan_of(output)
        # Rows behind the last token of a prompt, which vLLM fills up to those of a decode step.
        drafts = output.scheduled_spec_decode_tokens.items() if self._step is not None else ()
        self._drafts = {request_id: len(ids) for request_id, ids in drafts}
        self._plan_number = None if self._step is None else self._step.number
        self.running = True

    def abort_step(self) -> None:
        """Drop what is left of a step that did not come to its end."""
        self._step, self._spans, self._finished, self._due = None, [], [], []
        self._additions, self._growing = [], {}
        self._plan_number, self._layers_watched = None, 0
        self.running = False

    def begin_batch(
        self, request_ids: Sequence[str], query_start: Sequence[int], block_table: torch.Tensor
    ) -> None:
        """Find the watched requests in the batch.

        Args:
            request_ids: the batch's requests, in row order.
            query_start: ``R + 1`` token offsets of the rows, on the host.
            block_table: ``[R, W]`` int32 vLLM block ids.
        """
        # A step has one batch, so its plan is taken once.
        step, self._step = self._step, None
        if step is None:
            return
        row_of = {request_id: row for row, request_id in enumerate(request_ids)}
        pieces = [todo for todo in step.repack if todo.prefill]
        for request_id in (*step.grow, *(todo.request_id for todo in pieces)):
            self.pool.admit(request_id)
        watched: list[tuple[str, CompressionConfig, Compression | Repack | None]]
        watched = [(request_id, settings, None) for request_id, settings in step.observe]
        watched += [(todo.request_id, todo.settings, todo) for todo in step.compress]
        watched += [(todo.request_id, todo.settings, todo) for todo in pieces]
        for request_id, settings, todo in watched:
            method = method_of(settings)
            if todo is None and not method.reads & (Reads.WINDOW | Reads.COLUMN_SUMS):
                continue
            row = row_of[request_id]
            start, stop = int(query_start[row]), int(query_start[row + 1])
            stop -= self._drafts.get(request_id, 0)
            prefill = self._prefills.get(request_id)
            if prefill is None:
                prefill = self._new_prefill(method, settings.resolved_window)
                self._prefills[request_id] = prefill
            prefill.tokens += stop - start
            whole = todo if isinstance(todo, Compression) else None
            tokens = prefill.tokens if whole is None else whole.plan.tokens
            blocks = block_table[row, : -(-tokens // self.pool.block_size)].long()
            if todo is not None:
                needed = tokens if isinstance(todo, Compression) else todo.tokens
                if Reads.COLUMN_SUMS in method.reads and prefill.tokens != needed:
                    raise RuntimeError(
                        f"request {request_id}: {prefill.tokens} tokens of its prefill were seen"
                        f" when it was to be packed, {needed} are needed"
                    )
            if whole is not None:
                finished = Finished(
                    todo=whole,
                    method=method,
                    blocks=blocks,
                    queries=prefill.queries,
                    sums=prefill.sums,
                    grows=request_id in step.grow,
                )
                self._finished.append((finished, prefill.stopwatch))
            if method.reads & (Reads.WINDOW | Reads.COLUMN_SUMS):
                self._spans.append(_Span(row, start, stop, blocks, prefill))
            if todo is None and request_id in step.grow:
                self._growing[request_id] = blocks
            if isinstance(todo, Repack):
                self._due.append(Due(todo=todo, row=row, queries=prefill.queries, blocks=blocks))
        self._additions = [(todo, row_of[todo.request_id]) for todo in step.add]
        answers = [todo for todo in step.repack if not todo.prefill]
        self._due += [Due(todo=todo, row=row_of[todo.request_id]) for todo in answers]

    def _new_prefill(self, method: Method, window: int, tokens: int = 0) -> _Prefill:
        return _Prefill(method, window, Stopwatch(self.pool.pages.device), tokens)

    @property
    def planned(self) -> bool:
        """Whether this step's batch, not laid out yet, has prefills to watch."""
        return self._step is not None

    @property
    def must_see_layers(self) -> bool:
        """Whether this step's batch, not laid out yet, has prefills whose layers must be seen."""
        step = self._step
        if step is None:
            return False
        in_pieces = any(todo.prefill for todo in step.repack)
        return bool(step.observe or step.compress or in_pieces)

    @property
    def packs_again(self) -> bool:
        """Whether this step's batch, laid out, is followed by work on what requests hold."""
        return bool(self._due or self._additions)

    @property
    def watching(self) -> bool:
        """Whether `after_attention` has anything to do in this step."""
        return bool(self._spans)

    def after_attention(self, layer: int, query: torch.Tensor) -> None:
        """Keep what the end of the prefill needs of this chunk.

        Args:
            layer: index of the layer on this worker.
            query: ``[num_tokens, Hq, D]``, rotated.
        """
        self._layers_watched += 1
        for span in self._spans:
            prefill = span.prefill
            reads = prefill.method.reads_of(layer)
            if Reads.WINDOW in reads:
                prefill.queries[layer] = self._latest(layer, span, query)
            if Reads.COLUMN_SUMS in reads:
                with prefill.stopwatch.running():
                    self._accumulate(layer, span, query)

    def _latest(self, layer: int, span: _Span, query: torch.Tensor) -> torch.Tensor:
        """The last ``[<= w, Hq, D]`` queries of the prefill so far."""
        latest = query[max(span.start, span.stop - span.prefill.window) : span.stop]
        earlier = span.prefill.queries.get(layer)
        missing = span.prefill.window - len(latest)
        if earlier is not None and missing > 0:
            return torch.cat([earlier[-missing:], latest])
        # A copy, since the model goes on to write over its queries.
        return latest.clone()

    def _accumulate(self, layer: int, span: _Span, query: torch.Tensor) -> None:
        """Add up what the prefill's rows so far pay to every token: a chunk's rows are final."""
        prefill, rows = span.prefill, query[span.start : span.stop]
        if prefill.held is not None:
            most, computed = prefill.held
            self.repacker.add_chunk(layer, span.row, rows, most + prefill.tokens - computed)
            return
        where = self.packer.where(layer, span.blocks, Reads.COLUMN_SUMS)
        sums = column_sums(
            rows, where.key_pages, where.pages, prefill.tokens, where.scale, where.sinks
        )
        earlier = prefill.sums.get(layer)
        if earlier is not None:
            sums[:, : earlier.shape[1]] += earlier
        prefill.sums[layer] = sums

    def end_step(self) -> int | None:
        """Pack the prompts that ended: from the next step on they are read compressed.

        Returns:
            The number of the plan that was carried out; None if this step had none.

        Raises:
            RuntimeError: the batch was never laid out, so that blocks would be freed unpacked, or
                its layers ran unseen, so that nothing could be scored.
        """
        if self._step is not None:
            raise RuntimeError(
                f"the step ran without its compressions of {self._step.compress}: the attention"
                " backend's metadata builder was not called"
            )
        if self._spans and self._layers_watched != self.packer.num_layers:
            raise RuntimeError(
                f"{self._layers_watched} of {self.packer.num_layers} layers were seen in a step"
                " whose prefills are compressed: the others ran without calling their attention,"
                " as a replayed graph does"
            )
        for finished, stopwatch in self._finished:
            with stopwatch.running():
                pages = self.packer.pack(finished)
            self._prefills.pop(finished.todo.request_id, None)
            self.compressed += 1
            self.reports.add(finished.todo, finished.todo.plan.tokens, pages, stopwatch)
        for request_id, blocks in self._growing.items():
            prefill = self._prefills.pop(request_id)
            with prefill.stopwatch.running():
                self.packer.remember_whole(blocks, prefill.sums)
        if self._additions:
            self.repacker.add(self._additions)
        if self._due:
            self._pack_again()
        carried_out = self._plan_number
        self.abort_step()
        return carried_out

    def _pack_again(self) -> None:
        """Pack answers that grew, and prompts at a boundary: those that end there are done."""
        with ExitStack() as clocks:
            for due in self._due:
                if due.todo.prefill:
                    prefill = self._prefills[due.todo.request_id]
                    clocks.enter_context(prefill.stopwatch.running())
                    if prefill.sums:
                        assert due.blocks is not None
                        self.packer.remember_whole(due.blocks, prefill.sums)
                        prefill.sums = {}
            kept = self.repacker.run(self._due)
        for due in self._due:
            plan = due.todo.plan
            if due.todo.prefill:
                held = plan.most_pages * plan.block_size, due.todo.tokens
                self._prefills[due.todo.request_id].held = held
            if due.todo.ends:
                prefill = self._prefills.pop(due.todo.request_id)
                self.compressed += 1
                pages = kept[due.todo.request_id]
                self.reports.add(due.todo, due.todo.tokens, pages, prefill.stopwatch)

    def warm_up(self, longest: int) -> None:
        """Compress prompts of nobody, so that no request waits for a kernel to be compiled.

        With every method that a request may ask for. All blocks are the null block, which no
        request reads.
        """
        longest = min(longest, self.pool.longest)
        for settings in self._settings.variants:
            self._warm_up(settings, longest)
        for variant in self._settings.variants:
            if variant.decode_budget is not None:
                self.repacker.warm_up(variant, variant.resolved_decode_window)
            if variant.max_whole is not None:
                self.repacker.warm_up(variant, variant.resolved_window, self._queries)

    def _warm_up(self, settings: CompressionConfig, longest: int) -> None:
        """Lengths are one per configuration of the kernels, and odd.

        Whole attention is watched in the first one alone.
        """
        (heads, dim, dtype), block = self._queries, self.pool.block_size
        layers = range(self.packer.num_layers)
        budget = settings.budget if isinstance(settings.budget, int) else 0
        short = max(
            2 * settings.resolved_window, 4 * block, settings.min_prompt, budget + 2 * block
        )
        method = method_of(settings)
        lengths = sorted({min(short + extra, longest) for extra in (3, 4096, 32768, longest)})
        for tokens in lengths:
            plan = page_plan(settings.prompt(len(layers), tokens), block)
            if plan is None:
                continue
            device = self.pool.pages.device
            rows = max(plan.window, 1)
            if tokens == lengths[0] and Reads.COLUMN_SUMS in method.reads:
                rows = tokens
            query = torch.zeros(rows, heads, dim, dtype=dtype, device=device)
            blocks = torch.zeros(-(-tokens // block), dtype=torch.int64, device=device)
            span = _Span(0, 0, rows, blocks, self._new_prefill(method, plan.window, tokens))
            for layer in layers if rows == tokens else ():
                self._accumulate(layer, span, query)
            for in_place in (False, tokens == lengths[0]):
                todo = Compression(
                    request_id="",
                    settings=settings,
                    plan=plan,
                    destination=(0,) * plan.blocks,
                    in_place=in_place,
                )
                sums = torch.zeros(heads, tokens, device=device)
                finished = Finished(
                    todo=todo,
                    method=method,
                    blocks=blocks,
                    queries=dict.fromkeys(layers, query[: plan.window]),
                    sums=dict.fromkeys(layers, sums),
                )
                self.packer.pack(finished)
                self.pool.forget("")
