"""vLLM's CUDA worker with compression."""

from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from vllm_kvcompress.engine.attention import cuda as attention_cuda
from vllm_kvcompress.engine.worker.footprint import device_bytes
from vllm_kvcompress.engine.worker.worker import CompressingWorker
from vllm_kvcompress.errors import ConfigError

logger = init_logger("vllm.kvcompress")


class CompressingGPUWorker(CompressingWorker, Worker):
    """FLASH_ATTN and TRITON_ATTN, on Model Runner V2."""

    backends = attention_cuda.BACKENDS

    def determine_available_memory(self) -> int:
        """Memory for the KV cache: what vLLM found, less what compression will take.

        A size that the operator gave by hand (``--kv-cache-memory-bytes``) is kept.

        Raises:
            ConfigError: nothing would be left.
        """
        by_hand = self.cache_config.kv_cache_memory_bytes
        available: int = super().determine_available_memory()
        if by_hand:
            return available
        taken = device_bytes(self.vllm_config, self.settings, available)
        logger.info("compression takes %.2f GiB beside the KV cache", taken / 2**30)
        if taken >= available:
            raise ConfigError(
                f"--kv-compress needs {taken} bytes for its tables and scores, and {available} are"
                " left for it and the KV cache; raise --gpu-memory-utilization, or lower"
                " --max-model-len or --max-num-seqs"
            )
        # vLLM's advice on --kv-cache-memory-bytes, after its graphs are captured, adds these up
        self.peak_activation_memory += taken
        self.available_kv_cache_memory_bytes -= taken
        return available - taken

    def compile_or_warm_up_model(self) -> Any:
        """Compile the kernels too: no request should wait for them."""
        assert self.compressor is not None
        self.compressor.warm_up(self.vllm_config.model_config.max_model_len)
        return super().compile_or_warm_up_model()
