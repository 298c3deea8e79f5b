"""Gather the facts about a server for `refusals`, and refuse it before the model loads."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import vllm
from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_kvcompress.engine.layers import groups_of, stages_of, state_blocks_per_group
from vllm_kvcompress.planning.model_traits import Traits, traits_of
from vllm_kvcompress.refusals.model import MODEL
from vllm_kvcompress.refusals.rule import refuse
from vllm_kvcompress.refusals.server import SERVER, Executor, Server, draft_facts
from vllm_kvcompress.refusals.tested import (
    EXECUTORS,
    IMAGES,
    MODALITIES,
    OFFLOADING,
    OFFLOADING_KEYS,
    RAY,
    SIMPLE_CONNECTOR,
)
from vllm_kvcompress.settings.config import CompressionConfig

WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "vllm_kvcompress.engine.worker.cpu.CompressingCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "vllm_kvcompress.engine.worker.cuda.CompressingGPUWorker",
}
SCHEDULERS = {
    False: "vllm_kvcompress.engine.scheduling.scheduler.CompressingScheduler",
    True: "vllm_kvcompress.engine.scheduling.scheduler.CompressingAsyncScheduler",
}
_RUNNER_SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
# executor methods that pass a step from the scheduler to the workers
_STEP_PATH = ("_init_executor", "collective_rpc", "execute_model", "sample_tokens")
_RAY_SWITCH = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
_SAME_NAMES = (
    "decode_context_parallel_size", "prefill_context_parallel_size", "pipeline_parallel_size",
    "tensor_parallel_size", "data_parallel_size", "enable_elastic_ep", "enable_fault_tolerance",
    "enable_dbo", "max_num_seqs", "max_num_batched_tokens", "max_num_scheduled_tokens",
    "long_prefill_token_threshold", "disable_hybrid_kv_cache_manager", "kv_sharing_fast_prefill",
    "kv_cache_dtype_skip_layers", "calculate_kv_scales", "enable_mamba_shared_prefix_checkpoint",
    "enable_return_routed_experts",
)  # fmt: skip
"""Fields of vLLM's configuration with the name of their flag."""


def model_traits(config: VllmConfig) -> Traits:
    """Return the traits of the model from its config.json, vLLM's reading of it, and the flags."""
    model = config.model_config
    traits = traits_of(model.hf_config.to_dict(), model.hf_text_config.to_dict())
    window = model.get_sliding_window()
    declared = traits.declared_cache
    if getattr(config.quant_config, "kv_cache_scheme", None):
        # With this scheme every attention layer resolves "auto" to fp8.
        declared = declared or "fp8"
    return replace(
        traits,
        latent=traits.latent or model.use_mla,
        alibi=traits.alibi or bool(getattr(model, "uses_alibi", False)),
        runner=model.runner_type,
        diffusion=traits.diffusion or bool(getattr(model, "is_diffusion", False)),
        encoder_decoder=traits.encoder_decoder or model.is_encoder_decoder,
        state_space=traits.state_space or model.is_hybrid or model.is_attention_free,
        uneven=traits.uneven or model.has_noops,
        window=traits.window if window is None else window,
        bidirectional=traits.bidirectional or bool(getattr(model, "is_mm_prefix_lm", False)),
        dtype=str(model.dtype).removeprefix("torch."),
        declared_cache=declared,
        cached_states=state_blocks_per_group(config),
        cache=config.cache_config.cache_dtype,
    )


def _host_bytes() -> int:
    """Return the bytes of memory that this machine has, or that its container may use if fewer."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text()
    except OSError:
        return machine
    return min(machine, int(limit)) if limit.strip().isdigit() else machine


def _options(config: VllmConfig) -> Iterator[tuple[str, Any]]:
    """Yield the options of `Server.options`, also unset ones."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    aux = getattr(config, "aux_output_config", None)
    for name in _SAME_NAMES:
        values = (
            getattr(each, name, None)
            for each in (parallel, config.scheduler_config, cache, model, aux)
        )
        yield f"--{name.replace('_', '-')}", next(filter(None, values), None)
    attention, speculative = config.attention_config, config.speculative_config
    yield "--attention-config.use_non_causal", getattr(attention, "use_non_causal", False)
    if current_platform.is_cuda():
        per_kind = getattr(attention, "backend_per_kind", None) or {}
        chosen = per_kind.get("full_attention")
        chosen = chosen or attention.backend
        yield "--attention-backend", chosen and chosen.name
        if not config.use_v2_model_runner:
            fix = "remove the option that vLLM's log says V2 does not support yet"
            yield _RUNNER_SWITCH, f"unset {_RUNNER_SWITCH}" if _RUNNER_SWITCH in os.environ else fix
    if getattr(parallel, "data_parallel_backend", "mp") == "ray":
        yield "--data-parallel-backend", "ray"
    if parallel.worker_cls not in {*WORKERS, *WORKERS.values()}:
        yield "--worker-cls", parallel.worker_cls
    if config.scheduler_config.scheduler_cls not in SCHEDULERS.values():
        yield "--scheduler-cls", config.scheduler_config.scheduler_cls
    yield "--ubatch-size", getattr(parallel, "ubatch_size", 0)
    yield "--no-disable-cascade-attn", getattr(model, "disable_cascade_attn", True) is False
    yield "--no-enable-prefix-caching", not cache.enable_prefix_caching
    if speculative:
        modules = None
        if speculative.method == "mtp":
            modules = getattr(speculative.draft_model_config.hf_config, "n_predict", None)
        yield from draft_facts(speculative.method or "none", vars(speculative), modules)
    yield "--use-replayssm", getattr(cache, "use_replayssm", False)
    if (mode := getattr(cache, "mamba_cache_mode", "none")) == "align":
        yield "--prefix-match-unit", getattr(cache, "prefix_match_unit", None)
    yield "--mamba-cache-mode", mode
    yield IMAGES, model.is_multimodal_model
    if model.architecture in MODALITIES and model.multimodal_config is not None:
        yield "--ec-transfer-config", getattr(config, "ec_transfer_config", None) is not None
        yield "--enable-mm-embeds", model.multimodal_config.enable_mm_embeds
        yield "--video-pruning-rate", model.multimodal_config.video_pruning_rate
    events = config.kv_events_config
    if events is not None and events.enable_kv_cache_events:
        # The module imports vLLM's parsers, whose packages may be missing when the plugin loads.
        from vllm.v1.core.block_pool import BlockPool

        yield "--kv-events-config", not hasattr(BlockPool, "emit_cached_block_events")
    yield "VLLM_USE_RUST_FRONTEND", envs.VLLM_USE_RUST_FRONTEND
    if (transfer := config.kv_transfer_config) is None:
        return
    yield "kv_connector_module_path", transfer.kv_connector_module_path
    if transfer.kv_connector in OFFLOADING_KEYS:
        yield OFFLOADING, transfer.kv_connector
        keys = transfer.kv_connector_extra_config
        if transfer.kv_connector == SIMPLE_CONNECTOR:
            yield "eager offloading", not keys.get("lazy_offload")
        yield "offload_prompt_only", not keys.get("offload_prompt_only", True)
        yield "an offloading option", next(_untested_offloading(config), None)
    else:
        yield "--kv-transfer-config", transfer.kv_connector or "none"
        if transfer.kv_role != "kv_consumer":
            yield "kv_role", transfer.kv_role or "none"
        if transfer.get_from_extra_config("bidirectional_kv_xfer", False):
            yield "kv_role", "bidirectional_kv_xfer"
        yield "--kv-transfer-config.enable_permute_local_kv", transfer.enable_permute_local_kv
        if transfer.kv_buffer_device != config.device_config.device_type:
            yield "--kv-transfer-config.kv_buffer_device", transfer.kv_buffer_device


def _untested_offloading(config: VllmConfig) -> Iterator[str]:
    """Yield how to change settings of an offloading connector that were not tested."""
    transfer, events = config.kv_transfer_config, config.kv_events_config
    keys = dict(transfer.kv_connector_extra_config)
    if keys.get("spec_name") == "CPUOffloadingSpec":
        del keys["spec_name"]
    if transfer.kv_role != "kv_both":
        yield f"set kv_role to 'kv_both', got {transfer.kv_role!r}"
    tested_keys = {*OFFLOADING_KEYS[transfer.kv_connector]} - {"spec_name"}
    for key in sorted(keys.keys() - tested_keys):
        yield f"remove {key} {keys[key]!r}"
    if events is not None and events.enable_kv_cache_events:
        yield "remove --kv-events-config"


def _executor(config: VllmConfig) -> Executor:
    """Return the class of the executor: vLLM takes a name, a class or an import path."""
    # Imported here because vLLM itself imports it late.
    from vllm.v1.executor import Executor as VllmExecutor

    backend = config.parallel_config.distributed_executor_backend
    # Ray's executor classes cannot be imported without Ray, so this comes before `get_class`.
    if backend == "ray" and not getattr(envs, _RAY_SWITCH, True):
        return Executor("ray", "", fix=f"unset {_RAY_SWITCH}, or ")
    executor = VllmExecutor.get_class(config)
    name = backend if isinstance(backend, str) else executor.__qualname__
    ours = [cls for cls in executor.__mro__ if cls.__module__.startswith("vllm.v1.executor.")]
    base = ours[0]
    if base.__name__ not in EXECUTORS:
        fix = "set --distributed-executor-backend ray, or " if "Ray" in base.__name__ else ""
        return Executor(name, "", fix=fix)
    overridden = [own for own in _STEP_PATH if getattr(executor, own) is not getattr(base, own)]
    name = executor.__qualname__ if overridden else name
    return Executor(name, base.__name__, " and ".join(overridden))


def refuse_unsupported(config: VllmConfig, settings: CompressionConfig) -> None:
    """Raise ConfigError with the first reason why `config` cannot be served with compression."""
    traits = model_traits(config)
    before = f"--kv-compress {settings.compress}: "
    refuse(MODEL, traits, before)
    refuse(SERVER, _server(config, settings, traits), before)


def _server(config: VllmConfig, settings: CompressionConfig, traits: Traits) -> Server:
    model = config.model_config
    stateful, executor = groups_of(config).stateful, _executor(config)
    device = "cuda" if current_platform.is_cuda() else str(current_platform.device_name)
    return Server(
        settings=settings,
        model=traits,
        name=model.model,
        head_dim=model.get_head_size(),
        itemsize=model.dtype.itemsize,
        # vLLM chooses the block size of hybrid models later; the worker checks it then.
        block_size=None if stateful else config.cache_config.block_size,
        max_model_len=model.max_model_len,
        options={
            name: value
            for name, value in (*_options(config), (RAY, executor.base == "RayExecutorV2"))
            if value and not (value == 1 and name.endswith("-parallel-size"))
        },
        device="cpu" if current_platform.is_cpu() else device,
        executor=executor,
        stages=tuple(len(layers) for layers in stages_of(config)),
        vllm=vllm.__version__,
        host_bytes=_host_bytes(),
    )
