"""The table of vLLM names that compression needs, checked when compression is on."""

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from vllm.platforms import current_platform

from vllm_kvcompress.engine.startup.import_failures import import_failure, is_gone
from vllm_kvcompress.errors import VllmHookError

TESTED = SpecifierSet(">=0.31,<0.34")
_PLATFORMS: Mapping[str, str] = {
    "startup.backend_choice": "cuda",
    "worker.cpu": "cpu",
    "worker.cuda": "cuda",
    "worker.batch_rows": "states",
    "worker.draft_builders": "drafts",
    "worker.pulls": "pulls",
    "scheduling.offloading": "offloading",
    "attention.cpu": "cpu",
    "attention.cuda": "cuda",
}
"""Modules that only one platform needs, or only models whose layers keep a state ("states"), only
draft models ("drafts"), only engines that pull prompts ("pulls"), or only vLLM's offloading
("offloading")."""

_ATTENTION = "vllm.v1.attention.backends."
_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:"
_COORDINATOR = "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_UTILS = "vllm.v1.core.kv_cache_utils:"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_SPECS = "vllm.v1.kv_cache_interface:"
_CPU_ATTN = "vllm.v1.attention.backends.cpu_attn:"
_FLASH = "vllm.v1.attention.backends.flash_attn:"
_TRITON = "vllm.v1.attention.backends.triton_attn:"
_CPU_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
_GPU_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_GPU = "vllm.v1.worker.gpu."
_OPENAI = "vllm.entrypoints.openai."
_OUTPUTS = "vllm.v1.engine.output_processor:"
_RENDER = "vllm.renderers."
_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1."

_NAMES: Mapping[str, tuple[str, ...]] = {
    "startup.cli_args": (
        # until vLLM lets plugins add command-line flags
        "vllm.engine.arg_utils:EngineArgs.add_cli_args(parser)",
        "vllm.engine.arg_utils:EngineArgs.from_cli_args(args)",
    ),
    "startup.configure": (
        # until vLLM calls plugins with the finished VllmConfig
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    ),
    "startup.refusals": (
        # until vLLM documents which executors send every step through the worker
        "vllm.v1.executor:Executor.get_class(vllm_config)",
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor",
        "vllm.v1.executor.uniproc_executor:UniProcExecutor",
    ),
    "startup.backend_choice": (
        # until a plugin can declare which attention backends it supports
        "vllm.v1.attention.selector:get_attn_backend(head_size, dtype, kv_cache_dtype)",
        "vllm.config:set_current_vllm_config(vllm_config)",
    ),
    "frontend.api": (
        # until vLLM lets plugins check a request's extra arguments
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs(request_id, prompt, params)",
        "vllm.v1.engine.async_llm:AsyncLLM.generate(prompt, sampling_params, request_id)",
        f"{_OPENAI}responses.serving:OpenAIServingResponses.create_responses(request)",
        f"{_OPENAI}chat_completion.serving:OpenAIServingChat.create_chat_completion(request)",
        f"{_OPENAI}completion.serving:OpenAIServingCompletion.create_completion(request)",
        f"{_OPENAI}chat_completion.batch_serving:OpenAIServingChatBatch.create_batch_chat_completion"
        "(request)",
        "vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens.serve_tokens(request)",
        f"{_OPENAI}chat_completion.serving:OpenAIServingChat._with_kv_transfer_rejection_cleanup"
        "(awaitable, request, raw_request)",
    ),
    "frontend.protection.chat_parts": (
        # until vLLM reports which tokens of a chat are its system prompt, tools and last message
        f"{_RENDER}base:BaseRenderer.render_chat(conversations, chat_params, tok_params)",
        f"{_RENDER}base:BaseRenderer.render_chat_async(conversations, chat_params, tok_params)",
        f"{_RENDER}base:BaseRenderer.render_messages(messages, params)",
        f"{_RENDER}base:BaseRenderer.render_messages_async(messages, params)",
        f"{_RENDER}base:BaseRenderer.tokenize_prompt(prompt, params)",
        f"{_RENDER}params:ChatParams(chat_template_kwargs)",
        f"{_RENDER}params:TokenizeParams(return_token_offsets, truncate_prompt_tokens)",
    ),
    "frontend.aliases": (
        # until vLLM serves a model under names that stand for extra arguments
        f"{_OPENAI}models.serving:OpenAIServingModels.__init__"
        "(engine_client, base_model_paths, lora_modules)",
        f"{_OPENAI}models.serving:OpenAIServingModels.model_name(lora_request)",
        "vllm.entrypoints.serve.engine.serving:BaseServing._check_model(request)",
    ),
    "frontend.usage": (
        # until vLLM carries a plugin's figures from the scheduler to a response's usage
        f"{_OUTPUTS}OutputProcessor.process_outputs(engine_core_outputs)",
        f"{_OUTPUTS}RequestState.make_request_output(kv_transfer_params)",
        f"{_OPENAI}responses.serving:OpenAIServingResponses.responses_full_generator"
        "(request, context)",
        f"{_OPENAI}chat_completion.batch_serving:OpenAIServingChatBatch.create_batch_chat_completion"
        "(request)",
        "vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens.serve_tokens(request)",
        "vllm.entrypoints.serve.engine.protocol:PromptTokenUsageInfo(cached_tokens)",
    ),
    "frontend.stop_strings": (
        # until vLLM tells the scheduler whether a stop string or the client ended a request
        f"{_OUTPUTS}OutputProcessor.process_outputs(engine_core_outputs)",
        f"{_OUTPUTS}OutputProcessorOutput(reqs_to_abort)",
    ),
    "scheduling.scheduler": (
        # until vLLM reports to plugins how each request ended
        f"{_SCHEDULER}.finish_requests(request_ids, finished_status)",
        f"{_SCHEDULER}._free_request(request)",
        "vllm.v1.request:Request(abort_immediately)",
        # until vLLM lets plugins attach data to the SchedulerOutput
        f"{_SCHEDULER}.schedule",
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
        # until vLLM lets a plugin choose where chunks of a prompt end
        f"{_SCHEDULER}._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)",
        f"{_SCHEDULER}.add_request(request)",
        # until vLLM lets a plugin schedule queries that are not tokens of a request
        f"{_SCHEDULER}._update_after_schedule(scheduler_output)",
        # until vLLM lets a plugin keep the KV cache of a preempted request
        f"{_SCHEDULER}._preempt_request(request)",
        f"{_SCHEDULER}.reset_prefix_cache",
        "vllm.v1.request:Request(resumable)",
        "vllm.v1.request:Request.get_skip_reading_prefix_cache",
        # until vLLM lets a plugin choose which tokens of a pulled prompt are recomputed
        f"{_SCHEDULER}._update_waiting_for_remote_kv(request)",
        # until vLLM has a plugin interface for per-layer block tables
        f"{_SCHEDULER}.update_from_output(scheduler_output, model_runner_output)",
        f"{_SCHEDULER}.make_stats",
        # until vLLM carries a plugin's statistics
        "vllm.v1.metrics.stats:SchedulerStats(kv_connector_stats)",
    ),
    "scheduling.compression_stats": (
        # until vLLM carries a plugin's figures from the scheduler to a response's usage
        "vllm.v1.engine:EngineCoreOutput(request_id, kv_transfer_params)",
    ),
    "frontend.metrics": (
        # until vLLM's stat-logger plugins can decline, and are loaded offline
        "vllm.v1.metrics.loggers:StatLoggerManager.__init__(vllm_config)",
        # vLLM's own extension point
        "vllm.v1.metrics.loggers:AggregateStatLoggerBase.record"
        "(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)",
    ),
    "messages.cache_spec": (
        # vLLM's own extension point
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register"
        "(kvcache_spec_cls, manager_class, uniform_type_base_spec)",
        # until vLLM asks a manager, not its spec, for the most memory of one request
        f"{_SPECS}FullAttentionSpec.max_memory_usage_bytes(vllm_config)",
    ),
    "scheduling.kv_cache": (
        # until vLLM has a plugin interface for per-layer block tables
        f"{_MANAGER}FullAttentionManager.get_num_blocks_to_allocate"
        "(request_id, num_tokens, new_computed_blocks, apply_admission_cap)",
        f"{_MANAGER}FullAttentionManager.pop_blocks_for_free(request_id)",
        f"{_POOL}.evict_blocks(block_ids)",
    ),
    "scheduling.coordination": (
        # until vLLM tells managers that a prompt is being pulled
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots(delay_cache_blocks)",
        # until vLLM's managers know the request whose prefix they look up
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks(request)",
        # until vLLM has a plugin interface for per-layer block tables
        f"{_COORDINATOR}.find_longest_cache_hit(block_hashes, max_cache_hit_length)",
        f"{_COORDINATOR}.allocate_new_computed_blocks(request_id)",
        f"{_COORDINATOR}.get_num_blocks_to_allocate",
        f"{_COORDINATOR}.allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)",
        f"{_COORDINATOR}.cache_blocks(request, num_computed_tokens)",
    ),
    "scheduling.next_step": (
        f"{_SCHEDULER}._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)",
        f"{_SCHEDULER}._mamba_block_aligned_split"
        "(request, num_new_tokens, num_new_local_computed_tokens)",
    ),
    "scheduling.packed_prefixes": (
        # until vLLM's prefix cache has blocks of several sizes in one group
        f"{_POOL}.get_new_blocks(num_blocks)",
        f"{_POOL}.cache_full_blocks"
        "(request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id)",
        f"{_POOL}.take_events",
        f"{_POOL}.reset_prefix_cache",
        "vllm.distributed.kv_events:BlockRemoved(block_hashes, medium)",
        "vllm.distributed.kv_events:KVCacheEvent",
        f"{_UTILS}BlockHash",
        f"{_UTILS}ExternalBlockHash",
        f"{_UTILS}maybe_convert_block_hash(hash_bytes)",
    ),
    "worker.cpu": (
        # until vLLM has a plugin interface for per-layer block tables
        f"{_CPU_WORKER}.load_model",
        f"{_CPU_WORKER}.get_kv_cache_spec",
        f"{_CPU_WORKER}.sample_tokens(grammar_output)",
        f"{_CPU_WORKER}.execute_model(scheduler_output)",
        f"{_CPU_WORKER}.initialize_from_config(kv_cache_config)",
        # until vLLM rewinds a seeded generator on a CPU
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync(sampler_output)",
    ),
    "attention.cpu": (
        # until vLLM has a plugin interface for per-layer block tables
        "vllm._custom_ops:cpu_attn_get_scheduler_metadata"
        "(seq_lens, query_start_loc, isa, enable_kv_split, kv_cache_dtype)",
        f"{_CPU_ATTN}CPUAttentionMetadataBuilder.build"
        "(common_prefix_len, common_attn_metadata, fast_build)",
        f"{_CPU_ATTN}CPUAttentionBackendImpl.forward"
        "(layer, query, key, value, kv_cache, attn_metadata, output)",
        # until vLLM documents how its CPU kernels store keys and values
        f"{_CPU_ATTN}CPUAttentionBackendImpl.do_kv_cache_update"
        "(layer, key, value, kv_cache, slot_mapping)",
        f"{_CPU_ATTN}CPUAttentionBackend.get_impl_cls",
        f"{_CPU_ATTN}CPUAttentionBackend.get_builder_cls",
        f"{_CPU_ATTN}CPUAttentionMetadata"
        "(num_actual_tokens, max_query_len, query_start_loc, max_seq_len, seq_lens, block_table,"
        " slot_mapping, scheduler_metadata, causal)",
    ),
    "attention.backend": (
        # vLLM's own extension point
        f"{_ATTENTION}registry:register_backend(backend, class_path)",
        # until vLLM drops a cached backend when its override changes
        "vllm.v1.attention.selector:_cached_get_attn_backend.cache_clear",
    ),
    "worker.worker": (
        # until vLLM lets a worker attach data to a step's output
        "vllm.v1.outputs:AsyncModelRunnerOutput.get_output",
        # until vLLM lets a plugin request a step without full-graph replay
        f"{_GPU}cudagraph_utils:ModelCudaGraphManager.dispatch"
        "(num_reqs, num_tokens, uniform_token_count)",
        f"{_GPU}cudagraph_utils:BatchExecutionDescriptor(cg_mode, num_tokens, num_reqs)",
        f"{_GPU}dp_utils:dispatch_cg_and_sync_dp"
        "(cudagraph_manager, uniform_token_count, dp_size, dp_rank)",
        # until vLLM's executors notice an exception on any rank
        "vllm.v1.worker.worker_base:WorkerBase.__init__(rank)",
    ),
    "worker.cuda": (
        # until vLLM has a plugin interface for per-layer block tables
        f"{_GPU_WORKER}.load_model",
        f"{_GPU_WORKER}.determine_available_memory",
        f"{_GPU_WORKER}.get_kv_cache_spec",
        f"{_GPU_WORKER}.initialize_from_config(kv_cache_config)",
        f"{_GPU_WORKER}.compile_or_warm_up_model",
        f"{_GPU_WORKER}.sample_tokens(grammar_output)",
        f"{_GPU_WORKER}.execute_model(scheduler_output)",
    ),
    "attention.cuda": (
        # until vLLM has a plugin interface for per-layer block tables
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
        # until FLASH_ATTN calls flash_attn_varlen_func, whose log-sum-exp we read
        f"{_FLASH}FA4DenseAttentionKernel.kernel",
        "vllm.v1.attention.backend:AttentionCGSupport",
        f"{_ATTENTION}fa_utils:get_flash_attn_version",
        f"{_FLASH}FlashAttentionBackend.get_impl_cls",
        f"{_FLASH}FlashAttentionBackend.get_builder_cls",
        f"{_TRITON}TritonAttentionBackend.get_impl_cls",
        f"{_TRITON}TritonAttentionBackend.get_builder_cls",
    ),
    "worker.probe_rows": (
        # until vLLM lets a plugin schedule queries that are not tokens of a request
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_input_ids(scheduler_output)",
        f"{_GPU}model_runner:GPUModelRunner.prepare_inputs(scheduler_output)",
        f"{_GPU}buffer_utils:StagedWriteTensor.stage_write_elem(index, x)",
        "vllm.v1.core.sched.output:CachedRequestData(all_token_ids)",
    ),
    "worker.batch_rows": (
        # until vLLM passes attention the request order of a batch of such models
        f"{_GPU}model_states.mamba_hybrid:MambaHybridModelState.prepare_attn(input_batch)",
        f"{_GPU}input_batch:InputBatch(idx_mapping_np)",
    ),
    "worker.draft_builders": (
        # until vLLM has a plugin interface for per-layer block tables
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.initialize_attn_backend",
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
        ".build_per_group_and_layer_attn_metadata(common_attn_metadata, draft_index)",
        f"{_GPU}spec_decode.speculator:DraftModelSpeculator.set_attn(target_attn_groups)",
        "vllm.v1.attention.backend:AttentionMetadataBuilder.supports_draft_decode_metadata_update",
    ),
    "pages.pool": (
        # until torch copies host lists to the device without waiting
        "vllm.utils.torch_utils:async_tensor_h2d(data, device, dtype, out)",
    ),
    "startup": (
        "vllm.config:VllmConfig",
        "vllm.config:VllmConfig.max_in_flight_tokens",
        "vllm.config:CacheConfig.user_specified_block_size",
        "vllm.distributed.utils:get_pp_indices(num_hidden_layers, pp_rank, pp_size)",
        "vllm.platforms:current_platform",
        "vllm.logger:init_logger",
        "vllm:envs",
    ),
    "frontend": (
        "vllm.exceptions:VLLMValidationError",
        "vllm.outputs:RequestOutput",
        "vllm.sampling_params:SamplingParams(extra_args, max_tokens, n)",
        f"{_RENDER}base:BaseRenderer.mm_processor_cache",
        "vllm.multimodal.cache:BaseMultiModalProcessorCache.invalidate(mm_hash)",
        "vllm.multimodal.inputs:MultiModalFeatureSpec(modality, identifier, mm_position, mm_hash)",
        "vllm.v1.engine:EngineCoreRequest(prompt_token_ids, mm_features, sampling_params)",
        f"{_OPENAI}models.protocol:BaseModelPath(name, model_path)",
    ),
    "scheduling": (
        f"{_POOL}.get_num_free_blocks",
        f"{_POOL}.get_cached_block(block_hash, kv_cache_group_ids)",
        f"{_POOL}.touch(blocks)",
        f"{_UTILS}FreeKVCacheBlockQueue.prepend_n(blocks)",
        f"{_UTILS}FreeKVCacheBlockQueue.remove(block)",
        f"{_UTILS}get_group_id(key)",
        f"{_POOL}.free_blocks(ordered_blocks)",
        f"{_UTILS}KVCacheBlock(block_id, ref_cnt)",
        "vllm.v1.core.sched.output:SchedulerOutput"
        "(scheduled_new_reqs, scheduled_cached_reqs, finished_req_ids, preempted_req_ids)",
        f"{_MANAGER}register_all_kvcache_specs",
        f"{_SPECS}AttentionSpec(block_size, num_kv_heads, head_size, dtype)",
        f"{_SPECS}FullAttentionSpec(head_size_v, sliding_window, attention_chunk_size)",
        f"{_SPECS}KVCacheSpec",
        f"{_SPECS}SlidingWindowSpec(sliding_window)",
        f"{_MANAGER}SlidingWindowManager",
        f"{_SPECS}MambaSpec(shapes, page_size_padded, mamba_cache_mode)",
        f"{_MANAGER}MambaManager",
        f"{_SPECS}KVQuantMode.FP8_PER_TENSOR",
        "vllm.v1.request:Request(request_id, prompt_token_ids, sampling_params, pooling_params)",
        "vllm.v1.request:RequestStatus.RUNNING",
        "vllm.v1.request:RequestStatus.FINISHED_ABORTED",
        "vllm.v1.request:RequestStatus.FINISHED_ERROR",
    ),
    "scheduling.deferred_free": (f"{_SCHEDULER}._free_cow_retained_blocks(blocks, fence_seq)",),
    "worker.pulls": (
        # until vLLM's pulls wait for the compute stream
        f"{_CONNECTORS}nixl.metadata:NixlConnectorMetadata.add_new_req_to_recv(request_id)",
    ),
    "scheduling.offloading": (
        # until vLLM finishes the stores of a running request's blocks before they are freed
        f"{_CONNECTORS}offloading_connector:OffloadingConnector._max_loadable_tokens"
        "(request, num_computed_tokens)",
        f"{_CONNECTORS}offloading_connector:OffloadingConnector.get_num_new_matched_tokens"
        "(request, num_computed_tokens)",
        f"{_CONNECTORS}offloading_connector:OffloadingConnector.request_finished_all_groups"
        "(request, block_ids)",
        f"{_CONNECTORS}offloading_connector:OffloadingConnector.handle_preemptions"
        "(kv_connector_metadata)",
        f"{_CONNECTORS}offloading_connector:OffloadingConnector.scheduler",
        f"{_CONNECTORS}offloading.common:OffloadingConnectorMetadata"
        "(load_jobs, store_jobs, jobs_to_flush)",
        f"{_CONNECTORS}offloading.scheduler:OffloadingConnectorScheduler._remove_pending_job"
        "(job_id, block_ids)",
        f"{_CONNECTORS}offloading.scheduler:RequestOffloadState(max_offload_tokens)",
        f"{_CONNECTORS}offloading.scheduler:TransferJobStatus"
        "(deferred_fence_block_ids, fenced_block_ids)",
        f"{_CONNECTORS}offloading.scheduler:GroupOffloadConfig(tokens_per_block)",
        # until vLLM's loads wait for the compute stream, and look-aheads can reserve free blocks
        f"{_CONNECTORS}simple_cpu_offload_connector:SimpleCPUOffloadConnector"
        ".get_num_new_matched_tokens(request, num_computed_tokens)",
        f"{_CONNECTORS}simple_cpu_offload_connector:SimpleCPUOffloadConnector.request_finished"
        "(request, block_ids)",
        f"{_CONNECTORS}simple_cpu_offload_connector:SimpleCPUOffloadConnector.register_kv_caches"
        "(kv_caches)",
        f"{_CONNECTORS}simple_cpu_offload_connector:SimpleCPUOffloadConnector.start_load_kv",
        f"{_CONNECTORS}simple_cpu_offload_connector:SimpleCPUOffloadConnector.build_connector_meta"
        "(scheduler_output)",
        "vllm.v1.simple_kv_offload.metadata:SimpleCPUOffloadMetadata(load_cpu_blocks)",
        f"{_SCHEDULER}._build_kv_connector_meta(connector, scheduler_output)",
    ),
    "worker": (
        "vllm.config:CUDAGraphMode",
        "vllm.distributed:get_pp_group",
        "vllm.distributed.kv_transfer:get_kv_transfer_group",
        "vllm.config:ParallelConfig",
        "vllm.model_executor.layers.attention:Attention",
        f"{_SPECS}KVCacheConfig(num_blocks, kv_cache_tensors, kv_cache_groups)",
        f"{_SPECS}KVCacheTensor(size, layer_stride, block_stride, offset)",
        "vllm.v1.outputs:ModelRunnerOutput",
        "vllm.v1.outputs:LogprobsTensors(logprob_token_ids, logprobs, selected_token_ranks)",
        "vllm.utils.torch_utils:kv_cache_dtype_str_to_dtype(kv_cache_dtype, model_config)",
    ),
    "attention": (
        "vllm.v1.attention.backend:AttentionType",
        "vllm.v1.attention.backend:CommonAttentionMetadata"
        "(query_start_loc, query_start_loc_cpu, seq_lens, num_reqs, num_actual_tokens,"
        " max_query_len, max_seq_len, block_table_tensor, slot_mapping, causal)",
        f"{_ATTENTION}registry:AttentionBackendEnum.is_overridden",
        f"{_ATTENTION}registry:AttentionBackendEnum.clear_override",
    ),
}
"""Module or package of `engine` -> the names that it wraps, subclasses, registers with or calls.

Each is ``module:qualname(parameters that we pass or override by name)``. A comment says when the
names below it can be removed. Names without a comment can go once we no longer use them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmHook:
    """One vLLM name that this package uses.

    Args:
        name: module or package of `engine` that uses it.
        target: ``module:qualname`` in vLLM.
        params: parameters of `target` that we pass or override by name.
    """

    name: str
    target: str
    params: tuple[str, ...] = ()

    @property
    def on(self) -> str:
        """Return the platform that needs it, as in `_PLATFORMS`; "" for all."""
        return _PLATFORMS.get(self.name, "")

    def check(self, version: str) -> None:
        """Raise VllmHookError unless `target` exists and has `params`. Changes nothing.

        If the module exists but cannot be imported, the error names what is missing.
        """
        module, _, qualname = self.target.partition(":")
        fix = f"install a vLLM in {TESTED}, or serve without --kv-compress"
        not_found = f"vLLM {version} has no {self.target}"
        try:
            resolved: Any = importlib.import_module(module)
        except Exception as e:
            # Importing another package's module can raise anything.
            if is_gone(module, e):
                raise VllmHookError(not_found, fix) from e
            raise import_failure(e, version, module) from e
        try:
            for part in qualname.split("."):
                resolved = getattr(resolved, part)
        except AttributeError as e:
            raise VllmHookError(not_found, fix) from e
        parameters = inspect.signature(resolved).parameters if self.params else {}
        if missing := set(self.params) - parameters.keys():
            raise VllmHookError(f"vLLM {version}: {self.target} lost {sorted(missing)}", fix)


def _hook(name: str, signature: str) -> VllmHook:
    target, _, params = signature.rstrip(")").partition("(")
    return VllmHook(name=name, target=target, params=tuple(params.split(", ")) if params else ())


VLLM_HOOKS = tuple(_hook(name, each) for name, names in _NAMES.items() for each in names)
"""Every entry of `_NAMES`."""


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
