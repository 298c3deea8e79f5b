"""The table of everything that we need of vLLM, checked when compression is switched on."""

from collections.abc import Iterator

from vllm.platforms import current_platform

from vllm_kvcompress.engine.startup.seam import TESTED, Seam
from vllm_kvcompress.errors import SeamError

_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager"
_COORDINATOR = "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator"
_CPU_ATTN = "vllm.v1.attention.backends.cpu_attn:"
_CPU_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
_GPU_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_FLASH = "vllm.v1.attention.backends.flash_attn:"
_TRITON = "vllm.v1.attention.backends.triton_attn:"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils:"
_TABLES = "vLLM has a plugin interface for per-layer block tables"
_USAGE = "vLLM carries a plugin's figures from the scheduler to an answer's usage"
_HOOK = "never: vLLM's own hook"
_USED = "we no longer import it"


def _seams(
    name: str, kind: str, remove_when: str, *signatures: str, on: str = ""
) -> Iterator[Seam]:
    """What one of our modules needs for one reason, each as ``module:qualname(param, param)``."""
    for signature in signatures:
        target, _, params = signature.rstrip(")").partition("(")
        yield Seam(
            name=name,
            target=target,
            kind=kind,
            params=tuple(params.split(", ")) if params else (),
            remove_when=remove_when,
            on=on,
        )


SEAMS = (
    *_seams(
        "startup.cli_args",
        "wrap",
        "vLLM lets plugins add command-line flags",
        "vllm.engine.arg_utils:EngineArgs.add_cli_args(parser)",
        "vllm.engine.arg_utils:EngineArgs.from_cli_args(args)",
    ),
    *_seams(
        "startup.configure",
        "wrap",
        "vLLM calls plugins with the finished VllmConfig",
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    ),
    *_seams(
        "startup.refusals",
        "wrap",
        "vLLM says which executors send every step through the worker",
        "vllm.v1.executor:Executor.get_class(vllm_config)",
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor",
        "vllm.v1.executor.uniproc_executor:UniProcExecutor",
        "vllm.v1.executor.uniproc_executor:ExecutorWithExternalLauncher",
    ),
    *_seams(
        "startup.backend_choice",
        "wrap",
        "a plugin may say which attention backends it works with",
        "vllm.v1.attention.selector:get_attn_backend(head_size, dtype, kv_cache_dtype)",
        "vllm.config:set_current_vllm_config(vllm_config)",
        on="cuda",
    ),
    *_seams(
        "frontend.api",
        "wrap",
        "vLLM lets plugins check a request's extra arguments",
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs(request_id, prompt, params)",
        "vllm.v1.engine.async_llm:AsyncLLM.generate(prompt, sampling_params)",
        "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.create_responses"
        "(request)",
        "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.create_chat_completion"
        "(request)",
        "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.create_completion"
        "(request)",
    ),
    *_seams(
        "frontend.aliases",
        "wrap",
        "vLLM serves a model under names that stand for extra arguments",
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels.__init__"
        "(engine_client, base_model_paths, lora_modules)",
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels.model_name(lora_request)",
        "vllm.entrypoints.serve.engine.serving:BaseServing._check_model(request)",
    ),
    *_seams(
        "frontend.usage",
        "wrap",
        _USAGE,
        "vllm.v1.engine.output_processor:OutputProcessor.process_outputs(engine_core_outputs)",
        "vllm.v1.engine.output_processor:RequestState.make_request_output(kv_transfer_params)",
        "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.responses_full_generator"
        "(request, context)",
        "vllm.entrypoints.openai.chat_completion.batch_serving:OpenAIServingChatBatch.create_batch_chat_completion"
        "(request)",
        "vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens.serve_tokens(request)",
        "vllm.entrypoints.serve.engine.protocol:PromptTokenUsageInfo(cached_tokens)",
    ),
    *_seams(
        "scheduling.usage_notes",
        "wrap",
        _USAGE,
        "vllm.v1.engine:EngineCoreOutput(request_id, kv_transfer_params)",
    ),
    *_seams(
        "frontend.metrics",
        "wrap",
        "vLLM's stat-logger plugins may decline, and are loaded offline",
        "vllm.v1.metrics.loggers:StatLoggerManager.__init__(vllm_config)",
    ),
    *_seams(
        "frontend.metrics",
        "subclass",
        "never: vLLM's own interface",
        "vllm.v1.metrics.loggers:AggregateStatLoggerBase.record"
        "(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)",
    ),
    *_seams(
        "scheduling.cache_spec",
        "registry",
        _HOOK,
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register"
        "(kvcache_spec_cls, manager_class, uniform_type_base_spec)",
    ),
    *_seams(
        "scheduling.cache_spec",
        "subclass",
        "vLLM asks a manager, not its spec, what one request takes at most",
        "vllm.v1.kv_cache_interface:FullAttentionSpec.max_memory_usage_bytes(vllm_config)",
    ),
    *_seams(
        "scheduling.kv_cache",
        "subclass",
        _TABLES,
        f"{_MANAGER}.get_num_blocks_to_allocate"
        "(request_id, num_tokens, new_computed_blocks, apply_admission_cap)",
        f"{_MANAGER}.pop_blocks_for_free(request_id)",
        "vllm.v1.core.block_pool:BlockPool.evict_blocks(block_ids)",
    ),
    *_seams(
        "scheduling.scheduler",
        "subclass",
        "vLLM lets plugins attach data to the SchedulerOutput",
        f"{_SCHEDULER}.schedule",
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
    ),
    *_seams(
        "scheduling.scheduler",
        "subclass",
        "vLLM lets a plugin say where chunks of a prompt end",
        f"{_SCHEDULER}._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)",
        f"{_SCHEDULER}.add_request(request)",
    ),
    *_seams(
        "scheduling.scheduler",
        "subclass",
        _TABLES,
        f"{_SCHEDULER}.update_from_output(scheduler_output, model_runner_output)",
        f"{_SCHEDULER}.make_stats",
    ),
    *_seams(
        "scheduling.coordination",
        "wrap",
        "vLLM's managers are told whose prefix they look up",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks(request)",
    ),
    *_seams(
        "scheduling.coordination",
        "wrap",
        _TABLES,
        f"{_COORDINATOR}.find_longest_cache_hit(block_hashes, max_cache_hit_length)",
        f"{_COORDINATOR}.get_num_blocks_to_allocate",
        f"{_COORDINATOR}.allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)",
        f"{_COORDINATOR}.cache_blocks(request, num_computed_tokens)",
    ),
    *_seams(
        "scheduling.scheduler",
        "wrap",
        "vLLM carries a plugin's statistics",
        "vllm.v1.metrics.stats:SchedulerStats(kv_connector_stats)",
    ),
    *_seams(
        "worker.cpu",
        "subclass",
        _TABLES,
        f"{_CPU_WORKER}.load_model",
        f"{_CPU_WORKER}.get_kv_cache_spec",
        f"{_CPU_WORKER}.sample_tokens(grammar_output)",
        f"{_CPU_WORKER}.execute_model(scheduler_output)",
        f"{_CPU_WORKER}.initialize_from_config(kv_cache_config)",
        on="cpu",
    ),
    *_seams(
        "attention.cpu",
        "subclass",
        _TABLES,
        "vllm._custom_ops:cpu_attn_get_scheduler_metadata"
        "(seq_lens, query_start_loc, isa, enable_kv_split, kv_cache_dtype)",
        f"{_CPU_ATTN}CPUAttentionMetadataBuilder.build"
        "(common_prefix_len, common_attn_metadata, fast_build)",
        f"{_CPU_ATTN}CPUAttentionBackendImpl.forward"
        "(layer, query, key, value, kv_cache, attn_metadata, output)",
        on="cpu",
    ),
    *_seams(
        "attention.backend",
        "registry",
        _HOOK,
        "vllm.v1.attention.backends.registry:register_backend(backend, class_path)",
    ),
    *_seams(
        "attention.backend",
        "wrap",
        "vLLM forgets a cached backend when its override changes",
        "vllm.v1.attention.selector:_cached_get_attn_backend.cache_clear",
    ),
    *_seams(
        "attention.cpu",
        "wrap",
        "vLLM says how its CPU kernels store keys and values",
        f"{_CPU_ATTN}CPUAttentionBackendImpl.do_kv_cache_update"
        "(layer, key, value, kv_cache, slot_mapping)",
        on="cpu",
    ),
    *_seams(
        "worker.worker",
        "wrap",
        "vLLM lets a worker attach data to a step's output",
        "vllm.v1.outputs:AsyncModelRunnerOutput.get_output",
    ),
    *_seams(
        "worker.cuda",
        "subclass",
        _TABLES,
        f"{_GPU_WORKER}.load_model",
        f"{_GPU_WORKER}.determine_available_memory",
        f"{_GPU_WORKER}.get_kv_cache_spec",
        f"{_GPU_WORKER}.initialize_from_config(kv_cache_config)",
        f"{_GPU_WORKER}.compile_or_warm_up_model",
        f"{_GPU_WORKER}.sample_tokens(grammar_output)",
        f"{_GPU_WORKER}.execute_model(scheduler_output)",
        on="cuda",
    ),
    *_seams(
        "attention.cuda",
        "subclass",
        _TABLES,
        f"{_FLASH}FlashAttentionMetadataBuilder.build"
        "(common_prefix_len, common_attn_metadata, fast_build)",
        f"{_FLASH}FlashAttentionImpl.forward"
        "(layer, query, key, value, kv_cache, attn_metadata, output)",
        f"{_TRITON}TritonAttentionMetadataBuilder.build"
        "(common_prefix_len, common_attn_metadata, fast_build)",
        f"{_TRITON}TritonAttentionImpl.forward"
        "(layer, query, key, value, kv_cache, attn_metadata, output)",
        f"{_TRITON}TritonAttentionMetadataBuilder.build_for_cudagraph_capture"
        "(common_attn_metadata)",
        on="cuda",
    ),
    *_seams(
        "worker.worker",
        "wrap",
        "vLLM lets a plugin ask for a step without whole-graph replay",
        f"{_GRAPHS}ModelCudaGraphManager.dispatch(num_reqs, num_tokens, uniform_token_count)",
        f"{_GRAPHS}BatchExecutionDescriptor(cg_mode, num_tokens, num_reqs)",
        "vllm.v1.worker.gpu.dp_utils:dispatch_cg_and_sync_dp"
        "(cudagraph_manager, uniform_token_count, dp_size, dp_rank)",
    ),
    *_seams(
        "worker.worker",
        "subclass",
        "vLLM's executors hear what any rank raises",
        "vllm.v1.worker.worker_base:WorkerBase.__init__(rank)",
    ),
    *_seams(
        "pages.pool",
        "wrap",
        "torch uploads host lists without waiting",
        "vllm.utils.torch_utils:async_tensor_h2d(data, device, dtype, out)",
    ),
    *_seams(
        "startup",
        "use",
        _USED,
        "vllm.config:VllmConfig",
        "vllm.config:VllmConfig.max_in_flight_tokens",
        "vllm.distributed.utils:get_pp_indices(num_hidden_layers, pp_rank, pp_size)",
        "vllm.platforms:current_platform",
        "vllm.logger:init_logger",
        "vllm:envs",
    ),
    *_seams("frontend", "use", _USED, "vllm.exceptions:VLLMValidationError"),
    *_seams(
        "frontend",
        "use",
        _USED,
        "vllm.entrypoints.openai.models.protocol:BaseModelPath(name, model_path)",
    ),
    *_seams(
        "scheduling",
        "use",
        _USED,
        "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks",
        "vllm.v1.core.block_pool:BlockPool.get_new_blocks(num_blocks)",
        "vllm.v1.core.block_pool:BlockPool.free_blocks(ordered_blocks)",
        "vllm.v1.core.kv_cache_utils:KVCacheBlock(block_id, ref_cnt)",
        "vllm.v1.core.sched.output:SchedulerOutput"
        "(scheduled_new_reqs, scheduled_cached_reqs, finished_req_ids, preempted_req_ids)",
        "vllm.v1.core.single_type_kv_cache_manager:register_all_kvcache_specs",
        "vllm.v1.kv_cache_interface:AttentionSpec(block_size, num_kv_heads, head_size, dtype)",
        "vllm.v1.kv_cache_interface:FullAttentionSpec"
        "(head_size_v, sliding_window, attention_chunk_size)",
        "vllm.v1.kv_cache_interface:KVCacheSpec",
        "vllm.v1.kv_cache_interface:SlidingWindowSpec(sliding_window)",
        "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager",
        "vllm.v1.kv_cache_interface:KVQuantMode.FP8_PER_TENSOR",
        "vllm.v1.request:Request(request_id, prompt_token_ids, sampling_params, pooling_params)",
        "vllm.v1.request:RequestStatus.RUNNING",
        "vllm.v1.request:RequestStatus.FINISHED_STOPPED",
        "vllm.v1.request:RequestStatus.FINISHED_LENGTH_CAPPED",
    ),
    *_seams(
        "worker",
        "use",
        _USED,
        "vllm.config:CUDAGraphMode",
        "vllm.distributed:get_pp_group",
        "vllm.config:ParallelConfig",
        "vllm.model_executor.layers.attention:Attention",
        "vllm.v1.kv_cache_interface:KVCacheConfig(num_blocks, kv_cache_groups)",
        "vllm.v1.outputs:ModelRunnerOutput",
        "vllm.utils.torch_utils:kv_cache_dtype_str_to_dtype(kv_cache_dtype, model_config)",
    ),
    *_seams(
        "attention",
        "use",
        _USED,
        "vllm.v1.attention.backend:AttentionType",
        "vllm.v1.attention.backend:CommonAttentionMetadata"
        "(query_start_loc, query_start_loc_cpu, seq_lens, num_reqs, num_actual_tokens,"
        " max_query_len, max_seq_len, block_table_tensor, slot_mapping, causal)",
        "vllm.v1.attention.backends.registry:AttentionBackendEnum.is_overridden",
        "vllm.v1.attention.backends.registry:AttentionBackendEnum.clear_override",
    ),
    *_seams(
        "attention.cpu",
        "use",
        _USED,
        f"{_CPU_ATTN}CPUAttentionBackend.get_impl_cls",
        f"{_CPU_ATTN}CPUAttentionBackend.get_builder_cls",
        f"{_CPU_ATTN}CPUAttentionMetadata"
        "(num_actual_tokens, max_query_len, query_start_loc, max_seq_len, seq_lens, block_table,"
        " slot_mapping, scheduler_metadata, causal)",
        on="cpu",
    ),
    *_seams(
        "attention.cuda",
        "use",
        _USED,
        "vllm.v1.attention.backend:AttentionCGSupport",
        "vllm.v1.attention.backends.fa_utils:get_flash_attn_version",
        f"{_FLASH}FlashAttentionBackend.get_impl_cls",
        f"{_FLASH}FlashAttentionBackend.get_builder_cls",
        f"{_TRITON}TritonAttentionBackend.get_impl_cls",
        f"{_TRITON}TritonAttentionBackend.get_builder_cls",
        on="cuda",
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
