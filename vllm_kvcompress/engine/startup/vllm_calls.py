"""vLLM names that this package only calls or reads: the part of the hook table without changes."""

from vllm_kvcompress.engine.startup.vllm_hook import vllm_hooks

_CPU_ATTN = "vllm.v1.attention.backends.cpu_attn:"
_FLASH = "vllm.v1.attention.backends.flash_attn:"
_TRITON = "vllm.v1.attention.backends.triton_attn:"
_UNUSED = "we no longer import it"

VLLM_CALLS = (
    *vllm_hooks(
        "startup",
        "use",
        _UNUSED,
        "vllm.config:VllmConfig",
        "vllm.config:VllmConfig.max_in_flight_tokens",
        "vllm.config:CacheConfig.user_specified_block_size",
        "vllm.distributed.utils:get_pp_indices(num_hidden_layers, pp_rank, pp_size)",
        "vllm.platforms:current_platform",
        "vllm.logger:init_logger",
        "vllm:envs",
    ),
    *vllm_hooks(
        "frontend",
        "use",
        _UNUSED,
        "vllm.exceptions:VLLMValidationError",
        "vllm.outputs:RequestOutput",
        "vllm.sampling_params:SamplingParams(extra_args, max_tokens, n)",
        "vllm.renderers.base:BaseRenderer.mm_processor_cache",
        "vllm.multimodal.cache:BaseMultiModalProcessorCache.invalidate(mm_hash)",
        "vllm.multimodal.inputs:MultiModalFeatureSpec(modality, identifier, mm_position, mm_hash)",
        "vllm.v1.engine:EngineCoreRequest(prompt_token_ids, mm_features, sampling_params)",
    ),
    *vllm_hooks(
        "frontend",
        "use",
        _UNUSED,
        "vllm.entrypoints.openai.models.protocol:BaseModelPath(name, model_path)",
    ),
    *vllm_hooks(
        "scheduling",
        "use",
        _UNUSED,
        "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks",
        "vllm.v1.core.block_pool:BlockPool.evict_blocks(block_ids)",
        "vllm.v1.core.block_pool:BlockPool.get_cached_block(block_hash, kv_cache_group_ids)",
        "vllm.v1.core.block_pool:BlockPool.get_new_blocks(num_blocks)",
        "vllm.v1.core.block_pool:BlockPool.touch(blocks)",
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.prepend_n(blocks)",
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.remove(block)",
        "vllm.v1.core.kv_cache_utils:get_group_id(key)",
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
        "vllm.v1.kv_cache_interface:MambaSpec(shapes, page_size_padded, mamba_cache_mode)",
        "vllm.v1.core.single_type_kv_cache_manager:MambaManager",
        "vllm.v1.kv_cache_interface:KVQuantMode.FP8_PER_TENSOR",
        "vllm.v1.request:Request(request_id, prompt_token_ids, sampling_params, pooling_params)",
        "vllm.v1.request:RequestStatus.RUNNING",
        "vllm.v1.request:RequestStatus.FINISHED_ABORTED",
        "vllm.v1.request:RequestStatus.FINISHED_ERROR",
    ),
    *vllm_hooks(
        "scheduling.deferred_free",
        "use",
        "we no longer call it",
        "vllm.v1.core.sched.scheduler:Scheduler._free_cow_retained_blocks(blocks, fence_seq)",
    ),
    *vllm_hooks(
        "worker",
        "use",
        _UNUSED,
        "vllm.config:CUDAGraphMode",
        "vllm.distributed:get_pp_group",
        "vllm.config:ParallelConfig",
        "vllm.model_executor.layers.attention:Attention",
        "vllm.v1.kv_cache_interface:KVCacheConfig(num_blocks, kv_cache_tensors, kv_cache_groups)",
        "vllm.v1.kv_cache_interface:KVCacheTensor(size, layer_stride, block_stride, offset)",
        "vllm.v1.outputs:ModelRunnerOutput",
        "vllm.v1.outputs:LogprobsTensors(logprob_token_ids, logprobs, selected_token_ranks)",
        "vllm.utils.torch_utils:kv_cache_dtype_str_to_dtype(kv_cache_dtype, model_config)",
    ),
    *vllm_hooks(
        "attention",
        "use",
        _UNUSED,
        "vllm.v1.attention.backend:AttentionType",
        "vllm.v1.attention.backend:CommonAttentionMetadata"
        "(query_start_loc, query_start_loc_cpu, seq_lens, num_reqs, num_actual_tokens,"
        " max_query_len, max_seq_len, block_table_tensor, slot_mapping, causal)",
        "vllm.v1.attention.backends.registry:AttentionBackendEnum.is_overridden",
        "vllm.v1.attention.backends.registry:AttentionBackendEnum.clear_override",
    ),
    *vllm_hooks(
        "attention.cpu",
        "use",
        _UNUSED,
        f"{_CPU_ATTN}CPUAttentionBackend.get_impl_cls",
        f"{_CPU_ATTN}CPUAttentionBackend.get_builder_cls",
        f"{_CPU_ATTN}CPUAttentionMetadata"
        "(num_actual_tokens, max_query_len, query_start_loc, max_seq_len, seq_lens, block_table,"
        " slot_mapping, scheduler_metadata, causal)",
        on="cpu",
    ),
    *vllm_hooks(
        "attention.cuda",
        "use",
        _UNUSED,
        "vllm.v1.attention.backend:AttentionCGSupport",
        "vllm.v1.attention.backends.fa_utils:get_flash_attn_version",
        f"{_FLASH}FlashAttentionBackend.get_impl_cls",
        f"{_FLASH}FlashAttentionBackend.get_builder_cls",
        f"{_TRITON}TritonAttentionBackend.get_impl_cls",
        f"{_TRITON}TritonAttentionBackend.get_builder_cls",
        on="cuda",
    ),
)
