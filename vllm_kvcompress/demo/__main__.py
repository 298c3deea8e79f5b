"""Send one long prompt to the real server, uncompressed and compressed, and report both."""

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI
from rich.console import Console
from transformers import AutoTokenizer

from vllm_kvcompress.demo.report import save_picture, show
from vllm_kvcompress.demo.server import ENVIRONMENT, Compressed, Server, command, serve
from vllm_kvcompress.demo.text import long_prompt

NAME = "demo"


@dataclass(frozen=True, slots=True)
class Run:
    """What one server did with the prompt."""

    answer: str
    first_token: str
    prompt_tokens: int
    tokens_per_second: float
    blocks: float
    compressed: Compressed | None


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m vllm_kvcompress.demo", description=__doc__)
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--method", default="cake")
    parser.add_argument("--budget", default="0.1")
    parser.add_argument("--tokens", type=int, default=6000, help="length of the text")
    parser.add_argument("--max-tokens", type=int, default=64, help="length of the answer")
    parser.add_argument("--picture", type=Path, help="also save the report as this SVG file")
    parser.add_argument("--serve", action="store_true", help="leave the server up, no report")
    parser.add_argument("--port", type=int, default=8000)
    return parser.parse_args(argv)


def compression(args: argparse.Namespace) -> list[str]:
    return [
        *("--kv-compress", args.method, "--kv-budget", args.budget),
        *("--kv-compress-config", '{"log_requests": true}'),
    ]


def common(args: argparse.Namespace) -> list[str]:
    # Eager: the demo shows memory and ratios, and must not spend minutes compiling first.
    return ["--served-model-name", NAME, "--max-model-len", "8192", "--enforce-eager"]


def ask(server: Server, prompt: str, max_tokens: int) -> Run:
    """Stream one answer; time decoding alone, and watch vLLM's own usage gauge meanwhile."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600)
    usage: list[float] = []
    decoding, done = threading.Event(), threading.Event()

    def watch() -> None:
        decoding.wait()
        while not done.is_set():
            usage.append(server.metric("vllm:kv_cache_usage_perc"))
            done.wait(0.2)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    pieces, times, prompt_tokens, tokens = [], [], 0, 0
    stream = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    for event in stream:
        if event.choices and event.choices[0].delta.content:
            pieces.append(event.choices[0].delta.content)
            times.append(time.perf_counter())
            decoding.set()
        if event.usage:
            prompt_tokens, tokens = event.usage.prompt_tokens, event.usage.completion_tokens
    done.set()
    decoding.set()
    watcher.join()
    total = server.metric("vllm:cache_config_info", "num_gpu_blocks") - 1  # one is the null block
    lines = server.compressed()
    return Run(
        answer="".join(pieces),
        first_token=pieces[0] if pieces else "",
        prompt_tokens=prompt_tokens,
        tokens_per_second=(tokens - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0,
        blocks=max(usage, default=0.0) * total,
        compressed=lines[-1] if lines else None,
    )


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    model = str(Path(args.model).resolve())
    if args.serve:
        line = command(model, args.port, [*common(args), *compression(args)])
        os.execvpe(line[0], line, {**ENVIRONMENT, **os.environ})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so the server ends too
    prompt = long_prompt(AutoTokenizer.from_pretrained(model), args.tokens)
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for title, extra in (("off", []), (args.method, compression(args))):
            print(f"Starting vllm serve with compression {title} ...", flush=True)
            log = Path(folder) / f"{title}.log"
            with serve(model, [*common(args), *extra], log) as server:
                ask(server, prompt[:200], 4)  # the first request of a server pays for warm-up
                runs.append(ask(server, prompt, args.max_tokens))
    console = Console(width=100, record=args.picture is not None)
    status = show(runs[0], runs[1], method=args.method, budget=args.budget, console=console)
    if args.picture is not None:
        save_picture(console, args.picture, "make demo")
    return status


if __name__ == "__main__":
    sys.exit(main())
