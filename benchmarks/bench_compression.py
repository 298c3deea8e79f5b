"""Measure compression and decode steps of one cached prompt, in processor time of all threads.

    python benchmarks/bench_compression.py --dtype float32

The engine computes the prompt once, without compression. Then requests with the same prompt take
turns: off, on (kept tokens in 16 bits, or 32 in float32) and k4v3, each also with the method's
look-ahead. The prefix cache leaves them little to compute but the compression.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from engine_bench import print_result, replace_kernels_once, use_one_process
from origin import commit, machine

LOOKAHEAD = 32
CHOICES: dict[str, dict[str, Any]] = {
    "off": {"kv_compress": "off"},
    "on": {"kv_packed_dtype": "auto", "kv_lookahead": 0},
    "k4v3": {"kv_lookahead": 0},
    "on, look-ahead": {"kv_packed_dtype": "auto"},
    "k4v3, look-ahead": {},
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--method", default="cake-chunk")
    parser.add_argument("--budget", type=float, default=0.4)
    parser.add_argument("--prompt", type=int, default=6000, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=16, help="decode steps to time per request")
    parser.add_argument("--rounds", type=int, default=3, help="requests to time per kind")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    return parser.parse_args()


def time_calls(owner: Any, name: str, seconds: list[float]) -> None:
    """Replace a method by one that also adds the processor seconds of each call to a list."""
    inner = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        result = inner(*args, **kwargs)
        seconds.append(time.process_time() - start)
        return result

    setattr(owner, name, timed)


def main() -> None:
    args = parse_args()
    use_one_process(cache_gib=2)
    replace_kernels_once()
    from vllm import LLM, SamplingParams

    from vllm_kvcompress.serving.text import english

    settings = {
        **{"compress": args.method, "budget": args.budget, "lookahead": LOOKAHEAD},
        **{"packed_dtype": "k4v3", "allow_override": "all"},
    }
    llm = LLM(
        args.model,
        max_model_len=8192,
        enforce_eager=True,
        dtype=args.dtype,
        distributed_executor_backend="uni",
        enable_prefix_caching=True,
        additional_config={"kvcompress": settings},
    )
    engine, compressing, stepping = llm.llm_engine, list[float](), list[float]()
    compressor = engine.engine_core.engine_core.model_executor.driver_worker.worker.compressor
    for name in ("after_attention", "end_step"):
        time_calls(compressor, name, compressing)
    time_calls(engine, "step", stepping)
    prompt = llm.get_tokenizer().encode(english()[: 8 * args.prompt])[: args.prompt]

    def run(choice: dict[str, Any], num_output: int) -> tuple[float, list[float]]:
        """Return the seconds of a request's compression and of its steps."""
        compressing.clear()
        stepping.clear()
        params = SamplingParams(
            temperature=0, max_tokens=num_output, ignore_eos=True, extra_args=choice
        )
        engine.add_request("r", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            engine.step()
        return sum(compressing), list(stepping)

    prefill = sum(run(CHOICES["off"], 1)[1])
    compression: dict[str, list[float]] = {name: [] for name in CHOICES}
    decode: dict[str, list[float]] = {name: [] for name in CHOICES}
    for _ in range(args.rounds):
        for name, choice in CHOICES.items():
            lookahead = LOOKAHEAD if "look-ahead" in name else 0
            seconds, steps = run(choice, lookahead + args.steps + 4)
            compression[name].append(seconds)
            decode[name].append(statistics.median(steps[-args.steps :]))
    result = {
        "machine": machine(),
        "command": " ".join(["python", "benchmarks/bench_compression.py", *sys.argv[1:]]),
        "commit": commit(),
        "prefill_s": round(prefill, 2),
        "requests": {
            name: {
                "compression_s": round(statistics.median(compression[name]), 4),
                "share_of_prefill": round(statistics.median(compression[name]) / prefill, 4),
                "decode_step_ms": round(statistics.median(decode[name]) * 1e3, 2),
            }
            for name in CHOICES
        },
    }
    print_result(result, args.output)


if __name__ == "__main__":
    main()
