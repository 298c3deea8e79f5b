"""How many requests one pool serves at once, and how fast: a real server, off and compressed.

    python benchmarks/bench_concurrency.py --model .cache/smollm2-135m-instruct

Two servers, one after the other, with the same number of KV blocks. Each is sent the same prompts
all at once by ordinary HTTP clients, while its gauges are watched. The first round warms up.
"""

import argparse
import concurrent.futures
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from origin import commit, machine
from transformers import AutoTokenizer

from vllm_kvcompress.serving.process import CACHE_SPACE, Server, serve
from vllm_kvcompress.serving.text import english


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each answer")
    parser.add_argument("--blocks", type=int, default=30, help="KV blocks of 128 tokens")
    parser.add_argument("--budget", default="0.2")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    return parser.parse_args()


def watch(server: Server, stop: threading.Event, seen: list[float]) -> None:
    while not stop.wait(0.25):
        seen.append(server.metric("vllm:num_requests_running"))


def round_of(server: Server, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """Send all prompts at once; seconds, the most and the usual number that ran together."""

    def ask(prompt: list[int]) -> int:
        body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=1800)
        return int(answer.raise_for_status().json()["usage"]["completion_tokens"])

    stop, seen = threading.Event(), []
    watcher = threading.Thread(target=watch, args=(server, stop, seen))
    preempted = server.metric("vllm:num_preemptions_total")
    start = time.perf_counter()
    watcher.start()
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        counts = list(pool.map(ask, prompts))
    seconds = time.perf_counter() - start
    stop.set()
    watcher.join()
    assert counts == [tokens] * len(prompts), counts
    return {
        "seconds": round(seconds, 2),
        "running_most": max(seen),
        "running_median": statistics.median(seen),
        "preemptions": server.metric("vllm:num_preemptions_total") - preempted,
    }


def main() -> None:
    args = parse_args()
    model = str(Path(args.model).resolve())
    ids = AutoTokenizer.from_pretrained(model).encode(english())
    flags = [
        *("--served-model-name", "demo", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--max-model-len", str(args.prompt + args.tokens + 128)),
        *("--num-gpu-blocks-override", str(args.blocks + 1)),
    ]
    compressed = ["--kv-compress", "cake", "--kv-budget", args.budget, "--kv-min-prompt", "512"]
    result: dict[str, Any] = {
        "machine": machine(),
        "command": " ".join(["python", "benchmarks/bench_concurrency.py", *sys.argv[1:]]),
        "commit": commit(),
        "shapes": {
            **{"requests": args.requests, "prompt_tokens": args.prompt, "tokens": args.tokens},
            **{"blocks": args.blocks, "block_size": 128, "budget": args.budget},
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, extra in (("off", []), ("cake", compressed)):
            log, environment = Path(folder) / name, {CACHE_SPACE: "1"}
            with serve(model, [*flags, *extra], log, environment=environment) as server:
                rounds = []
                for turn in range(1 + args.rounds):
                    starts = [(turn * args.requests + i) * 37 for i in range(args.requests)]
                    prompts = [ids[at : at + args.prompt] for at in starts]
                    assert all(len(prompt) == args.prompt for prompt in prompts), "text too short"
                    rounds.append(round_of(server, prompts, args.tokens))
                result[name] = rounds[1:]
    times = [
        statistics.median(turn["seconds"] for turn in result[name]) for name in ("off", "cake")
    ]
    result["speedup"] = round(times[0] / times[1], 2)
    print(json.dumps(result, indent=2))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
