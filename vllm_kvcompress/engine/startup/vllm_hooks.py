"""The table of vLLM names that compression needs, checked when compression is on."""

from vllm.platforms import current_platform

from vllm_kvcompress.engine.startup.vllm_calls import VLLM_CALLS
from vllm_kvcompress.engine.startup.vllm_hook import TESTED, vllm_hooks
from vllm_kvcompress.errors import VllmHookError

_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager"
_COORDINATOR = "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_CPU_ATTN = "vllm.v1.attention.backends.cpu_attn:"
_CPU_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
_GPU_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_FLASH = "vllm.v1.attention.backends.flash_attn:"
_TRITON = "vllm.v1.attention.backends.triton_attn:"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils:"
_TABLES = "vLLM has a plugin interface for per-layer block tables"
_USAGE = "vLLM carries a plugin's figures from the scheduler to a response's usage"
# Hooks checked only for models whose layers keep a state.
STATES = "states"
_VLLM_INTERFACE = "never: vLLM's own hook"
_UNCALLED = "we no longer call it"

VLLM_HOOKS = (
    *vllm_hooks(
        "startup.cli_args",
        "wrap",
        "vLLM lets plugins add command-line flags",
        "vllm.engine.arg_utils:EngineArgs.add_cli_args(parser)",
        "vllm.engine.arg_utils:EngineArgs.from_cli_args(args)",
    ),
    *vllm_hooks(
        "startup.configure",
        "wrap",
        "vLLM calls plugins with the finished VllmConfig",
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    ),
    *vllm_hooks(
        "startup.refusals",
        "wrap",
        "vLLM documents which executors send every step through the worker",
        "vllm.v1.executor:Executor.get_class(vllm_config)",
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor",
        "vllm.v1.executor.uniproc_executor:UniProcExecutor",
        "vllm.v1.executor.uniproc_executor:ExecutorWithExternalLauncher",
    ),
    *vllm_hooks(
        "startup.backend_choice",
        "wrap",
        "a plugin can declare which attention backends it supports",
        "vllm.v1.attention.selector:get_attn_backend(head_size, dtype, kv_cache_dtype)",
        "vllm.config:set_current_vllm_config(vllm_config)",
        on="cuda",
    ),
    *vllm_hooks(
        "frontend.api",
        "wrap",
        "vLLM lets plugins check a request's extra arguments",
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs(request_id, prompt, params)",
        "vllm.v1.engine.async_llm:AsyncLLM.generate(prompt, sampling_params, request_id)",
        "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.create_responses"
        "(request)",
        "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.create_chat_completion"
        "(request)",
        "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.create_completion"
        "(request)",
        "vllm.entrypoints.openai.chat_completion.batch_serving:OpenAIServingChatBatch.create_batch_chat_completion"
        "(request)",
        "vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens.serve_tokens(request)",
        "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat._with_kv_transfer_rejection_cleanup"
        "(awaitable, request, raw_request)",
    ),
    *vllm_hooks(
        "frontend.protection.chat_parts",
        "wrap",
        "vLLM reports which tokens of a chat are its system prompt, its tools and its last message",
        "vllm.renderers.base:BaseRenderer.render_chat(conversations, chat_params, tok_params)",
        "vllm.renderers.base:BaseRenderer.render_chat_async"
        "(conversations, chat_params, tok_params)",
    ),
    *vllm_hooks(
        "frontend.protection.chat_parts",
        "use",
        _UNCALLED,
        "vllm.renderers.base:BaseRenderer.render_messages(messages, params)",
        "vllm.renderers.base:BaseRenderer.render_messages_async(messages, params)",
        "vllm.renderers.base:BaseRenderer.tokenize_prompt(prompt, params)",
        "vllm.renderers.params:ChatParams(chat_template_kwargs)",
        "vllm.renderers.params:TokenizeParams(return_token_offsets, truncate_prompt_tokens)",
    ),
    *vllm_hooks(
        "frontend.aliases",
        "wrap",
        "vLLM serves a model under names that stand for extra arguments",
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels.__init__"
        "(engine_client, base_model_paths, lora_modules)",
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels.model_name(lora_request)",
        "vllm.entrypoints.serve.engine.serving:BaseServing._check_model(request)",
    ),
    *vllm_hooks(
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
    *vllm_hooks(
        "frontend.stop_strings",
        "wrap",
        "vLLM tells the scheduler whether a stop string or the client ended a request",
        "vllm.v1.engine.output_processor:OutputProcessor.process_outputs(engine_core_outputs)",
        "vllm.v1.engine.output_processor:OutputProcessorOutput(reqs_to_abort)",
    ),
    *vllm_hooks(
        "scheduling.scheduler",
        "subclass",
        "vLLM reports to plugins how each request ended",
        f"{_SCHEDULER}.finish_requests(request_ids, finished_status)",
        f"{_SCHEDULER}._free_request(request)",
        "vllm.v1.request:Request(abort_immediately)",
    ),
    *vllm_hooks(
        "scheduling.compression_stats",
        "wrap",
        _USAGE,
        "vllm.v1.engine:EngineCoreOutput(request_id, kv_transfer_params)",
    ),
    *vllm_hooks(
        "frontend.metrics",
        "wrap",
        "vLLM's stat-logger plugins can decline, and are loaded offline",
        "vllm.v1.metrics.loggers:StatLoggerManager.__init__(vllm_config)",
    ),
    *vllm_hooks(
        "frontend.metrics",
        "subclass",
        "never: vLLM's own interface",
        "vllm.v1.metrics.loggers:AggregateStatLoggerBase.record"
        "(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)",
    ),
    *vllm_hooks(
        "messages.cache_spec",
        "registry",
        _VLLM_INTERFACE,
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register"
        "(kvcache_spec_cls, manager_class, uniform_type_base_spec)",
    ),
    *vllm_hooks(
        "messages.cache_spec",
        "subclass",
        "vLLM asks a manager, not its spec, for the most memory of one request",
        "vllm.v1.kv_cache_interface:FullAttentionSpec.max_memory_usage_bytes(vllm_config)",
    ),
    *vllm_hooks(
        "scheduling.kv_cache",
        "subclass",
        _TABLES,
        f"{_MANAGER}.get_num_blocks_to_allocate"
        "(request_id, num_tokens, new_computed_blocks, apply_admission_cap)",
        f"{_MANAGER}.pop_blocks_for_free(request_id)",
        "vllm.v1.core.block_pool:BlockPool.evict_blocks(block_ids)",
    ),
    *vllm_hooks(
        "scheduling.scheduler",
        "subclass",
        "vLLM lets plugins attach data to the SchedulerOutput",
        f"{_SCHEDULER}.schedule",
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
    ),
    *vllm_hooks(
        "scheduling.scheduler",
        "subclass",
        "vLLM lets a plugin choose where chunks of a prompt end",
        f"{_SCHEDULER}._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)",
        f"{_SCHEDULER}.add_request(request)",
    ),
    *vllm_hooks(
        "scheduling.scheduler",
        "subclass",
        "vLLM lets a plugin schedule queries that are not tokens of a request",
        f"{_SCHEDULER}._update_after_schedule(scheduler_output)",
    ),
    *vllm_hooks(
        "scheduling.scheduler",
        "subclass",
        "vLLM lets a plugin choose which tokens of a pulled prompt are recomputed",
        f"{_SCHEDULER}._update_waiting_for_remote_kv(request)",
    ),
    *vllm_hooks(
        "scheduling.coordination",
        "wrap",
        "vLLM tells managers that a prompt is being pulled",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots(delay_cache_blocks)",
    ),
    *vllm_hooks(
        "scheduling.scheduler",
        "subclass",
        _TABLES,
        f"{_SCHEDULER}.update_from_output(scheduler_output, model_runner_output)",
        f"{_SCHEDULER}.make_stats",
    ),
    *vllm_hooks(
        "scheduling.next_step",
        "use",
        _UNCALLED,
        f"{_SCHEDULER}._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)",
        f"{_SCHEDULER}._mamba_block_aligned_split"
        "(request, num_new_tokens, num_new_local_computed_tokens)",
    ),
    *vllm_hooks(
        "scheduling.coordination",
        "wrap",
        "vLLM's managers know the request whose prefix they look up",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks(request)",
    ),
    *vllm_hooks(
        "scheduling.coordination",
        "wrap",
        _TABLES,
        f"{_COORDINATOR}.find_longest_cache_hit(block_hashes, max_cache_hit_length)",
        f"{_COORDINATOR}.allocate_new_computed_blocks(request_id)",
        f"{_COORDINATOR}.get_num_blocks_to_allocate",
        f"{_COORDINATOR}.allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)",
        f"{_COORDINATOR}.cache_blocks(request, num_computed_tokens)",
    ),
    *vllm_hooks(
        "scheduling.packed_prefixes",
        "wrap",
        "vLLM's prefix cache has blocks of several sizes in one group",
        f"{_POOL}.get_new_blocks(num_blocks)",
        f"{_POOL}.cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks,"
        " block_size, kv_cache_group_id)",
        f"{_POOL}.take_events",
        f"{_POOL}.reset_prefix_cache",
        "vllm.distributed.kv_events:BlockRemoved(block_hashes, medium)",
        "vllm.distributed.kv_events:KVCacheEvent",
        "vllm.v1.core.kv_cache_utils:BlockHash",
        "vllm.v1.core.kv_cache_utils:ExternalBlockHash",
        "vllm.v1.core.kv_cache_utils:maybe_convert_block_hash(hash_bytes)",
    ),
    *vllm_hooks(
        "scheduling.scheduler",
        "wrap",
        "vLLM carries a plugin's statistics",
        "vllm.v1.metrics.stats:SchedulerStats(kv_connector_stats)",
    ),
    *vllm_hooks(
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
    *vllm_hooks(
        "worker.cpu",
        "wrap",
        "vLLM rewinds a seeded generator on a CPU",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync(sampler_output)",
        on="cpu",
    ),
    *vllm_hooks(
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
    *vllm_hooks(
        "attention.backend",
        "registry",
        _VLLM_INTERFACE,
        "vllm.v1.attention.backends.registry:register_backend(backend, class_path)",
    ),
    *vllm_hooks(
        "attention.backend",
        "wrap",
        "vLLM drops a cached backend when its override changes",
        "vllm.v1.attention.selector:_cached_get_attn_backend.cache_clear",
    ),
    *vllm_hooks(
        "attention.cpu",
        "wrap",
        "vLLM documents how its CPU kernels store keys and values",
        f"{_CPU_ATTN}CPUAttentionBackendImpl.do_kv_cache_update"
        "(layer, key, value, kv_cache, slot_mapping)",
        on="cpu",
    ),
    *vllm_hooks(
        "worker.worker",
        "wrap",
        "vLLM lets a worker attach data to a step's output",
        "vllm.v1.outputs:AsyncModelRunnerOutput.get_output",
    ),
    *vllm_hooks(
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
    *vllm_hooks(
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
    *vllm_hooks(
        "attention.cuda",
        "wrap",
        "FLASH_ATTN calls flash_attn_varlen_func, whose log-sum-exp we read",
        # It calls the module's `flash_attn_varlen_func`, which only CUDA builds have.
        f"{_FLASH}FA4DenseAttentionKernel.kernel",
        on="cuda",
    ),
    *vllm_hooks(
        "worker.worker",
        "wrap",
        "vLLM lets a plugin request a step without full-graph replay",
        f"{_GRAPHS}ModelCudaGraphManager.dispatch(num_reqs, num_tokens, uniform_token_count)",
        f"{_GRAPHS}BatchExecutionDescriptor(cg_mode, num_tokens, num_reqs)",
        "vllm.v1.worker.gpu.dp_utils:dispatch_cg_and_sync_dp"
        "(cudagraph_manager, uniform_token_count, dp_size, dp_rank)",
    ),
    *vllm_hooks(
        "worker.worker",
        "subclass",
        "vLLM's executors notice an exception on any rank",
        "vllm.v1.worker.worker_base:WorkerBase.__init__(rank)",
    ),
    *vllm_hooks(
        "worker.probe_rows",
        "wrap",
        "vLLM lets a plugin schedule queries that are not tokens of a request",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_input_ids(scheduler_output)",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_inputs(scheduler_output)",
        "vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor.stage_write_elem(index, x)",
        "vllm.v1.core.sched.output:CachedRequestData(all_token_ids)",
    ),
    *vllm_hooks(
        "worker.batch_rows",
        "wrap",
        "vLLM passes attention the request order of a batch of models whose layers keep a state",
        "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState.prepare_attn"
        "(input_batch)",
        "vllm.v1.worker.gpu.input_batch:InputBatch(idx_mapping_np)",
        on=STATES,
    ),
    *vllm_hooks(
        "pages.pool",
        "wrap",
        "torch copies host lists to the device without waiting",
        "vllm.utils.torch_utils:async_tensor_h2d(data, device, dtype, out)",
    ),
    *VLLM_CALLS,
)


def check_all(version: str) -> None:
    """Raise VllmHookError unless this vLLM is supported and has this platform's hooks.

    Changes nothing.
    """
    if not TESTED.contains(version, prereleases=True):
        raise VllmHookError(
            f"vLLM {version} is untested with --kv-compress; install a vLLM in {TESTED}, or serve"
            " without --kv-compress"
        )
    platform = "cuda" if current_platform.is_cuda() else "cpu"
    for hook in VLLM_HOOKS:
        if hook.on in ("", platform):
            hook.check(version)


def check(*names: str, version: str) -> None:
    """Raise VllmHookError unless this vLLM has the hooks of the modules in `names`."""
    for hook in VLLM_HOOKS:
        if hook.name in names:
            hook.check(version)
