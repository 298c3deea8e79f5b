"""Measure the output quality of methods on built-in tasks.

    python -m benchmarks.evidence --model .cache/smollm2-135m-instruct --tasks niah-multikey-1 \\
        --count 100 --tokens 2200 --methods cake chunkkv --budgets 0.2 0.1 --out results.jsonl

Each line of the output has one prompt, one method and one budget. If the full cache gives none of
a prompt's expected answers, the prompt gets only the full cache's line and does not count towards
--count. Prompts without expected answers always count. Run the same command again to continue an
interrupted run.

A method with a look-ahead, such as `ahead={"compress": "cake-chunk", "lookahead": 32}`, compresses
the prompt after the full cache's first 32 output tokens. If the output ends earlier, the prompt
stays uncompressed and the line has `"packed": false`.

Other number formats: `"packed_dtype": "k4v3"` packs the kept tokens into 4-bit keys and 3-bit
values, also at a budget of 1.0. `"cache": "fp8"` gives the engine's KV cache a format of vLLM,
for prompt and output: `fp8={"compress": "cake-chunk", "cache": "fp8", "budget": [0.4, 0.2]}`. The
name of such a format alone, for example `fp8`, measures it without eviction. Each line has
`bytes`: the bytes of the compressed prompt, scales included, relative to the prompt in 16 bits.
A look-ahead's output tokens are part of the prompt here, and later output tokens do not count.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence.cache_formats import CACHE_FORMATS
from benchmarks.evidence.cells import FULL
from benchmarks.evidence.compressed_cache import (
    CompressedCache,
    PromptCompressor,
    cache_format_of,
    method_settings,
    settings_at,
)
from benchmarks.evidence.outputs import (
    CompressedOutput,
    FullOutput,
    compare_outputs,
    full_cache_output,
)
from benchmarks.evidence.reference_model import PrefilledPrompt, ReferenceModel
from benchmarks.evidence.systems import WITHOUT_LOOKAHEAD, systems
from benchmarks.evidence.texts import TASK, text_items
from benchmarks.field import FIELD_TASKS, field_items
from benchmarks.field.data import FieldData
from benchmarks.field.harm import chance_score
from benchmarks.jsonl import append, lines
from benchmarks.origin import commit, machine
from vllm_kvcompress.compare.measures import loops, shared_length, similarity
from vllm_kvcompress.compare.tasks import SCORED, TASKS, Item, build_items
from vllm_kvcompress.compare.tasks.short_answers import exact_match, final_answer, token_f1
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.registry import PRESETS, RECOMMENDED

BUDGETS = (0.5, 0.2, 0.1, 0.05)
PROMPTS_PER_RESULT = 4
"""Prompts to generate for each wanted result, since the full cache answers only some of them."""
OPEN, EXTRA_TOKENS = "open", 24
"""Value of --question without an assistant prefix, and the extra output tokens that it needs."""
LATE = "late"
PREAMBLE = (
    "I have read the whole text, from its first sentence to its last one, and I have looked at each"
    " place in it that mentions a number. Some of these numbers belong to other questions than"
    " yours, so I leave them out, and I say nothing of the rest of the text either. My answer to"
    " your question, exactly as it stands in the text, is as follows. "
)
"""Start of the output with ``--question late``: longer than a look-ahead, without the answer."""
GROUPS_OF_METHODS: Mapping[str, Mapping[str, str]] = {
    "systems": systems(lookahead=True),
    "prefill-systems": systems(lookahead=False),
}
"""Names for several methods at once."""
BATCH_SIZE = 16
"""Caches that decode together. A batch has similar lengths, since caches pad to the longest."""
UNKNOWN = ("unknown", 0.0)
"""Marks a prompt that an earlier run skipped because the full cache does not answer it."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct", help="model folder")
    parser.add_argument(
        "--tasks", nargs="+", default=list(TASKS), choices=[*TASKS, TASK, *FIELD_TASKS]
    )
    parser.add_argument(
        "--count",
        type=int,
        default=100,
        help="prompts per task; those with expected answers count only if the full cache gives one",
    )
    parser.add_argument("--tokens", type=int, default=2200, help="maximum tokens per prompt")
    parser.add_argument(
        "--question",
        choices=("last", "first", OPEN, LATE),
        default="last",
        help="question after (last) or before (first) the text; open: last, without an assistant"
        " prefix that begins the answer, as in ordinary chats; late: last, and the output begins"
        " with a preamble longer than a look-ahead",
    )
    parser.add_argument("--per-text", type=int, default=5, help="questions per text")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(PRESETS),
        metavar="NAME[=JSON]",
        help=f"presets; {WITHOUT_LOOKAHEAD!r}; systems (all systems at equal bytes);"
        " prefill-systems (the same without a look-ahead); names of vLLM's low-bit caches; or"
        " NAME=JSON with settings as in --kv-compress-config, measured only at their own budget, or"
        " list of budgets, if they have one",
    )
    parser.add_argument(
        "--attempts",
        type=int,
        default=PROMPTS_PER_RESULT,
        help="prompts to try per prompt that counts, because the full cache fails some",
    )
    parser.add_argument(
        "--max-tokens", type=int, help="maximum output tokens; default: as the task defines"
    )
    parser.add_argument(
        "--forced",
        action="store_true",
        help="for prompts that count whatever the full cache answers, compare along its output only"
        " and do not decode compressed outputs to their end: no similarity, length, loops and F1,"
        " but three times faster",
    )
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of weights and activations; bfloat16 is faster where the processor supports it",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to append to")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    torch.set_num_threads(args.threads)
    methods = parse_methods(args.methods)
    model = ReferenceModel(args.model, getattr(torch, args.dtype))
    origin = {
        "model": Path(args.model).name,
        "tokens": args.tokens,
        "question": args.question,
        "seed": args.seed,
        "max_tokens": args.max_tokens,
        "dtype": args.dtype,
        "commit": commit(),
        "machine": machine(),
    }
    for task in args.tasks:
        measure_task(model, args, task, methods, origin)


def parse_methods(names: Sequence[str]) -> dict[str, str]:
    """Return method names with their settings: the name of a preset, or a JSON object.

    The name of a cache format stands for an engine that evicts nothing.
    """
    alone = {"compress": "off", "budget": 1.0}
    named = {name: json.dumps({**alone, "cache": name}) for name in CACHE_FORMATS}
    named[WITHOUT_LOOKAHEAD] = json.dumps({"compress": RECOMMENDED, "lookahead": 0})
    methods: dict[str, str] = {}
    for argument in names:
        name, _, raw = argument.partition("=")
        if argument in GROUPS_OF_METHODS:
            methods |= GROUPS_OF_METHODS[argument]
        else:
            methods[name] = raw or named.get(name, name)
    return methods


def budgets_for(raw: str, budgets: Sequence[float]) -> Sequence[float]:
    """Return the bytes or budgets in the settings `raw`, or all `budgets` if they have none."""
    settings = method_settings(raw)
    budget: float | list[float] | None = settings.get("bytes", settings.get("budget"))
    if budget is None:
        return budgets
    return budget if isinstance(budget, list) else [budget]


def measure_task(
    model: ReferenceModel,
    args: argparse.Namespace,
    task: str,
    methods: dict[str, str],
    origin: dict[str, Any],
) -> None:
    """Append the missing results of a task to the output file."""
    items = task_items(model, args, task)
    needs_answer = {item.name for item in items if needs_full_answer(item)}
    keys = ("model", "tokens", "question", "seed", "max_tokens", "dtype")
    same_run = {key: origin[key] for key in keys} | {"task": task}
    default_dtype = {"dtype": "float32"}  # of results from before there was a choice
    measured: dict[str, set[tuple[str, float]]] = {}
    for line in lines(args.out):
        of_line = {**default_dtype, **line}
        if all(of_line.get(key) == value for key, value in same_run.items()):
            measured.setdefault(line["item"], set()).add((line["method"], line["budget"]))
            if line["method"] == FULL and not line["score"] and line["item"] in needs_answer:
                measured[line["item"]].add(UNKNOWN)
    forced_prefixes: dict[str, list[int]] = {}
    if args.question == LATE:
        items, forced_prefixes = with_late_answers(model, items)
    wanted = [
        (name, budget) for name, raw in methods.items() for budget in budgets_for(raw, args.budgets)
    ]
    settings = [settings_at(raw, 0.5) for raw in methods.values()]
    with_column_sums = any(
        Reads.COLUMN_SUMS in each.method.reads for each in settings if each.enabled
    )
    num_answered = 0
    start = time.perf_counter()

    def is_pending(item: Item) -> bool:
        nonlocal num_answered
        done = measured.get(item.name, set())
        if UNKNOWN in done:
            return False
        complete = bool(done) and done.issuperset(wanted)
        num_answered += complete
        return not complete

    prefilled = prefill_items(model, items, is_pending, with_column_sums=with_column_sums)
    for item, prompt in prefilled:
        if num_answered >= args.count:
            break
        done = measured.get(item.name, set())
        results = measure(
            model,
            item,
            prompt,
            [pair for pair in wanted if pair not in done],
            methods,
            decode_fully=not args.forced,
            forced_prefix=forced_prefixes.get(item.name, ()),
        )
        full_score = next(r["score"] for r in results if r["method"] == FULL)
        if (FULL, 1.0) in done:
            results = [r for r in results if r["method"] != FULL]
        common = {**origin, "task": task, "item": item.name, "group": item.group}
        append(args.out, [{**common, **result} for result in results])
        num_answered += full_score > 0 or not needs_full_answer(item)
        seconds = time.perf_counter() - start
        print(f"{item.name}: {num_answered} of {args.count} answered, {seconds:.0f} s", flush=True)


def task_items(model: ReferenceModel, args: argparse.Namespace, task: str) -> list[Item]:
    """Return the prompts of a task: more than --count if the full cache may fail some."""
    shared = {"tokens": args.tokens, "seed": args.seed, "count_tokens": model.count_tokens}
    if task == TASK:
        items = text_items(count=args.count, **shared)
    elif task in FIELD_TASKS:
        items = field_items(FieldData(), [task], count=args.count * args.attempts, **shared)
    else:
        items = build_items(
            [task],
            count=args.count * (args.attempts if task in SCORED else 1),
            question="last" if args.question in (OPEN, LATE) else args.question,
            questions_per_text=args.per_text,
            **shared,
        )
        if args.question == OPEN:
            items = [without_assistant_prefix(item) for item in items]
    if args.max_tokens is None:
        return items
    return [replace(item, max_tokens=args.max_tokens) for item in items]


def needs_full_answer(item: Item) -> bool:
    """Return whether a prompt counts only if the full cache gives an expected answer.

    An answer with reasons is also compared with the full cache's own answer, so it always counts.
    So do the tasks of `field.harm`: a compressed cache may also correct what the full cache does.
    """
    return item.known and item.match not in ("f1", "number", "refusal", "mrcr")


def without_assistant_prefix(item: Item) -> Item:
    """Return the prompt without the assistant message that begins the answer.

    With that message, the prompt's last tokens name the fact that the question is about, which
    favours small observation windows. Ordinary requests have no such message.
    """
    if item.messages[-1]["role"] != "assistant":
        return item
    return replace(item, messages=item.messages[:-1], max_tokens=item.max_tokens + EXTRA_TOKENS)


def with_late_answers(
    model: ReferenceModel, items: Sequence[Item]
) -> tuple[list[Item], dict[str, list[int]]]:
    """Return the prompts without an assistant prefix, and by item name a forced output prefix.

    The forced prefix is `PREAMBLE` followed by the assistant prefix, for example "The special
    number for Oslo is".
    """
    late_items, forced_prefixes = [], {}
    for item in items:
        prefix = PREAMBLE
        if item.messages[-1]["role"] == "assistant":
            prefix += item.messages[-1]["content"]
            item = replace(item, messages=item.messages[:-1])
        ids = model.tokenizer.encode(prefix, add_special_tokens=False)
        forced_prefixes[item.name] = ids
        late_items.append(replace(item, max_tokens=item.max_tokens + len(ids)))
    return late_items, forced_prefixes


def prefill_items(
    model: ReferenceModel,
    items: Sequence[Item],
    is_pending: Callable[[Item], bool],
    *,
    with_column_sums: bool,
) -> Iterator[tuple[Item, PrefilledPrompt]]:
    """Yield each pending item with its full cache; questions on one text share its prefill."""
    shared: PrefilledPrompt | None = None
    for item, following in zip(items, [*items[1:], None], strict=True):
        if not is_pending(item):
            continue
        ids = model.encode(item.messages, item.tools)
        if shared is None or shared.ids != ids[: len(shared.ids)]:
            shared = None
            if following is not None and following.group == item.group:
                common = shared_length(ids, model.encode(following.messages, following.tools))
                if len(ids) // 2 < common < len(ids):
                    shared = model.prefill(ids[:common], with_column_sums=with_column_sums)
        yield item, model.prefill(ids, with_column_sums=with_column_sums, prefix=shared)


def measure(
    model: ReferenceModel,
    item: Item,
    prompt: PrefilledPrompt,
    pending: Sequence[tuple[str, float]],
    methods: dict[str, str],
    *,
    decode_fully: bool = True,
    forced_prefix: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """Return result lines of one prompt: the full cache's, then one per method and budget.

    If the prompt has expected answers and the full cache gives none, only its line is returned.

    Args:
        pending: names and budgets to measure.
        methods: settings by method name.
        decode_fully: also decode outputs to their end for prompts without expected answers.
        forced_prefix: token ids that every output starts with.
    """
    full = full_cache_output(model, item, prompt, forced_prefix)
    full_score = item.score(full.text)
    length = len(prompt.ids)
    results: list[dict[str, Any]] = [
        {
            "method": FULL,
            "budget": 1.0,
            "score": full_score,
            "prompt_tokens": length,
            "kept": 1.0,
            "bytes": 1.0,
            **({} if (chance := chance_score(item)) is None else {"chance": chance}),
        }
    ]
    if needs_full_answer(item) and not full_score:
        return results
    decode_fully = decode_fully or needs_full_answer(item)
    stored: dict[str, PrefilledPrompt] = {}
    for lookahead, by_format in by_prefill(pending, methods).items():
        extended = full.prompt_with_output(lookahead)
        if extended is None:
            # Even these complete outputs get no similarity if the longer ones get none: a mean
            # over short outputs alone would mislead.
            unchanged = uncompressed_output(full)
            for name, budget in (pair for pairs in by_format.values() for pair in pairs):
                results.append(
                    result_line(
                        item, full, unchanged, name, budget, packed=False, complete=decode_fully
                    )
                )
            continue
        compressed: list[tuple[str, float, CompressedCache]] = []
        for cache_name, pairs in by_format.items():
            prefilled = extended
            if cache_name is not None:
                prefilled = stored[cache_name] = model.stored_as(
                    extended, CACHE_FORMATS[cache_name], prefix=stored.get(cache_name)
                )
            compressor = PromptCompressor(prefilled, output_tokens=lookahead)
            for name, budget in pairs:
                settings = settings_at(methods[name], budget)
                if "bytes" in method_settings(methods[name]):
                    settings = compressor.settings_within(methods[name], budget)
                cache = compressor.compress(settings)
                assert cache is not None, f"{name} at {budget} keeps all {length} tokens"
                compressed.append((name, budget, cache))
        compressed.sort(key=lambda each: each[2].tokens)
        for start in range(0, len(compressed), BATCH_SIZE):
            batch = compressed[start : start + BATCH_SIZE]
            outputs = compare_outputs(
                model,
                item,
                extended,
                [cache for _, _, cache in batch],
                full,
                decode_fully=decode_fully,
            )
            for (name, budget, cache), output in zip(batch, outputs, strict=True):
                line = result_line(
                    item, full, output, name, budget, packed=True, complete=decode_fully
                )
                kept_prompt_tokens = cache.tokens / len(extended.full_layers) - lookahead
                line["kept"] = round(kept_prompt_tokens / length, 5)
                line["bytes"] = round(cache.share_of_bytes, 5)
                results.append(line)
    return results


def by_prefill(
    pending: Sequence[tuple[str, float]], methods: dict[str, str]
) -> dict[int, dict[str | None, list[tuple[str, float]]]]:
    """Group method names and budgets by look-ahead in tokens, then by name of the cache's format.

    Short look-aheads come first: longer ones continue their prefills.
    """
    groups: dict[int, dict[str | None, list[tuple[str, float]]]] = {}
    for name, budget in pending:
        settings = settings_at(methods[name], budget)
        lookahead = settings.resolved_lookahead if settings.enabled else 0
        cache_format = cache_format_of(methods[name])
        cache_name = None if cache_format is None else cache_format.name
        groups.setdefault(lookahead, {}).setdefault(cache_name, []).append((name, budget))
    return dict(sorted(groups.items()))


def uncompressed_output(full: FullOutput) -> CompressedOutput:
    """Return the full cache's output as the result of a look-ahead that the output never passes."""
    compared = len(full.tokens) - 1
    return CompressedOutput(
        tokens=full.tokens, text=full.text, same=True, kl=[0.0] * compared, agreed=[True] * compared
    )


def result_line(
    item: Item,
    full: FullOutput,
    output: CompressedOutput,
    name: str,
    budget: float,
    *,
    packed: bool,
    complete: bool,
) -> dict[str, Any]:
    """Return the result of one method at one budget.

    Args:
        packed: True if the prompt was compressed, False if the output ended before that.
        complete: True if `output` was decoded to its end.
    """
    line = {
        "method": name,
        "budget": budget,
        "score": item.score(output.text),
        "full": item.score(full.text),
        "same": output.same,
        "kl": output.mean_kl,
        "top1": output.top1,
        "kept": 1.0,
        "bytes": 1.0,
        "packed": packed,
    }
    if item.rules:
        by_output, by_full = item.obeyed(output.text), item.obeyed(full.text)
        rules = {rule: [by_output[rule], by_full[rule]] for rule in by_output}
        # Rules that the full cache breaks show nothing about compression, so they do not count.
        both = sum(by_output[rule] and by_full[rule] for rule in by_output) / len(rules)
        return line | {"score": both, "rules": rules}
    if item.match == "all":
        # As with rules: an answer that only the compressed cache names shows nothing.
        pairs = zip(item.matched(output.text), item.matched(full.text), strict=True)
        line["score"] = sum(map(min, pairs)) / len(item.answers)
    if needs_full_answer(item):
        return line
    if item.match == "f1" and complete:
        answer, full_answer = final_answer(output.text), final_answer(full.text)
        line |= {
            "answer_f1": token_f1(answer, full_answer),
            "answer_same": exact_match(answer, full_answer),
        }
    line |= {
        "kl_at": [round(kl, 5) for kl in output.kl],
        "agreed_at": "".join("01"[same] for same in output.agreed),
        "full_length": len(full.tokens),
        "full_loops": loops(full.text),
    }
    if complete:
        line |= {
            "similarity": similarity(full.text.split(), output.text.split()),
            "length": len(output.tokens),
            "loops": loops(output.text),
        }
    return line


if __name__ == "__main__":
    main()
