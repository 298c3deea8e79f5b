"""Measure concurrency and throughput of a real server with and without compression.

    python benchmarks/bench_concurrency.py --model .cache/smollm2-135m-instruct

Servers run one after the other with the same number of KV blocks: vLLM alone, compression when the
prefill ends, and compression after a look-ahead. HTTP clients send all prompts at once to each
server while its metrics are sampled. Two requests with short outputs warm each server up. The
picture shows the last round.
"""

import argparse
import concurrent.futures
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from origin import commit, machine
from transformers import AutoTokenizer

from vllm_kvcompress.methods.registry import RECOMMENDED
from vllm_kvcompress.serving.process import CACHE_SPACE, Server, serve
from vllm_kvcompress.serving.text import english

OFF, WITHOUT_LOOKAHEAD = "vLLM alone", "when the prefill ends"
LOOKAHEAD = "look-ahead"
BLOCK = 128
_COLORS = ("#616e7c", "#2171b5", "#b5342f")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--method", default=RECOMMENDED)
    parser.add_argument("--budget", default="0.2")
    parser.add_argument("--lookahead", type=int, default=32, help="tokens")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=1500, help="tokens per prompt")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per output")
    parser.add_argument("--blocks", type=int, default=30, help=f"KV blocks of {BLOCK} tokens")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="auto", help="auto uses the dtype of the checkpoint")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    parser.add_argument("--picture", type=Path, help="save blocks over time as a PNG")
    return parser.parse_args()


@dataclass(slots=True)
class MetricSamples:
    """Samples of a server's metrics during one round.

    Args:
        seconds: times since the start of the round.
        running: running requests.
        blocks: KV blocks in use, without the null block.
    """

    seconds: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    blocks: list[float] = field(default_factory=list)


def sample_metrics(
    server: Server, blocks: int, stop: threading.Event, samples: MetricSamples
) -> None:
    start = time.perf_counter()
    while not stop.wait(0.25):
        samples.running.append(server.metric("vllm:num_requests_running"))
        samples.blocks.append(round(server.metric("vllm:kv_cache_usage_perc") * blocks, 1))
        samples.seconds.append(round(time.perf_counter() - start, 2))


def run_round(
    server: Server, prompts: Sequence[list[int]], tokens: int, blocks: int
) -> tuple[dict[str, float], MetricSamples]:
    """Send all prompts at once; return the figures of the round and the metric samples."""

    def complete(prompt: list[int]) -> int:
        body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=1800)
        return int(response.raise_for_status().json()["usage"]["completion_tokens"])

    stop, samples = threading.Event(), MetricSamples()
    sampler = threading.Thread(target=sample_metrics, args=(server, blocks, stop, samples))
    preempted = server.metric("vllm:num_preemptions_total")
    start = time.perf_counter()
    sampler.start()
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        counts = list(pool.map(complete, prompts))
    seconds = time.perf_counter() - start
    stop.set()
    sampler.join()
    assert counts == [tokens] * len(prompts), counts
    return {
        "seconds": round(seconds, 2),
        "running_most": max(samples.running),
        "running_mean": round(statistics.fmean(samples.running), 2),
        "blocks_mean": round(statistics.fmean(samples.blocks), 1),
        "preemptions": server.metric("vllm:num_preemptions_total") - preempted,
    }, samples


def servers(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the compression flags of each server."""
    compression = [
        "--kv-compress",
        args.method,
        "--kv-budget",
        args.budget,
        "--kv-min-prompt",
        "512",
    ]
    return {
        OFF: [],
        WITHOUT_LOOKAHEAD: [*compression, "--kv-lookahead", "0"],
        LOOKAHEAD: [*compression, "--kv-lookahead", str(args.lookahead)],
    }


def main() -> None:
    args = parse_args()
    model = str(Path(args.model).resolve())
    ids = AutoTokenizer.from_pretrained(model).encode(english())
    flags = [
        "--served-model-name",
        "demo",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--max-model-len",
        str(args.prompt + args.tokens + BLOCK),
        "--dtype",
        args.dtype,
        "--num-gpu-blocks-override",
        str(args.blocks + 1),
    ]
    result: dict[str, Any] = {
        "machine": machine(),
        "command": " ".join(["python", "benchmarks/bench_concurrency.py", *sys.argv[1:]]),
        "commit": commit(),
        "shapes": {
            **{"method": args.method, "budget": args.budget, "lookahead": args.lookahead},
            **{"requests": args.requests, "prompt_tokens": args.prompt, "tokens": args.tokens},
            **{"blocks": args.blocks, "block_size": BLOCK, "dtype": args.dtype},
        },
        "servers": {},
    }
    last: dict[str, MetricSamples] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, extra) in enumerate(servers(args).items()):
            log, environment = Path(folder) / str(number), {CACHE_SPACE: "1"}
            with serve(model, [*flags, *extra], log, environment=environment) as server:
                rounds = []
                starts = range(0, 37 * (args.rounds * args.requests + 2), 37)
                texts = [ids[start : start + args.prompt] for start in starts]
                assert all(len(prompt) == args.prompt for prompt in texts), "text too short"
                # Long enough to compress the prompts after the look-ahead and decode after that.
                run_round(server, texts[-2:], args.lookahead + 16, args.blocks)
                for turn in range(args.rounds):
                    prompts = texts[turn * args.requests :][: args.requests]
                    figures, last[name] = run_round(server, prompts, args.tokens, args.blocks)
                    rounds.append(figures)
                result["servers"][name] = rounds
    times = {
        name: statistics.median(turn["seconds"] for turn in rounds)
        for name, rounds in result["servers"].items()
    }
    result["requests_per_second"] = {
        name: round(args.requests / seconds, 3) for name, seconds in times.items()
    }
    result["over_at_once"] = {
        name: round(times[WITHOUT_LOOKAHEAD] / seconds, 3) for name, seconds in times.items()
    }
    print(json.dumps(result, indent=2))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=2) + "\n")
    if args.picture:
        picture(last, args, args.picture)


def picture(last: dict[str, MetricSamples], args: argparse.Namespace, path: Path) -> None:
    """Plot blocks in use and running requests over the seconds of each server's last round."""
    figure = Figure(figsize=(9, 6), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for color, (name, samples) in zip(_COLORS, last.items(), strict=True):
        upper.step(
            samples.seconds, samples.blocks, color=color, linewidth=1.4, label=name, where="post"
        )
        lower.step(samples.seconds, samples.running, color=color, linewidth=1.4, where="post")
    upper.axhline(args.blocks, color="#cbd2d9", linewidth=1.0, zorder=0)
    upper.set_ylabel(f"KV blocks in use, of {args.blocks}")
    lower.set_ylabel(f"running requests, of {args.requests}")
    lower.set_xlabel("seconds")
    upper.set_title(
        f"{args.requests} prompts of {args.prompt:,} tokens, {args.tokens:,} output tokens:"
        f" {args.method} at {args.budget}, look-ahead {args.lookahead}",
        fontsize=10,
    )
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=len(last))
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


if __name__ == "__main__":
    main()
