"""vLLM's CUDA worker with compression."""

from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from vllm_kvcompress.engine.attention import cuda as attention_cuda
from vllm_kvcompress.engine.device_memory import device_bytes
from vllm_kvcompress.engine.worker.worker import CompressingWorker
from vllm_kvcompress.errors import ConfigError

logger = init_logger("vllm.kvcompress")


class CompressingGPUWorker(CompressingWorker, Worker):
    """vLLM's CUDA worker with FLASH_ATTN and TRITON_ATTN on Model Runner V2."""

    backends = attention_cuda.BACKENDS

    def determine_available_memory(self) -> int:
        """Return the bytes for the KV cache: vLLM's result minus the memory of compression.

        An explicit size (``--kv-cache-memory-bytes``) is returned unchanged.

        Raises:
            ConfigError: no memory would be left for the KV cache.
        """
        explicit_bytes = self.cache_config.kv_cache_memory_bytes
        available: int = super().determine_available_memory()
        if explicit_bytes:
            return available
        needed = device_bytes(self.vllm_config, self.settings, available)
        logger.info("compression takes %.2f GiB beside the KV cache", needed / 2**30)
        if needed >= available:
            raise ConfigError(
                f"--kv-compress needs {needed} bytes for its tables and scores, and {available} are"
                " left for it and the KV cache; raise --gpu-memory-utilization, or lower"
                " --max-model-len or --max-num-seqs"
            )
        # After graph capture vLLM sums these up to recommend a --kv-cache-memory-bytes.
        self.peak_activation_memory += needed
        self.available_kv_cache_memory_bytes -= needed
        return available - needed

    def compile_or_warm_up_model(self) -> Any:
        """Also compile the compression kernels, so that no request waits for them."""
        assert self.compressor is not None
        self.compressor.warm_up(self.vllm_config.model_config.max_model_len)
        return super().compile_or_warm_up_model()
