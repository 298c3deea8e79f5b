"""Measure chats that grow, on servers whose KV pool holds only some of them.

    python -m benchmarks.chats --model .cache/smollm2-135m-instruct --out chats.jsonl
    python -m benchmarks.chats --report chats.jsonl

Each turn sends a whole chat again with a further question, so a chat is warm if its history is
still in the prefix cache. Chats alternate: each one waits while all others run. In a fixed order,
which is LRU's worst case, a pool that cannot hold all chats may lose every one of them; --shuffle
avoids that. Servers alternate too, after each turn of all chats, so that other load on the machine
affects all of them. The result file is written anew. It has a line about the run, a line
for each request, and after each turn a line for each server with its figures so far.

Parts:

* pressure: the pool holds --fit chats. Servers: vLLM alone, vLLM with an fp8 cache, and the plugin
  with --kv-reuse.
* warm: the pool holds all chats, and one request runs at a time. It compares the time to first
  token of a warm turn with that of vLLM alone.

Pools have equal bytes, with two exceptions. vLLM's CPU build has an fp8 cache only with AVX-512.
Elsewhere, vLLM alone with twice as many blocks stands in: fp8 would have as many. A processor
without bfloat16 instructions runs in float32. A packed page then holds the tokens of 8 blocks
instead of 4, so the plugin gets half of the blocks. Its tokens that are not packed yet then take
twice their share of the pool.
"""

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from openai import OpenAI

from benchmarks.chats_table import ALONE, PRESSURE, WARM, report
from benchmarks.jsonl import append
from benchmarks.origin import commit, machine
from vllm_kvcompress.compare.tasks import ORDINARY, CountTokens, build_items
from vllm_kvcompress.demo.ask import NAME, Reply, ask
from vllm_kvcompress.demo.chats import QUESTION_TOKENS, Chat
from vllm_kvcompress.serving.process import CACHE_SPACE, Server, launch

FP8, FP8_BLOCKS = "vLLM, fp8", "vLLM, as many blocks as fp8 would have"
_COUNTERS = {
    "prefix_cache_queries": "vllm:prefix_cache_queries_total",
    "prefix_cache_hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A server to measure.

    Args:
        name: name in the results.
        flags: flags that only this server gets.
        blocks: KV blocks in its pool, without vLLM's null block.
    """

    name: str
    flags: tuple[str, ...]
    blocks: int


@dataclass(slots=True, kw_only=True)
class RunningSystem:
    """A system's server with the chats that it has had so far.

    Args:
        before: the server's counters before the first turn.
        wall_s: seconds that each turn of all chats took.
    """

    system: System
    server: Server
    chats: list[Chat]
    before: dict[str, float] = field(default_factory=dict)
    wall_s: list[float] = field(default_factory=list)

    def counters(self) -> dict[str, float]:
        return {name: self.server.metric(metric) for name, metric in _COUNTERS.items()}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chats",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct", help="model folder")
    parser.add_argument("--parts", nargs="+", default=[PRESSURE, WARM], choices=[PRESSURE, WARM])
    parser.add_argument("--chats", type=int, default=12)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--fit", type=int, default=3, help="16-bit chats that the pool holds")
    parser.add_argument("--open", type=int, default=2, help="chats whose request runs at a time")
    parser.add_argument(
        "--shuffle",
        action="store_true",
        help="run chats in a new order in each turn; in the same order, which is the default, vLLM"
        " always evicts the history that is needed next",
    )
    parser.add_argument("--warm-chats", type=int, default=4, help="chats of the part `warm`")
    parser.add_argument("--warm-turns", type=int, default=4)
    parser.add_argument(
        "--prompt",
        nargs=2,
        type=int,
        default=(1500, 2500),
        metavar=("MIN", "MAX"),
        help="tokens of the shortest and the longest first prompt",
    )
    parser.add_argument("--output-tokens", nargs=2, type=int, default=(60, 100), metavar="TOKENS")
    parser.add_argument("--reuse", nargs="+", default=["grid"], help="values of --kv-reuse")
    parser.add_argument("--block-size", type=int, default=32, help="tokens of a KV block")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    parser.add_argument("--out", type=Path, help="JSONL file to write")
    parser.add_argument(
        "--report", nargs="+", type=Path, metavar="FILE", help="print tables of results instead"
    )
    args = parser.parse_args(argv)
    if args.out is None and not args.report:
        parser.error("give --out to measure, or --report to print tables")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if args.report:
        print(report(args.report))
        return
    args.out.unlink(missing_ok=True)
    # sys.exit unwinds the stack, which ends the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:
        logs = args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs.mkdir(parents=True, exist_ok=True)
        append(args.out, [origin(args, argv)])
        for part in args.parts:
            measure(args, part, logs)
    print(report([args.out]))


def origin(args: argparse.Namespace, argv: Sequence[str] | None) -> dict[str, Any]:
    """Return the line about the run."""
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    return {
        "command": " ".join(["python", "-m", "benchmarks.chats", *arguments_given]),
        "machine": machine(),
        "commit": commit(),
        "versions": {name: version(name) for name in ("vllm", "torch", "vllm-kvcompress")},
        "model": Path(args.model).name,
        "dtype": dtype(),
        "block_size": args.block_size,
        "chats": args.chats,
        "turns": args.turns,
        "open": args.open,
        "fit": args.fit,
        "shuffle": args.shuffle,
    }


def dtype() -> str:
    """Return bfloat16 where the processor multiplies it at least as fast as float32."""
    import torch

    fast = torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "bfloat16" if fast else "float32"


def has_fp8_cache() -> bool:
    """Return whether vLLM has an fp8 cache for this device."""
    import torch

    return torch.cuda.is_available() or bool(torch.cpu._is_avx512_supported())


def chat_tokens(args: argparse.Namespace) -> int:
    """Return the tokens that a chat of mean length has at its end."""
    turn = statistics.fmean(args.output_tokens) + QUESTION_TOKENS
    return int(statistics.fmean(args.prompt) + args.turns * turn)


def max_tokens(args: argparse.Namespace) -> int:
    """Return the tokens that no chat exceeds."""
    turns = max(args.turns, args.warm_turns)
    return int(args.prompt[1] + (turns + 1) * (args.output_tokens[1] + QUESTION_TOKENS))


def systems(
    args: argparse.Namespace, part: str, *, sixteen_bits: bool, fp8_cache: bool
) -> list[System]:
    """Return the systems of a part.

    Args:
        sixteen_bits: whether the servers run in 16 bits, not in float32.
        fp8_cache: whether vLLM has an fp8 cache here.
    """
    if part == PRESSURE:
        blocks = -(-args.fit * chat_tokens(args) // args.block_size)
    else:
        blocks = -(-(args.warm_chats + 1) * max_tokens(args) // args.block_size)
    plugin_blocks = blocks if part == WARM or sixteen_bits else blocks // 2
    found = [System(name=ALONE, flags=(), blocks=blocks)]
    if part == PRESSURE:
        fp8 = System(name=FP8, flags=("--kv-cache-dtype", "fp8"), blocks=2 * blocks)
        stand_in = System(name=FP8_BLOCKS, flags=(), blocks=2 * blocks)
        found.append(fp8 if fp8_cache else stand_in)
    if plugin_blocks * args.block_size < max_tokens(args):
        raise SystemExit(f"the longest chat exceeds {plugin_blocks} blocks: raise --fit")
    k4v3 = ("--kv-compress", "cake-chunk", "--kv-budget", "1.0", "--kv-packed-dtype", "k4v3")
    for reuse in args.reuse:
        name = f"plugin, reuse {reuse}"
        found.append(System(name=name, flags=(*k4v3, "--kv-reuse", reuse), blocks=plugin_blocks))
    return found


def first_prompts(args: argparse.Namespace, chats: int, count_tokens: CountTokens) -> list[str]:
    """Return the first prompt of each chat: an ordinary request about its own text."""
    tasks, (shortest, longest) = list(ORDINARY), args.prompt
    prompts = []
    for number in range(chats):
        tokens = shortest + (longest - shortest) * (number * 5 % chats) // max(chats - 1, 1)
        items = build_items(
            [tasks[number % len(tasks)]],
            count=number // len(tasks) + 1,
            tokens=tokens,
            seed=args.seed,
            question="last",
            count_tokens=count_tokens,
            questions_per_text=1,
        )
        prompts.append(items[-1].messages[0]["content"])
    return prompts


def new_chats(args: argparse.Namespace, prompts: Sequence[str]) -> list[Chat]:
    low, high = args.output_tokens
    return [
        Chat(
            number=number,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=low + (high - low) * (number % 6) // 5,
        )
        for number, prompt in enumerate(prompts)
    ]


def measure(args: argparse.Namespace, part: str, logs: Path) -> None:
    """Measure the systems of a part and write their lines."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    chats, turns = (
        (args.chats, args.turns) if part == PRESSURE else (args.warm_chats, args.warm_turns)
    )
    prompts = first_prompts(args, chats, lambda text: len(tokenizer.encode(text)))
    model = str(Path(args.model).resolve())
    wanted = systems(args, part, sixteen_bits=dtype() == "bfloat16", fp8_cache=has_fp8_cache())
    with ExitStack() as stack:
        running = [
            RunningSystem(
                system=system,
                server=stack.enter_context(
                    launch(
                        model,
                        server_flags(args, system),
                        logs / f"{part}_{number}.log",
                        environment={CACHE_SPACE: "2", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"},
                    )
                ),
                chats=new_chats(args, prompts),
            )
            for number, system in enumerate(wanted)
        ]
        for each in running:
            each.server.wait_healthy(deadline_s=600)
            warm_up = {"role": "user", "content": "What is a compiler? " * 100}
            send(each.server, Chat(number=-1, messages=[warm_up], max_tokens=8))
            each.before = each.counters()
        run_turn = run_under_pressure if part == PRESSURE else run_warm
        for turn in range(1, turns + 1):
            if args.shuffle:
                for each in running:
                    random.Random(f"{args.seed}:{turn}").shuffle(each.chats)
            for line in run_turn(running, turn, args.open):
                append(args.out, [{"part": part, **line}])
            for each in running:
                line = {"part": part, "system": each.system.name, **totals(args, each, turn)}
                append(args.out, [line])


def totals(args: argparse.Namespace, running: RunningSystem, turns: int) -> dict[str, Any]:
    """Return a system's figures of its first turns; later lines of a system replace this one."""
    counts = running.counters()
    return {
        "turns": turns,
        "blocks": running.system.blocks,
        "flags": server_flags(args, running.system),
        "wall_s": [round(seconds, 2) for seconds in running.wall_s],
        **{name: round(counts[name] - running.before[name]) for name in counts},
    }


def server_flags(args: argparse.Namespace, system: System) -> list[str]:
    length = -(-max_tokens(args) // args.block_size) * args.block_size
    return [
        *("--served-model-name", NAME, "--enforce-eager", "--dtype", dtype()),
        *("--block-size", str(args.block_size), "--max-model-len", str(length)),
        *("--num-gpu-blocks-override", str(system.blocks + 1)),
        "--enable-prompt-tokens-details",
        *system.flags,
    ]


def run_under_pressure(
    running: Sequence[RunningSystem], turn: int, open_chats: int
) -> Iterator[dict[str, Any]]:
    """Run one turn of all chats on one server after the other, and yield a line per request."""
    for each in running:
        start = time.perf_counter()
        with ThreadPoolExecutor(open_chats) as pool:
            replies = list(pool.map(partial(take_turn, each, turn), each.chats))
        each.wall_s.append(time.perf_counter() - start)
        yield from replies
        print(f"turn {turn}, {each.system.name}: {each.wall_s[-1]:.0f} s", flush=True)


def run_warm(
    running: Sequence[RunningSystem], turn: int, _open_chats: int
) -> Iterator[dict[str, Any]]:
    """Run each chat's turn on one server after the other, and yield a line per request."""
    for number in range(len(running[0].chats)):
        for each in running:
            yield take_turn(each, turn, each.chats[number])
    print(f"turn {turn}, pool for all chats", flush=True)


def take_turn(running: RunningSystem, turn: int, chat: Chat) -> dict[str, Any]:
    """Run one turn of a chat, and return the request's line."""
    if turn > 1:
        chat.ask_follow_up(turn)
    reply = send(running.server, chat)
    chat.messages.append({"role": "assistant", "content": reply.text})
    return {
        "system": running.system.name,
        "chat": chat.number,
        "turn": turn,
        "prompt_tokens": reply.prompt_tokens,
        "cached_tokens": reply.cached_tokens,
        "output_tokens": len(reply.token_ids),
        "first_token_s": round(reply.first_token_s, 4),
        "end_s": round(reply.end_s, 4),
    }


def send(server: Server, chat: Chat) -> Reply:
    """Send a chat, and return the greedy reply, which ends at the model's end of turn."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="-", timeout=900, max_retries=0)
    return ask(client, server, chat.messages, chat.max_tokens, salt="chats", ignore_eos=False)


if __name__ == "__main__":
    main()
