"""Run CUDA's attention backends and full CUDA graphs on a CPU, with Model Runner V2.

TRITON_ATTN runs its real kernels in Triton's interpreter. FLASH_ATTN's kernels exist only for CUDA,
so Python loops replace them; vLLM's metadata builder and implementation are real.

A CUDA graph replays with the tensors and numbers of its capture, independent of the current step.
`Graphs` emulates this: it keeps the inputs that vLLM prepares for a capture. A step in FULL mode
runs the model on them, so that only persistent buffers carry values of the current step.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    ModelCudaGraphManager,
    prepare_inputs_to_capture,
)

from vllm_kvcompress.engine.attention import cuda as attention_cuda
from vllm_kvcompress.engine.worker import cpu as worker_cpu


def use(monkeypatch: Any, backend: str, *, version: int = 3) -> SimpleNamespace:
    """Let CPU engines that start later use `backend`; return counters of its kernel calls."""
    counters = SimpleNamespace(calls=0, plans=0, splits=set(), log_sums=0)
    chosen = AttentionBackendEnum[backend]
    monkeypatch.setattr(
        CpuPlatform, "get_attn_backend_cls", classmethod(lambda *_, **__: chosen.get_path())
    )
    monkeypatch.setattr(worker_cpu.CompressingCPUWorker, "backends", attention_cuda.BACKENDS)

    # TRITON_ATTN queries the GPU's compute capability before it stores K and V
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    def attend(
        *, q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, block_table, **options
    ):
        counters.calls += 1
        counters.plans += options["scheduler_metadata"] is not None
        counters.splits.add(options["num_splits"])
        assert options["causal"] is True
        assert options["fa_version"] == version
        assert len(seqused_k) == len(block_table) == len(cu_seqlens_q) - 1
        group, size = q.shape[1] // k.shape[2], k.shape[1]
        # the kernels compute it in every call
        log_sums = torch.full((q.shape[1], len(q)), torch.nan)
        for request_index, tokens in enumerate(seqused_k.tolist()):
            start, stop = cu_seqlens_q[request_index : request_index + 2].tolist()
            assert tokens <= max_seqlen_k
            assert stop - start <= max_seqlen_q
            if stop == start:
                continue
            pages = block_table[request_index, : math.ceil(tokens / size)].long()
            keys, values = (x[pages].flatten(0, 1)[:tokens].float() for x in (k, v))
            keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
            logits = torch.einsum("qhd,khd->hqk", q[start:stop].float(), keys)
            positions = torch.arange(tokens - (stop - start), tokens)[:, None]
            masked = torch.arange(tokens) > positions
            if (window := (options.get("window_size") or [-1])[0]) >= 0:
                masked |= torch.arange(tokens) < positions - window
            logits = (logits * options["softmax_scale"]).masked_fill(masked, -torch.inf)
            if (sinks := options.get("s_aux")) is not None:
                sink = sinks.float()[:, None, None].expand(-1, stop - start, 1)
                logits = torch.cat([logits, sink], -1)
            log_sums[:, start:stop] = logits.logsumexp(-1)
            weights = logits.softmax(-1)[..., :tokens]
            out[start:stop] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
        if not options.get("return_softmax_lse"):
            return out
        counters.log_sums += 1
        return out, log_sums

    def store(key, value, key_cache, value_cache, slots, *_):
        valid_slots = slots[slots >= 0]
        index = valid_slots // key_cache.shape[1], valid_slots % key_cache.shape[1]
        key_cache[index], value_cache[index] = (
            key[: len(slots)][slots >= 0],
            value[: len(slots)][slots >= 0],
        )

    def plan(**sizes):
        return torch.zeros(1 + 4 * sizes["batch_size"], dtype=torch.int32)

    stand_ins = {
        "flash_attn_varlen_func": attend,
        "reshape_and_cache_flash": store,
        "get_scheduler_metadata": plan,
        "get_flash_attn_version": lambda *_, **__: version,
        "flash_attn_supports_quant_query_input": lambda: False,
        "flash_attn_supports_sinks": lambda *_, **__: True,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(flash_attn, name, stand_in, raising=False)
    return counters


class Graphs:
    """Full-graph decode steps of engines that start after this object is created.

    Args:
        sizes: numbers of requests of the graphs; a step is padded to the next size.
        drafts: draft tokens per request.
    """

    def __init__(self, monkeypatch: Any, sizes: tuple[int, ...], drafts: int = 0) -> None:
        self.sizes, self.replays, self.padded = sizes, 0, 0
        self._each = tokens_per_request = 1 + drafts
        self._captured: dict[int, Any] = {}
        self._addresses: dict[int, list[int]] = {}
        dispatch = ModelCudaGraphManager.dispatch

        def dispatching(manager, num_reqs, num_tokens, uniform_token_count, *args, **kwargs):
            fitting_sizes = [size for size in sizes if size * tokens_per_request >= num_tokens]
            if uniform_token_count == tokens_per_request and fitting_sizes and self._captured:
                return BatchExecutionDescriptor(
                    cg_mode=CUDAGraphMode.FULL,
                    num_tokens=fitting_sizes[0] * tokens_per_request,
                    num_reqs=fitting_sizes[0],
                    uniform_token_count=tokens_per_request,
                )
            return dispatch(manager, num_reqs, num_tokens, uniform_token_count, *args, **kwargs)

        monkeypatch.setattr(ModelCudaGraphManager, "dispatch", dispatching)
        monkeypatch.setattr(ModelCudaGraphManager, "run_fullgraph", lambda _, desc: self._run(desc))

    def capture(self, engine: Any) -> None:
        """Capture the graphs; vLLM does this after it allocates the KV cache."""
        self._runner = runner = engine.worker.model_runner
        self._compressor = engine.worker.compressor
        with torch.inference_mode():
            for size in self.sizes:
                self._captured[size] = prepare_inputs_to_capture(
                    size,
                    size * self._each,
                    runner.model_state,
                    runner.input_buffers,
                    runner.block_tables,
                    runner.attn_groups,
                    runner.kv_cache_config,
                    full_cudagraph=True,
                    max_query_len=self._each,
                )
                self._addresses[size] = self._reads(size)

    def _reads(self, size: int) -> list[int]:
        """Return the addresses that a graph's attention kernels read: pages, tables and lengths."""
        all_metadata = self._captured[size].attn_metadata.values()
        metadata = next(candidate for candidate in all_metadata if hasattr(candidate, "kvcompress"))
        by_layer = metadata.kvcompress.layers
        layers = [by_layer[index] for index in range(len(self._compressor.pool.layer_offset))]
        tensors = [x for candidate in layers for x in (candidate.block_table, candidate.seq_lens)]
        return [x.data_ptr() for x in (self._compressor.pool.pages, *tensors)]

    def _run(self, desc: BatchExecutionDescriptor) -> torch.Tensor:
        assert not self._compressor.watching, "a replayed graph runs no Python"
        self.replays += 1
        requests = desc.num_reqs
        assert self._reads(requests) == self._addresses[requests], "a captured tensor moved"
        runner, rows = self._runner, desc.num_tokens
        captured = self._captured[requests]
        self.padded += bool((runner.input_buffers.seq_lens[:requests] == 0).any())
        with set_forward_context(
            captured.attn_metadata,
            runner.vllm_config,
            num_tokens=rows,
            slot_mapping=captured.slot_mappings,
        ):
            hidden: torch.Tensor = runner.model(
                input_ids=runner.input_buffers.input_ids[:rows],
                positions=runner.input_buffers.positions[:rows],
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        return hidden
