"""vLLM's CPU worker with compression."""

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvcompress.engine.attention import cpu as attention_cpu
from vllm_kvcompress.engine.worker.worker import CompressingWorker


class CompressingCPUWorker(CompressingWorker, CPUWorker):
    """vLLM's CPU worker with CPU_ATTN on both model runners."""

    backends = attention_cpu.BACKENDS
