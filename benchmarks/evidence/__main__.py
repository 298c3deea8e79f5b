"""Measure methods on built-in tasks.

    python -m benchmarks.evidence --model .cache/smollm2-135m-instruct --tasks niah-multikey-1 \\
        --count 100 --tokens 2200 --methods cake chunkkv --budgets 0.2 0.1 --out results.jsonl

A prompt counts where the full cache names at least one of its answers, and always where nobody
knows them. Each line of the output is one prompt under one method and budget; a run that is started
again goes on where it stopped.

A method with a look-ahead, `ahead={"compress": "cake-chunk", "lookahead": 32}`, packs the prompt
with the full cache's own first tokens behind it. What ends before is left whole (`packed`).
`kept={"compress": "cake-chunk", "protect": "system,tools"}` protects these parts of each chat.
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

from benchmarks.evidence.answers import Answer, Compared, compare, full_answer
from benchmarks.evidence.cells import FULL, lines
from benchmarks.evidence.kept import Kept, Scored, settings_of
from benchmarks.evidence.parts import parts_of
from benchmarks.evidence.reader import Prompt, Reader
from benchmarks.evidence.texts import TASK, text_items
from benchmarks.evidence.variants import VARIANTS
from benchmarks.origin import commit, machine
from vllm_kvcompress.compare.measures import loops, similarity
from vllm_kvcompress.compare.tasks import SCORED, TASKS, Item, build_items
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.presets import PRESETS
from vllm_kvcompress.settings.method_of import method_of

BUDGETS = (0.5, 0.2, 0.1, 0.05)
MOST_ASKED = 4
"""Prompts that are asked for each that is wanted, where the full cache answers few."""
OPEN, TALK = "open", 24
"""A question whose answer the model begins itself, and tokens it may say before it names it."""
LATE = "late"
PREAMBLE = (
    "I have read the whole text, from its first sentence to its last one, and I have looked at each"
    " place in it that mentions a number. Some of these numbers belong to other questions than"
    " yours, so I leave them out, and I say nothing of the rest of the text either. My answer to"
    " your question, exactly as it stands in the text, is as follows. "
)
"""With what an answer begins that names late what is asked for: more tokens than a look-ahead."""
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
        choices=("last", "first", OPEN, LATE),
        default="last",
        help="open: last, and the answer is not begun for the model, as in ordinary chats; late:"
        " last, and the answer itself begins with words that say nothing of what is asked for",
    )
    parser.add_argument("--per-text", type=int, default=5, help="questions about one text")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(PRESETS),
        metavar="NAME[=JSON]",
        help="presets, parts (each variant of the recommended preset), or names of your own for"
        " settings as --kv-compress-config takes them; with a budget in them at that one alone",
    )
    parser.add_argument(
        "--max-tokens", type=int, help="tokens of an answer; by itself as many as its task gives"
    )
    parser.add_argument(
        "--forced",
        action="store_true",
        help="do not decode on where an answer whose right one nobody knows is another: no"
        " similarity, lengths and loops, in a third of the time",
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
        "max_tokens": args.max_tokens,
        "commit": commit(),
        "machine": machine(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for task in args.tasks:
        measure_task(reader, args, task, methods, origin)


def methods_of(asked: Sequence[str]) -> dict[str, str]:
    """Name to settings: a preset's name, or a JSON object."""
    methods: dict[str, str] = {}
    for each in asked:
        name, _, raw = each.partition("=")
        if name == "parts":
            methods |= VARIANTS
        else:
            methods[name] = raw or VARIANTS.get(name, name)
    return methods


def budgets_of(raw: str, budgets: Sequence[float]) -> Sequence[float]:
    """At which budgets some settings are measured: their own, or all that were asked for."""
    own: float | None = json.loads(raw).get("budget") if raw.startswith("{") else None
    return budgets if own is None else [own]


def measure_task(
    reader: Reader,
    args: argparse.Namespace,
    task: str,
    methods: dict[str, str],
    origin: dict[str, Any],
) -> None:
    keys = ("model", "tokens", "question", "seed", "max_tokens")
    where = {key: origin[key] for key in keys} | {"task": task}
    known: dict[str, set[tuple[str, float]]] = {}
    for line in lines(args.out):
        if all(line.get(key) == value for key, value in where.items()):
            known.setdefault(line["item"], set()).add((line["method"], line["budget"]))
            if line["method"] == FULL and not line["score"] and task in SCORED:
                known[line["item"]].add(("unknown", 0.0))
    items = items_of(reader, args, task)
    begins: dict[str, list[int]] = {}
    if args.question == LATE:
        items, begins = late(reader, items)
    wanted = [
        (name, budget) for name, raw in methods.items() for budget in budgets_of(raw, args.budgets)
    ]
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
        pack_request = [pair for pair in wanted if pair not in have]
        begun = begins[item.name] if args.question == LATE else ()
        results = measure(
            reader, item, prompt, pack_request, methods, own_answers=not args.forced, begun=begun
        )
        right = next(r["score"] for r in results if r["method"] == FULL)
        if (FULL, 1.0) in have:
            results = [r for r in results if r["method"] != FULL]
        with args.out.open("a") as out:
            for result in results:
                row = {**origin, "task": task, "item": item.name, "group": item.group, **result}
                out.write(json.dumps(row) + "\n")
        answered += right > 0 or not item.known
        spent = time.perf_counter() - start
        print(f"{item.name}: {answered} of {args.count} answered, {spent:.0f} s", flush=True)


def items_of(reader: Reader, args: argparse.Namespace, task: str) -> list[Item]:
    """The prompts; more than are wanted where the full cache will not answer all."""
    if task == TASK:
        items = text_items(
            count=args.count, tokens=args.tokens, seed=args.seed, count_tokens=reader.count_tokens
        )
        return [roomy(item, args.max_tokens) for item in items]
    items = build_items(
        [task],
        count=args.count * (MOST_ASKED if task in SCORED else 1),
        tokens=args.tokens,
        seed=args.seed,
        question="last" if args.question in (OPEN, LATE) else args.question,
        count_tokens=reader.count_tokens,
        questions_per_text=args.per_text,
    )
    items = [opened(item) for item in items] if args.question == OPEN else items
    return [roomy(item, args.max_tokens) for item in items]


def roomy(item: Item, max_tokens: int | None) -> Item:
    """The same prompt with room for so many tokens; None leaves what it has."""
    return item if max_tokens is None else replace(item, max_tokens=max_tokens)


def opened(item: Item) -> Item:
    """The same question without the words that begin its answer.

    With them, the prompt ends by naming what is asked for, which flatters small windows. An
    ordinary request has none.
    """
    if item.messages[-1]["role"] != "assistant":
        return item
    return replace(item, messages=item.messages[:-1], max_tokens=item.max_tokens + TALK)


def late(reader: Reader, items: Sequence[Item]) -> tuple[list[Item], dict[str, list[int]]]:
    """The same questions, and by name the tokens with which each answer begins.

    What the last prompt's own words would be, "The special number for Oslo is", the answer says
    itself, behind `PREAMBLE`.
    """
    asked, begins = [], {}
    for item in items:
        words = PREAMBLE
        if item.messages[-1]["role"] == "assistant":
            words += item.messages[-1]["content"]
            item = replace(item, messages=item.messages[:-1])
        begins[item.name] = reader.tokenizer.encode(words, add_special_tokens=False)
        asked.append(replace(item, max_tokens=item.max_tokens + len(begins[item.name])))
    return asked, begins


def read_items(
    reader: Reader, items: Sequence[Item], is_todo: Callable[[Item], bool], *, sums: bool
) -> Iterator[tuple[Item, Prompt]]:
    """Each item that is to do, and its full cache; what a text's questions share is read once."""
    shared: Prompt | None = None
    for item, after in zip(items, [*items[1:], None], strict=True):
        if not is_todo(item):
            continue
        ids = reader.encode(item.messages, item.tools)
        if shared is None or shared.ids != ids[: len(shared.ids)]:
            shared = None
            if after is not None and after.group == item.group:
                common = shared_length(ids, reader.encode(after.messages, after.tools))
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
    pack_request: Sequence[tuple[str, float]],
    methods: dict[str, str],
    *,
    own_answers: bool = True,
    begun: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """The full cache's line, and where that knows the answer each method's and budget's.

    Args:
        begun: tokens with which the answer begins.
    """
    full = full_answer(reader, item, prompt, begun)
    right = item.score(full.text)
    length = len(prompt.ids)
    out: list[dict[str, Any]] = [
        {"method": FULL, "budget": 1.0, "score": right, "prompt_tokens": length, "kept": 1.0}
    ]
    if item.known and not right:
        return out
    own_answers = own_answers or item.known
    protects = any(settings_of(raw, 0.5).protect for raw in methods.values())
    parts = parts_of(reader.tokenizer, item, prompt.ids) if protects else {}
    for answered, pairs in by_lookahead(pack_request, methods).items():
        after = full.after(answered)
        if after is None:
            # Told or not as of the others: alone, those that end early would look alike.
            whole, told = untouched(full), own_answers
            out += [line_of(item, full, whole, *pair, packed=False, told=told) for pair in pairs]
            continue
        scored = Scored(after, answered=answered, parts=parts)
        for start in range(0, len(pairs), ROWS):
            batch = pairs[start : start + ROWS]
            kept: list[Kept] = []
            for name, budget in batch:
                made = scored.keep(settings_of(methods[name], budget))
                assert made is not None, f"{name} at {budget} keeps all {length} tokens"
                kept.append(made)
            compared = compare(reader, item, after, kept, full, own_answers=own_answers)
            for pair, each, made in zip(batch, compared, kept, strict=True):
                line = line_of(item, full, each, *pair, packed=True, told=own_answers)
                share = made.tokens / len(scored.layers) - answered
                out.append(line | {"kept": round(share / length, 5)})
    return out


def by_lookahead(
    pack_request: Sequence[tuple[str, float]], methods: dict[str, str]
) -> dict[int, list[tuple[str, float]]]:
    """Methods and budgets by the answer's tokens that judge their prompt, smallest budgets first.

    Those of one look-ahead are packed at one place and answer together.
    """
    found: dict[int, list[tuple[str, float]]] = {}
    for name, budget in sorted(pack_request, key=lambda pair: pair[1]):
        ahead = settings_of(methods[name], budget).resolved_lookahead
        found.setdefault(ahead, []).append((name, budget))
    return found


def untouched(full: Answer) -> Compared:
    """An answer that ends before its prompt would be packed is the full cache's."""
    others = len(full.tokens) - 1
    return Compared(
        tokens=full.tokens, text=full.text, same=True, kl=[0.0] * others, agreed=[True] * others
    )


def line_of(
    item: Item,
    full: Answer,
    each: Compared,
    name: str,
    budget: float,
    *,
    packed: bool,
    told: bool,
) -> dict[str, Any]:
    """What is written of one method at one budget.

    Args:
        packed: whether the prompt was packed, or the answer ended before.
        told: whether `each` is an answer to its end.
    """
    line = {
        "method": name,
        "budget": budget,
        "score": item.score(each.text),
        "full": item.score(full.text),
        "same": each.same,
        "kl": each.mean_kl,
        "top1": each.top1,
        "kept": 1.0,
        "packed": packed,
    }
    if item.rules:
        own, whole = item.obeyed(each.text), item.obeyed(full.text)
        rules = {name: [own[name], whole[name]] for name in own}
        # What the full cache does not obey says nothing of compression.
        kept = sum(own[name] and whole[name] for name in own) / len(rules)
        return line | {"score": kept, "rules": rules}
    if item.known:
        return line
    line |= {
        "kl_at": [round(kl, 5) for kl in each.kl],
        "agreed_at": "".join("01"[same] for same in each.agreed),
        "full_length": len(full.tokens),
        "full_loops": loops(full.text),
    }
    if told:
        line |= {
            "similarity": similarity(full.text.split(), each.text.split()),
            "length": len(each.tokens),
            "loops": loops(each.text),
        }
    return line


if __name__ == "__main__":
    main()
