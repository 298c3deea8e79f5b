"""Shared functions of the benchmarks that run engines in one process."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LIKELY = 20
"""Number of most likely tokens per position that divergences are computed from."""


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


def cache_options(*, cache_gib: int) -> dict[str, int | float]:
    """Return the `LLM` arguments that give each engine on a shared GPU a cache of `cache_gib`.

    Empty on a CPU, where `use_one_process` sets the size in the environment.
    """
    import torch

    if not torch.cuda.is_available():
        return {}
    return {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": cache_gib << 30}


def blocks_in_use(llm: Any) -> int:
    """Return the number of KV blocks in use, without the null block."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def forced_output_processor() -> type:
    """Return a vLLM logits processor class that forces the tokens in ``extra_args["write"]``.

    On a GPU it implements the interface of Model Runner V2, which the plugin uses there.
    """
    import torch

    return _processor_for_v2() if torch.cuda.is_available() else _processor_for_v1()


def _processor_for_v1() -> type:
    import torch
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class ForcedOutput(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            tokens = (params.extra_args or {}).get("write")
            if tokens is None:
                return None

            def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
                mask_all_but(logits, tokens[len(output_ids)])
                return logits

            return force

    return ForcedOutput


def _processor_for_v2() -> type:
    import torch
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

    class ForcedOutput(LogitsProcessor):
        def __init__(self, vllm_config: Any, req_states: Any) -> None:
            self._prompts = req_states.prompt_len
            self._outputs: dict[int, list[int]] = {}

        def add_request(self, req_idx: int, sampling_params: Any) -> bool:
            self._outputs[req_idx] = (sampling_params.extra_args or {}).get("write") or []
            return bool(self._outputs[req_idx])

        def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
            slots, positions = ctx.expanded_idx_mapping.tolist(), ctx.pos.tolist()
            for index, (slot, position) in enumerate(zip(slots, positions, strict=False)):
                tokens = self._outputs.get(slot)
                output_index = position + 1 - int(self._prompts.np[slot])
                if tokens and 0 <= output_index < len(tokens):
                    mask_all_but(logits[index], tokens[output_index])
            return logits

    return ForcedOutput


def mask_all_but(logits: "torch.Tensor", token: int) -> None:
    """Set all ``logits [vocabulary]`` except one token's to minus infinity, in place."""
    value = logits[token].clone()
    logits.fill_(float("-inf"))
    logits[token] = value


def track_max_blocks(llm: Any) -> Callable[[], int]:
    """Track the maximum number of KV blocks in use, and return a function that returns it.

    It looks when blocks are allocated, because a compressed prompt frees blocks in the same step.
    """
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    allocate, max_blocks = pool.get_new_blocks, 0

    def tracked(*args: Any, **kwargs: Any) -> Any:
        nonlocal max_blocks
        blocks = allocate(*args, **kwargs)
        max_blocks = max(max_blocks, blocks_in_use(llm))
        return blocks

    pool.get_new_blocks = tracked
    return lambda: max_blocks


def top_logprobs(output: Any) -> list[dict[str, float]]:
    """Return per output position the log-probabilities of the top tokens, most likely first."""
    return [
        {
            str(token): entry.logprob
            for token, entry in sorted(position.items(), key=lambda x: x[1].rank)
        }
        for position in output.logprobs or ()
    ]


def print_result(result: dict[str, Any], output: Path | None) -> None:
    """Print a result as JSON, and write it to `output` if given."""
    text = json.dumps(result, indent=2)
    print(text)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n")
