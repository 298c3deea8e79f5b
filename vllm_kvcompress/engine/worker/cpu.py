"""vLLM's CPU worker with compression."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvcompress.engine.attention import cpu as attention_cpu
from vllm_kvcompress.engine.worker.worker import CompressingWorker


class CompressingCPUWorker(CompressingWorker, CPUWorker):
    """vLLM's CPU worker with CPU_ATTN on both model runners."""

    backends = attention_cpu.BACKENDS

    def compile_or_warm_up_model(self) -> Any:
        """Also compile the attention over packed groups, so that no request waits for it."""
        assert self.compressor is not None
        pool = self.compressor.pool
        if pool.packs_groups:
            from kvcompress_kernels.packed_attention.cpu import compile_for

            head_dim = int(self.vllm_config.model_config.get_head_size())
            compile_for(head_dim, self.compressor.queries_dtype, pool.elements.dtype)
        return super().compile_or_warm_up_model()
