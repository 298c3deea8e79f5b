"""Measure the cost of each method's compression as a share of the prefill.

    python benchmarks/bench_methods.py --model .cache/smollm2-135m-instruct

One engine in one process. Every round prefills the same prompt once per method, in turns, so that
other load affects all methods. The share is the time inside the compressor relative to the rest of
the prefill, which is vLLM's own work. Figures are medians over rounds.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from engine_bench import print_result, use_one_process
from origin import commit, machine

GOALS = {"caote": 0.08, "fastcaote": 0.08, "h2o": 0.60, "d2o": 0.60}  # all other methods: 0.05


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--prompt", type=int, default=6000, help="prompt length in tokens")
    parser.add_argument("--chunk", type=int, default=2048, help="max_num_batched_tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--methods", nargs="*", help="presets (default: all)")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    return parser.parse_args()


class TimedEngine:
    """An engine with a timed compressor that accepts settings per request."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm import LLM

        self.llm: Any = LLM(
            args.model,
            max_model_len=8192,
            max_num_batched_tokens=args.chunk,
            enforce_eager=True,
            dtype="float32",
            distributed_executor_backend="uni",
            enable_prefix_caching=False,
            additional_config={
                "kvcompress": {
                    "compress": "cake",
                    "min_prompt": 1,
                    "lookahead": 0,
                    "allow_override": "all",
                }
            },
        )
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.seconds = 0.0
        compressor = core.model_executor.driver_worker.worker.compressor
        for name in ("after_attention", "end_step"):
            setattr(compressor, name, self._timed(getattr(compressor, name)))

    def _timed(self, inner: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed

    def prefill(self, ids: list[int], overrides: dict[str, Any]) -> tuple[float, float]:
        """Return the seconds of vLLM's own prefill and of the compression of one request.

        Args:
            overrides: compression settings of the request, for its `extra_args`.
        """
        from vllm import SamplingParams

        self.seconds = 0.0
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, extra_args=overrides)
        self.llm.llm_engine.add_request("r", {"prompt_token_ids": ids}, params)
        start = time.perf_counter()
        while not self.scheduler.running or self.scheduler.running[0].num_output_tokens == 0:
            self.llm.llm_engine.step()
        total, compression = time.perf_counter() - start, self.seconds
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()
        return total - compression, compression


def main() -> None:
    args = parse_args()
    use_one_process(cache_gib=2)
    from vllm_kvcompress.methods.registry import PRESETS
    from vllm_kvcompress.serving.text import english

    engine = TimedEngine(args)
    ids = engine.llm.get_tokenizer().encode(english()[: args.prompt * 8])[: args.prompt]
    names = args.methods or list(PRESETS)
    overrides = {name: {"kv_compress": name, "kv_budget": args.budget} for name in names}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    engine.prefill(ids, overrides[names[0]])  # warm up
    for _ in range(args.rounds):
        for name in names:
            times[name].append(engine.prefill(ids, overrides[name]))
    result = {
        "machine": machine(),
        "command": " ".join(["python", "benchmarks/bench_methods.py", *sys.argv[1:]]),
        "commit": commit(),
        "shapes": {
            **{"prompt_tokens": len(ids), "budget": args.budget, "chunk": args.chunk},
            **{"dtype": "float32", "rounds": args.rounds},
        },
        "methods": {
            name: {
                "prefill_s": round(statistics.median(prefill for prefill, _ in pairs), 3),
                "compression_s": round(
                    statistics.median(compression for _, compression in pairs), 4
                ),
                "share": round(statistics.median(ours / prefill for prefill, ours in pairs), 4),
                "goal": GOALS.get(name, 0.05),
            }
            for name, pairs in times.items()
        },
    }
    print_result(result, args.output)


if __name__ == "__main__":
    main()
