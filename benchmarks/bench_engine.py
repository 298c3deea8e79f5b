"""Engine steps with and without compression, side by side.

    python benchmarks/bench_engine.py --model .cache/smollm2-135m-instruct

Every configuration runs in a process of its own, in turns (off, on, off, on, ...), so that what
else the machine does falls on all of them. Steps are timed, not runs: a step that computes only
decodes is a decode step, one that computes a prompt is a prefill step. Reported are medians over
the rounds, and ratios within one round.

* decode: median decode step of `--batch` requests with prompts of `--prompt` tokens
* compression: seconds inside our code while prompts end, as a share of all prefill steps' time
* bound: vLLM alone with prompts of `--budget` x `--prompt` tokens: what decoding costs when nothing
  is left of the dropped tokens, so the most that any compression can win on this machine
* idle: plugin on, every prompt under the threshold, against vLLM without the plugin's flag
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CONFIGURATIONS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "on": {"compress": "cake", "budget": 0.1},
    "bound": None,
    "idle": {"compress": "cake", "budget": 0.1, "min_prompt": 1_000_000},
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--method", default="cake")
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=6000, help="tokens per prompt")
    parser.add_argument("--steps", type=int, default=48, help="decode steps to time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(CONFIGURATIONS), choices=CONFIGURATIONS)
    parser.add_argument("--dtype", default="auto", help="bfloat16 for the demo model")
    parser.add_argument("--eager", action="store_true", help="no torch.compile")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def child(args: argparse.Namespace) -> dict[str, float]:
    """One engine, one batch of prompts, its steps timed."""
    settings = json.loads(args.child)
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="4",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
    )
    from vllm import LLM, SamplingParams

    from vllm_kvcompress.demo.text import english

    llm = LLM(
        args.model,
        max_model_len=8192,
        enforce_eager=args.eager,
        dtype=args.dtype,
        distributed_executor_backend="uni",
        enable_prefix_caching=False,
        **({"additional_config": {"kvcompress": settings}} if settings else {}),
    )
    spent = _time_compression(llm) if settings else [0.0]
    ids = llm.get_tokenizer().encode(english()[: args.batch * args.prompt * 8])
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=args.steps + args.batch + 64, ignore_eos=True)
    for i in range(args.batch):
        prompt = ids[i * args.prompt : (i + 1) * args.prompt]
        assert len(prompt) == args.prompt, "the text is too short for this many prompts"
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    scheduler = engine.engine_core.engine_core.scheduler
    prefill: list[float] = []
    decode: list[float] = []
    while len(decode) < args.steps:
        pending = len(scheduler.waiting) or any(r.is_prefill_chunk for r in scheduler.running)
        pending = pending or not scheduler.running
        start = time.perf_counter()
        engine.step()
        (prefill if pending else decode).append(time.perf_counter() - start)
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "decode_step_ms": statistics.median(decode) * 1e3,
        "prefill_s": sum(prefill),
        "compression_s": spent[0],
        "blocks_in_use": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
    }


def _time_compression(llm: Any) -> list[float]:
    """Sum up the time inside `after_attention` and `end_step` of the worker's compressor."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    compressor, spent = worker.compressor, [0.0]
    for name in ("after_attention", "end_step"):
        inner = getattr(compressor, name)

        def timed(*a: Any, _inner: Any = inner, **k: Any) -> Any:
            start = time.perf_counter()
            try:
                return _inner(*a, **k)
            finally:
                spent[0] += time.perf_counter() - start

        setattr(compressor, name, timed)
    return spent


def run_child(args: argparse.Namespace, name: str) -> dict[str, float]:
    prompt = int(args.budget * args.prompt) if name == "bound" else args.prompt
    line = [sys.executable, __file__, *sys.argv[1:], "--prompt", str(prompt)]
    line += ["--child", json.dumps(CONFIGURATIONS[name])]
    out = subprocess.run(line, capture_output=True, text=True, check=False)
    if out.returncode:
        raise SystemExit(f"a benchmark process failed:\n{out.stderr[-3000:]}")
    result: dict[str, float] = json.loads(out.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    args = parse_args()
    if args.child:
        print(json.dumps(child(args)))
        return
    CONFIGURATIONS["on"] = {"compress": args.method, "budget": args.budget}
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(args.rounds):
        done = {}
        for name in args.only:
            done[name] = run_child(args, name)
            print(f"round {number + 1} {name}: {done[name]}", flush=True)
        rounds.append(done)
    result = report(args, rounds)
    print(json.dumps(result, indent=2))
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n")


def report(args: argparse.Namespace, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    def median(of: Any) -> float:
        return round(statistics.median(of(done) for done in rounds), 4)

    ratios: dict[str, float] = {}
    if {"off", "on"} <= set(args.only):
        ratios["decode_speedup"] = median(
            lambda d: d["off"]["decode_step_ms"] / d["on"]["decode_step_ms"]
        )
        ratios["compression_share_of_prefill"] = median(
            lambda d: d["on"]["compression_s"] / d["on"]["prefill_s"]
        )
    if {"off", "bound"} <= set(args.only):
        ratios["decode_speedup_bound"] = median(
            lambda d: d["off"]["decode_step_ms"] / d["bound"]["decode_step_ms"]
        )
    if {"off", "idle"} <= set(args.only):
        for key in ("decode_step_ms", "prefill_s"):
            ratios[f"idle_{key}_ratio"] = median(lambda d, key=key: d["idle"][key] / d["off"][key])
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "command": " ".join(["python", "benchmarks/bench_engine.py", *sys.argv[1:]]),
        "commit": commit,
        "shapes": {"batch": args.batch, "prompt_tokens": args.prompt, "budget": args.budget},
        "medians": {
            name: {key: median(lambda d, k=key, n=name: d[n][k]) for key in rounds[0][name]}
            for name in args.only
        },
        "ratios": ratios,
    }


if __name__ == "__main__":
    main()
