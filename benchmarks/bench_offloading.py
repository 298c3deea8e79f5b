"""Measure offloading beside compression: two passes over prompts in a pool that is too small.

    python benchmarks/bench_offloading.py --output offloading.json

An engine with compression serves every prompt, twice, and then so does one with vLLM's
OffloadingConnector too. Between the passes the pool has evicted most blocks of the prefix
cache. Times are CPU times of the process, which include copies to and from host memory: vLLM's own
worker needs CUDA, so a worker for tests copies.
"""

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

from engine_bench import print_result, replace_kernels_once, use_one_process
from origin import commit, machine

NAMES = ("without", "with offloading")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--method", default="cake-chunk")
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per prompt")
    parser.add_argument("--outputs", type=int, default=24, help="output tokens per prompt")
    parser.add_argument("--blocks", type=int, default=1 + 40, help="KV blocks of 64 tokens")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    use_one_process(cache_gib=1)
    from late_offloading import install_late_copies, transfer
    from vllm import LLM

    replace_kernels_once()
    install_late_copies(seed=0)
    settings = {"compress": args.method, "budget": args.budget}
    rng = random.Random(0)
    prompts = [rng.choices(range(1000, 40_000), k=args.tokens) for _ in range(args.prompts)]
    passes: dict[str, list[dict[str, Any]]] = {}
    outputs: list[Any] = []
    # vLLM keeps one connector per process, so the engine with the connector comes second.
    for name in NAMES:
        llm = LLM(
            args.model,
            max_model_len=args.tokens + 512,
            block_size=64,
            enforce_eager=True,
            dtype="float32",
            distributed_executor_backend="uni",
            disable_log_stats=False,
            num_gpu_blocks_override=args.blocks,
            additional_config={"kvcompress": settings},
            **(transfer(4096) if name == NAMES[1] else {}),
        )
        served = [serve(llm, prompts, args.outputs) for _ in range(2)]
        passes[name] = [figures for figures, _ in served]
        outputs += [tokens for _, tokens in served]
        llm.llm_engine.engine_core.shutdown()
    equal = all(each == outputs[0] for each in outputs)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "commit": commit(),
        "prompt_tokens": args.prompts * args.tokens,
        "equal_outputs": equal,
        "passes": passes,
    }
    print_result(result, args.output)


def serve(llm: Any, prompts: list[list[int]], outputs: int) -> tuple[dict[str, Any], list[Any]]:
    """Serve the prompts, two at once; return the figures of the pass and the output tokens."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
    before, start = counters(llm), time.process_time()
    served: list[Any] = []
    for index in range(0, len(prompts), 2):
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts[index : index + 2]]
        served += llm.generate(inputs, params, use_tqdm=False)
    seconds = time.process_time() - start
    figures = {name: value - before[name] for name, value in counters(llm).items()}
    found = figures["prefix_cache_hits"] + figures["external_prefix_cache_hits"]
    computed = sum(map(len, prompts)) - found
    figures |= {"computed_prompt_tokens": computed, "cpu_seconds": round(seconds, 2)}
    return figures, [list(output.outputs[0].token_ids) for output in served]


def counters(llm: Any) -> dict[str, Any]:
    """Return how many prompt tokens vLLM has found on the device and in host memory."""
    values = {"prefix_cache_hits": 0, "external_prefix_cache_hits": 0}
    for metric in llm.get_metrics():
        if (name := metric.name.removeprefix("vllm:")) in values:
            values[name] += metric.value
    return values


if __name__ == "__main__":
    main()
