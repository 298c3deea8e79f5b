"""Configurations that compression does not support, each refused before the model loads."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_kvcompress.engine.layers import groups_of, stages_of, state_blocks_per_group
from vllm_kvcompress.engine.startup.connectors import connector_refusal
from vllm_kvcompress.engine.startup.state_refusals import state_refusal
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
    merging_refusal,
    packed_cache_refusal,
    packed_shape_refusal,
    probe_space_refusal,
    repacking_refusal,
    unreachable_length_refusal,
)
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.packed_dtype import OFF
from vllm_kvcompress.settings.whole_blocks import in_whole_blocks

CUDA_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")
_RUNNER_SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
# executor methods that pass a step from the scheduler to the workers
_STEP_PATH = ("_init_executor", "collective_rpc", "execute_model", "sample_tokens")
_MP = "set --distributed-executor-backend mp"
_EXECUTORS = "vllm.v1.executor"
# These call each rank's worker for every step. Ray's class is known by path, because it can only be
# imported where Ray is installed.
_WORKER_EXECUTORS = (
    f"{_EXECUTORS}.multiproc_executor.MultiprocExecutor",
    f"{_EXECUTORS}.uniproc_executor.UniProcExecutor",
    f"{_EXECUTORS}.ray_executor_v2.RayExecutorV2",
)
_NGRAM = "ngram"
_RAY_SWITCH = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"


def _multimodal(config: VllmConfig, settings: CompressionConfig) -> str | None:
    """Return why prompts with images cannot be compressed in this configuration; None if they can.

    Models that were never tested with images need no refusal here: the API server refuses each
    request with an image.
    """
    # Imported here: only the process that receives requests needs this module.
    from vllm_kvcompress.engine.frontend.modalities import TESTED

    model = config.model_config
    if model.architecture not in TESTED or model.multimodal_config is None:
        return None
    if getattr(config, "ec_transfer_config", None) is not None:
        return (
            "images that another server encodes are not tested; remove --ec-transfer-config, or"
            " serve this model without --kv-compress"
        )
    if model.multimodal_config.enable_mm_embeds:
        return (
            "images sent as embeddings are not tested; remove --enable-mm-embeds, or serve"
            " this model without --kv-compress"
        )
    if pruning_rate := model.multimodal_config.video_pruning_rate:
        return (
            "a model that prunes video tokens processes images differently, which is not tested;"
            f" remove --video-pruning-rate, got {pruning_rate}"
        )
    return None


def _platform(config: VllmConfig) -> str | None:
    if current_platform.is_cpu():
        return None
    if not current_platform.is_cuda():
        return (
            "it runs only on CUDA and on CPUs, and this is"
            f" {current_platform.device_name}; serve without --kv-compress on this machine"
        )
    if not config.use_v2_model_runner:
        fix = f"unset {_RUNNER_SWITCH}"
        if _RUNNER_SWITCH not in os.environ:
            fix = "remove the option that vLLM's log says V2 does not support yet"
        return f"on CUDA it runs only on Model Runner V2; {fix}"
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
            fix = f"pass --attention-backend {CUDA_BACKENDS[0]}"
            if per_kind:
                fix = f"remove {flag} and {fix}"
            return (
                f"the attention backend must be one of {list(CUDA_BACKENDS)}, got {chosen.name};"
                f" {fix}"
            )
    return None


def _causal(config: VllmConfig) -> str | None:
    if getattr(config.attention_config, "use_non_causal", False):
        return (
            "every token must attend only to the tokens before it; remove"
            " --attention-config.use_non_causal"
        )
    return None


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


def _model(config: VllmConfig) -> str | None:
    return unsupported(model_traits(config))


def _one_group(config: VllmConfig) -> str | None:
    if (
        groups_of(config).num_uncompressed
        and config.scheduler_config.disable_hybrid_kv_cache_manager
    ):
        return (
            "layers with a sliding window or a state need their own KV cache group; remove"
            " --disable-hybrid-kv-cache-manager, and the option that turned the manager off"
            " according to vLLM's log"
        )
    return None


def _context_parallel(config: VllmConfig) -> str | None:
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            flag = "--" + name.replace("_", "-")
            return (
                "context parallelism splits one prompt over ranks, which is not supported; set"
                f" {flag} 1, got {size}"
            )
    return None


def _pipeline_parallel(config: VllmConfig) -> str | None:
    size = config.parallel_config.pipeline_parallel_size
    if size == 1:
        return None
    counts = [len(layers) for layers in stages_of(config)]
    if groups_of(config).num_uncompressed:
        return (
            "pipeline stages of models with sliding windows or states are not tested; set"
            f" --pipeline-parallel-size 1 and use --tensor-parallel-size, got {size}"
        )
    if len(set(counts)) > 1:
        fix = f"set --pipeline-parallel-size to a divisor of {sum(counts)}"
        if sum(counts) % size == 0:
            fix = "unset VLLM_PP_LAYER_PARTITION"
        return (
            "every pipeline stage must have the same number of layers, because all stages use the"
            f" same block table; {fix}, got {size} with {counts}"
        )
    if config.speculative_config is not None:
        return "drafts over pipeline stages are not tested; remove --speculative-config"
    return None


def _executor(config: VllmConfig) -> str | None:
    """Check the class of the executor, since vLLM takes a name, a class or an import path."""
    # Imported here because vLLM itself imports it late.
    from vllm.v1.executor import Executor

    parallel = config.parallel_config
    if getattr(parallel, "data_parallel_backend", "mp") == "ray":
        return (
            "data-parallel ranks as Ray actors are not tested; set --data-parallel-backend mp, got"
            " ray"
        )
    backend = parallel.distributed_executor_backend
    # Ray's executor classes cannot be imported without Ray, so this comes before `get_class`.
    if backend == "ray" and not getattr(envs, _RAY_SWITCH, True):
        return _bypasses_worker(f"unset {_RAY_SWITCH}", "ray")
    executor = Executor.get_class(config)
    executor_name = backend if isinstance(backend, str) else executor.__qualname__
    ancestry = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in executor.__mro__}
    if f"{_EXECUTORS}.ray_executor.RayDistributedExecutor" in ancestry:
        return _bypasses_worker("set --distributed-executor-backend ray", executor_name)
    if f"{_EXECUTORS}.uniproc_executor.ExecutorWithExternalLauncher" in ancestry:
        return (
            "ranks that an external launcher starts schedule independently, which is not tested;"
            f" start one process and {_MP}, got {executor_name}"
        )
    known = next((ancestry[path] for path in ancestry if path in _WORKER_EXECUTORS), None)
    if known is None:
        return (
            "every step must go through the worker, and only vLLM's own executors are known to do"
            f" that; {_MP}, got {executor_name}"
        )
    if known.__name__ == "RayExecutorV2" and parallel.data_parallel_size > 1:
        return (
            "data-parallel ranks on Ray's executor are not tested; set --data-parallel-size 1, or"
            f" {_MP}, got {executor_name}"
        )
    overridden = [
        name for name in _STEP_PATH if getattr(executor, name) is not getattr(known, name)
    ]
    if overridden:
        return (
            f"every step must go through the worker, and {executor.__qualname__} overrides"
            f" {' and '.join(overridden)}; {_MP}, or inherit them from {known.__name__}"
        )
    return None


def _bypasses_worker(fix: str, executor_name: str) -> str:
    return (
        "every step must go through the worker, and Ray's older executor calls the model runner"
        f" directly; {fix}, or {_MP}, got {executor_name}"
    )


def _elastic_experts(config: VllmConfig) -> str | None:
    if getattr(config.parallel_config, "enable_elastic_ep", False):
        return (
            "elastic expert parallelism adds and removes ranks while requests run, which is not"
            " supported; remove --enable-elastic-ep"
        )
    return None


def _routed_experts(config: VllmConfig) -> str | None:
    aux = getattr(config, "aux_output_config", None)
    if getattr(aux, "enable_return_routed_experts", False) or getattr(
        config.model_config, "enable_return_routed_experts", False
    ):
        return (
            "vLLM looks up the experts of a token by its KV block, and compression frees blocks of"
            " the prompt; remove --enable-return-routed-experts"
        )
    return None


def _fault_tolerance(config: VllmConfig) -> str | None:
    if getattr(config.parallel_config, "enable_fault_tolerance", False):
        return (
            "a worker that survives a failed step would keep the compressed state of dropped"
            " requests; remove --enable-fault-tolerance"
        )
    return None


def _microbatches(config: VllmConfig) -> str | None:
    parallel = config.parallel_config
    if getattr(parallel, "enable_dbo", False) or getattr(parallel, "ubatch_size", 0):
        return (
            "dual-batch overlap splits a batch in two, which is not supported; remove --enable-dbo"
            " and --ubatch-size"
        )
    return None


def _reuse(config: VllmConfig, settings: CompressionConfig) -> str | None:
    mode = settings.packed.reuse
    if mode == OFF:
        return None
    remove = f"or --kv-reuse (got --kv-reuse {mode})"
    if not any(variant.reuses_pages for variant in settings.variants):
        return (
            "--kv-reuse needs --kv-budget 1.0 and --kv-packed-dtype k4v3; set both, or remove"
            f" --kv-reuse, got budget {settings.budget} and {settings.resolved_packed_dtype}"
        )
    if settings.pressure:
        return (
            "cached pages do not count as used, so --kv-pressure would leave a later turn"
            f" uncompressed, and it could not read them; remove --kv-pressure, {remove}"
        )
    if not config.cache_config.enable_prefix_caching:
        return f"--kv-reuse needs prefix caching; remove --no-enable-prefix-caching, {remove}"
    if config.kv_transfer_config is not None:
        return (
            "a KV connector may write to pages while a later request reads them; remove"
            f" --kv-transfer-config, {remove}"
        )
    events = config.kv_events_config
    if events is not None and events.enable_kv_cache_events and not _announces_again():
        return (
            "KV events of packed pages need BlockPool.emit_cached_block_events, which this vLLM"
            f" lacks; remove --kv-events-config, {remove}"
        )
    if groups_of(config).num_uncompressed:
        return (
            "--kv-reuse does not support layers with a sliding window or a state; serve another"
            f" model, or remove --kv-reuse, got --kv-reuse {mode}"
        )
    if config.speculative_config is not None:
        return (
            "--kv-reuse does not support speculative decoding; remove --speculative-config,"
            f" {remove}"
        )
    return None


def _announces_again() -> bool:
    """Return whether this vLLM has the method that announces cached blocks again."""
    # The module imports vLLM's parsers, whose packages may be missing when the plugin is loaded.
    from vllm.v1.core.block_pool import BlockPool

    return hasattr(BlockPool, "emit_cached_block_events")


def _speculative(config: VllmConfig) -> str | None:
    speculative = config.speculative_config
    if speculative is None or speculative.method == _NGRAM:
        return None
    return (
        f"drafts of {speculative.method} are not tested, or come from layers with their own KV"
        " cache; draft from the prompt with --speculative-config"
        f' \'{{"method": "{_NGRAM}", ...}}\', or remove --speculative-config and'
        f" the --spec- flags, and name {config.model_config.model} itself as the model instead of"
        " a speculator for it"
    )


def _cascade(config: VllmConfig) -> str | None:
    if getattr(config.model_config, "disable_cascade_attn", True) is False:
        return (
            "cascade attention reads a shared prefix, which compressed requests no longer have;"
            " remove --no-disable-cascade-attn"
        )
    return None


def _kv_sharing(config: VllmConfig) -> str | None:
    if getattr(config.cache_config, "kv_sharing_fast_prefill", False):
        return "layers that share KV caches are not supported; remove --kv-sharing-fast-prefill"
    return None


def _lengths_fit(config: VllmConfig, settings: CompressionConfig) -> str | None:
    max_model_len = config.model_config.max_model_len
    window = max(variant.resolved_window for variant in settings.variants)
    if window >= max_model_len:
        return (
            "the observation window must be shorter than --max-model-len;"
            f" set --kv-window below {max_model_len}, got {window}"
        )
    return unreachable_length_refusal(settings, max_model_len)


def _packed_again(config: VllmConfig, settings: CompressionConfig) -> str | None:
    # vLLM chooses the block size of hybrid models later; the worker checks it then.
    block_size = None if groups_of(config).stateful else config.cache_config.block_size
    if block_size is not None:
        settings = in_whole_blocks(settings, block_size)
    return repacking_refusal(settings, block_size)


def _packed_shape(config: VllmConfig, settings: CompressionConfig) -> str | None:
    # vLLM chooses the block size of hybrid models later; the worker checks it then.
    block_size = None if groups_of(config).stateful else config.cache_config.block_size
    model = config.model_config
    return packed_shape_refusal(settings, model.get_head_size(), block_size, model.dtype.itemsize)


def _probe_fits(config: VllmConfig, settings: CompressionConfig) -> str | None:
    scheduler = config.scheduler_config
    names = ("max_num_batched_tokens", "max_num_scheduled_tokens", "long_prefill_token_threshold")
    limits = {f"--{name.replace('_', '-')}": getattr(scheduler, name, None) for name in names}
    return probe_space_refusal(settings, scheduler.max_num_seqs, *limits.items())


def _quantised(config: VllmConfig, settings: CompressionConfig) -> str | None:
    cache = config.cache_config
    traits = model_traits(config)
    stored = stored_in(traits)
    if stored not in FLOAT8_CACHES:
        return None
    for refusal in (merging_refusal, packed_cache_refusal):
        if reason := refusal(settings, stored, plain_cache(traits)):
            return reason
    if skipped := list(getattr(cache, "kv_cache_dtype_skip_layers", ())):
        return (
            "all layers must use the same KV cache dtype; remove --kv-cache-dtype-skip-layers,"
            f" got {skipped}"
        )
    if getattr(cache, "calculate_kv_scales", False):
        return (
            "quantisation scales must stay the same while tokens are cached; remove"
            " --calculate-kv-scales, and serve a checkpoint that includes its scales"
        )
    return None


def _drafts(config: VllmConfig, settings: CompressionConfig) -> str | None:
    is_set = {
        "--kv-decode-budget": settings.decode.budget is not None,
        "--kv-max-whole": settings.pieces.max_whole is not None,
        "--kv-decode-interval": any(variant.packs_outputs for variant in settings.variants),
    }
    flags = [flag for flag, given in is_set.items() if given]
    if config.speculative_config is None or not flags:
        return None
    return (
        "requests compressed more than once are compressed at exact lengths, which drafts can skip"
        f" or roll back; remove --speculative-config, or {' and '.join(flags)}"
    )


def front_end() -> str | None:
    """Return why compression cannot use this API server; None if it is vLLM's Python server."""
    if envs.VLLM_USE_RUST_FRONTEND:
        return (
            "the Rust front end does not check compression settings of requests, count them, or"
            " serve further model names; unset VLLM_USE_RUST_FRONTEND"
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
    """Raise ConfigError with the first reason why `config` cannot be served with compression."""
    for check in REFUSALS:
        if (reason := check(config)) is not None:
            raise ConfigError(f"--kv-compress {settings.compress}: {reason}")
    with_settings = (
        connector_refusal,
        _multimodal,
        state_refusal,
        _quantised,
        _reuse,
        _drafts,
        _lengths_fit,
        _packed_again,
        _packed_shape,
        _probe_fits,
    )
    for check_settings in with_settings:
        if (reason := check_settings(config, settings)) is not None:
            raise ConfigError(f"--kv-compress {settings.compress}: {reason}")
