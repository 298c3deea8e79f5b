"""What every benchmark of engines in one process does alike."""

import json
import os
from pathlib import Path
from typing import Any


def in_this_process(*, cache_gib: int) -> None:
    """Before the first import of vLLM: one process, quiet, with a CPU cache of `cache_gib`."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE=str(cache_gib),
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
    )


def blocks_in_use(llm: Any) -> int:
    """KV blocks out of the pool, the null block aside."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def tell(result: dict[str, Any], output: Path | None) -> None:
    """Print a result, and write it where that was asked for."""
    text = json.dumps(result, indent=2)
    print(text)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n")
