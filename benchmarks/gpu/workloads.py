"""Models, sizes and `LLM` options of the stages that run engines."""

from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.models import Model, largest
from benchmarks.gpu.rounds import ONE_PERCENT_ROUNDS

MAX_POOL_TOKENS = 147_456
FULL_AT_ONCE = 18  # uncompressed long prompts that fit into the pool
MAX_OUTPUT_TOKENS = 256
RESERVE = 6 << 30  # bytes that an engine needs in addition to weights and pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the workloads.

    Args:
        pool: tokens that the KV pool holds, in blocks of `block`.
        prompt_8k, prompt_32k, prompt_128k: prompt length and rounds of workloads with a single
            request, named after the lengths for the largest pool.
        together: (requests, prompt length, rounds) of workloads that decode together.
        short: requests, prompt length and rounds of the workload that is not compressed.
        look_aheads: (requests, prompt length, rounds) of workloads that pack while they decode.
        crowd: requests, prompt length and output tokens of the workload that exceeds the pool.
        steps: decode steps to time per workload.
        gap_tokens: output tokens of the requests in `look_aheads`; a look-ahead has fewer.
        budget_tokens: the budget in tokens per layer.
        min_prompt: the plugin's threshold in tokens.
    """

    pool: int
    block: int = 16
    prompt_8k: tuple[int, int]
    prompt_32k: tuple[int, int]
    prompt_128k: tuple[int, int]
    together: tuple[tuple[int, int, int], ...]
    short: tuple[int, int, int] = (16, 512, ONE_PERCENT_ROUNDS)
    look_aheads: tuple[tuple[int, int, int], ...]
    crowd: tuple[int, int, int]
    steps: int = 48
    gap_tokens: int = 64
    budget_tokens: int = 1024
    min_prompt: int = 1024

    @property
    def max_prompt(self) -> int:
        return max(length for length, _ in (self.prompt_8k, self.prompt_32k, self.prompt_128k))

    @property
    def budgets(self) -> dict[str, float | int]:
        return {"0.1": 0.1, f"{self.budget_tokens} tokens": self.budget_tokens}


def sizes(pool: int) -> Sizes:
    """Return sizes for a pool of `pool` tokens: 8k, 32k and 128k prompts for the largest pool."""
    long = pool // FULL_AT_ONCE
    longer, longest = 4 * long, pool - 2 * long - MAX_OUTPUT_TOKENS
    return Sizes(
        pool=pool,
        prompt_8k=(long, ONE_PERCENT_ROUNDS),
        prompt_32k=(longer, 10),
        prompt_128k=(longest, 1),
        together=((FULL_AT_ONCE - 2, long, 1), (4, longer, 1)),
        look_aheads=((16, long // 4, 10), (16, long, 5)),
        crowd=(6 * FULL_AT_ONCE, long, 192),
    )


DRY = Sizes(
    pool=1280,
    block=32,
    prompt_8k=(256, 2),
    prompt_32k=(384, 1),
    prompt_128k=(320, 1),
    together=((2, 256, 1),),
    short=(2, 64, 1),
    look_aheads=((2, 256, 1),),
    crowd=(6, 256, 8),
    steps=4,
    gap_tokens=40,
    budget_tokens=64,
    min_prompt=128,
)


def fit_model(free: int) -> tuple[Model, Sizes]:
    """Return the largest model that two engines with a pool each can run in `free` bytes.

    Raises:
        RuntimeError: no model fits.
    """
    per_engine = free // 2 - RESERVE
    model = largest(per_engine)
    spare = per_engine - model.weights
    pool = (
        min(MAX_POOL_TOKENS, spare // model.token_bytes) // (16 * FULL_AT_ONCE) * 16 * FULL_AT_ONCE
    )
    return model, sizes(pool)


def options(model: Model, workload: Sizes, *, dry: bool) -> dict[str, Any]:
    """Return arguments of vLLM's `LLM`: its defaults except for the pool and random weights."""
    common: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_num_seqs": 128,
        "block_size": workload.block,
        "max_model_len": workload.max_prompt + MAX_OUTPUT_TOKENS,
    }
    if dry:
        return {
            **common,
            "dtype": "float32",
            "num_gpu_blocks_override": workload.pool // workload.block,
            "enforce_eager": True,
            "max_num_batched_tokens": 512,
            "distributed_executor_backend": "uni",
        }
    return {
        **common,
        "dtype": "bfloat16",
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": workload.pool * model.token_bytes,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 96, 128]},
    }
