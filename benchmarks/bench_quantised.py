"""Compare an fp8 KV cache, eviction, and both together at equal memory.

    python benchmarks/bench_quantised.py --model .cache/smollm2-135m-instruct

Engines run in one process, prompt by prompt, as in `bench_pieces`. vLLM alone answers a built-in
question. The other engines are forced to write the same output, so that probabilities are for the
same text. If an engine would have chosen another token, it also writes its own answer.

* memory: of a compressed prompt's tokens, relative to vLLM's cache in the model's dtype
* named: number of prompts whose answer both vLLM alone and the engine name
* KL: from vLLM alone, in nats per token; a lower bound from the 20 most likely tokens
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from bench_pieces import BLOCK, FULL, MeasuredEngine, compare_on_questions
from engine_bench import (
    LIKELY,
    forced_output_processor,
    print_result,
    track_max_blocks,
    use_one_process,
)
from origin import commit, machine

FP8_DTYPES = {"fp8": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--method", default="cake-chunk")
    parser.add_argument(
        "--shares",
        type=float,
        nargs="*",
        default=[0.5, 0.2, 0.1],
        help="shares of the uncompressed memory",
    )
    parser.add_argument("--task", default="niah-multikey-1")
    parser.add_argument("--count", type=int, default=40, help="prompts")
    parser.add_argument("--tokens", type=int, default=2000, help="maximum tokens per prompt")
    parser.add_argument("--question", choices=("last", "first"), default="last")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    return parser.parse_args()


def engine_configurations(args: argparse.Namespace) -> dict[str, tuple[str, float | None, float]]:
    """Return by name the cache dtype, the budget (None: no eviction) and the share of memory.

    An fp8 token takes half the memory of a 16-bit token, so twice as many tokens fit.
    """
    fp8_share = 0.5 if args.dtype in ("bfloat16", "float16") else 0.25
    configurations: dict[str, tuple[str, float | None, float]] = {FULL: ("auto", None, 1.0)}
    configurations |= {name: (cache, None, fp8_share) for name, cache in FP8_DTYPES.items()}
    for share in args.shares:
        configurations[f"{args.method} {share:g}"] = ("auto", share, share)
        if share < fp8_share:
            configurations[f"fp8, {args.method} {share / fp8_share:g}"] = (
                "fp8_e4m3",
                share / fp8_share,
                share,
            )
    return configurations


def build_engine(cache: str, budget: float | None, args: argparse.Namespace) -> MeasuredEngine:
    from vllm import LLM

    options: dict[str, Any] = {}
    if budget is not None:
        settings = {"compress": args.method, "budget": budget, "lookahead": 0}
        options = {"additional_config": {"kvcompress": settings}}
    longest = args.tokens + 512
    llm = LLM(
        args.model,
        max_model_len=longest,
        num_gpu_blocks_override=2 + -(-longest // BLOCK),
        block_size=BLOCK,
        enforce_eager=True,
        dtype=args.dtype,
        kv_cache_dtype=cache,
        distributed_executor_backend="uni",
        enable_prefix_caching=False,
        max_num_seqs=1,
        logits_processors=[forced_output_processor()],
        max_logprobs=LIKELY,
        **options,
    )
    return MeasuredEngine(llm, track_max_blocks(llm))


def report(args: argparse.Namespace, found: dict[str, MeasuredEngine]) -> dict[str, Any]:
    shares = {name: share for name, (_, _, share) in engine_configurations(args).items()}
    return {
        "machine": machine(),
        "command": " ".join(["python", "benchmarks/bench_quantised.py", *sys.argv[1:]]),
        "commit": commit(),
        "shapes": {
            **{"task": args.task, "question": args.question, "prompts": args.count},
            **{"known": sum(map(bool, found[FULL].named)), "tokens": args.tokens},
            **{"method": args.method, "dtype": args.dtype},
        },
        "rows": {
            name: {
                "memory": shares[name],
                "named": round(sum(engine.named), 2),
                "kl": round(statistics.fmean(engine.kl), 4) if engine.kl else None,
            }
            for name, engine in found.items()
        },
    }


def main() -> None:
    args = parse_args()
    use_one_process(cache_gib=1)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    found = {
        name: build_engine(cache, budget, args)
        for name, (cache, budget, _) in engine_configurations(args).items()
    }
    compare_on_questions(args, found, found[FULL].llm.get_tokenizer())
    print_result(report(args, found), args.output)


if __name__ == "__main__":
    main()
