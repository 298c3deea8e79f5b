"""VllmHook `worker`: vLLM's workers, which pack prompts after the step that ends their prefill.

`worker.cpu` and `worker.cuda` name them; each imports nothing of the other's platform.
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from vllm.config import CUDAGraphMode, ParallelConfig, VllmConfig
from vllm.distributed import get_pp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_kvcompress.engine.attention.backend import (
    Backends,
    BatchOrder,
    CompressedBuilder,
    CompressedImpl,
    override_backends,
)
from vllm_kvcompress.engine.compression.compressor import PromptCompressor
from vllm_kvcompress.engine.compression.stages import Stages
from vllm_kvcompress.engine.layers import groups_of, stages_of
from vllm_kvcompress.engine.messages.settings import settings_given
from vllm_kvcompress.engine.messages.step import StepReport, attach_report, plan_of
from vllm_kvcompress.engine.pages.pool import PagePool
from vllm_kvcompress.engine.pages.query_ring import QueryRing
from vllm_kvcompress.engine.pages.scales import Scales
from vllm_kvcompress.engine.scheduling.cache_spec import CompressedSpec, compressed_specs
from vllm_kvcompress.engine.worker.batch_rows import BatchRows
from vllm_kvcompress.engine.worker.footprint import max_blocks, max_rows, sizes_of
from vllm_kvcompress.engine.worker.probe_rows import ProbeRows, probe_rows
from vllm_kvcompress.errors import ConfigError, VllmHookError
from vllm_kvcompress.planning.cache_dtypes import FLOAT8_CACHES
from vllm_kvcompress.planning.memory import ring_bytes, ring_places, ring_slots
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.method_of import keeps_sums, merges
from vllm_kvcompress.settings.whole_blocks import in_whole_blocks

logger = init_logger("vllm.kvcompress")


class CompressingWorker:
    """Mixin before a vLLM worker, for both of vLLM's model runners."""

    backends: ClassVar[Backends]
    compressor: PromptCompressor | None = None
    probe_rows: ProbeRows
    vllm_config: VllmConfig
    model_runner: Any
    rank: int
    # Number of the plan of the step whose output is not handed back yet.
    _carried_out: int | None = None

    @property
    def settings(self) -> CompressionConfig:
        """The engine's settings, once the model is loaded, by which vLLM chooses the KV block."""
        given = settings_given(self.vllm_config.additional_config)
        return in_whole_blocks(given, int(self.vllm_config.cache_config.block_size))

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with override_backends(self.backends):
            super().load_model(*args, **kwargs)  # type: ignore[misc]
        refuse_other_backends(self.vllm_config, self.backends)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        slots = ring_slots(sizes_of(self.vllm_config), self.settings)
        return compressed_specs(super().get_kv_cache_spec(), self.settings, slots)  # type: ignore[misc]

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        self.compressor = bind_compressor(
            self.vllm_config, self.settings, self.model_runner, kv_cache_config
        )
        self.probe_rows = probe_rows(self.model_runner, self.compressor)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """vLLM's step, and its plan.

        Raises:
            SystemExit: this rank could not carry out the plan, and its executor hears another
                rank alone. That one would be believed; the end of a process is noticed.
        """
        assert self.compressor is not None
        self._carried_out = None
        try:
            self.compressor.begin_step(scheduler_output)
            self.probe_rows.begin_step(scheduler_output)
            result = super().execute_model(scheduler_output)  # type: ignore[misc]
            self._carried_out = self.compressor.end_step()
        except Exception as failure:
            self.compressor.abort_step()
            if plan_of(scheduler_output) is None or self._heard:
                raise
            logger.critical(
                "a rank that could not compress a prompt must not go on, since the others would:"
                " this process ends, and the engine with it",
                exc_info=True,
            )
            raise SystemExit(1) from failure
        return result if result is None else self._reporting(result)

    @property
    def _heard(self) -> bool:
        """Whether vLLM's executor listens to this rank: the first one of the last stage."""
        parallel = self.vllm_config.parallel_config
        first_of_last = parallel.world_size - parallel.tensor_parallel_size
        return bool(self.rank == first_of_last)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """The step's output, with a `StepReport` if there is anything to tell."""
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        self.probe_rows.sampled()
        return output if output is None else self._reporting(output)

    def _reporting(self, output: Any) -> Any:
        assert self.compressor is not None
        carried_out, self._carried_out = self._carried_out, None
        packed = self.compressor.reports.take()
        if carried_out is None and not packed:
            return output
        report = StepReport(carried_out=carried_out, packed=tuple(packed))
        if isinstance(output, AsyncModelRunnerOutput):
            wait = output.get_output
            output.get_output = lambda: _with_report(wait(), report)
            return output
        return _with_report(output, report)


def _with_report(output: ModelRunnerOutput, report: StepReport) -> ModelRunnerOutput:
    # A copy, since vLLM shares one empty output between steps.
    output = copy.copy(output)
    attach_report(output, report)
    return output


def refuse_other_backends(config: VllmConfig, known: Backends) -> None:
    """Raise ConfigError unless every attention layer runs on one of our backends."""
    layers = config.compilation_config.static_forward_context.values()
    others = {
        layer.attn_backend.get_name()
        for layer in layers
        if isinstance(layer, Attention) and not isinstance(layer.impl, CompressedImpl)
    }
    if others:
        names = sorted(backend.name for backend in known)
        raise ConfigError(
            f"--kv-compress works with the attention backends {names}, vLLM chose"
            f" {sorted(others)}; pass --attention-backend {names[0]}, or serve without"
            " --kv-compress"
        )


def bind_compressor(
    config: VllmConfig, settings: CompressionConfig, runner: Any, kv_cache_config: KVCacheConfig
) -> PromptCompressor:
    """Build the page pool over the runner's KV cache and connect layers and builders to it.

    Layers with a sliding window, or with a state, are not bound: they run as vLLM's.

    Raises:
        VllmHookError: the runner has more than one group of layers with full attention, others than
            the model's config says, or a layer or a builder that is not ours.
    """
    groups = kv_cache_config.kv_cache_groups
    ours = [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, CompressedSpec)]
    if len(ours) != 1:
        raise VllmHookError(
            "compression needs one group of layers with full attention, vLLM made"
            f" {len(ours)} of {len(groups)} groups; serve this model without --kv-compress"
        )
    group = groups[ours[0]]
    names = sorted(group.layer_names, key=_layer_index)
    context = config.compilation_config.static_forward_context
    layers: list[Attention] = [context[name] for name in names]
    builders = [b for g in runner.attn_groups[ours[0]] for b in g.metadata_builders]
    impls = {type(layer.impl) for layer in layers}
    wrong = [cls for cls in impls if not issubclass(cls, CompressedImpl)]
    wrong += [type(b) for b in builders if not isinstance(b, CompressedBuilder)]
    stages, stage = stages_of(config), get_pp_group().rank_in_group
    known = stages[stage]
    others = tuple(map(_layer_index, names)) != known
    if wrong or len(impls) != 1 or len(builders) != 1 or others:
        raise VllmHookError(
            "compression needs one group of attention layers, all on its own backend, those that"
            f" the model's config calls full ({len(known)}); got {len(layers)} layers,"
            f" {len(builders)} builders and foreign classes"
            f" {sorted({cls.__name__ for cls in wrong})}"
        )
    block_size = group.kv_cache_spec.block_size
    pool = page_pool(config, settings, layers, block_size, kv_cache_config.num_blocks)
    compressor = PromptCompressor(
        settings,
        pool,
        layers[0].impl.layout(layers[0], config.model_config.dtype),
        scales=scales_of(layers, pool.pages.device),
        stages=Stages(stages, stage, pool.pages.device),
        queries=(*_query_shape(layers), config.model_config.dtype),
    )
    for index, layer in enumerate(layers):
        layer.impl.bind(compressor, index)
    builders[0].bind(compressor, batch_order(runner))
    watch_every_layer(runner, compressor, config.parallel_config)
    return compressor


def page_pool(
    config: VllmConfig,
    settings: CompressionConfig,
    layers: Sequence[Attention],
    block_size: int,
    num_blocks: int,
) -> PagePool:
    """The page pool over the caches of these layers, with what methods remember beside it.

    Raises:
        VllmHookError: a block of the cache is several blocks of the kernels.
    """
    caches: list[torch.Tensor] = [layer.kv_cache for layer in layers]
    if caches[0].shape[0] != num_blocks:
        raise VllmHookError(
            f"compression needs kernel blocks of {block_size} tokens, one per KV cache block; got"
            f" {caches[0].shape[0]} for {num_blocks} blocks, as FLASH_ATTN version 4 has them for"
            " heads of 256; choose another with --attention-config.flash_attn_version or"
            " --attention-backend, or serve without --kv-compress"
        )
    pool = PagePool(
        caches,
        max_requests=config.scheduler_config.max_num_seqs,
        max_rows=max_rows(config),
        max_blocks=max_blocks(config, settings, num_blocks),
        block_size=block_size,
        stored=stored_in(layers),
    )
    heads, dim = _query_shape(layers)
    pool.ring = query_ring(config, settings, pool, heads=heads, dim=dim)
    pool.remember(
        layers[0].impl.num_kv_heads,
        sums=any(keeps_sums(variant) for variant in settings.variants),
        thresholds=any(merges(variant) for variant in settings.variants),
    )
    return pool


def _query_shape(layers: Sequence[Attention]) -> tuple[int, int]:
    """Query heads and head dim of a layer."""
    return layers[0].impl.num_heads, layers[0].impl.head_size


def stored_in(layers: Sequence[Attention]) -> torch.dtype | None:
    """The float8 that these layers' caches hold; None where they are not quantised."""
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
    """The layers' factors. A checkpoint's scales say nothing where the cache is not quantised.

    Raises:
        VllmHookError: a layer has a scale per head, or one that is not positive.
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
        # queries that attention takes quantised are divided by theirs before it
        query = layer._q_scale_float if layer.query_quant is not None else 1.0
        logits.append(layer.impl.scale * key * query)
        values.append(value)
    return Scales(logits, values, device, sinks)


def sinks_of(layers: Sequence[Attention], device: torch.device) -> torch.Tensor | None:
    """``[L, Hq]`` float32: the logits of the layers' sinks; None where they have none."""
    every = [getattr(layer.impl, "sinks", None) for layer in layers]
    found: list[torch.Tensor] = [own for own in every if own is not None]
    if not found:
        return None
    if len(found) != len(every):
        raise VllmHookError(
            "compression needs attention sinks in all layers with full attention, or in none;"
            " serve this model without --kv-compress"
        )
    return torch.stack([own.detach().to(device, torch.float32) for own in found])


def query_ring(
    config: VllmConfig, settings: CompressionConfig, pool: PagePool, *, heads: int, dim: int
) -> QueryRing | None:
    """Room for the last queries of requests, where what they hold is judged by them."""
    sizes = sizes_of(config)
    places = ring_places(sizes, settings)
    if not places:
        return None
    slots = ring_slots(sizes, settings)
    logger.info(
        "the last %d queries of %d of %d requests take %.2f GiB beside the cache%s",
        places,
        slots,
        sizes.max_requests,
        ring_bytes(sizes, settings) / 2**30,
        "" if slots == sizes.max_requests else "; others are packed at the end of their prefill",
    )
    return QueryRing(
        layers=len(pool.layer_offset),
        slots=slots + 1,
        requests=sizes.max_requests + 1,
        window=places,
        heads=heads,
        dim=dim,
        max_rows=max_rows(config),
        dtype=config.model_config.dtype,
        device=pool.pages.device,
    )


def watch_every_layer(runner: Any, compressor: PromptCompressor, parallel: ParallelConfig) -> None:
    """Never replay a whole graph in a step whose layers must be seen.

    A replay runs no Python, so that no layer would be scored. It is decode steps that are
    replayed, and the last token of a prompt alone counts as one. Such a step runs piecewise, or
    without a graph.

    Data-parallel ranks of a mixture of experts run every step together, on graphs of one shape:
    they tell each other what they found, and each looks again by what all of them told
    (``dp_utils``). One that answers differently then would run another graph than the others. One
    that finds none makes all run without, so that is what a rank with such a step tells.
    """
    manager = getattr(runner, "cudagraph_manager", None)
    if manager is None:
        return
    dispatch = manager.dispatch

    def dispatching(
        num_reqs: int, num_tokens: int, uniform_token_count: int | None, *args: Any, **kwargs: Any
    ) -> Any:
        if not compressor.must_see_layers:
            return dispatch(num_reqs, num_tokens, uniform_token_count, *args, **kwargs)
        descriptor = dispatch(num_reqs, num_tokens, None, *args, **kwargs)
        if descriptor.cg_mode != CUDAGraphMode.FULL and parallel.data_parallel_size == 1:
            return descriptor
        return dataclasses.replace(
            descriptor, cg_mode=CUDAGraphMode.NONE, num_tokens=num_tokens, num_reqs=num_reqs
        )

    manager.dispatch = dispatching


def _layer_index(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())


def batch_order(runner: Any) -> BatchOrder:
    """How this model runner orders its batch: V1 keeps ids, V2 numbers its request table."""
    if hasattr(runner, "req_states"):
        # of models whose layers keep a state, vLLM leaves the rows out of attention's metadata
        stateful = groups_of(runner.vllm_config).stateful
        rows = BatchRows(runner.model_state) if stateful else None

        def from_table(metadata: CommonAttentionMetadata) -> Sequence[str]:
            table = runner.req_states.index_to_req_id
            found = metadata.req_idx if rows is None else rows.latest
            return [table[index] for index in found.tolist()]

        return from_table

    def from_batch(metadata: CommonAttentionMetadata) -> Sequence[str]:
        ids: list[str] = runner.input_batch.req_ids
        return ids[: metadata.num_reqs]

    return from_batch
