"""VllmHook `worker`: vLLM's workers, extended to execute the scheduler's packing plans.

`worker.cpu` and `worker.cuda` define the classes; neither imports the other's platform.
"""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from vllm.config import CUDAGraphMode, ParallelConfig, VllmConfig
from vllm.distributed import get_pp_group
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from kvcompress_kernels.packed_attention import workspace
from vllm_kvcompress.engine.attention.backend import (
    Backends,
    BatchOrder,
    CompressedBuilder,
    CompressedImpl,
    override_backends,
)
from vllm_kvcompress.engine.compression.compressor import PromptCompressor
from vllm_kvcompress.engine.compression.stages import Stages
from vllm_kvcompress.engine.device_memory import sizes_of
from vllm_kvcompress.engine.layers import (
    draft_layers_of,
    draft_names,
    groups_of,
    layer_index,
    stages_of,
)
from vllm_kvcompress.engine.messages.cache_spec import CompressedSpec, compressed_specs
from vllm_kvcompress.engine.messages.settings import parsed_settings
from vllm_kvcompress.engine.messages.step import StepReport, attach_report, plan_of
from vllm_kvcompress.engine.pages.host_pages import HostPages
from vllm_kvcompress.engine.pages.pool import PagePool
from vllm_kvcompress.engine.pages.query_ring import QueryRing
from vllm_kvcompress.engine.pages.scales import Scales
from vllm_kvcompress.engine.worker.batch_rows import BatchRows
from vllm_kvcompress.engine.worker.draft_builders import draft_builders_of
from vllm_kvcompress.engine.worker.probe_rows import ProbeRows, probe_rows
from vllm_kvcompress.engine.worker.pulls import starts_pulls
from vllm_kvcompress.errors import ConfigError, VllmHookError
from vllm_kvcompress.planning.cache_dtypes import FLOAT8_CACHES
from vllm_kvcompress.planning.memory import (
    host_slots,
    ring_bytes,
    ring_places,
    ring_slots,
    scratch_blocks,
    table_columns,
)
from vllm_kvcompress.settings.config import CompressionConfig

logger = init_logger("vllm.kvcompress")


class CompressingWorker:
    """Mixin that adds compression to a vLLM worker, with either of vLLM's model runners."""

    backends: ClassVar[Backends]
    compressor: PromptCompressor | None = None
    probe_rows: ProbeRows
    vllm_config: VllmConfig
    model_runner: Any
    rank: int
    # Number of the last executed plan, until the step's output reports it.
    _executed_plan: int | None = None

    @property
    def reads_copies(self) -> bool:
        """Return whether prefills behind packed pages read dequantised copies (`ScratchPages`).

        They do where vLLM's kernel on copies is faster than `packed_attention`.
        """
        return True

    @property
    def settings(self) -> CompressionConfig:
        """Return the engine's settings, rounded to KV blocks; valid once the model is loaded.

        vLLM chooses the block size while it loads the model.
        """
        configured = parsed_settings(self.vllm_config.additional_config)
        return configured.in_whole_blocks(int(self.vllm_config.cache_config.block_size))

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with override_backends(self.backends):
            super().load_model(*args, **kwargs)  # type: ignore[misc]
        refuse_other_backends(self.vllm_config, self.backends)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        config, specs = self.vllm_config, super().get_kv_cache_spec()  # type: ignore[misc]
        slots = ring_slots(sizes_of(config), self.settings)
        return compressed_specs(specs, self.settings, slots, draft_names(config, specs))

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache with scratch blocks after vLLM's, and build the compressor."""
        scratch = 0
        if self.reads_copies:
            scratch = scratch_blocks(sizes_of(self.vllm_config), self.settings)
        allocated = with_more_blocks(kv_cache_config, scratch)
        super().initialize_from_config(allocated)  # type: ignore[misc]
        # vLLM sets it to the blocks that are allocated, but it is what the scheduler may use.
        self.vllm_config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        self.compressor = bind_compressor(
            self.vllm_config, self.settings, self.model_runner, allocated, scratch
        )
        self.probe_rows = probe_rows(self.model_runner, self.compressor)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run vLLM's step. Execute its packing plan too, unless `sample_tokens` will do so.

        Raises:
            SystemExit: as in `_failures_stop_the_engine`.
        """
        assert self.compressor is not None
        self._executed_plan = None
        with self._failures_stop_the_engine(has_plan=plan_of(scheduler_output) is not None):
            if starts_pulls(scheduler_output):
                self._finish_earlier_steps()
            self.compressor.begin_step(scheduler_output)
            self.probe_rows.begin_step(scheduler_output)
            result = super().execute_model(scheduler_output)  # type: ignore[misc]
            if result is not None or not self._packs_after_sampling:
                self._executed_plan = self._end_step()
        return result if result is None else self._with_own_report(result)

    def _finish_earlier_steps(self) -> None:
        """Wait until the device has executed all earlier steps, with their packing and copies.

        Pulls overwrite blocks that these steps freed, outside of the stream's order. The scheduler
        frees blocks when a step's tokens arrive, and the device may still pack then.
        """
        assert self.compressor is not None
        if self.compressor.pool.pages.is_cuda:
            torch.cuda.current_stream().synchronize()

    @property
    def _packs_after_sampling(self) -> bool:
        """Return whether plans are executed after sampling.

        The copy of the sampled tokens to the host then does not wait for the packing. The stages of
        a pipeline pack before sampling: the last stage receives the other stages' counts and sends
        them the sampled tokens, and all ranks must order these messages alike.
        """
        return bool(self.vllm_config.parallel_config.pipeline_parallel_size == 1)

    @contextmanager
    def _failures_stop_the_engine(self, *, has_plan: bool) -> Iterator[None]:
        """Drop the step's state if the body fails, and make the executor notice the failure.

        Args:
            has_plan: whether the step has a plan. Without one, vLLM handles the failure.

        Raises:
            SystemExit: this rank could not execute the plan, and the executor only reads another
                rank's output. Exiting is the only signal that the executor notices.
        """
        assert self.compressor is not None
        try:
            yield
        except Exception as failure:
            self.compressor.abort_step()
            if not has_plan or self._is_output_rank:
                raise
            logger.critical(
                "this rank failed to compress a request, and the other ranks would continue with"
                " a different KV cache: stopping this process, which stops the engine",
                exc_info=True,
            )
            raise SystemExit(1) from failure

    @property
    def _is_output_rank(self) -> bool:
        """Return whether vLLM's executor reads the output of this rank."""
        parallel = self.vllm_config.parallel_config
        first_of_last = parallel.world_size - parallel.tensor_parallel_size
        return bool(self.rank == first_of_last)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample the step's tokens, then execute its packing plan.

        On a GPU, vLLM has started to copy the tokens to the host by then, so neither the copy nor
        the client waits for the packing. Stores of vLLM's offloading that read a destination block
        end first, though. The tokens are not delivered if the packing fails: the
        exception takes the place of the step's output.

        Returns:
            The step's output, with a `StepReport` if there is anything to report.

        Raises:
            SystemExit: as in `_failures_stop_the_engine`.
        """
        assert self.compressor is not None
        has_plan = self.compressor.plan is not None
        with self._failures_stop_the_engine(has_plan=has_plan):
            output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
            self.probe_rows.sampled()
            if self.compressor.running:
                self._executed_plan = self._end_step()
        return output if output is None else self._with_own_report(output)

    def _end_step(self) -> int | None:
        """Execute the step's plan and return its number; None without a plan."""
        assert self.compressor is not None
        plan = self.compressor.plan
        if plan is not None and plan.finish_stores:
            get_kv_transfer_group().finish_stores(plan.finish_stores)
        return self.compressor.end_step()

    def _with_own_report(self, output: Any) -> Any:
        """Attach a `StepReport` to the output if a plan was executed or a prompt was packed."""
        assert self.compressor is not None
        executed_plan, self._executed_plan = self._executed_plan, None
        packed = self.compressor.reports.take()
        if executed_plan is None and not packed:
            return output
        report = StepReport(executed_plan=executed_plan, packed=tuple(packed))
        if isinstance(output, AsyncModelRunnerOutput):
            wait = output.get_output
            output.get_output = lambda: _with_report(wait(), report)
            return output
        return _with_report(output, report)


def _with_report(output: ModelRunnerOutput, report: StepReport) -> ModelRunnerOutput:
    # Copy, because vLLM reuses one empty output for many steps.
    output = copy.copy(output)
    attach_report(output, report)
    return output


def with_more_blocks(config: KVCacheConfig, blocks: int) -> KVCacheConfig:
    """Return the configuration of a KV cache that has `blocks` more blocks, after the others."""

    old = int(config.num_blocks)
    new = old + blocks

    def grown(size: int) -> int:
        return size // old * new

    tensors = []
    for tensor in config.kv_cache_tensors:
        # In a layout with layers outermost, each layer has a region of all blocks.
        regions = (
            {"layer_stride": grown(tensor.layer_stride), "offset": grown(tensor.offset)}
            if tensor.layer_stride > tensor.block_stride
            else {}
        )
        tensors.append(dataclasses.replace(tensor, size=grown(tensor.size), **regions))
    return dataclasses.replace(config, num_blocks=new, kv_cache_tensors=tensors)


def refuse_other_backends(config: VllmConfig, known: Backends) -> None:
    """Check that every attention layer uses one of our backends.

    Raises:
        ConfigError: a layer uses another backend.
    """
    layers = config.compilation_config.static_forward_context.values()
    other_backends = {
        layer.attn_backend.get_name()
        for layer in layers
        if isinstance(layer, Attention) and not isinstance(layer.impl, CompressedImpl)
    }
    if other_backends:
        names = sorted(backend.name for backend in known)
        raise ConfigError(
            f"--kv-compress works with the attention backends {names}, but vLLM chose"
            f" {sorted(other_backends)}; pass --attention-backend {names[0]}, or serve without"
            " --kv-compress"
        )


def bind_compressor(
    config: VllmConfig,
    settings: CompressionConfig,
    runner: Any,
    kv_cache_config: KVCacheConfig,
    scratch: int = 0,
) -> PromptCompressor:
    """Build the page pool over the runner's KV cache and bind layers and builders to it.

    Sliding-window and state-space layers are not bound; they run unchanged.

    Args:
        config, settings, runner: of the worker.
        kv_cache_config: the allocated KV cache.
        scratch: how many of its last blocks are scratch blocks.

    Raises:
        VllmHookError: the runner does not have exactly one group of full-attention layers, its
            layers differ from those in the model's config, or a layer or builder has a class that
            is not ours.
    """
    groups = kv_cache_config.kv_cache_groups
    compressed = [
        i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, CompressedSpec)
    ]
    if len(compressed) != 1:
        raise VllmHookError(
            "compression needs exactly one group of full-attention layers, but vLLM made"
            f" {len(compressed)} among {len(groups)} groups; serve this model without"
            " --kv-compress"
        )
    group = groups[compressed[0]]
    names = sorted(group.layer_names, key=layer_index)
    context = config.compilation_config.static_forward_context
    layers: list[Attention] = [context[name] for name in names]
    num_target = len(names) - len(draft_names(config, names))
    target, drafts = layers[:num_target], layers[num_target:]
    builders: list[Any] = []
    draft_builders = draft_builders_of(runner)
    for attn_group in runner.attn_groups[compressed[0]]:
        # A draft model with another number of query heads has a builder of its own here too.
        is_target = not set(attn_group.layer_names).isdisjoint(names[:num_target])
        (builders if is_target else draft_builders).extend(attn_group.metadata_builders)
    impls = {type(layer.impl) for layer in layers}
    foreign = [cls for cls in impls if not issubclass(cls, CompressedImpl)]
    for builder in (*builders, *draft_builders):
        if not isinstance(builder, CompressedBuilder):
            foreign.append(type(builder))
    stages, stage = stages_of(config), get_pp_group().rank_in_group
    expected = stages[stage]
    unexpected_layers = (
        tuple(map(layer_index, names[:num_target])) != expected
        or len(drafts) != draft_layers_of(config)
        or bool(draft_builders) != bool(drafts)
    )
    if foreign or len(impls) != 1 or len(builders) != 1 or unexpected_layers:
        raise VllmHookError(
            f"compression needs the {len(expected)} full-attention layers of the model's config in"
            f" one group, all on its own attention backend; got {len(target)} layers and"
            f" {len(drafts)} draft layers with {len(builders)} and {len(draft_builders)} builders,"
            " and foreign classes"
            f" {sorted({cls.__name__ for cls in foreign})}"
        )
    block_size = group.kv_cache_spec.block_size
    num_blocks = kv_cache_config.num_blocks
    pool = page_pool(config, settings, layers, block_size, num_blocks, scratch, len(drafts))
    slots = host_slots(settings.park, len(names) * group.kv_cache_spec.page_size_bytes)
    compressor = PromptCompressor(
        settings,
        pool,
        layers[0].impl.layout(layers[0], config.model_config.dtype),
        scales=scales_of(target, pool.pages.device),
        stages=Stages(stages, stage, pool.pages.device),
        queries=(*_query_shape(layers), config.model_config.dtype),
        host_pages=HostPages(pool, slots) if slots else None,
    )
    for index, layer in enumerate(target):
        layer.impl.bind(compressor, index)
    for index, layer in enumerate(drafts):
        layer.impl.bind_draft(compressor, index)
    builders[0].bind(compressor, batch_order(runner))
    for builder in draft_builders:
        builder.bind_drafts(compressor)
    watch_every_layer(runner, compressor, config.parallel_config)
    return compressor


def page_pool(
    config: VllmConfig,
    settings: CompressionConfig,
    layers: Sequence[Attention],
    block_size: int,
    num_blocks: int,
    scratch: int,
    draft_layers: int = 0,
) -> PagePool:
    """Return a page pool over the layers' caches, with the query ring and method state.

    Args:
        config, settings: of the worker.
        layers: the compressed layers, then the draft model's, with their caches allocated.
        block_size: tokens in a block.
        num_blocks: allocated blocks.
        scratch: how many of the last blocks are scratch blocks.
        draft_layers: how many of the last layers belong to a draft model.

    Raises:
        VllmHookError: vLLM split each block of the cache into several kernel blocks.
    """
    caches: list[torch.Tensor] = [layer.kv_cache for layer in layers]
    if caches[0].shape[0] != num_blocks:
        raise VllmHookError(
            f"compression needs one kernel block of {block_size} tokens per KV cache block; got"
            f" {caches[0].shape[0]} kernel blocks for {num_blocks} blocks (FLASH_ATTN version 4"
            " with head size 256 does this); pass another --attention-config.flash_attn_version or"
            " --attention-backend, or serve without --kv-compress"
        )
    sizes = sizes_of(config)
    pool = PagePool(
        caches,
        max_requests=config.scheduler_config.max_num_seqs,
        max_rows=sizes.rows,
        max_blocks=table_columns(sizes, settings, num_blocks - scratch),
        block_size=block_size,
        stored=stored_in(layers),
        packs_groups=settings.packs_k4v3,
        scratch_blocks=scratch,
        draft_layers=draft_layers,
    )
    heads, dim = _query_shape(layers)
    if pool.packs_groups:
        pool.workspace = workspace(
            heads,
            layers[0].impl.num_kv_heads,
            dim,
            rows=sizes.rows,
            device=pool.pages.device,
        )
    pool.ring = query_ring(config, settings, pool, heads=heads, dim=dim)
    pool.allocate_method_state(
        layers[0].impl.num_kv_heads,
        sums=any(variant.method.sums_attention for variant in settings.variants),
        thresholds=any(variant.method.merges_repeatedly for variant in settings.variants),
    )
    return pool


def _query_shape(layers: Sequence[Attention]) -> tuple[int, int]:
    """Return the query heads and head dim of a layer."""
    return layers[0].impl.num_heads, layers[0].impl.head_size


def stored_in(layers: Sequence[Attention]) -> torch.dtype | None:
    """Return the float8 dtype of the layers' caches, or None if they are not quantised.

    Raises:
        VllmHookError: the caches have different dtypes.
    """
    names = {FLOAT8_CACHES.get(layer.impl.kv_cache_dtype) for layer in layers}
    if len(names) > 1:
        raise VllmHookError(
            "compression needs all layers' KV caches in one dtype, got"
            f" {sorted({layer.impl.kv_cache_dtype for layer in layers})}; serve this model without"
            " --kv-compress"
        )
    name = names.pop()
    return None if name is None else getattr(torch, name)


def scales_of(layers: Sequence[Attention], device: torch.device) -> Scales:
    """Return the layers' scales. An unquantised cache ignores the checkpoint's KV scales.

    Raises:
        VllmHookError: a layer has one scale per head, or a scale that is not positive.
    """
    sinks = sinks_of(layers, device)
    if stored_in(layers) is None:
        return Scales([layer.impl.scale for layer in layers], [1.0] * len(layers), device, sinks)
    logits, values = [], []
    for layer in layers:
        key, value = layer._k_scale_float, layer._v_scale_float
        if layer._k_scale.numel() > 1 or min(key, value) <= 0:
            raise VllmHookError(
                "compression needs one positive scale per layer on cached keys and values, got"
                f" {layer._k_scale.tolist()} and {layer._v_scale.tolist()} in {layer.layer_name};"
                " serve this model without --kv-compress"
            )
        # Quantised queries were divided by their scale before attention.
        query = layer._q_scale_float if layer.query_quant is not None else 1.0
        logits.append(layer.impl.scale * key * query)
        values.append(value)
    return Scales(logits, values, device, sinks)


def sinks_of(layers: Sequence[Attention], device: torch.device) -> torch.Tensor | None:
    """Return the sink logits ``[L, Hq]`` float32 of the layers, or None if they have no sinks.

    Raises:
        VllmHookError: only some of the layers have sinks.
    """
    layer_sinks = [getattr(layer.impl, "sinks", None) for layer in layers]
    sinks: list[torch.Tensor] = [tensor for tensor in layer_sinks if tensor is not None]
    if not sinks:
        return None
    if len(sinks) != len(layer_sinks):
        raise VllmHookError(
            "compression needs attention sinks in all layers with full attention, or in none;"
            " serve this model without --kv-compress"
        )
    return torch.stack([tensor.detach().to(device, torch.float32) for tensor in sinks])


def query_ring(
    config: VllmConfig, settings: CompressionConfig, pool: PagePool, *, heads: int, dim: int
) -> QueryRing | None:
    """Allocate the ring of last queries, or return None if no method scores with them."""
    sizes = sizes_of(config)
    window = ring_places(sizes, settings)
    if not window:
        return None
    slots = ring_slots(sizes, settings)
    logger.info(
        "storing the last %d queries of %d of %d requests takes %.2f GiB beside the KV cache%s",
        window,
        slots,
        sizes.max_requests,
        ring_bytes(sizes, settings) / 2**30,
        ""
        if slots == sizes.max_requests
        else "; further requests are compressed at the end of their prefill",
    )
    return QueryRing(
        layers=len(pool.layer_offset),
        slots=slots + 1,
        requests=sizes.max_requests + 1,
        window=window,
        heads=heads,
        dim=dim,
        max_rows=sizes.rows,
        dtype=config.model_config.dtype,
        device=pool.pages.device,
    )


def watch_every_layer(runner: Any, compressor: PromptCompressor, parallel: ParallelConfig) -> None:
    """Prevent full CUDA graph replay in steps whose layers must call our Python code.

    A full replay runs no Python, so no layer would be observed. vLLM replays decode steps, and a
    step with only the last token of a prompt counts as one. Such a step runs with a piecewise graph
    or without a graph.

    Data-parallel ranks of a mixture-of-experts model must run graphs of one shape in every step.
    They exchange their graph modes and dispatch again with the common mode (``dp_utils``), so a
    rank must not choose its own mode in the second dispatch. If one rank reports no graph, all
    ranks run without one, so a rank whose layers must be observed reports that.
    """
    manager = getattr(runner, "cudagraph_manager", None)
    if manager is None:
        return
    dispatch = manager.dispatch

    def dispatching(
        num_reqs: int, num_tokens: int, uniform_token_count: int | None, *args: Any, **kwargs: Any
    ) -> Any:
        if not compressor.must_run_layers_in_python:
            return dispatch(num_reqs, num_tokens, uniform_token_count, *args, **kwargs)
        descriptor = dispatch(num_reqs, num_tokens, None, *args, **kwargs)
        if descriptor.cg_mode != CUDAGraphMode.FULL and parallel.data_parallel_size == 1:
            return descriptor
        return dataclasses.replace(
            descriptor, cg_mode=CUDAGraphMode.NONE, num_tokens=num_tokens, num_reqs=num_reqs
        )

    manager.dispatch = dispatching


def batch_order(runner: Any) -> BatchOrder:
    """Return the function that gives this model runner's batch order.

    V1 has the request ids in row order; V2 has indices into its request table.
    """
    if hasattr(runner, "req_states"):
        # For models with state-space layers, vLLM leaves `req_idx` out of attention's metadata.
        stateful = groups_of(runner.vllm_config).stateful
        rows = BatchRows(runner.model_state) if stateful else None

        def from_table(metadata: CommonAttentionMetadata) -> Sequence[str]:
            table = runner.req_states.index_to_req_id
            indices = metadata.req_idx if rows is None else rows.latest
            return [table[index] for index in indices.tolist()]

        return from_table

    def from_batch(metadata: CommonAttentionMetadata) -> Sequence[str]:
        ids: list[str] = runner.input_batch.req_ids
        return ids[: metadata.num_reqs]

    return from_batch
