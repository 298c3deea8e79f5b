"""Measure methods on built-in tasks.

    python -m benchmarks.evidence --model .cache/smollm2-135m-instruct --tasks niah-multikey-1 \\
        --count 100 --tokens 2200 --methods cake chunkkv --budgets 0.2 0.1 --out results.jsonl

A prompt counts where the full cache names at least one of its answers. Each line of the output is
one prompt under one method and budget; a run that is started again goes on where it stopped.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence.answers import compare, full_answer
from benchmarks.evidence.cells import FULL, lines
from benchmarks.evidence.kept import Kept, Scored, settings_of
from benchmarks.evidence.reader import Prompt, Reader
from benchmarks.evidence.texts import TASK, text_items
from benchmarks.evidence.variants import VARIANTS
from benchmarks.origin import commit, machine
from vllm_kvcompress.compare.tasks import TASKS, Item, build_items, score
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.presets import PRESETS
from vllm_kvcompress.settings.method_of import method_of

BUDGETS = (0.5, 0.2, 0.1, 0.05)
MOST_ASKED = 4
"""Prompts that are asked for each that is wanted, where the full cache answers few."""
OPEN, TALK = "open", 24
"""A question whose answer the model begins itself, and tokens it may say before it names it."""
ROWS = 32
"""Caches that answer together. Neighbours in budget, since each is padded to the longest."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct", help="its folder")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=[*TASKS, TASK])
    parser.add_argument("--count", type=int, default=100, help="answered prompts of each task")
    parser.add_argument("--tokens", type=int, default=2200, help="tokens of a prompt, about")
    parser.add_argument(
        "--question",
        choices=("last", "first", OPEN),
        default="last",
        help="open: last, and the answer is not begun for the model, as in ordinary chats",
    )
    parser.add_argument("--per-text", type=int, default=5, help="questions about one text")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(PRESETS),
        metavar="NAME[=JSON]",
        help="presets, parts (each variant of the recommended preset), or names of your own for"
        " settings as --kv-compress-config takes them",
    )
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, required=True, help="a JSONL file, appended to")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    torch.set_num_threads(args.threads)
    methods = methods_of(args.methods)
    reader = Reader(args.model)
    origin = {
        "model": Path(args.model).name,
        "tokens": args.tokens,
        "question": args.question,
        "seed": args.seed,
        "commit": commit(),
        "machine": machine(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for task in args.tasks:
        measure_task(reader, args, task, methods, origin)


def methods_of(asked: Sequence[str]) -> dict[str, str]:
    """Name to settings: a preset's name, or a JSON object."""
    methods = {}
    for each in asked:
        name, _, raw = each.partition("=")
        if name == "parts":
            methods |= VARIANTS
        else:
            methods[name] = raw or VARIANTS.get(name, name)
    return methods


def measure_task(
    reader: Reader,
    args: argparse.Namespace,
    task: str,
    methods: dict[str, str],
    origin: dict[str, Any],
) -> None:
    where = {key: origin[key] for key in ("model", "tokens", "question", "seed")} | {"task": task}
    known: dict[str, set[tuple[str, float]]] = {}
    for line in lines(args.out):
        if all(line[key] == value for key, value in where.items()):
            known.setdefault(line["item"], set()).add((line["method"], line["budget"]))
            if line["method"] == FULL and not line["score"] and task != TASK:
                known[line["item"]].add(("unknown", 0.0))
    items = items_of(reader, args, task)
    wanted = [(name, budget) for name in methods for budget in args.budgets]
    sums = any(
        Reads.COLUMN_SUMS in method_of(settings_of(raw, 0.5)).reads for raw in methods.values()
    )
    answered = 0
    start = time.perf_counter()

    def is_todo(item: Item) -> bool:
        nonlocal answered
        have = known.get(item.name, set())
        if ("unknown", 0.0) in have:
            return False
        done = bool(have) and have.issuperset(wanted)
        answered += done
        return not done

    for item, prompt in read_items(reader, items, is_todo, sums=sums):
        if answered >= args.count:
            break
        have = known.get(item.name, set())
        todo = [pair for pair in wanted if pair not in have]
        results = measure(reader, item, prompt, todo, methods)
        right = next(r["score"] for r in results if r["method"] == FULL)
        if (FULL, 1.0) in have:
            results = [r for r in results if r["method"] != FULL]
        with args.out.open("a") as out:
            for result in results:
                row = {**origin, "task": task, "item": item.name, "group": item.group, **result}
                out.write(json.dumps(row) + "\n")
        answered += right > 0 or not item.answers
        spent = time.perf_counter() - start
        print(f"{item.name}: {answered} of {args.count} answered, {spent:.0f} s", flush=True)


def items_of(reader: Reader, args: argparse.Namespace, task: str) -> list[Item]:
    """More prompts than are wanted, since the full cache will not answer all."""
    if task == TASK:
        return text_items(
            count=args.count, tokens=args.tokens, seed=args.seed, count_tokens=reader.count_tokens
        )
    items = build_items(
        [task],
        count=args.count * MOST_ASKED,
        tokens=args.tokens,
        seed=args.seed,
        question="last" if args.question == OPEN else args.question,
        count_tokens=reader.count_tokens,
        questions_per_text=args.per_text,
    )
    return [opened(item) for item in items] if args.question == OPEN else items


def opened(item: Item) -> Item:
    """The same question without the words that begin its answer.

    With them, the prompt ends by naming what is asked for, which flatters small windows.
    """
    assert item.messages[-1]["role"] == "assistant", "this task begins no answer"
    return replace(item, messages=item.messages[:-1], max_tokens=item.max_tokens + TALK)


def read_items(
    reader: Reader, items: Sequence[Item], is_todo: Callable[[Item], bool], *, sums: bool
) -> Iterator[tuple[Item, Prompt]]:
    """Each item that is to do, and its full cache; what a text's questions share is read once."""
    shared: Prompt | None = None
    for item, after in zip(items, [*items[1:], None], strict=True):
        if not is_todo(item):
            continue
        ids = reader.encode(item.messages)
        if shared is None or shared.ids != ids[: len(shared.ids)]:
            shared = None
            if after is not None and after.group == item.group:
                common = shared_length(ids, reader.encode(after.messages))
                if len(ids) // 2 < common < len(ids):
                    shared = reader.read(ids[:common], sums=sums)
        yield item, reader.read(ids, sums=sums, earlier=shared)


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    differ = (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return next(differ, min(len(one), len(other)))


def measure(
    reader: Reader,
    item: Item,
    prompt: Prompt,
    todo: Sequence[tuple[str, float]],
    methods: dict[str, str],
) -> list[dict[str, Any]]:
    """The full cache's line, and where that knows the answer each method's and budget's."""
    full, logits = full_answer(reader, item, prompt)
    right = score(item.answers, full.text)
    length = len(prompt.ids)
    out: list[dict[str, Any]] = [
        {"method": FULL, "budget": 1.0, "score": right, "prompt_tokens": length, "kept": 1.0}
    ]
    if item.answers and not right:
        return out
    scored = Scored(prompt)
    ordered = sorted(todo, key=lambda pair: pair[1])
    for start in range(0, len(ordered), ROWS):
        pairs = ordered[start : start + ROWS]
        kept: list[Kept] = []
        for name, budget in pairs:
            made = scored.keep(settings_of(methods[name], budget))
            assert made is not None, f"{name} at {budget} keeps all {length} tokens"
            kept.append(made)
        compared = compare(reader, item, prompt, kept, full, logits)
        for (name, budget), each, made in zip(pairs, compared, kept, strict=True):
            out.append(
                {
                    "method": name,
                    "budget": budget,
                    "score": each.score,
                    "full": right,
                    "same": each.same,
                    "kl": each.kl,
                    "top1": each.top1,
                    "kept": round(made.tokens / (length * reader.layers), 5),
                }
            )
    return out


if __name__ == "__main__":
    main()
