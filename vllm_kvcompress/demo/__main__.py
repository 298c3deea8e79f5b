"""Send concurrent prompts to vLLM alone, then to the compressed server, and report both.

Both are real servers with the same small pool of KV blocks. They start together, because a start
keeps one core busy most of the time. Then they take turns: one server is idle while the other is
measured. Each of these requests has a cache salt of its own, so each server computes each prompt
in full.

Two further servers then run chats of several turns, whose later turns read the prefix cache: vLLM
alone, and the plugin with --kv-reuse. Their pools hold only some of the chats.
"""

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console

from vllm_kvcompress.demo import chats
from vllm_kvcompress.demo.ask import NAME, Measured, ask_all
from vllm_kvcompress.demo.figures import compare, failures, losses, turn
from vllm_kvcompress.demo.progress import show_step
from vllm_kvcompress.demo.questions import CHOSEN, REQUEST, UNCOMPRESSED, prompt, sections
from vllm_kvcompress.demo.report import (
    save_picture,
    show_load,
    show_losses,
    show_outputs,
    show_question,
)
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.registry import RECOMMENDED
from vllm_kvcompress.serving.process import CACHE_SPACE, ENVIRONMENT, Server, command, launch
from vllm_kvcompress.settings.packed_dtype import AUTO, PACKED_DTYPES
from vllm_kvcompress.settings.text import refuse_other_digits

ALONE, COMPRESSED = "vLLM alone", "compressed"
RESERVED_CORES = "VLLM_CPU_NUM_OF_RESERVED_CPU"
QUESTION_TEXT = 1600
"""Tokens of the text before the question, for which it was chosen."""
BLOCK = 128
"""Tokens of a KV block on both servers: vLLM's default on CPUs."""
FIT = 2
"""Uncompressed requests that fit into the pool."""
AROUND = 160
"""Most tokens around a prompt's text: chat template and instruction or questions."""
QUESTION_TOKENS = 96
"""Output tokens of the question."""
SHORT = {"tokens": 1200, "requests": 6, "max_tokens": 128}
LONG = {"tokens": 3200, "requests": 12, "max_tokens": 384}


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
    parser.add_argument("--budget", default="0.2")
    parser.add_argument("--packed-dtype", default=AUTO, choices=PACKED_DTYPES)
    parser.add_argument(
        "--long",
        action="store_true",
        help="the thorough form: {requests} prompts of {tokens} tokens, {max_tokens} output tokens"
        " each".format(**LONG),
    )
    for flag, what in (
        ("--tokens", "tokens of each prompt's text"),
        ("--requests", "prompts sent at once"),
        ("--max-tokens", "output tokens of each of these requests"),
    ):
        name = flag[2:].replace("-", "_")
        defaults = f" (default: {SHORT[name]}; with --long: {LONG[name]})"
        parser.add_argument(flag, type=_whole_number, help=what + defaults)
    parser.add_argument("--json", type=Path, help="also save all figures as this JSON file")
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
    flags = ["--kv-compress", args.method, "--kv-budget", args.budget]
    if args.packed_dtype != AUTO:
        flags += ["--kv-packed-dtype", args.packed_dtype]
    return [*flags, "--kv-compress-config", '{"log_requests": true}']


def common() -> list[str]:
    """Return the flags of every server, apart from the size of its pool."""
    # Without --enforce-eager, vLLM compiles the model for minutes before it serves.
    flags = ["--served-model-name", NAME, "--enforce-eager", "--enable-prompt-tokens-details"]
    return [*flags, *([] if _multiplies_bfloat16() else ["--dtype", "float32"])]


def pool_blocks(args: argparse.Namespace) -> int:
    """Return the KV blocks that `FIT` uncompressed requests need at their end."""
    return FIT * -(-_longest(args) // BLOCK)


def _longest(args: argparse.Namespace) -> int:
    text = max(args.tokens + args.max_tokens, QUESTION_TEXT + QUESTION_TOKENS)
    return int(text + AROUND)


def pool(args: argparse.Namespace) -> list[str]:
    """Return the flags that give both servers the same small pool."""
    return _pool(pool_blocks(args), BLOCK, _longest(args))


def _pool(blocks: int, block_size: int, max_model_len: int) -> list[str]:
    # vLLM keeps one more block, the null block, for itself.
    flags = ["--block-size", str(block_size), "--num-gpu-blocks-override", str(blocks + 1)]
    return [*flags, "--max-model-len", str(max_model_len)]


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

    By default vLLM reserves one core, which is half of a two-core machine.
    """
    return {RESERVED_CORES: os.environ.get(RESERVED_CORES, "0")}


def server_flags(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the flags of both servers by their names."""
    shared = [*common(), *pool(args)]
    return {ALONE: shared, COMPRESSED: [*shared, *compression(args)]}


def chat_flags() -> dict[str, list[str]]:
    """Return the flags of both servers of the chats."""
    sixteen_bits = _multiplies_bfloat16()
    off, on = (
        [
            *common(),
            *_pool(
                chats.pool_blocks(compressed=compressed, sixteen_bits=sixteen_bits),
                chats.BLOCK,
                -(-chats.CHAT_TOKENS // chats.BLOCK) * chats.BLOCK,
            ),
        ]
        for compressed in (False, True)
    )
    return {ALONE: off, COMPRESSED: [*on, *chats.REUSE.split()]}


@contextmanager
def both_servers(flags: dict[str, list[str]], model: str) -> Iterator[dict[str, Server]]:
    """Start vLLM alone and the compressed server, without waiting until they are healthy.

    Args:
        flags: flags by the names of the servers.
        model: the model's folder.
    """
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers: dict[str, Server] = {}
        for name, arguments in flags.items():
            print(f"vllm serve {os.path.relpath(model)} {shlex.join(arguments)}", flush=True)
            log = logs / f"{len(servers)}.log"
            servers[name] = stack.enter_context(
                launch(model, arguments, log, environment=environment() | _every_core())
            )
        yield servers


def wait_healthy(servers: dict[str, Server], console: Console) -> None:
    """Return once both servers are healthy.

    Raises:
        RuntimeError: a server ended, or was not healthy within 10 minutes.
    """
    with show_step(console, "both servers", "starting") as step:
        for name, server in servers.items():
            server.wait_healthy(deadline_s=600)
            step.state = f"{name} is up"
        step.state = "up"


def measure(
    servers: dict[str, Server],
    what: str,
    prompts: Sequence[str],
    tokens: int,
    console: Console,
) -> tuple[Measured, Measured]:
    """Send all prompts at once, first to vLLM alone and then to the compressed server.

    Args:
        what: names the requests in the progress lines and in their salts.
        tokens: output tokens per request.
    """
    measured = []
    for name, server in servers.items():
        with show_step(console, f"{name}, {what}", "computing prompts") as step:

            def tell(count: int) -> None:
                step.state = f"{count} of {tokens * len(prompts)} output tokens"

            measured.append(ask_all(server, prompts, tokens=tokens, salt=what, on_tokens=tell))
    off, on = measured
    return off, on


def measure_chats(
    model: str, requests: Sequence[str], console: Console
) -> tuple[list[chats.Turn], list[chats.Turn]]:
    """Start both servers of the chats, and run all chats, first with vLLM alone.

    Args:
        requests: the first message of each chat.
    """
    measured = []
    with both_servers(chat_flags(), model) as servers:
        wait_healthy(servers, console)
        measure(servers, "warming up", [requests[0][:200]], 8, console)
        for name, server in servers.items():
            with show_step(console, f"{name}, chats", "computing prompts") as step:
                turns = []
                for turn in chats.run(server, requests):
                    turns.append(turn)
                    step.state = f"{len(turns)} of {chats.CHATS * chats.TURNS} turns"
            measured.append(turns)
    off, on = measured
    return off, on


def origin() -> dict[str, str]:
    """Return the machine and the commit, for the figures' file.

    Raises:
        SystemExit: this is no checkout of the repository.
    """
    try:
        from benchmarks.origin import commit, machine
    except ImportError:
        raise SystemExit("--json names the commit: run the demo in a checkout's folder") from None
    return {"machine": machine(), "commit": commit()}


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    model = str(Path(args.model).resolve())
    if args.serve:
        flags = [*common(), "--max-model-len", "8192", *compression(args)]
        line = command(model, args.port, flags)
        os.execvpe(line[0], line, {**ENVIRONMENT, **os.environ, **environment()})
    source = origin() if args.json else {}
    # sys.exit unwinds the stack, which ends the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    terminal = Console()
    with both_servers(server_flags(args), model) as servers:
        # This import takes seconds, so it runs while the servers start.
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        texts = sections(tokenizer, args.tokens, args.requests)
        question = prompt(tokenizer, QUESTION_TEXT, CHOSEN)
        requests = [f"{text}\n\n{REQUEST}" for text in texts]
        wait_healthy(servers, terminal)
        # The first request to a server includes one-time work.
        measure(servers, "warming up", [question[:200]], 8, terminal)
        one_measured = measure(servers, "one request", [question], QUESTION_TOKENS, terminal)
        load_measured = measure(
            servers, f"{args.requests} requests at once", requests, args.max_tokens, terminal
        )
    texts = sections(tokenizer, chats.TEXT_TOKENS, chats.CHATS)
    turns = measure_chats(model, [f"{text}\n\n{REQUEST}" for text in texts], terminal)
    end = tokenizer.eos_token_id
    one, load = compare(*one_measured, end), compare(*load_measured, end)
    answers = [turn(measured.replies[0], end) for measured in one_measured]
    named = [CHOSEN.named(tokenizer.decode(ids[UNCOMPRESSED:])) for ids in answers]
    lost = losses(one, load, [fact for fact in named[0] if fact not in named[1]])
    lost += chats.losses(*turns)
    failed = [*failures(one, load), *chats.failures(turns[1])]
    console = Console(width=100, highlight=False, record=args.picture is not None)
    console.rule(f"[bold]vllm serve MODEL {shlex.join(compression(args)[:-2])}[/]")
    show_load(load, pool=pool_blocks(args), fit=FIT, instruction=REQUEST, console=console)
    show_outputs(load, tokenizer.decode, console)
    show_question(one, CHOSEN, answers, named, tokenizer.decode, console)
    console.rule(f"[bold]vllm serve MODEL {chats.REUSE}[/]")
    chats.show(*turns, sixteen_bits=_multiplies_bfloat16(), console=console)
    show_losses(lost, failed, console)
    if args.picture is not None:
        save_picture(console, args.picture, "make demo")
    if args.json is not None:
        figures = {
            "command": shlex.join(
                ["python", "-m", "vllm_kvcompress.demo", *(argv or sys.argv[1:])]
            ),
            "date": datetime.now(UTC).date().isoformat(),
            **source,
            "vllm": version("vllm"),
            "flags": dict(zip(("off", "on"), server_flags(args).values(), strict=True)),
            "pool": {"blocks": pool_blocks(args), "block_tokens": BLOCK, "fit_uncompressed": FIT},
            "at_once": {"instruction": REQUEST, "equal": load.equal, **asdict(load)},
            "question": {"asked": CHOSEN.asked, "facts": named, **asdict(one)},
            "chats": {
                "flags": dict(zip(("off", "on"), chat_flags().values(), strict=True)),
                "off": [asdict(turn) for turn in turns[0]],
                "on": [asdict(turn) for turn in turns[1]],
            },
            "losses": lost,
            "failures": failed,
        }
        args.json.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
