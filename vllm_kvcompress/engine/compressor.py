"""What a worker does in the step that ends a prefill: observe, choose, pack.

Per step: `begin_step`, then `begin_batch` from the metadata builder once the batch is laid out,
`after_attention` from each layer, and `end_step` after the last one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput

from kvcompress_kernels import column_sums, gather_kept, merge_evicted, scatter_kept
from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.engine.kv_layouts import PageViews
from vllm_kvcompress.engine.page_pool import PagePool
from vllm_kvcompress.engine.step_plan import Compression, StepPlan
from vllm_kvcompress.pipeline import Method, Observed, PagedLayer, method_of, with_tail
from vllm_kvcompress.policies.base import Reads

logger = init_logger("vllm.kvcompress")


@dataclass(slots=True)
class _Prefill:
    """What a request's earlier chunks leave for its last one.

    Args:
        method: what will compress it.
        window: its observation window w.
        tokens: tokens computed so far.
        queries: per layer, the last ``[<= w, Hq, D]`` queries.
        sums: per layer, column sums ``[Hq, tokens]`` of the chunks so far.
    """

    method: Method
    window: int
    tokens: int = 0
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    sums: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Finishing:
    """A request whose prefill ends in this step."""

    todo: Compression
    method: Method
    blocks: torch.Tensor  # [ceil(S / bs)] int64, vLLM block ids of the prompt
    layers: list[Observed] = field(default_factory=list)


@dataclass(slots=True)
class _Span:
    """One watched request's tokens in this step's batch.

    Args:
        start, stop: rows of the batch.
        blocks: ``[ceil(tokens / bs)]`` int64, vLLM block ids of all its tokens so far.
    """

    start: int
    stop: int
    blocks: torch.Tensor
    prefill: _Prefill
    finishing: _Finishing | None


class PromptCompressor:
    """Compresses prompts on one worker.

    Args:
        settings: the engine's settings, for what they say of the log.
        pool: the page pool of this worker's layers.
        views: reads the pool's pages as keys and values (`kv_layouts`).
        scale: factor on the attention logits.
        num_layers: layers on this worker, L.
    """

    def __init__(
        self,
        settings: CompressionConfig,
        pool: PagePool,
        views: Callable[[torch.Tensor], PageViews],
        *,
        scale: float,
        num_layers: int,
    ) -> None:
        self.pool = pool
        self.compressed = 0
        self._settings = settings
        self._keys, self._values = views(pool.pages)
        self._scale = scale
        self._num_layers = num_layers
        self._prefills: dict[str, _Prefill] = {}
        self._step: StepPlan | None = None
        self._spans: list[_Span] = []
        self._finishing: list[_Finishing] = []
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
        self._step = getattr(output, "kvcompress", None)
        self._spans = []
        self._finishing = []
        self.running = True

    def begin_batch(
        self, request_ids: Sequence[str], query_start: Sequence[int], block_table: torch.Tensor
    ) -> None:
        """Find the watched requests in the batch.

        Args:
            request_ids: the batch's requests, in row order.
            query_start: ``R + 1`` token offsets of the rows, on the host.
            block_table: ``[R, W]`` int32 vLLM block ids.
        """
        step, self._step = self._step, None  # one batch a step: it is laid out once
        if step is None:
            return
        row_of = {request_id: row for row, request_id in enumerate(request_ids)}
        watched: list[tuple[str, CompressionConfig, Compression | None]]
        watched = [(request_id, settings, None) for request_id, settings in step.observe]
        watched += [(todo.request_id, todo.settings, todo) for todo in step.compress]
        for request_id, settings, todo in watched:
            method = method_of(settings)
            if todo is None and not method.reads & (Reads.WINDOW | Reads.COLUMN_SUMS):
                continue
            row = row_of[request_id]
            start, stop = int(query_start[row]), int(query_start[row + 1])
            prefill = self._prefills.get(request_id)
            if prefill is None:
                prefill = _Prefill(method, settings.resolved_window)
                self._prefills[request_id] = prefill
            prefill.tokens += stop - start
            tokens = prefill.tokens if todo is None else todo.plan.tokens
            blocks = block_table[row, : -(-tokens // self.pool.block_size)].long()
            finishing = None
            if todo is not None:
                finishing = _Finishing(todo, method, blocks)
                self._finishing.append(finishing)
                if Reads.COLUMN_SUMS in method.reads and prefill.tokens != tokens:
                    raise RuntimeError(
                        f"request {request_id}: {prefill.tokens} tokens were seen at the end of"
                        f" prefill, {tokens} are needed"
                    )
            self._spans.append(_Span(start, stop, blocks, prefill, finishing))

    @property
    def watching(self) -> bool:
        """Whether `after_attention` has anything to do in this step."""
        return bool(self._spans)

    def after_attention(self, layer: int, query: torch.Tensor) -> None:
        """Keep what later chunks need; at the end of a prefill, score the prompt.

        Args:
            layer: index of the layer on this worker.
            query: ``[num_tokens, Hq, D]``, rotated.
        """
        for span in self._spans:
            where = PagedLayer(
                layer=layer,
                key_pages=self._keys,
                value_pages=self._values,
                pages=self.pool.flat_ids(layer, span.blocks),
                scale=self._scale,
            )
            reads, window, sums = span.prefill.method.reads_of(layer), None, None
            if Reads.WINDOW in reads:
                window = self._latest(layer, span, query)
            if Reads.COLUMN_SUMS in reads:
                sums = self._accumulated(where, span, query)
            if span.finishing is not None:
                plan = span.finishing.todo.plan
                if window is not None and len(window) != plan.window:
                    raise RuntimeError(
                        f"request {span.finishing.todo.request_id}: {len(window)} window queries"
                        f" were kept at the end of prefill, {plan.window} are needed"
                    )
                seen = span.finishing.method.observe(where, plan, window, sums)
                assert len(span.finishing.layers) == layer, "layers run in their order"
                span.finishing.layers.append(seen)
                continue
            if window is not None:
                span.prefill.queries[layer] = window.clone()
            if sums is not None:
                span.prefill.sums[layer] = sums

    def _latest(self, layer: int, span: _Span, query: torch.Tensor) -> torch.Tensor:
        """The last ``[<= w, Hq, D]`` queries of the prefill so far."""
        latest = query[max(span.start, span.stop - span.prefill.window) : span.stop]
        earlier = span.prefill.queries.pop(layer, None)
        missing = span.prefill.window - len(latest)
        if earlier is not None and missing > 0:
            return torch.cat([earlier[-missing:], latest])
        return latest

    def _accumulated(self, where: PagedLayer, span: _Span, query: torch.Tensor) -> torch.Tensor:
        """Column sums ``[Hq, tokens]`` of the prefill so far: a chunk's rows are final."""
        sums = column_sums(
            query[span.start : span.stop],
            where.key_pages,
            where.pages,
            span.prefill.tokens,
            where.scale,
        )
        earlier = span.prefill.sums.pop(where.layer, None)
        if earlier is not None:
            sums[:, : earlier.shape[1]] += earlier
        return sums

    def end_step(self) -> None:
        """Pack the prompts that ended: from the next step on they are read compressed.

        Raises:
            RuntimeError: the batch was never laid out, so that blocks would be freed unpacked.
        """
        if self._step is not None:
            raise RuntimeError(
                f"the step ran without its compressions of {self._step.compress}: the attention"
                " backend's metadata builder was not called"
            )
        for finishing in self._finishing:
            self._pack(finishing)
            self._prefills.pop(finishing.todo.request_id, None)
        self._finishing = []
        self._spans = []
        self.running = False

    # -- packing ------------------------------------------------------------------------------

    def _pack(self, finishing: _Finishing) -> None:
        todo, plan = finishing.todo, finishing.todo.plan
        pages = finishing.method.layer_pages(plan, finishing.layers)
        targets = list(self.pool.destination(todo.destination)[: plan.pages].split(pages))
        # In place a layer's target may be another layer's source: read all before writing any.
        packed = (self._gather(layer, count, finishing) for layer, count in enumerate(pages))
        for (keys, values), target in zip(
            list(packed) if todo.in_place else packed, targets, strict=True
        ):
            scatter_kept(self._keys, self._values, keys, values, target)
        self.pool.admit(todo.request_id, targets, plan.full_blocks)
        self.compressed += 1
        self._report(todo, pages)

    def _gather(
        self, layer: int, count: int, finishing: _Finishing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's kept tokens as whole pages; merging also rewrites the layer's tail."""
        plan = finishing.todo.plan
        kept = finishing.method.select(finishing.layers, layer, plan, count)
        if finishing.method.merge:
            return self._merge(layer, kept, finishing)
        prompt = self.pool.flat_ids(layer, finishing.blocks[: plan.full_blocks])
        return gather_kept(self._keys, self._values, prompt, kept)

    def _merge(
        self, layer: int, kept: torch.Tensor, finishing: _Finishing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plan = finishing.todo.plan
        pages = self.pool.flat_ids(layer, finishing.blocks)
        keys, values = merge_evicted(
            self._keys, self._values, pages, plan.tokens, with_tail(kept, plan)
        )
        keys, values = keys.to(self._keys.dtype), values.to(self._values.dtype)
        packed = kept.shape[1]
        if plan.tail:  # the request's own block: no hash, no other reader
            last = pages[-1]
            self._keys[last, :, :, : plan.tail] = keys[:, packed:].transpose(1, 2)
            self._values[last, :, : plan.tail] = values[:, packed:]
        shape = (len(kept), packed // plan.block_size, plan.block_size, keys.shape[-1])
        return (
            keys[:, :packed].reshape(shape).permute(1, 0, 3, 2),
            values[:, :packed].reshape(shape).permute(1, 0, 2, 3),
        )

    def _report(self, todo: Compression, pages: list[int]) -> None:
        if not self._settings.log_requests:
            return
        plan = todo.plan
        tokens = [count * plan.block_size + plan.tail for count in pages]
        tail_blocks = int(plan.tail > 0)
        logger.info(
            "kv-compress: request=%s prompt_tokens=%d kept_tokens=%.1f blocks_before=%d"
            " blocks_after=%d layer_tokens=%s",
            todo.request_id,
            plan.tokens,
            sum(tokens) / len(tokens),
            plan.full_blocks + tail_blocks,
            plan.blocks + tail_blocks,
            str(tokens).replace(" ", ""),
        )
