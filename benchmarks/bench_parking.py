"""Measure what parking preempted requests saves in a pool that is too small.

    OMP_NUM_THREADS=1 python benchmarks/bench_parking.py --output parking.json

Batch requests wait from the start. With ``--interactive``, requests of a higher priority arrive in
bursts while batch requests decode. When their outputs have filled the pool, vLLM preempts the batch
request that arrived last. It starts again when its prompt fits.

Two engines, without and with ``--kv-park``, run the same requests. They take turns, one step each,
so that other load affects both. Seconds are CPU times of the process during an engine's steps. A
third engine, whose pool is large enough for all requests, gives the outputs without preemption.

What parking saves depends on how many packed requests are preempted, so on all of these numbers:
small changes of the pool's size add or remove a preemption. A look-ahead that ends early in a full
pool changes outputs too, so outputs are comparable only with ``--lookahead 0``.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from engine_bench import print_result, replace_kernels_once, use_one_process
from origin import commit, machine

BLOCK = 32


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--method", default="cake-chunk")
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument("--lookahead", type=int, help="output tokens; the method's by default")
    parser.add_argument("--requests", type=int, default=8, help="batch requests")
    parser.add_argument("--prompt", type=int, default=1100, help="tokens; 1,024 are compressed")
    parser.add_argument("--tokens", type=int, default=400, help="output tokens per batch request")
    parser.add_argument("--interactive", type=int, default=0, help="interactive requests")
    parser.add_argument("--interactive-prompt", type=int, default=400, help="tokens")
    parser.add_argument("--interactive-tokens", type=int, default=100, help="output tokens")
    parser.add_argument("--burst", type=int, default=1, help="of them, those that arrive together")
    parser.add_argument("--every", type=int, default=20, help="steps between two bursts")
    parser.add_argument("--chunk", type=int, help="tokens per step; vLLM's default")
    parser.add_argument("--blocks", type=int, default=100, help=f"KV blocks of {BLOCK} tokens")
    parser.add_argument("--park", type=float, default=1.0, help="GiB of host memory")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    return parser.parse_args()


class Arrival(NamedTuple):
    """A request of the load.

    Args:
        step: the engine's step before which the request arrives.
        tokens: output tokens.
        priority: requests with a lower number run first.
    """

    name: str
    step: int
    prompt: list[int]
    tokens: int
    priority: int


@dataclass(slots=True)
class MeasuredEngine:
    """One engine and what its steps took.

    Args:
        arrivals: requests that have not arrived yet, by step.
        computed: tokens that its steps computed.
        preemptions: times that a request was preempted.
        arrived: `seconds` at the arrival of each request.
        latency: seconds from the arrival to the end of each request.
        outputs: output tokens of each request.
    """

    llm: Any
    arrivals: list[Arrival]
    steps: int = 0
    seconds: float = 0.0
    computed: int = 0
    preemptions: int = 0
    arrived: dict[str, float] = field(default_factory=dict)
    latency: dict[str, float] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)

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

    @property
    def has_ended(self) -> bool:
        return not (self.arrivals or self.llm.llm_engine.has_unfinished_requests())

    def step(self) -> None:
        """Submit the requests that arrive now, and run one step."""
        while self.arrivals and self.arrivals[0].step <= self.steps:
            self.submit(self.arrivals.pop(0))
        start = time.process_time()
        outputs = self.llm.llm_engine.step()
        self.seconds += time.process_time() - start
        self.steps += 1
        for output in outputs:
            if output.finished:
                name = output.request_id
                self.outputs[name] = list(output.outputs[0].token_ids)
                self.latency[name] = self.seconds - self.arrived[name]

    def submit(self, arrival: Arrival) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=arrival.tokens, ignore_eos=True)
        prompt = {"prompt_token_ids": arrival.prompt}
        self.llm.llm_engine.add_request(arrival.name, prompt, params, priority=arrival.priority)
        self.arrived[arrival.name] = self.seconds

    def median_latency(self, kind: str) -> float | None:
        """Return the median latency of the batch or the interactive requests, in seconds."""
        seconds = [each for name, each in self.latency.items() if name.startswith(kind)]
        return round(statistics.median(seconds), 1) if seconds else None


def build_engine(
    args: argparse.Namespace, arrivals: list[Arrival], blocks: int, park: float | None
) -> MeasuredEngine:
    """Return an engine that has not run any step."""
    from vllm import LLM

    settings = {"compress": args.method, "budget": args.budget, "park": park}
    if args.lookahead is not None:
        settings["lookahead"] = args.lookahead
    llm = LLM(
        args.model,
        max_model_len=args.prompt + args.tokens,
        max_num_batched_tokens=args.chunk,
        scheduling_policy="priority" if args.interactive else "fcfs",
        enforce_eager=True,
        dtype="float32",
        block_size=BLOCK,
        num_gpu_blocks_override=1 + blocks,
        distributed_executor_backend="uni",
        additional_config={"kvcompress": settings},
    )
    engine = MeasuredEngine(llm, list(arrivals))
    engine.watch()
    return engine


def make_arrivals(args: argparse.Namespace) -> list[Arrival]:
    """Return the requests of the load by step. No two prompts share text."""
    from transformers import AutoTokenizer

    from vllm_kvcompress.serving.text import english

    ids = AutoTokenizer.from_pretrained(args.model).encode(english())
    kinds = [("batch", args.prompt, args.tokens, 0, 1)] * args.requests
    kinds += [
        (
            "interactive",
            args.interactive_prompt,
            args.interactive_tokens,
            args.every * (i // args.burst + 1),
            0,
        )
        for i in range(args.interactive)
    ]
    arrivals = []
    for i, (kind, prompt, tokens, step, priority) in enumerate(kinds):
        arrivals.append(Arrival(f"{kind} {i}", step, ids[:prompt], tokens, priority))
        del ids[:prompt]
    return arrivals


def main() -> None:
    args = parse_args()
    use_one_process(cache_gib=2)
    replace_kernels_once()
    arrivals = make_arrivals(args)
    needed = sum(len(each.prompt) + each.tokens - 1 for each in arrivals)
    enough = sum(-(-(len(each.prompt) + each.tokens) // BLOCK) for each in arrivals)
    engines = {
        "recompute": build_engine(args, arrivals, args.blocks, None),
        "park": build_engine(args, arrivals, args.blocks, args.park),
        "large pool": build_engine(args, arrivals, enough, None),
    }
    while active := [each for each in engines.values() if not each.has_ended]:
        for engine in active:
            engine.step()
    expected = engines["large pool"].outputs
    result = {
        "machine": machine(),
        "command": " ".join(["python", "benchmarks/bench_parking.py", *sys.argv[1:]]),
        "commit": commit(),
        "shapes": {
            name: value
            for name, value in vars(args).items()
            if name not in ("model", "output") and value is not None
        },
        "configurations": {
            name: {
                "steps": engine.steps,
                "preemptions": engine.preemptions,
                "recomputed_tokens": engine.computed - needed,
                "outputs_as_in_large_pool": sum(
                    engine.outputs[each] == expected[each] for each in expected
                ),
                "cpu_s": round(engine.seconds, 1),
                "median_latency_cpu_s": {
                    kind: engine.median_latency(kind) for kind in ("batch", "interactive")
                },
            }
            for name, engine in engines.items()
        },
        "ratio": round(engines["park"].seconds / engines["recompute"].seconds, 3),
    }
    print_result(result, args.output)


if __name__ == "__main__":
    main()
