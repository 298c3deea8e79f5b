"""What compression cannot work with, each refused in one sentence before the model loads."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_kvcompress.engine.layers import groups_of, stages_of, states_kept
from vllm_kvcompress.engine.startup.connectors import why_not_connected
from vllm_kvcompress.engine.startup.multimodal import why_not_processed
from vllm_kvcompress.engine.startup.state_refusals import why_not_with_states
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.planning.cache_dtypes import FLOAT8_CACHES
from vllm_kvcompress.planning.model_traits import (
    Traits,
    plain_cache,
    stored_in,
    traits_of,
    unsupported,
)
from vllm_kvcompress.planning.obstacles import (
    why_never_reached,
    why_no_room_for_probe,
    why_not_again,
    why_not_merged,
)
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.whole_blocks import in_whole_blocks

CUDA_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")
_RUNNER_SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
# what carries a step from the scheduler to the workers
_STEP_PATH = ("_init_executor", "collective_rpc", "execute_model", "sample_tokens")
_MP = "set --distributed-executor-backend mp"
_EXECUTORS = "vllm.v1.executor"
# These call each rank's worker for a step. Ray's is known by its path: it loads only where Ray is.
_THROUGH_THE_WORKER = (
    f"{_EXECUTORS}.multiproc_executor.MultiprocExecutor",
    f"{_EXECUTORS}.uniproc_executor.UniProcExecutor",
    f"{_EXECUTORS}.ray_executor_v2.RayExecutorV2",
)
_DRAFTS_FROM_THE_PROMPT = "ngram"
_RAY_SWITCH = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"


def _platform(config: VllmConfig) -> str | None:
    if current_platform.is_cpu():
        return None
    if not current_platform.is_cuda():
        return (
            "it runs on CUDA and on CPUs, and this is"
            f" {current_platform.device_name}; serve without --kv-compress on this machine"
        )
    if not config.use_v2_model_runner:
        cure = f"unset {_RUNNER_SWITCH}"
        if _RUNNER_SWITCH not in os.environ:
            cure = "remove the option that vLLM's log says V2 does not support yet"
        return f"on CUDA it runs only on Model Runner V2; {cure}"
    return None


def _backend(config: VllmConfig) -> str | None:
    if not current_platform.is_cuda():
        return None
    attention = config.attention_config
    per_kind = getattr(attention, "backend_per_kind", None) or {}
    for flag, chosen in (
        ("--attention-config.backend_per_kind", per_kind.get("full_attention")),
        ("--attention-backend", None if "full_attention" in per_kind else attention.backend),
    ):
        if chosen is not None and chosen.name not in CUDA_BACKENDS:
            cure = f"pass --attention-backend {CUDA_BACKENDS[0]}"
            if per_kind:
                cure = f"remove {flag} and {cure}"
            return (
                f"the attention backend must be one of {list(CUDA_BACKENDS)}, got {chosen.name};"
                f" {cure}"
            )
    return None


def _causal(config: VllmConfig) -> str | None:
    if getattr(config.attention_config, "use_non_causal", False):
        return (
            "every token must attend only to those before it; remove"
            " --attention-config.use_non_causal"
        )
    return None


def model_traits(config: VllmConfig) -> Traits:
    """Traits of the model by its config.json, by what vLLM made of that, and by vLLM's flags."""
    model = config.model_config
    traits = traits_of(model.hf_config.to_dict(), model.hf_text_config.to_dict())
    window = model.get_sliding_window()
    declared = traits.declared_cache
    if getattr(config.quant_config, "kv_cache_scheme", None):
        # Every attention layer then turns "auto" into fp8.
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
        looks_ahead=traits.looks_ahead or bool(getattr(model, "is_mm_prefix_lm", False)),
        dtype=str(model.dtype).removeprefix("torch."),
        declared_cache=declared,
        cached_states=states_kept(config),
        cache=config.cache_config.cache_dtype,
    )


def _model(config: VllmConfig) -> str | None:
    return unsupported(model_traits(config))


def _one_group(config: VllmConfig) -> str | None:
    if groups_of(config).others and config.scheduler_config.disable_hybrid_kv_cache_manager:
        return (
            "layers with a sliding window or a state must have blocks of their own; remove"
            " --disable-hybrid-kv-cache-manager, and the option for which vLLM's log says that it"
            " turned that manager off"
        )
    return None


def _context_parallel(config: VllmConfig) -> str | None:
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            flag = "--" + name.replace("_", "-")
            return f"context parallelism spreads one prompt over ranks; set {flag} 1, got {size}"
    return None


def _pipeline_parallel(config: VllmConfig) -> str | None:
    size = config.parallel_config.pipeline_parallel_size
    if size == 1:
        return None
    counts = [len(layers) for layers in stages_of(config)]
    if groups_of(config).others:
        return (
            "pipeline stages of models with sliding windows or states are not tested; set"
            f" --pipeline-parallel-size 1 and use --tensor-parallel-size, got {size}"
        )
    if len(set(counts)) > 1:
        cure = f"set --pipeline-parallel-size to a divisor of {sum(counts)}"
        if sum(counts) % size == 0:
            cure = "unset VLLM_PP_LAYER_PARTITION"
        return (
            "every pipeline stage must hold as many layers as the others, since all take the same"
            " blocks;"
            f" {cure}, got {size} with {counts}"
        )
    if config.speculative_config is not None:
        return "drafts over pipeline stages are not tested; remove --speculative-config"
    return None


def _executor(config: VllmConfig) -> str | None:
    """Judge the executor by its class: vLLM takes a name, a class or an import path."""
    # imported where compression is asked for: vLLM itself loads it late
    from vllm.v1.executor import Executor

    parallel = config.parallel_config
    if getattr(parallel, "data_parallel_backend", "mp") == "ray":
        return (
            "data-parallel ranks as Ray actors are not tested; set --data-parallel-backend mp, got"
            " ray"
        )
    backend = parallel.distributed_executor_backend
    # Ray's classes load only where Ray is installed, so that one is not asked for.
    if backend == "ray" and not getattr(envs, _RAY_SWITCH, True):
        return _past_the_worker(f"unset {_RAY_SWITCH}", "ray")
    executor = Executor.get_class(config)
    executor_name = backend if isinstance(backend, str) else executor.__qualname__
    ancestry = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in executor.__mro__}
    if f"{_EXECUTORS}.ray_executor.RayDistributedExecutor" in ancestry:
        return _past_the_worker("set --distributed-executor-backend ray", executor_name)
    if f"{_EXECUTORS}.uniproc_executor.ExecutorWithExternalLauncher" in ancestry:
        return (
            "ranks that an external launcher starts schedule on their own, which is not tested;"
            f" start one process and {_MP}, got {executor_name}"
        )
    known = next((ancestry[path] for path in ancestry if path in _THROUGH_THE_WORKER), None)
    if known is None:
        return (
            "every step must go through the worker, which is known of vLLM's own executors alone;"
            f" {_MP}, got {executor_name}"
        )
    if known.__name__ == "RayExecutorV2" and parallel.data_parallel_size > 1:
        return (
            "data-parallel ranks on Ray's executor are not tested; set --data-parallel-size 1, or"
            f" {_MP}, got {executor_name}"
        )
    own = [name for name in _STEP_PATH if getattr(executor, name) is not getattr(known, name)]
    if own:
        return (
            f"every step must go through the worker, and {executor.__qualname__} has its own"
            f" {' and '.join(own)}; {_MP}, or inherit them from {known.__name__}"
        )
    return None


def _past_the_worker(cure: str, executor_name: str) -> str:
    return (
        "every step must go through the worker, and Ray's older executor calls the model runner"
        f" itself; {cure}, or {_MP}, got {executor_name}"
    )


def _elastic_experts(config: VllmConfig) -> str | None:
    if getattr(config.parallel_config, "enable_elastic_ep", False):
        return "ranks must not come and go while requests run; remove --enable-elastic-ep"
    return None


def _routed_experts(config: VllmConfig) -> str | None:
    aux = getattr(config, "aux_output_config", None)
    if getattr(aux, "enable_return_routed_experts", False) or getattr(
        config.model_config, "enable_return_routed_experts", False
    ):
        return (
            "the experts of a token are looked up by its KV block, and a compressed prompt has"
            " given its blocks back; remove --enable-return-routed-experts"
        )
    return None


def _fault_tolerance(config: VllmConfig) -> str | None:
    if getattr(config.parallel_config, "enable_fault_tolerance", False):
        return (
            "a worker that survives a failed step would keep packed requests that are gone; remove"
            " --enable-fault-tolerance"
        )
    return None


def _microbatches(config: VllmConfig) -> str | None:
    parallel = config.parallel_config
    if getattr(parallel, "enable_dbo", False) or getattr(parallel, "ubatch_size", 0):
        return "dual-batch overlap splits a batch in two; remove --enable-dbo and --ubatch-size"
    return None


def _speculative(config: VllmConfig) -> str | None:
    speculative = config.speculative_config
    if speculative is None or speculative.method == _DRAFTS_FROM_THE_PROMPT:
        return None
    return (
        f"drafts of {speculative.method} come from layers with a KV cache of their own, or are"
        " untested; take them from the prompt with --speculative-config"
        f' \'{{"method": "{_DRAFTS_FROM_THE_PROMPT}", ...}}\', or remove --speculative-config and'
        f" the --spec- flags, and name {config.model_config.model} itself as the model, not a"
        " speculator for it"
    )


def _cascade(config: VllmConfig) -> str | None:
    if getattr(config.model_config, "disable_cascade_attn", True) is False:
        return (
            "cascade attention reads a shared prefix that compressed requests no longer have;"
            " remove --no-disable-cascade-attn"
        )
    return None


def _kv_sharing(config: VllmConfig) -> str | None:
    if getattr(config.cache_config, "kv_sharing_fast_prefill", False):
        return "layers must not share KV caches; remove --kv-sharing-fast-prefill"
    return None


def _lengths_fit(config: VllmConfig, settings: CompressionConfig) -> str | None:
    longest = config.model_config.max_model_len
    window = max(variant.resolved_window for variant in settings.variants)
    if window >= longest:
        return (
            "the observation window must be shorter than the longest prompt;"
            f" set --kv-window below {longest}, got {window}"
        )
    return why_never_reached(settings, longest)


def _packed_again(config: VllmConfig, settings: CompressionConfig) -> str | None:
    # where vLLM chooses the block later, each layer's cache is asked again
    known = None if groups_of(config).stateful else config.cache_config.block_size
    if known is not None:
        settings = in_whole_blocks(settings, known)
    return why_not_again(settings, known)


def _probe_fits(config: VllmConfig, settings: CompressionConfig) -> str | None:
    scheduler = config.scheduler_config
    names = ("max_num_batched_tokens", "max_num_scheduled_tokens", "long_prefill_token_threshold")
    rooms = {f"--{name.replace('_', '-')}": getattr(scheduler, name, None) for name in names}
    return why_no_room_for_probe(settings, scheduler.max_num_seqs, *rooms.items())


def _quantised(config: VllmConfig, settings: CompressionConfig) -> str | None:
    cache = config.cache_config
    traits = model_traits(config)
    stored = stored_in(traits)
    if stored not in FLOAT8_CACHES:
        return None
    if reason := why_not_merged(settings, stored, plain_cache(traits)):
        return reason
    if skipped := list(getattr(cache, "kv_cache_dtype_skip_layers", ())):
        return (
            "all layers must store keys and values alike; remove --kv-cache-dtype-skip-layers,"
            f" got {skipped}"
        )
    if getattr(cache, "calculate_kv_scales", False):
        return (
            "scales must not change while tokens are cached with them; remove"
            " --calculate-kv-scales, and serve a checkpoint that brings its scales"
        )
    return None


def _drafts(config: VllmConfig, settings: CompressionConfig) -> str | None:
    given = {
        "--kv-decode-budget": settings.decode_budget is not None,
        "--kv-max-whole": settings.max_whole is not None,
    }
    asked = [flag for flag, is_given in given.items() if is_given]
    if config.speculative_config is None or not asked:
        return None
    return (
        "requests that are packed more than once are packed at lengths that drafts step over or"
        f" take back; remove --speculative-config, or {' and '.join(asked)}"
    )


def front_end() -> str | None:
    """Say why compression cannot use this front end; None when it is vLLM's in Python."""
    if envs.VLLM_USE_RUST_FRONTEND:
        return (
            "the Rust front end neither checks what requests ask for, nor counts, nor knows further"
            " names of the model; unset VLLM_USE_RUST_FRONTEND"
        )
    return None


def _front_end(config: VllmConfig) -> str | None:
    return front_end()


REFUSALS: tuple[Callable[[Any], str | None], ...] = (
    _platform,
    _backend,
    _causal,
    _model,
    _one_group,
    _context_parallel,
    _pipeline_parallel,
    _executor,
    _elastic_experts,
    _fault_tolerance,
    _microbatches,
    _speculative,
    _cascade,
    _routed_experts,
    _kv_sharing,
    _front_end,
)


def refuse_unsupported(config: VllmConfig, settings: CompressionConfig) -> None:
    """Raise ConfigError with the first reason why `config` cannot be served compressed."""
    for check in REFUSALS:
        if (reason := check(config)) is not None:
            raise ConfigError(f"--kv-compress {settings.compress}: {reason}")
    of_both = (
        *(why_not_connected, why_not_processed, why_not_with_states, _quantised, _drafts),
        *(_lengths_fit, _packed_again, _probe_fits),
    )
    for of_settings in of_both:
        if (reason := of_settings(config, settings)) is not None:
            raise ConfigError(f"--kv-compress {settings.compress}: {reason}")
