"""What a worker does in the step that ends a prefill: observe, choose, pack.

Per step: `begin_step`, then `begin_batch` from the metadata builder once the batch is laid out,
`after_attention` from each layer, and `end_step` after the last one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput

from kvcompress_kernels import gather_kept, scatter_kept, window_scores
from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.engine.kv_layouts import PageViews
from vllm_kvcompress.engine.page_pool import PagePool
from vllm_kvcompress.engine.step_plan import Compression, StepPlan
from vllm_kvcompress.pipeline import kept_positions, layer_pages
from vllm_kvcompress.plan import LayerStats, WindowColumns

logger = init_logger("vllm.kvcompress")


@dataclass(slots=True)
class _Prefill:
    """A request whose window queries are being collected: per layer ``[<= w, Hq, D]``."""

    queries: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Finishing:
    """A request whose prefill ends in this step."""

    todo: Compression
    blocks: torch.Tensor  # [ceil(S / bs)] int64, vLLM block ids of the prompt
    scores: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> [Hkv, P]
    entropy: dict[int, torch.Tensor] = field(default_factory=dict)
    shift: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Span:
    """One watched request's tokens in this step's batch."""

    start: int
    stop: int
    prefill: _Prefill
    finishing: _Finishing | None


class PromptCompressor:
    """Compresses prompts on one worker.

    Args:
        settings: the engine's settings.
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
        self._allocator = settings.build_allocator()
        self._scorer = settings.build_scorer()
        self._selector = settings.build_selector()
        self._window = settings.resolved_window
        self._variance = self._scorer.needs_variance or self._allocator.needs_stats
        self._watches = self._scorer.reads_window or self._allocator.needs_stats
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
        watched: list[tuple[str, Compression | None]] = [(r, None) for r in step.observe]
        watched += [(todo.request_id, todo) for todo in step.compress]
        for request_id, todo in watched:
            row = row_of[request_id]
            finishing = None
            if todo is not None:
                count = -(-todo.plan.tokens // self.pool.block_size)
                finishing = _Finishing(todo, block_table[row, :count].long())
                self._finishing.append(finishing)
            if self._watches:
                prefill = self._prefills.setdefault(request_id, _Prefill())
                start, stop = query_start[row], query_start[row + 1]
                self._spans.append(_Span(int(start), int(stop), prefill, finishing))

    @property
    def watching(self) -> bool:
        """Whether `after_attention` has anything to do in this step."""
        return bool(self._spans)

    def after_attention(self, layer: int, query: torch.Tensor) -> None:
        """Keep the window's queries; at the end of a prefill, score the prompt.

        Args:
            layer: index of the layer on this worker.
            query: ``[num_tokens, Hq, D]``, rotated.
        """
        for span in self._spans:
            latest = query[max(span.start, span.stop - self._window) : span.stop]
            earlier = span.prefill.queries.pop(layer, None)
            missing = self._window - len(latest)
            if earlier is not None and missing > 0:
                latest = torch.cat([earlier[-missing:], latest])
            if span.finishing is not None:
                self._observe(layer, latest, span.finishing)
            else:
                span.prefill.queries[layer] = latest.clone()

    def _observe(self, layer: int, query: torch.Tensor, finishing: _Finishing) -> None:
        plan = finishing.todo.plan
        if len(query) != plan.window:
            raise RuntimeError(
                f"request {finishing.todo.request_id}: {len(query)} window queries were kept at"
                f" the end of prefill, {plan.window} are needed"
            )
        seen = window_scores(
            query,
            self._keys,
            self.pool.flat_ids(layer, finishing.blocks),
            plan.tokens,
            self._scale,
            variance=self._variance,
        )
        if self._scorer.reads_window:
            columns = WindowColumns(
                total=seen.total,
                variance=seen.variance,
                rows=plan.window,
                num_kv_heads=self._keys.shape[1],
                past=plan.prompt.past,
                device=query.device,
            )
            finishing.scores[layer] = self._scorer.score(columns)
        if self._allocator.needs_stats:
            finishing.entropy[layer] = seen.entropy
            finishing.shift[layer] = seen.shift

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
        pages = layer_pages(self._allocator, plan, self._stats(finishing))
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

    def _stats(self, finishing: _Finishing) -> list[LayerStats] | None:
        if not self._allocator.needs_stats:
            return None
        layers = range(self._num_layers)
        both = torch.stack(
            [torch.stack([finishing.entropy[i], finishing.shift[i]]) for i in layers]
        )
        return [LayerStats(entropy=h, shift=v) for h, v in both.tolist()]  # the one copy to host

    def _gather(
        self, layer: int, count: int, finishing: _Finishing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plan = finishing.todo.plan
        scores = finishing.scores.pop(layer, None)
        if scores is None:
            scores = self._scorer.score(
                WindowColumns(
                    num_kv_heads=self._keys.shape[1],
                    past=plan.prompt.past,
                    device=self._keys.device,
                )
            )
        kept = kept_positions(scores, plan, count, self._selector)
        prompt = self.pool.flat_ids(layer, finishing.blocks[: plan.full_blocks])
        return gather_kept(self._keys, self._values, prompt, kept)

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
