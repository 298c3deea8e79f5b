"""Measure long outputs under a decode budget, also with output tokens dropped at random.

    python -m benchmarks.evidence.long_outputs --model .cache/smollm2-135m-instruct \\
        --out long.jsonl
    python -m benchmarks.evidence.long_outputs --report long.jsonl

The full cache samples an output for each prompt, with a seed, because long greedy outputs of small
models repeat themselves. Every system is then fed that output, so all of them are compared on the
same text. Each line of the result has one prompt and one system. Run the same command again to
continue an interrupted run.

Two kinds of prompts: requests about a text, and texts with hidden numbers. In the second kind the
output goes on for --late-tokens tokens. Then "The special number for X is" follows for each hidden
number, and a system finds the number if it would choose all its tokens.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence.cache_formats import CACHE_FORMATS
from benchmarks.evidence.cells import FULL, lines
from benchmarks.evidence.compressed_cache import CompressedCache, stack_caches
from benchmarks.evidence.long_outputs_table import report
from benchmarks.evidence.outputs import divergence
from benchmarks.evidence.random_outputs import REDRAW, UNIFORM
from benchmarks.evidence.reference_model import PrefilledPrompt, ReferenceModel
from benchmarks.evidence.simulated_request import SCORED, SimulatedRequest, packs_prompt
from benchmarks.origin import commit, machine
from vllm_kvcompress.compare.tasks import ORDINARY, Message, build_items
from vllm_kvcompress.demo.questions import REQUEST
from vllm_kvcompress.serving.text import english
from vllm_kvcompress.settings.config import CompressionConfig

PARTS = 4
"""Parts of an output for which figures are given."""
LOGITS = 64
"""Tokens whose logits are compared at a time."""
HIDDEN_NUMBERS = "niah-multikey-1"
DEMO = "demo"
LARGE_WINDOW = 64
"""Decode window of a further system with random output tokens, which need recent tokens more than
methods that score: the default window is at most 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A way to hold a request's cache.

    Args:
        name: name in the results.
        settings: settings of prompt and output.
        cache: name of the cache's number format; None for an exact cache.
        kept_prompt: how output tokens are chosen if the prompt's kept tokens stay, as in
            `SimulatedRequest`; None if the method may drop prompt tokens.
    """

    name: str
    settings: CompressionConfig
    cache: str | None = None
    kept_prompt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPrompt:
    """A prompt whose output is long.

    Args:
        task, name: task and unique name.
        group: prompts of one group share a text, so they are not independent samples.
        messages: the chat.
        output_tokens: length of the output.
        facts: sentences to add after the output, each cut before its hidden number, with the
            number.
    """

    task: str
    name: str
    group: str
    messages: Sequence[Message]
    output_tokens: int
    facts: Sequence[tuple[str, str]] = ()


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct", help="model folder")
    parser.add_argument("--count", type=int, default=2, help="prompts of each ordinary task")
    parser.add_argument("--texts", type=int, default=4, help="texts with hidden numbers")
    parser.add_argument("--tokens", type=int, default=500, help="maximum tokens of a text")
    parser.add_argument("--output-tokens", type=int, default=2000)
    parser.add_argument("--late-tokens", type=int, default=1000)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--methods", nargs="*", default=["snapkv", "tova", "streamingllm", "cake"])
    parser.add_argument(
        "--prompt-budget",
        type=float,
        default=0.4,
        help="share of the prompt that stays; 1.0 leaves prompts uncompressed",
    )
    parser.add_argument("--decode-budgets", nargs="*", type=int, default=[512, 256])
    parser.add_argument("--decode-interval", type=int, default=128)
    parser.add_argument("--without-formats", action="store_true", help="leave out fp8 and k4v3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="JSONL file to append to")
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
    torch.set_num_threads(args.threads)
    model = ReferenceModel(args.model)
    origin = {
        "model": Path(args.model).name,
        "tokens": args.tokens,
        "temperature": args.temperature,
        "seed": args.seed,
        "commit": commit(),
        "machine": machine(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    prompts, start = long_prompts(model, args), time.perf_counter()
    sample_missing(model, args, origin, prompts)
    for number, prompt in enumerate(prompts):
        measure_prompt(model, args, origin, prompt)
        seconds = time.perf_counter() - start
        print(f"{prompt.name}: {number + 1} of {len(prompts)}, {seconds:.0f} s", flush=True)


def systems(args: argparse.Namespace) -> list[System]:
    """Return all systems that the arguments ask for."""
    found = []
    for budget in args.decode_budgets:
        bound = {
            "budget": args.prompt_budget,
            "min_prompt": 0,
            "decode_budget": budget,
            "decode_interval": args.decode_interval,
        }
        for name in ("cake-chunk", *args.methods):
            settings = CompressionConfig.parse({**bound, "compress": name})
            found.append(System(name=name, settings=settings))
        settings = CompressionConfig.parse({**bound, "compress": "cake-chunk"})
        found.append(System(name="cake-chunk, prompt kept", settings=settings, kept_prompt=SCORED))
        kinds: list[tuple[str, int | None]] = [(REDRAW, None), (UNIFORM, None)]
        if budget - args.prompt_budget * args.tokens >= 2 * LARGE_WINDOW:
            kinds.append((UNIFORM, LARGE_WINDOW))
        for draws, window in kinds:
            settings = CompressionConfig.parse(
                {**bound, "compress": "cake-chunk", "decode_window": window}
            )
            name = f"random output, {draws}" + (f", window {window}" if window else "")
            found.append(System(name=name, settings=settings, kept_prompt=draws))
    if not args.without_formats:
        off = CompressionConfig.parse({"compress": "off"})
        found.append(System(name="fp8", settings=off, cache="fp8"))
        groups = {
            "compress": "cake-chunk",
            "budget": 1.0,
            "min_prompt": 0,
            "packed_dtype": "k4v3",
            "lookahead": 0,
            "decode_interval": args.decode_interval,
        }
        found.append(System(name="k4v3", settings=CompressionConfig.parse(groups)))
    return found


def long_prompts(model: ReferenceModel, args: argparse.Namespace) -> list[LongPrompt]:
    """Return the prompts: the demo's request, ordinary requests, and texts with hidden numbers."""
    text, prompts = english(), []
    if args.count:
        ids = model.tokenizer.encode(text[: args.tokens * 12], add_special_tokens=False)
        start = model.tokenizer.decode(ids[: args.tokens - 20])
        message = {"role": "user", "content": f"{start}\n\n{REQUEST}"}
        prompts.append(
            LongPrompt(
                task=DEMO,
                name=DEMO,
                group=DEMO,
                messages=(message,),
                output_tokens=args.output_tokens,
            )
        )
    common = {
        "tokens": args.tokens,
        "seed": args.seed,
        "question": "last",
        "count_tokens": model.count_tokens,
    }
    prompts += [
        LongPrompt(
            task=item.task,
            name=item.name,
            group=item.group or item.name,
            messages=item.messages,
            output_tokens=args.output_tokens,
        )
        for item in build_items(list(ORDINARY), count=args.count, **common)
    ]
    by_text: dict[str, list[Any]] = {}
    for item in build_items([HIDDEN_NUMBERS], count=10 * args.texts, **common):
        by_text.setdefault(item.group or item.name, []).append(item)
    for group, items in by_text.items():
        facts = [(item.messages[-1]["content"], item.answers[0]) for item in items]
        prompts.append(
            LongPrompt(
                task=HIDDEN_NUMBERS,
                name=group,
                group=group,
                messages=items[0].messages[:-1],
                output_tokens=args.late_tokens,
                facts=facts,
            )
        )
    return prompts


def sample_missing(
    model: ReferenceModel,
    args: argparse.Namespace,
    origin: Mapping[str, Any],
    prompts: Sequence[LongPrompt],
) -> None:
    """Append an output for every prompt that has none in the output file."""
    done = {line["item"] for line in lines(args.out) if "output" in line}
    missing = [prompt for prompt in prompts if prompt.name not in done]
    if not missing:
        return
    prefilled = [
        model.prefill(model.encode(prompt.messages), with_column_sums=False) for prompt in missing
    ]
    seeds = [args.seed * 10_007 + prompts.index(prompt) for prompt in missing]
    length = max(prompt.output_tokens for prompt in missing)
    outputs = sampled(model, prefilled, length, args.temperature, seeds)
    with args.out.open("a") as out:
        for prompt, output in zip(missing, outputs, strict=True):
            line = {**origin, "task": prompt.task, "item": prompt.name, "group": prompt.group}
            line |= {"system": FULL, "output": output[: prompt.output_tokens]}
            out.write(json.dumps(line) + "\n")
    print(f"sampled {len(missing)} outputs of up to {length} tokens", flush=True)


@torch.inference_mode()
def sampled(
    model: ReferenceModel,
    prompts: Sequence[PrefilledPrompt],
    tokens: int,
    temperature: float,
    seeds: Sequence[int],
) -> list[list[int]]:
    """Return an output of the full cache for each prompt, sampled past the end of turn."""
    caches = [CompressedCache(keys=p.keys, values=p.values, tokens=0) for p in prompts]
    batch = stack_caches(prompts[0], caches, tokens)
    batch.position = torch.tensor([[len(prompt.ids)] for prompt in prompts])
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    logits = torch.stack([prompt.logits for prompt in prompts])
    outputs: list[list[int]] = [[] for _ in prompts]
    for index in range(tokens):
        probabilities = (logits / temperature).softmax(-1)
        for output, row, generator in zip(outputs, probabilities, generators, strict=True):
            output.append(int(torch.multinomial(row, 1, generator=generator)))
        if index < tokens - 1:
            fed = torch.tensor([output[-1:] for output in outputs])
            hidden = model.decode(batch, fed, torch.full((len(outputs), 1), index))
            logits = model.logits(hidden[:, -1])
    return outputs


def measure_prompt(
    model: ReferenceModel, args: argparse.Namespace, origin: Mapping[str, Any], prompt: LongPrompt
) -> None:
    """Append the results of all systems that the output file lacks for a prompt."""
    of_prompt = [line for line in lines(args.out) if line["item"] == prompt.name]
    output = next(line["output"] for line in of_prompt if "output" in line)
    done = {run_key(line) for line in of_prompt if "kl" in line}
    pending = [system for system in systems(args) if run_key(described(system)) not in done]
    if not pending:
        return
    ids = model.encode(prompt.messages)
    results = compared(model, ids, output, prompt.facts, pending, args.seed)
    with args.out.open("a") as out:
        for system, result in results:
            line = {**origin, "task": prompt.task, "item": prompt.name, "group": prompt.group}
            line |= {"prompt_tokens": len(ids), "output_tokens": len(output)}
            out.write(json.dumps({**line, **described(system), **result}) + "\n")


def described(system: System) -> dict[str, Any]:
    """Return the fields of a result line that identify a system."""
    settings = system.settings
    return {
        "system": system.name,
        "prompt_budget": settings.budget if settings.enabled else 1.0,
        "decode_budget": settings.decode.budget,
        "decode_interval": settings.decode.interval if settings.enabled else None,
    }


def run_key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(
        line[key] for key in ("system", "prompt_budget", "decode_budget", "decode_interval")
    )


def compared(
    model: ReferenceModel,
    ids: list[int],
    output: Sequence[int],
    facts: Sequence[tuple[str, str]],
    wanted: Sequence[System],
    seed: int,
) -> Iterator[tuple[System, dict[str, Any]]]:
    """Yield each system with its figures along the output, relative to the full cache."""
    exact = model.prefill(ids, with_column_sums=False)
    fed, max_tokens = output[:-1], len(ids) + len(output) + 64
    full = SimulatedRequest.begin(
        model,
        CompressionConfig.parse({"compress": "off"}),
        exact,
        prompt_tokens=len(ids),
        max_tokens=max_tokens,
    )
    full_hidden = full.feed(fed)
    known = [fact for fact in facts if finds(model, full, fact)]
    starts: dict[tuple[str | None, int], PrefilledPrompt] = {(None, 0): exact}
    hidden, shares, found = [], [], []
    for system in wanted:
        settings = system.settings
        ahead = settings.resolved_lookahead if packs_prompt(settings) else 0
        if settings.budget == 1.0:
            ahead = 0
        if (system.cache, ahead) not in starts:
            starts[system.cache, ahead] = model.prefill(
                [*ids, *fed[:ahead]],
                with_column_sums=False,
                prefix=exact if ahead else None,
                cache_format=CACHE_FORMATS.get(system.cache or ""),
            )
        request = SimulatedRequest.begin(
            model,
            settings,
            starts[system.cache, ahead],
            prompt_tokens=len(ids),
            max_tokens=max_tokens,
            kept_prompt=system.kept_prompt,
            seed=seed,
        )
        # Until the look-ahead ends, the cache is the full one.
        hidden.append(torch.cat([full_hidden[:ahead], request.feed(fed[ahead:])]))
        full_held = [model.num_layers * n for n in range(len(ids) + 1, len(ids) + len(fed) + 1)]
        share = 1.0 if system.cache is None else share_of_format(model, system.cache)
        held = [*full_held[:ahead], *request.held]
        shares.append([share * a / b for a, b in zip(held, full_held, strict=True)])
        found.append(sum(finds(model, request, fact) for fact in known))
    kl, equal = torch.zeros(len(wanted), len(fed)), torch.zeros(len(wanted), len(fed))
    for start in range(0, len(fed), LOGITS):
        part = slice(start, start + LOGITS)
        full_log_probs = model.logits(full_hidden[part]).log_softmax(-1)
        for index, states in enumerate(hidden):
            logits = model.logits(states[part])
            kl[index, part] = divergence(full_log_probs, logits)
            equal[index, part] = (logits.argmax(-1) == full_log_probs.argmax(-1)).float()
    for index, system in enumerate(wanted):
        result: dict[str, Any] = {
            "kl": part_means(kl[index].tolist()),
            "equal": part_means(equal[index].tolist()),
            "bytes": part_means(shares[index]),
        }
        if facts:
            result |= {"facts": len(facts), "known": len(known), "found": found[index]}
        yield system, result


def share_of_format(model: ReferenceModel, name: str) -> float:
    """Return the bytes of a cache in a number format, relative to 16 bits."""
    layers = range(model.num_layers)
    shares = [CACHE_FORMATS[name].share_of_bytes(i, model.num_layers, model.dim) for i in layers]
    return sum(shares) / len(shares)


def part_means(values: Sequence[float]) -> list[float]:
    """Return the mean of each part of an output, to 6 digits."""
    ends = [round(number * len(values) / PARTS) for number in range(PARTS + 1)]
    return [round(sum(values[start:end]) / (end - start), 6) for start, end in pairwise(ends)]


def finds(model: ReferenceModel, request: SimulatedRequest, fact: tuple[str, str]) -> bool:
    """Return whether a request would write the hidden number after its output so far."""
    sentence, number = fact
    begin = model.tokenizer.encode(f"\n\n{sentence}", add_special_tokens=False)
    answer = model.tokenizer.encode(f" {number}", add_special_tokens=False)
    hidden = request.branch().feed([*begin, *answer[:-1]])
    chosen = model.logits(hidden[len(begin) - 1 :]).argmax(-1).tolist()
    return bool(chosen == answer)


if __name__ == "__main__":
    main()
