"""What every benchmark of engines in one process does alike."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LIKELY = 20
"""Most likely tokens of each place, by which distributions are compared."""


def in_this_process(*, cache_gib: int) -> None:
    """Before the first import of vLLM: one process, quiet, with a CPU cache of `cache_gib`."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE=str(cache_gib),
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
    )


def cache_options(*, cache_gib: int) -> dict[str, int | float]:
    """Of vLLM's `LLM` on a GPU, which several engines share: a cache of `cache_gib` for each.

    On a CPU the environment says it (`in_this_process`), and nothing is left to say.
    """
    import torch

    if not torch.cuda.is_available():
        return {}
    return {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": cache_gib << 30}


def blocks_in_use(llm: Any) -> int:
    """KV blocks out of the pool, the null block aside."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def writing() -> type:
    """A logits processor of vLLM's interface: a request's next token is the one it is to write.

    On a GPU it is of Model Runner V2's interface, which the plugin runs on there.
    """
    import torch

    return _writing_on_v2() if torch.cuda.is_available() else _writing_on_v1()


def _writing_on_v1() -> type:
    import torch
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class Writing(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            text = (params.extra_args or {}).get("write")
            if text is None:
                return None

            def write(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
                leave_only(logits, text[len(output_ids)])
                return logits

            return write

    return Writing


def _writing_on_v2() -> type:
    import torch
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

    class Writing(LogitsProcessor):
        def __init__(self, vllm_config: Any, req_states: Any) -> None:
            self._prompts = req_states.prompt_len
            self._texts: dict[int, list[int]] = {}

        def add_request(self, req_idx: int, sampling_params: Any) -> bool:
            self._texts[req_idx] = (sampling_params.extra_args or {}).get("write") or []
            return bool(self._texts[req_idx])

        def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
            slots, positions = ctx.expanded_idx_mapping.tolist(), ctx.pos.tolist()
            for row, (slot, position) in enumerate(zip(slots, positions, strict=False)):
                text = self._texts.get(slot)
                written = position + 1 - int(self._prompts.np[slot])
                if text and 0 <= written < len(text):
                    leave_only(logits[row], text[written])
            return logits

    return Writing


def leave_only(logits: "torch.Tensor", token: int) -> None:
    """Every other token of ``logits [vocabulary]`` is out of the question."""
    kept = logits[token].clone()
    logits.fill_(float("-inf"))
    logits[token] = kept


def most_blocks_in_use(llm: Any) -> Callable[[], int]:
    """From now on: asked, it says how many KV blocks were out of the pool at most.

    Seen where blocks are taken: a prompt that is compressed gives its own back in the same step.
    """
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    take, most = pool.get_new_blocks, 0

    def taking(*args: Any, **kwargs: Any) -> Any:
        nonlocal most
        taken = take(*args, **kwargs)
        most = max(most, blocks_in_use(llm))
        return taken

    pool.get_new_blocks = taking
    return lambda: most


def likely_tokens(answer: Any) -> list[dict[str, float]]:
    """Of each place of an answer its most likely tokens' log-probabilities, the likeliest first."""
    return [
        {str(token): each.logprob for token, each in sorted(place.items(), key=lambda x: x[1].rank)}
        for place in answer.logprobs or ()
    ]


def tell(result: dict[str, Any], output: Path | None) -> None:
    """Print a result, and write it where that was asked for."""
    text = json.dumps(result, indent=2)
    print(text)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n")
