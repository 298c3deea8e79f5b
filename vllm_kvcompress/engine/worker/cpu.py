"""vLLM's CPU worker with compression."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvcompress.engine.attention import cpu as attention_cpu
from vllm_kvcompress.engine.worker.worker import CompressingWorker
from vllm_kvcompress.methods.base import Reads


def runs_amx(dtype: torch.dtype) -> bool:
    """Return whether vLLM's AMX kernels compute the attention of a model of this dtype."""
    return dtype == torch.bfloat16 and bool(torch.cpu.get_capabilities().get("amx_tile"))


class CompressingCPUWorker(CompressingWorker, CPUWorker):
    """vLLM's CPU worker with CPU_ATTN on both model runners."""

    backends = attention_cpu.BACKENDS

    @property
    def reads_copies(self) -> bool:
        """Return whether vLLM's AMX kernels run, which multiply many queries fast.

        Without AVX-512, `packed_attention` takes 0.6 to 0.9 of the time of vLLM's kernel
        (benchmarks/results/packed_attention_cpu.json). AVX-512 without AMX is not measured.
        """
        return runs_amx(self.vllm_config.model_config.dtype)

    def compile_or_warm_up_model(self) -> Any:
        """Also compile the numba code that requests may use, so that none of them waits for it."""
        assert self.compressor is not None
        pool = self.compressor.pool
        attention = Reads.WINDOW | Reads.COLUMN_SUMS
        if any(settings.method.reads & attention for settings in self.settings.variants):
            from kvcompress_kernels.window_scores.cpu import compile_for as compile_scoring

            compile_scoring(pool.elements.dtype)
        if pool.packs_groups:
            from kvcompress_kernels.dequantise_pages.cpu import compile_for as compile_dequantising
            from kvcompress_kernels.packed_attention.cpu import compile_for

            head_dim = int(self.vllm_config.model_config.get_head_size())
            compile_for(head_dim, self.compressor.queries_dtype, pool.elements.dtype)
            if pool.scratch is not None:
                compile_dequantising(head_dim, pool.elements.dtype)
        return super().compile_or_warm_up_model()

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        with _unfinished_seeds_kept(self.model_runner):
            return super().sample_tokens(*args, **kwargs)


class _DiscardedGenerator(torch.Generator):
    """A generator for a token that is discarded. Rewinding it does nothing."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self


@contextmanager
def _unfinished_seeds_kept(runner: Any) -> Iterator[None]:
    """Leave the generators of seeded requests with an unfinished prompt as they are.

    vLLM samples a token after each chunk and discards it if the prompt is unfinished. Model Runner
    V1 then rewinds the request's generator, which generators on a CPU refuse, so the engine would
    stop. V2 has no generators: it samples by seed and position.
    """
    batch = getattr(runner, "input_batch", None)
    generators: dict[int, torch.Generator] = getattr(batch, "generators", {})
    unfinished = {
        request_index: generator
        for request_index, generator in generators.items()
        if runner.discard_request_mask.np[request_index]
    }
    generators.update({index: _DiscardedGenerator(device="cpu") for index in unfinished})
    try:
        yield
    finally:
        generators.update(unfinished)
