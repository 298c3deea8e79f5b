"""Measure what parking preempted requests saves in a pool that is too small.

    OMP_NUM_THREADS=1 python benchmarks/bench_parking.py --output parking.json

Two engines, without and with ``--kv-park``, run the same requests. They take turns, one step each,
so that other load affects both. Seconds are CPU times of the process during an engine's steps.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_bench import print_result, replace_kernels_once, use_one_process
from origin import commit, machine


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--method", default="cake-chunk")
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1100, help="tokens; 1,024 are compressed")
    parser.add_argument("--tokens", type=int, default=400, help="output tokens per request")
    parser.add_argument("--blocks", type=int, default=100, help="KV blocks of 32 tokens")
    parser.add_argument("--park", type=float, default=1.0, help="GiB of host memory")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    return parser.parse_args()


@dataclass(slots=True)
class MeasuredEngine:
    """One engine and what its steps took.

    Args:
        computed: tokens that its steps computed.
        preemptions: times that a request was preempted.
    """

    llm: Any
    seconds: float = 0.0
    computed: int = 0
    preemptions: int = 0

    def watch(self) -> None:
        """Count the tokens of each step, and preemptions."""
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        schedule, preempt = scheduler.schedule, scheduler._preempt_request

        def counting(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.computed += output.total_num_scheduled_tokens
            return output

        def preempting(*args: Any, **kwargs: Any) -> None:
            self.preemptions += 1
            preempt(*args, **kwargs)

        scheduler.schedule, scheduler._preempt_request = counting, preempting

    def step(self) -> None:
        start = time.process_time()
        self.llm.llm_engine.step()
        self.seconds += time.process_time() - start


def build_engine(args: argparse.Namespace, park: float | None) -> MeasuredEngine:
    """Return an engine with submitted prompts that has not run any step."""
    from vllm import LLM, SamplingParams

    from vllm_kvcompress.serving.text import english

    settings = {"compress": args.method, "budget": args.budget, "park": park}
    llm = LLM(
        args.model,
        max_model_len=args.prompt + args.tokens,
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        num_gpu_blocks_override=1 + args.blocks,
        distributed_executor_backend="uni",
        additional_config={"kvcompress": settings},
    )
    engine = MeasuredEngine(llm)
    engine.watch()
    ids = llm.get_tokenizer().encode(english()[: args.requests * args.prompt * 8])
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    for i in range(args.requests):
        prompt = ids[i * args.prompt : (i + 1) * args.prompt]
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    return engine


def main() -> None:
    args = parse_args()
    use_one_process(cache_gib=4)
    replace_kernels_once()
    engines = {"recompute": build_engine(args, None), "park": build_engine(args, args.park)}
    while active := [e for e in engines.values() if e.llm.llm_engine.has_unfinished_requests()]:
        for engine in active:
            engine.step()
    needed = args.requests * (args.prompt + args.tokens - 1)
    result = {
        "machine": machine(),
        "command": " ".join(["python", "benchmarks/bench_parking.py", *sys.argv[1:]]),
        "commit": commit(),
        "shapes": {
            **{"requests": args.requests, "prompt_tokens": args.prompt, "tokens": args.tokens},
            **{"method": args.method, "budget": args.budget, "blocks": args.blocks},
        },
        "configurations": {
            name: {
                "preemptions": engine.preemptions,
                "recomputed_tokens": engine.computed - needed,
                "cpu_s": round(engine.seconds, 1),
            }
            for name, engine in engines.items()
        },
        "ratio": round(engines["park"].seconds / engines["recompute"].seconds, 3),
    }
    print_result(result, args.output)


if __name__ == "__main__":
    main()
