"""Send vLLM alone and the compressed server the same requests, and report both side by side.

Both are real servers. They start together, because a start keeps one core busy most of the time.
Then they take turns: a question about a long text, and an ordinary request. Every request has its
own prefix-cache salt, so each server computes each prompt in full.
"""

import argparse
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from rich.console import Console

from vllm_kvcompress.demo.ask import NAME, Reply, ask, summary
from vllm_kvcompress.demo.progress import Progress
from vllm_kvcompress.demo.questions import CHOSEN, REQUEST, REQUEST_TOKENS, prompt
from vllm_kvcompress.demo.report import save_picture, show, show_request
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.registry import RECOMMENDED, RECOMMENDED_BUDGETS
from vllm_kvcompress.serving.process import CACHE_SPACE, ENVIRONMENT, Server, command, launch
from vllm_kvcompress.serving.text import long_prompt
from vllm_kvcompress.settings.packed_dtype import K4V3, PACKED_DTYPES
from vllm_kvcompress.settings.text import refuse_other_digits

ALONE, COMPRESSED = "vLLM alone", "compressed"
RESERVED_CORES = "VLLM_CPU_NUM_OF_RESERVED_CPU"
SHORT = {"tokens": 3000, "rounds": 1}
LONG = {"tokens": 6000, "rounds": 3}


def _whole_number(text: str) -> int:
    """Parse a command-line integer written in ASCII digits."""
    try:
        refuse_other_digits(text)
    except ConfigError as e:
        raise argparse.ArgumentTypeError(str(e)) from None
    return int(text)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_kvcompress.demo", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--method", default=RECOMMENDED)
    parser.add_argument("--budget", default=str(RECOMMENDED_BUDGETS["balanced"]))
    parser.add_argument("--packed-dtype", default=K4V3, choices=PACKED_DTYPES)
    parser.add_argument(
        "--long",
        action="store_true",
        help="the thorough form: a text of {tokens} tokens, the question {rounds} times".format(
            **LONG
        ),
    )
    parser.add_argument(
        "--tokens",
        type=_whole_number,
        help=f"length of the text (default: {SHORT['tokens']}; with --long: {LONG['tokens']})",
    )
    parser.add_argument(
        "--max-tokens", type=_whole_number, default=96, help="output tokens per request"
    )
    parser.add_argument(
        "--rounds",
        type=_whole_number,
        help="how many times to ask the question"
        f" (default: {SHORT['rounds']}; with --long: {LONG['rounds']})",
    )
    parser.add_argument("--picture", type=Path, help="also save the report as this SVG file")
    parser.add_argument(
        "--serve", action="store_true", help="only start the compressed server and leave it running"
    )
    parser.add_argument("--port", type=_whole_number, default=8000, help="port of --serve")
    args = parser.parse_args(argv)
    for name, default in (LONG if args.long else SHORT).items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    return args


def compression(args: argparse.Namespace) -> list[str]:
    """Return the flags that only the compressed server gets."""
    return [
        "--kv-compress",
        args.method,
        "--kv-budget",
        args.budget,
        "--kv-packed-dtype",
        args.packed_dtype,
        "--kv-compress-config",
        '{"log_requests": true}',
    ]


def common(args: argparse.Namespace) -> list[str]:
    """Return the flags that both servers get."""
    # Without --enforce-eager, vLLM compiles the model for minutes before it serves.
    flags = ["--served-model-name", NAME, "--max-model-len", "8192", "--enforce-eager"]
    # Both servers' blocks are counted, so they need one size: that of k4v3 on a CPU.
    flags += ["--block-size", "32"]
    return [*flags, *([] if _multiplies_bfloat16() else ["--dtype", "float32"])]


def _multiplies_bfloat16() -> bool:
    """Return whether bfloat16, the checkpoint's dtype, is at least as fast as float32 here.

    A CPU without AVX-512 emulates bfloat16: a matrix product takes about eight times as long.
    """
    if torch.cuda.is_available():
        return True
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def environment() -> dict[str, str]:
    """Return the KV cache size: the operator's, or 1 GiB because two servers share the machine."""
    return {CACHE_SPACE: os.environ.get(CACHE_SPACE, "1")}


def _every_core() -> dict[str, str]:
    """Return a setting that reserves no core for the API server, or the operator's setting.

    By default vLLM reserves one core, which is half of a two-core machine. The demo sends one
    request at a time, so the API servers are idle while a model computes.
    """
    return {RESERVED_CORES: os.environ.get(RESERVED_CORES, "0")}


@contextmanager
def both_servers(args: argparse.Namespace, model: str) -> Iterator[dict[str, Server]]:
    """Start vLLM alone and the compressed server, without waiting until they are healthy.

    Args:
        model: the model's folder.
    """
    flags = {ALONE: common(args), COMPRESSED: [*common(args), *compression(args)]}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers: dict[str, Server] = {}
        for name, arguments in flags.items():
            print(f"vllm serve {args.model} {shlex.join(arguments)}", flush=True)
            log = logs / f"{len(servers)}.log"
            servers[name] = stack.enter_context(
                launch(model, arguments, log, environment=environment() | _every_core())
            )
        yield servers


def wait_healthy(servers: dict[str, Server], progress: Progress) -> None:
    """Return once both servers are healthy.

    Raises:
        RuntimeError: a server ended, or was not healthy within 10 minutes.
    """
    with progress.step("both servers", "starting") as step:
        for name, server in servers.items():
            server.wait_healthy(deadline_s=600)
            step.state = f"{name} is up"
        step.state = "up"


def replies(
    args: argparse.Namespace,
    servers: dict[str, Server],
    question: str,
    request: str,
    progress: Progress,
) -> dict[str, list[Reply]]:
    """Return each server's replies: the question `args.rounds` times, then the request.

    Args:
        servers: the healthy servers.
        question: the prompt that ends in the question.
        request: the prompt of the ordinary request.
        progress: shows how far each request is.
    """
    by_server: dict[str, list[Reply]] = {name: [] for name in servers}
    # The first request to a server includes one-time work, so it is not timed.
    for name, server in servers.items():
        with progress.step(name, "warming up") as step:
            ask(server, question[:200], tokens=4, salt="warm-up")
            step.state = "warm"
    rounds = [f"question {number} of {args.rounds}" for number in range(1, args.rounds + 1)]
    if args.rounds == 1:
        rounds = ["question"]
    contents = dict.fromkeys(rounds, question) | {"ordinary request": request}
    for what, content in contents.items():
        for name, server in servers.items():
            by_server[name].append(_ask(args, name, server, content, what, progress))
    return by_server


def _ask(
    args: argparse.Namespace,
    name: str,
    server: Server,
    content: str,
    what: str,
    progress: Progress,
) -> Reply:
    """Return the reply to one request, and show its progress meanwhile."""
    with progress.step(f"{name}, {what}", "computing the prompt") as step:

        def tell(count: int) -> None:
            step.state = f"{count} of {args.max_tokens} output tokens"

        return ask(server, content, tokens=args.max_tokens, salt=what, on_tokens=tell)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    model = str(Path(args.model).resolve())
    if args.serve:
        line = command(model, args.port, [*common(args), *compression(args)])
        os.execvpe(line[0], line, {**ENVIRONMENT, **os.environ, **environment()})
    # sys.exit unwinds the stack, which ends the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    progress = Progress(Console())
    with both_servers(args, model) as servers:
        # This import takes seconds, so it runs while the servers start.
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        question = prompt(tokenizer, args.tokens, CHOSEN)
        request = long_prompt(tokenizer, REQUEST_TOKENS, REQUEST)
        wait_healthy(servers, progress)
        by_server = replies(args, servers, question, request, progress)
    off, on = (summary(by_server[name][:-1], tokenizer) for name in (ALONE, COMPRESSED))
    console = Console(width=100, highlight=False, record=args.picture is not None)
    status = show(
        off,
        on,
        question=CHOSEN,
        method=args.method,
        budget=args.budget,
        packed_dtype=args.packed_dtype,
        console=console,
    )
    off, on = (summary(by_server[name][-1:], tokenizer) for name in (ALONE, COMPRESSED))
    status |= show_request(off, on, request=REQUEST, console=console)
    if args.picture is not None:
        save_picture(console, args.picture, "make demo")
    return status


if __name__ == "__main__":
    sys.exit(main())
