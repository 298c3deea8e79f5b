"""What we need of vLLM, as data: checked when compression is switched on, tested in CI."""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from vllm.platforms import current_platform

from vllm_kvcompress.engine.import_failures import import_failure, is_gone
from vllm_kvcompress.errors import SeamError


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """One place where we touch vLLM.

    Args:
        name: module of this package that uses it.
        target: ``module:qualname`` in vLLM.
        kind: "registry" (vLLM's own hook), "subclass" (chosen by a flag) or "wrap" (a method
            that is called through, with something added before or after).
        params: parameters of `target` that we pass or override by name.
        remove_when: observable event after which the entry can go.
        on: the platform that needs it, "cpu" or "cuda"; both when empty.
    """

    name: str
    target: str
    kind: str
    params: tuple[str, ...]
    remove_when: str
    on: str = ""

    def check(self, version: str) -> None:
        """Raise SeamError unless `target` exists and takes `params`. Touches nothing.

        A module that is there and cannot be imported is told as that, with what is missing.
        """
        module, _, qualname = self.target.partition(":")
        cure = f"install a vLLM in {TESTED}, or serve without --kv-compress"
        gone = f"vLLM {version} has no {self.target}"
        try:
            found: Any = importlib.import_module(module)
        except Exception as e:  # anything may go wrong while others are imported
            if is_gone(module, e):
                raise SeamError(gone, cure) from e
            raise import_failure(e, version, module) from e
        try:
            for part in qualname.split("."):
                found = getattr(found, part)
        except AttributeError as e:
            raise SeamError(gone, cure) from e
        has = inspect.signature(found).parameters if self.params else {}
        if lost := set(self.params) - has.keys():
            raise SeamError(f"vLLM {version}: {self.target} lost {sorted(lost)}", cure)


TESTED = SpecifierSet(">=0.31,<0.34")

_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager"
_CPU = "vllm.v1.attention.backends.cpu_attn"
_ALWAYS = "never: vLLM's own hook"
_CHECKS = "vLLM lets plugins check a request's extra arguments"
_NAMES = "vLLM serves a model under names that stand for extra arguments"
_USAGE = "vLLM carries a plugin's figures from the scheduler to an answer's usage"
_SUBCLASS = "vLLM has a plugin interface for per-layer block tables"


def _overridden(name: str, target: str, *params: str, on: str = "") -> Seam:
    return Seam(
        name=name, target=target, kind="subclass", params=params, remove_when=_SUBCLASS, on=on
    )


SEAMS = (
    Seam(
        name="cli_args",
        target="vllm.engine.arg_utils:EngineArgs.add_cli_args",
        kind="wrap",
        params=("parser",),
        remove_when="vLLM lets plugins add command-line flags",
    ),
    Seam(
        name="cli_args",
        target="vllm.engine.arg_utils:EngineArgs.from_cli_args",
        kind="wrap",
        params=("args",),
        remove_when="vLLM lets plugins add command-line flags",
    ),
    Seam(
        name="configure",
        target="vllm.engine.arg_utils:EngineArgs.create_engine_config",
        kind="wrap",
        params=(),
        remove_when="vLLM calls plugins with the finished VllmConfig",
    ),
    *(
        Seam(
            name="refusals",
            target=target,
            kind="wrap",
            params=params,
            remove_when="vLLM says which executors send every step through the worker",
        )
        for target, params in (
            ("vllm.v1.executor:Executor.get_class", ("vllm_config",)),
            ("vllm.v1.executor:Executor.uses_ray", ()),
            ("vllm.v1.executor.multiproc_executor:MultiprocExecutor", ()),
            ("vllm.v1.executor.uniproc_executor:UniProcExecutor", ()),
            ("vllm.v1.executor.uniproc_executor:ExecutorWithExternalLauncher", ()),
        )
    ),
    Seam(
        name="backend_choice",
        target="vllm.v1.attention.selector:get_attn_backend",
        kind="wrap",
        params=("head_size", "dtype", "kv_cache_dtype"),
        remove_when="a plugin may say which attention backends it works with",
        on="cuda",
    ),
    Seam(
        name="backend_choice",
        target="vllm.config:set_current_vllm_config",
        kind="wrap",
        params=("vllm_config",),
        remove_when="a plugin may say which attention backends it works with",
        on="cuda",
    ),
    Seam(
        name="api",
        target="vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        kind="wrap",
        params=("request_id", "prompt", "params"),
        remove_when=_CHECKS,
    ),
    Seam(
        name="api",
        target="vllm.v1.engine.async_llm:AsyncLLM.generate",
        kind="wrap",
        params=("prompt", "sampling_params"),
        remove_when=_CHECKS,
    ),
    Seam(
        name="api",
        target="vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.create_responses",
        kind="wrap",
        params=("request",),
        remove_when=_CHECKS,
    ),
    Seam(
        name="api",
        target="vllm.entrypoints.openai.chat_completion.serving:"
        "OpenAIServingChat.create_chat_completion",
        kind="wrap",
        params=("request",),
        remove_when=_CHECKS,
    ),
    Seam(
        name="api",
        target="vllm.entrypoints.openai.completion.serving:"
        "OpenAIServingCompletion.create_completion",
        kind="wrap",
        params=("request",),
        remove_when=_CHECKS,
    ),
    Seam(
        name="aliases",
        target="vllm.entrypoints.openai.models.serving:OpenAIServingModels.__init__",
        kind="wrap",
        params=("engine_client", "base_model_paths", "lora_modules"),
        remove_when=_NAMES,
    ),
    Seam(
        name="aliases",
        target="vllm.entrypoints.openai.models.serving:OpenAIServingModels.model_name",
        kind="wrap",
        params=("lora_request",),
        remove_when=_NAMES,
    ),
    Seam(
        name="aliases",
        target="vllm.entrypoints.serve.engine.serving:BaseServing._check_model",
        kind="wrap",
        params=("request",),
        remove_when=_NAMES,
    ),
    Seam(
        name="usage",
        target="vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
        kind="wrap",
        params=("engine_core_outputs",),
        remove_when=_USAGE,
    ),
    Seam(
        name="usage",
        target="vllm.v1.engine.output_processor:RequestState.make_request_output",
        kind="wrap",
        params=("kv_transfer_params",),
        remove_when=_USAGE,
    ),
    Seam(
        name="usage",
        target="vllm.entrypoints.openai.responses.serving:"
        "OpenAIServingResponses.responses_full_generator",
        kind="wrap",
        params=("request", "context"),
        remove_when=_USAGE,
    ),
    Seam(
        name="usage",
        target="vllm.entrypoints.openai.chat_completion.batch_serving:"
        "OpenAIServingChatBatch.create_batch_chat_completion",
        kind="wrap",
        params=("request",),
        remove_when=_USAGE,
    ),
    Seam(
        name="usage",
        target="vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens.serve_tokens",
        kind="wrap",
        params=("request",),
        remove_when=_USAGE,
    ),
    Seam(
        name="usage",
        target="vllm.entrypoints.serve.engine.protocol:PromptTokenUsageInfo",
        kind="wrap",
        params=("cached_tokens",),
        remove_when=_USAGE,
    ),
    Seam(
        name="usage_notes",
        target="vllm.v1.engine:EngineCoreOutput",
        kind="wrap",
        params=("request_id", "kv_transfer_params"),
        remove_when=_USAGE,
    ),
    Seam(
        name="metrics",
        target="vllm.v1.metrics.loggers:StatLoggerManager.__init__",
        kind="wrap",
        params=("vllm_config",),
        remove_when="vLLM's stat-logger plugins may decline, and are loaded offline",
    ),
    Seam(
        name="metrics",
        target="vllm.v1.metrics.loggers:AggregateStatLoggerBase.record",
        kind="subclass",
        params=("scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
        remove_when="never: vLLM's own interface",
    ),
    Seam(
        name="kv_cache",
        target="vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register",
        kind="registry",
        params=("kvcache_spec_cls", "manager_class", "uniform_type_base_spec"),
        remove_when=_ALWAYS,
    ),
    _overridden(
        "kv_cache",
        f"{_MANAGER}.get_num_blocks_to_allocate",
        "request_id",
        "num_tokens",
        "new_computed_blocks",
        "apply_admission_cap",
    ),
    _overridden(
        "kv_cache",
        f"{_MANAGER}.allocate_new_blocks",
        "request_id",
        "num_tokens",
        "num_tokens_main_model",
    ),
    _overridden(
        "kv_cache",
        f"{_MANAGER}.find_longest_cache_hit",
        "block_hashes",
        "max_length",
        "kv_cache_group_ids",
        "block_pool",
        "kv_cache_spec",
    ),
    _overridden("kv_cache", f"{_MANAGER}.cache_blocks", "request", "num_tokens"),
    _overridden("kv_cache", f"{_MANAGER}.pop_blocks_for_free", "request_id"),
    _overridden("kv_cache", "vllm.v1.core.block_pool:BlockPool.evict_blocks", "block_ids"),
    Seam(
        name="scheduler",
        target="vllm.v1.core.sched.scheduler:Scheduler.schedule",
        kind="subclass",
        params=(),
        remove_when="vLLM lets plugins attach data to the SchedulerOutput",
    ),
    _overridden(
        "scheduler",
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        "scheduler_output",
        "model_runner_output",
    ),
    _overridden("scheduler", "vllm.v1.core.sched.scheduler:Scheduler.make_stats"),
    Seam(
        name="scheduler",
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
        kind="wrap",
        params=("request",),
        remove_when="vLLM's managers are told whose prefix they look up",
    ),
    Seam(
        name="scheduler",
        target="vllm.v1.metrics.stats:SchedulerStats",
        kind="wrap",
        params=("kv_connector_stats",),
        remove_when="vLLM carries a plugin's statistics",
    ),
    Seam(
        name="scheduler",
        target="vllm.v1.core.sched.async_scheduler:AsyncScheduler",
        kind="subclass",
        params=(),
        remove_when="vLLM lets plugins attach data to the SchedulerOutput",
    ),
    _overridden("worker_cpu", "vllm.v1.worker.cpu_worker:CPUWorker.load_model", on="cpu"),
    _overridden("worker_cpu", "vllm.v1.worker.cpu_worker:CPUWorker.get_kv_cache_spec", on="cpu"),
    _overridden(
        "attention_cpu",
        "vllm._custom_ops:cpu_attn_get_scheduler_metadata",
        "seq_lens",
        "query_start_loc",
        "isa",
        "enable_kv_split",
        "kv_cache_dtype",
        on="cpu",
    ),
    _overridden(
        "worker_cpu",
        "vllm.v1.worker.cpu_worker:CPUWorker.sample_tokens",
        "grammar_output",
        on="cpu",
    ),
    _overridden(
        "worker_cpu",
        "vllm.v1.worker.cpu_worker:CPUWorker.execute_model",
        "scheduler_output",
        on="cpu",
    ),
    _overridden(
        "worker_cpu",
        "vllm.v1.worker.cpu_worker:CPUWorker.initialize_from_config",
        "kv_cache_config",
        on="cpu",
    ),
    Seam(
        name="attention",
        target="vllm.v1.attention.backends.registry:register_backend",
        kind="registry",
        params=("backend", "class_path"),
        remove_when=_ALWAYS,
    ),
    Seam(
        name="attention",
        target="vllm.v1.attention.selector:_cached_get_attn_backend.cache_clear",
        kind="wrap",
        params=(),
        remove_when="vLLM forgets a cached backend when its override changes",
    ),
    _overridden(
        "attention_cpu",
        f"{_CPU}:CPUAttentionMetadataBuilder.build",
        "common_prefix_len",
        "common_attn_metadata",
        "fast_build",
        on="cpu",
    ),
    _overridden(
        "attention_cpu",
        f"{_CPU}:CPUAttentionBackendImpl.forward",
        "layer",
        "query",
        "key",
        "value",
        "kv_cache",
        "attn_metadata",
        "output",
        on="cpu",
    ),
    Seam(
        name="attention_cpu",
        target=f"{_CPU}:CPUAttentionBackendImpl.do_kv_cache_update",
        kind="wrap",
        params=("layer", "key", "value", "kv_cache", "slot_mapping"),
        remove_when="vLLM says how its CPU kernels store keys and values",
        on="cpu",
    ),
    Seam(
        name="worker",
        target="vllm.v1.outputs:AsyncModelRunnerOutput.get_output",
        kind="wrap",
        params=(),
        remove_when="vLLM lets a worker attach data to a step's output",
    ),
    _overridden("worker_cuda", "vllm.v1.worker.gpu_worker:Worker.load_model", on="cuda"),
    _overridden(
        "worker_cuda", "vllm.v1.worker.gpu_worker:Worker.determine_available_memory", on="cuda"
    ),
    _overridden("worker_cuda", "vllm.v1.worker.gpu_worker:Worker.get_kv_cache_spec", on="cuda"),
    _overridden(
        "worker_cuda",
        "vllm.v1.worker.gpu_worker:Worker.initialize_from_config",
        "kv_cache_config",
        on="cuda",
    ),
    _overridden(
        "worker_cuda", "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model", on="cuda"
    ),
    _overridden(
        "worker_cuda",
        "vllm.v1.worker.gpu_worker:Worker.sample_tokens",
        "grammar_output",
        on="cuda",
    ),
    _overridden(
        "worker_cuda",
        "vllm.v1.worker.gpu_worker:Worker.execute_model",
        "scheduler_output",
        on="cuda",
    ),
    _overridden(
        "attention_cuda",
        "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder.build",
        "common_prefix_len",
        "common_attn_metadata",
        "fast_build",
        on="cuda",
    ),
    _overridden(
        "attention_cuda",
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward",
        "layer",
        "query",
        "key",
        "value",
        "kv_cache",
        "attn_metadata",
        "output",
        on="cuda",
    ),
    _overridden(
        "attention_cuda",
        "vllm.v1.attention.backends.triton_attn:TritonAttentionMetadataBuilder.build",
        "common_prefix_len",
        "common_attn_metadata",
        "fast_build",
        on="cuda",
    ),
    _overridden(
        "attention_cuda",
        "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.forward",
        "layer",
        "query",
        "key",
        "value",
        "kv_cache",
        "attn_metadata",
        "output",
        on="cuda",
    ),
    _overridden(
        "attention_cuda",
        "vllm.v1.attention.backends.triton_attn:"
        "TritonAttentionMetadataBuilder.build_for_cudagraph_capture",
        "common_attn_metadata",
        on="cuda",
    ),
    Seam(
        name="worker",
        target="vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager.dispatch",
        kind="wrap",
        params=("num_reqs", "num_tokens", "uniform_token_count"),
        remove_when="vLLM lets a plugin ask for a step without whole-graph replay",
    ),
    Seam(
        name="worker",
        target="vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor",
        kind="wrap",
        params=("cg_mode", "num_tokens", "num_reqs"),
        remove_when="vLLM lets a plugin ask for a step without whole-graph replay",
    ),
    Seam(
        name="worker",
        target="vllm.v1.worker.gpu.dp_utils:dispatch_cg_and_sync_dp",
        kind="wrap",
        params=("cudagraph_manager", "uniform_token_count", "dp_size", "dp_rank"),
        remove_when="vLLM lets a plugin ask for a step without whole-graph replay",
    ),
    Seam(
        name="worker",
        target="vllm.v1.worker.worker_base:WorkerBase.__init__",
        kind="subclass",
        params=("is_driver_worker",),
        remove_when="vLLM's executors hear what any rank raises",
    ),
    Seam(
        name="page_pool",
        target="vllm.utils.torch_utils:async_tensor_h2d",
        kind="wrap",
        params=("data", "device", "dtype", "out"),
        remove_when="torch uploads host lists without waiting",
    ),
)


def check_all(version: str) -> None:
    """Raise SeamError unless this vLLM is supported and has this platform's seams.

    Touches nothing.
    """
    if not TESTED.contains(version, prereleases=True):
        raise SeamError(
            f"vLLM {version} is untested with --kv-compress; install a vLLM in {TESTED}, or serve"
            " without --kv-compress"
        )
    platform = "cuda" if current_platform.is_cuda() else "cpu"
    for seam in SEAMS:
        if seam.on in ("", platform):
            seam.check(version)


def check(*names: str, version: str) -> None:
    """Raise SeamError unless this vLLM has the seams of some of our modules."""
    for seam in SEAMS:
        if seam.name in names:
            seam.check(version)


def install() -> None:
    """Add the flags and the configuration hook; safe to call twice.

    Both only look whether compression was asked for. Everything else is checked and selected by
    `configure` once it was.
    """
    from vllm_kvcompress.engine import cli_args, configure

    cli_args.install()
    configure.install()
