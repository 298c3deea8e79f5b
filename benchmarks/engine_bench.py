"""Shared functions of the benchmarks that run engines in one process."""

import json
import os
from pathlib import Path
from typing import Any


def use_one_process(*, cache_gib: int) -> None:
    """Configure vLLM for one quiet process with a CPU KV cache; call before importing vLLM."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE=str(cache_gib),
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
    )


def replace_kernels_once() -> None:
    """Let vLLM replace its Triton kernels on a CPU only once in this process.

    It searches all modules whenever an engine starts, and fails on those of numba, which attention
    over packed pages uses. Call this before the first engine starts.
    """
    import functools

    from vllm.platforms.cpu import CpuPlatform

    once = functools.cache(CpuPlatform.register_triton_kernel_overrides)
    CpuPlatform.register_triton_kernel_overrides = staticmethod(once)


def blocks_in_use(llm: Any) -> int:
    """Return the number of KV blocks in use, without the null block."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def print_result(result: dict[str, Any], output: Path | None) -> None:
    """Print a result as JSON, and write it to `output` if given."""
    text = json.dumps(result, indent=2)
    print(text)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n")
