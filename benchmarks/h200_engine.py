"""Stage `engine`: the demo model on the real engine, with the plugin and without.

For each attention backend, eager and with graphs, two engines answer the same prompts. What must be
equal to the token: budget 1.0, prompts under the threshold, and the first token at any budget.
Needles, FULL graphs by vLLM's own log, and host syncs are looked at on the default of CUDA.
"""

import json
import random
from collections.abc import Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from h200_report import Report
from h200_worker import NEVER, Prompt, Worker, workers
from needles import ANSWER, PHRASINGS, Needle, needle, passage, slots

Answer = dict[str, Any]  # of `Engine.answer`
ROOT = Path(__file__).parents[1]
MODEL = ROOT / ".cache" / "smollm2-135m-instruct"
ON_CPU = ROOT / "benchmarks" / "results" / "quality.json"
BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")
EAGER, GRAPHS = "eager", "graphs"
DEFAULT = ("FLASH_ATTN", GRAPHS)
MIN_PROMPT = 256
NEW = 48  # tokens of an answer
BUDGETS: tuple[float | int, ...] = (0.5, 0.1, 100)
ASKED = (("snapkv", 0.5), ("cake", 0.5), ("snapkv", 0.2))  # of needles
MARGIN = 0.2  # of the needles: bfloat16 and blocks of 16 against the CPU's float32 and 32
LENGTHS = (20, 70, 130, 200, 250), (900, 1500, 2047, 2500, 3000, 3500)  # short prompts, long ones
DRY_LENGTHS = (20, 70, 130), (300, 420)
DECODES = 40  # steps whose graphs are looked at


def settings(method: str, budget: float | int, *, least: int = MIN_PROMPT) -> dict[str, Any]:
    return {"compress": method, "budget": budget, "min_prompt": least}


def combinations(dry: bool) -> list[tuple[str, str]]:
    return [("CPU_ATTN", EAGER)] if dry else list(product(BACKENDS, (GRAPHS, EAGER)))


def options(backend: str, mode: str, *, dry: bool) -> dict[str, Any]:
    """Of vLLM's `LLM`. Chunks shorter than the long prompts; the backend's own choice of graphs."""
    common: dict[str, Any] = {
        "max_model_len": 4096,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 32,
        "disable_log_stats": False,
        "cudagraph_metrics": True,
        "enforce_eager": mode == EAGER,
    }
    if dry:
        more = {"dtype": "float32", "num_gpu_blocks_override": 512, "block_size": 32}
        return {**common, **more, "distributed_executor_backend": "uni"}
    memory = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2 << 30}
    return {**common, **memory, "dtype": "bfloat16", "attention_backend": backend}


def english_prompts(tokenizer: Any, lengths: Sequence[int], seed: int) -> list[Prompt]:
    """Stretches of CPython's manual of these lengths."""
    rng = random.Random(seed)
    texts = [passage(tokenizer, length, rng)[0] for length in lengths]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def ids(answers: Sequence[Answer]) -> list[Prompt]:
    return [answer["ids"] for answer in answers]


def equal_tokens(a: Sequence[Prompt], b: Sequence[Prompt]) -> float:
    """Share of tokens before the first difference of each pair."""
    same = sum(first_difference(x, y) for x, y in zip(a, b, strict=True))
    return same / max(sum(len(x) for x in a), 1)


def differences(wanted: Sequence[Answer], got: Sequence[Answer]) -> str:
    """Where answers part, and how near vLLM's choice was there: rounding turns near ones."""
    found = []
    for number, (a, b) in enumerate(zip(wanted, got, strict=True)):
        at = first_difference(a["ids"], b["ids"])
        if at < len(a["ids"]):
            found.append(f"prompt {number} at token {at}, {a['ahead'][at]:.2g} nats ahead")
    return "; ".join(found)


def first_difference(a: Prompt, b: Prompt) -> int:
    pairs = enumerate(zip(a, b, strict=True))
    return next((i for i, (x, y) in pairs if x != y), len(a))


def engine(report: Report, device: torch.device) -> None:
    from transformers import AutoTokenizer

    if not (MODEL / "config.json").exists():
        report.failed("the demo model", f"{MODEL} is missing; make it with `make model`")
        return
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    lengths = DRY_LENGTHS if report.dry else LENGTHS
    short, long = (english_prompts(tokenizer, some, report.seed) for some in lengths)
    full: dict[tuple[str, str], list[Prompt]] = {}
    started = {chosen: start(*chosen, dry=report.dry) for chosen in combinations(report.dry)}
    try:
        for chosen, pair in started.items():
            try:
                with workers(*pair):
                    full[chosen] = one_pair(report, chosen, pair, tokenizer, short, long)
            except Exception as e:  # the other pairs may still run
                report.failed(", ".join(chosen), f"{type(e).__name__}: {e}")
    finally:
        for one in chain.from_iterable(started.values()):
            one.close()
    across(report, full)


def start(backend: str, mode: str, *, dry: bool) -> tuple[Worker, Worker]:
    """vLLM without the plugin, and with it."""
    how = options(backend, mode, dry=dry)
    plugin = settings("cake", 0.1)
    return Worker(str(MODEL), None, **how), Worker(str(MODEL), plugin, **how)


def one_pair(
    report: Report,
    chosen: tuple[str, str],
    pair: tuple[Worker, Worker],
    tokenizer: Any,
    short: list[Prompt],
    long: list[Prompt],
) -> list[Prompt]:
    """All checks of one backend and mode; returns the full cache's answers to `long`."""
    where, dry = ", ".join(chosen), report.dry
    new, budgets = (8, BUDGETS[:2]) if dry else (NEW, BUDGETS)
    off, on = pair
    for name, one in (("vLLM", off), ("plugin", on)):
        report.row("engines", engine=name, asked=where, **one.ask("about"))

    def both(prompts: list[Prompt], alone: bool) -> list[list[Answer]]:
        return [one.ask("answer", prompts=prompts, tokens=new, alone=alone) for one in pair]

    def same(what: str, wanted: Sequence[Answer], got: Sequence[Answer]) -> None:
        name = f"{where}: {what}: share of equal tokens"
        share = equal_tokens(ids(wanted), ids(got))
        report.check(name, share, ("==", 1.0), note=differences(wanted, got))

    same("short prompts at budget 0.1", *both(short, False))
    on.ask("configure", settings=settings("cake", 1.0))
    full, whole = both(long, False)
    same("long prompts at budget 1.0", full, whole)
    on.ask("configure", settings=settings("cake", 0.1, least=NEVER))
    alone, idle = both(long, True)
    same("long prompts under the threshold, one by one", alone, idle)
    report.check(f"{where}: compressed so far", on.ask("compressed"), ("==", 0))
    for budget in budgets:
        on.ask("configure", settings=settings("cake", budget))
        before = on.ask("compressed")
        asked = {"prompts": long, "tokens": new, "alone": True}
        answers = on.ask("answer", **asked)
        firsts = [[first_token(answer) for answer in some] for some in (alone, answers)]
        same(f"first tokens at budget {budget}", *firsts)
        count = on.ask("compressed") - before
        report.check(f"{where}: compressed at budget {budget}", count, ("==", len(long)))
        share = equal_tokens(ids(alone), ids(answers))
        report.row("texts at a budget", where=where, budget=budget, equal_tokens=share)
    if chosen == DEFAULT or dry:
        find_needles(report, tokenizer, off, on)
        on.ask("configure", settings=settings("cake", 0.1))
        watch_syncs(report, off, on, long)
    if chosen[1] == GRAPHS or dry:
        on.ask("configure", settings=settings("cake", 0.1))
        watch_graphs(report, where, off, on, long)
    return ids(full)


def first_token(answer: Answer) -> Answer:
    return {**answer, "ids": answer["ids"][:1]}


def find_needles(report: Report, tokenizer: Any, off: Worker, on: Worker) -> None:
    """Facts that the full cache finds, asked of compressed caches."""
    count = 1 if report.dry else 20
    made = [needle(tokenizer, slot, PHRASINGS["chat"], 0) for slot in slots(count)]
    made = found(off, made)
    least = 1 if report.dry else 0.7 * count
    report.check("needles: found by the full cache", len(made), (">=", least))
    on_cpu = {(p["method"], p["budget"]): p for p in json.loads(ON_CPU.read_text())["pairs"]}
    for method, budget in ASKED[:1] if report.dry else ASKED:
        on.ask("configure", settings=settings(method, budget))
        share = len(found(on, made)) / max(len(made), 1)
        known = on_cpu[method, budget]
        least = known["needles_answered"] / known["needles"] - MARGIN
        name = f"needles: {method} {budget}: share found"
        report.check(
            name, share, (">=", round(least, 3)), measured=True, note="the CPU's, less 0.2"
        )


def found(one: Worker, made: Sequence[Needle]) -> list[Needle]:
    prompts = [list(n.ids) for n in made]
    answers = one.ask("answer", prompts=prompts, tokens=ANSWER, alone=False)
    return [n for n, said in zip(made, answers, strict=True) if n.answered_by(said["text"])]


def watch_graphs(report: Report, where: str, off: Worker, on: Worker, long: list[Prompt]) -> None:
    """Decode steps of compressed requests must replay FULL graphs, by vLLM's log."""
    steps = 4 if report.dry else DECODES
    for name, one in (("vLLM", off), ("plugin", on)):
        seen = one.ask("graphs", prompts=long, steps=steps)
        total = max(sum(seen["modes"].values()), 1)
        share = seen["modes"].get("FULL", 0) / total
        check = f"{where}: {name}: decode steps in FULL graphs"
        report.check(check, share, ("==", 1.0), measured=True, note=str(seen["modes"]))
        report.row(
            "vLLM's log of its graphs", where=where, engine=name, log=" / ".join(seen["log"])
        )


def watch_syncs(report: Report, off: Worker, on: Worker, long: list[Prompt]) -> None:
    """What prefills, compressions and decodes make the host wait for, against vLLM alone."""
    new = 4 if report.dry else 16
    without, with_plugin = (one.ask("syncs", prompts=long, tokens=new) for one in (off, on))
    for name, seen in (("vLLM", without), ("plugin", with_plugin)):
        report.row("host syncs in the worker's steps", engine=name, **seen)
    report.check(
        "host syncs: requests compressed meanwhile", with_plugin["compressed"], ("==", len(long))
    )
    report.check("host syncs made by the plugin", with_plugin["ours"], ("==", 0), measured=True)
    more = with_plugin["all"] - without["all"]
    report.check("host syncs more than without the plugin", more, ("<=", 0), measured=True)


def across(report: Report, full: Mapping[tuple[str, str], list[Prompt]]) -> None:
    """How far the full cache's answers agree between backends and modes: bfloat16 need not."""
    for where, answers in full.items():
        reference = full.get(DEFAULT, answers)
        share = equal_tokens(reference, answers)
        report.row(
            "full cache against the default's, long prompts",
            where=", ".join(where),
            equal_tokens=share,
        )
