"""Ask vLLM alone and the compressed server about a long text, and report both side by side.

Both are the real server, up at the same time and asked in turns: a question, some times, and an
ordinary request once. Every request has a salt of its own for the prefix cache, so each prompt is
computed in full.
"""

import argparse
import os
import shlex
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoTokenizer

from vllm_kvcompress.demo.ask import NAME, Reply, ask, summary
from vllm_kvcompress.demo.progress import Progress
from vllm_kvcompress.demo.questions import CHOSEN, REQUEST, REQUEST_TOKENS, prompt
from vllm_kvcompress.demo.report import save_picture, show, show_request
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.presets import RECOMMENDED
from vllm_kvcompress.serving.process import CACHE_SPACE, ENVIRONMENT, Server, command, serve
from vllm_kvcompress.serving.text import long_prompt
from vllm_kvcompress.settings.text import refuse_other_digits

ALONE, COMPRESSED = "vLLM alone", "compressed"
RESERVED_CORES = "VLLM_CPU_NUM_OF_RESERVED_CPU"


def _whole_number(text: str) -> int:
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
    parser.add_argument("--budget", default="0.2")
    parser.add_argument("--tokens", type=_whole_number, default=6000, help="length of the text")
    parser.add_argument(
        "--max-tokens", type=_whole_number, default=96, help="tokens of each answer"
    )
    parser.add_argument(
        "--rounds", type=_whole_number, default=3, help="times that the question is asked"
    )
    parser.add_argument("--picture", type=Path, help="also save the report as this SVG file")
    parser.add_argument("--serve", action="store_true", help="leave the server up, no report")
    parser.add_argument("--port", type=_whole_number, default=8000)
    return parser.parse_args(argv)


def compression(args: argparse.Namespace) -> list[str]:
    """The flags that the compressed server has and vLLM alone does not."""
    return [
        *("--kv-compress", args.method, "--kv-budget", args.budget),
        *("--kv-compress-config", '{"log_requests": true}'),
    ]


def common(args: argparse.Namespace) -> list[str]:
    """The flags of both servers."""
    # Eager: the demo shows memory and ratios, and must not spend minutes compiling first.
    flags = ["--served-model-name", NAME, "--max-model-len", "8192", "--enforce-eager"]
    return [*flags, *([] if _multiplies_bfloat16() else ["--dtype", "float32"])]


def _multiplies_bfloat16() -> bool:
    """Whether bfloat16, the checkpoint's dtype, is no slower here than float32.

    A CPU without AVX-512 has to emulate it: a matrix product takes about eight times as long.
    """
    if torch.cuda.is_available():
        return True
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def environment() -> dict[str, str]:
    """The size of the KV cache, where the operator sets none: two servers share the machine."""
    return {CACHE_SPACE: os.environ.get(CACHE_SPACE, "1")}


def _every_core() -> dict[str, str]:
    """The setting that lets the model use every core, where the operator names no other number.

    vLLM keeps a core for a server's front end, half of a machine that has two. Here one request is
    computed at a time, and the front ends have nothing to do meanwhile.
    """
    return {RESERVED_CORES: os.environ.get(RESERVED_CORES, "0")}


def replies(
    args: argparse.Namespace, model: str, question: str, request: str, progress: Progress
) -> tuple[list[Reply], list[Reply]]:
    """What vLLM alone and the compressed server answered.

    The question comes first, `args.rounds` times, and the request last.

    Args:
        model: the model's folder.
        question: the prompt that ends in it.
        request: the other prompt.
        progress: where the waiting is shown.
    """
    flags = {ALONE: common(args), COMPRESSED: [*common(args), *compression(args)]}
    by_server: dict[str, list[Reply]] = {ALONE: [], COMPRESSED: []}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers: dict[str, Server] = {}
        for name, arguments in flags.items():
            print(f"vllm serve {args.model} {shlex.join(arguments)}", flush=True)
            with progress.step(name, "starting the server") as step:
                log = logs / f"{len(servers)}.log"
                servers[name] = stack.enter_context(
                    serve(model, arguments, log, environment=environment() | _every_core())
                )
                step.state = "the server is up"
        # A server's first request pays for its warm-up.
        for name, server in servers.items():
            with progress.step(name, "warming up") as step:
                ask(server, question[:200], tokens=4, salt="warm-up")
                step.state = "the server is warm"
        for number in range(1, args.rounds + 1):
            for name, server in servers.items():
                what = f"question {number} of {args.rounds}"
                by_server[name].append(_ask(args, name, server, question, what, progress))
        for name, server in servers.items():
            by_server[name].append(_ask(args, name, server, request, "request", progress))
    return by_server[ALONE], by_server[COMPRESSED]


def _ask(
    args: argparse.Namespace,
    name: str,
    server: Server,
    content: str,
    what: str,
    progress: Progress,
) -> Reply:
    """One request, shown while it is computed and answered."""
    with progress.step(f"{name}, {what}", "computing the prompt") as step:

        def tell(count: int) -> None:
            step.state = f"{count} of {args.max_tokens} tokens"

        return ask(server, content, tokens=args.max_tokens, salt=what, on_tokens=tell)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    model = str(Path(args.model).resolve())
    if args.serve:
        line = command(model, args.port, [*common(args), *compression(args)])
        os.execvpe(line[0], line, {**ENVIRONMENT, **os.environ, **environment()})
    # An exit unwinds the stack, so that the servers end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    tokenizer = AutoTokenizer.from_pretrained(model)
    question = prompt(tokenizer, args.tokens, CHOSEN)
    request = long_prompt(tokenizer, REQUEST_TOKENS, REQUEST)
    both = replies(args, model, question, request, Progress(Console()))
    off, on = (summary(each[:-1], tokenizer) for each in both)
    console = Console(width=100, highlight=False, record=args.picture is not None)
    status = show(off, on, question=CHOSEN, method=args.method, budget=args.budget, console=console)
    asked = [summary(each[-1:], tokenizer) for each in both]
    status |= show_request(*asked, request=REQUEST, console=console)
    if args.picture is not None:
        save_picture(console, args.picture, "make demo")
    return status


if __name__ == "__main__":
    sys.exit(main())
