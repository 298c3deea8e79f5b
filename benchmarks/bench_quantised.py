"""An fp8 KV cache, eviction, and both at once, where they take the same memory.

    python benchmarks/bench_quantised.py --model .cache/smollm2-135m-instruct

Engines side by side in one process, prompt by prompt, as in `bench_pieces`: vLLM alone answers a
built-in question; the others write the same answer, so that probabilities are along the same text,
and answer themselves where they would have chosen another token.

* memory: of a compressed prompt's tokens, in shares of vLLM's own cache in the model's dtype
* named: of the prompts whose answer vLLM alone names, those that name it
* KL: from vLLM alone, in nats per token, a lower bound by the 20 most likely tokens
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from bench_pieces import BLOCK, FULL, Contender, ask
from engine_bench import LIKELY, in_this_process, most_blocks_in_use, tell, writing
from origin import commit, machine

ALONE = {"fp8": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--method", default="cake-chunk")
    parser.add_argument(
        "--shares", type=float, nargs="*", default=[0.5, 0.2, 0.1], help="of the memory"
    )
    parser.add_argument("--task", default="niah-multikey-1")
    parser.add_argument("--count", type=int, default=40, help="prompts")
    parser.add_argument("--tokens", type=int, default=2000, help="of a prompt, about")
    parser.add_argument("--question", choices=("last", "first"), default="last")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    return parser.parse_args()


def contenders_of(args: argparse.Namespace) -> dict[str, tuple[str, float | None, float]]:
    """By name: the cache's dtype, the budget or None without eviction, and the share of memory.

    A quantised token takes half of a 16-bit one, and so twice as many fit.
    """
    half = 0.5 if args.dtype in ("bfloat16", "float16") else 0.25
    made: dict[str, tuple[str, float | None, float]] = {FULL: ("auto", None, 1.0)}
    made |= {name: (cache, None, half) for name, cache in ALONE.items()}
    for share in args.shares:
        made[f"{args.method} {share:g}"] = ("auto", share, share)
        if share < half:
            made[f"fp8, {args.method} {share / half:g}"] = ("fp8_e4m3", share / half, share)
    return made


def contender(cache: str, budget: float | None, args: argparse.Namespace) -> Contender:
    from vllm import LLM

    own: dict[str, Any] = {}
    if budget is not None:
        compress = {"compress": args.method, "budget": budget, "lookahead": 0}
        own = {"additional_config": {"kvcompress": compress}}
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
        logits_processors=[writing()],
        max_logprobs=LIKELY,
        **own,
    )
    return Contender(llm, most_blocks_in_use(llm))


def report(args: argparse.Namespace, found: dict[str, Contender]) -> dict[str, Any]:
    shares = {name: share for name, (_, _, share) in contenders_of(args).items()}
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
                "named": round(sum(one.named), 2),
                "kl": round(statistics.fmean(one.kl), 4) if one.kl else None,
            }
            for name, one in found.items()
        },
    }


def main() -> None:
    args = parse_args()
    in_this_process(cache_gib=1)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    found = {
        name: contender(cache, budget, args)
        for name, (cache, budget, _) in contenders_of(args).items()
    }
    ask(args, found, found[FULL].llm.get_tokenizer())
    tell(report(args, found), args.output)


if __name__ == "__main__":
    main()
