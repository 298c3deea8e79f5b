"""Stage `tokens`: the demo model on the real engine, with the plugin and without.

For each attention backend, eager and with graphs, two engines answer the same prompts. What must be
equal to the token: budget 1.0, prompts under the threshold, and the first token at any budget.
FULL graphs by vLLM's own log are looked at with graphs, host syncs on the default of CUDA. On that,
once more, with prompts in pieces, look-aheads and bounded answers.
"""

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence.texts import passage
from benchmarks.gpu.engine_process import NEVER, EngineProcess, TokenIds, both
from benchmarks.gpu.models import DRY as DRY_MODEL
from benchmarks.gpu.report import Report

Answer = dict[str, Any]  # of `Engine.answer`
ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".cache" / "smollm2-135m-instruct"
EAGER, GRAPHS = "eager", "graphs"
DEFAULT = ("FLASH_ATTN", GRAPHS)
BACKENDS = (*product(("FLASH_ATTN", "TRITON_ATTN"), (GRAPHS, EAGER)),)
DRY_BACKENDS = (("CPU_ATTN", EAGER),)
BUDGETS: tuple[float | int, ...] = (0.5, 0.1, 100)
SHORT, LONG = (20, 70, 130, 200, 250), (900, 1500, 2047, 2500, 3000, 3500)  # tokens of prompts
DRY_SHORT, DRY_LONG = (20, 130), (300, 420)
MIN_PROMPT = 256
NEW = 48  # tokens of an answer
DECODES = 40  # steps whose graphs are looked at
FEATURES = {"lookahead": 32, "max_whole": 2048, "piece": 512}
FEATURES |= {"decode_budget": 512, "decode_interval": 128}
BOUNDED = 550  # tokens of an answer that is packed again
DRY_FEATURES = {"lookahead": 8, "max_whole": 256, "piece": 96, "window": 8}
DRY_FEATURES |= {"decode_budget": 64, "decode_interval": 32}
DRY_BOUNDED = 80


def settings(method: str, budget: float | int, *, least: int = MIN_PROMPT) -> dict[str, Any]:
    return {"compress": method, "budget": budget, "min_prompt": least, "lookahead": 0}


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
        more |= {"load_format": "dummy", "skip_tokenizer_init": True}
        return {**common, **more, "distributed_executor_backend": "uni"}
    memory = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2 << 30}
    return {**common, **memory, "dtype": "bfloat16", "attention_backend": backend}


def run(report: Report, device: torch.device) -> None:
    if report.dry:
        rng = random.Random(report.seed)
        short, long = (
            [[rng.randrange(3, DRY_MODEL.vocabulary) for _ in range(n)] for n in lengths]
            for lengths in (DRY_SHORT, DRY_LONG)
        )
        with tempfile.TemporaryDirectory() as folder:
            every_backend(report, DRY_MODEL.write(Path(folder)), short, long)
        return
    if not (MODEL / "config.json").exists():
        report.failed("the demo model", f"{MODEL} is missing; make it with `make model`")
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    short, long = (english(tokenizer, lengths, report.seed) for lengths in (SHORT, LONG))
    every_backend(report, str(MODEL), short, long)


def english(tokenizer: Any, lengths: Sequence[int], seed: int) -> list[TokenIds]:
    """Stretches of CPython's manual of these lengths."""
    rng = random.Random(seed)
    texts = [passage(length, rng, lambda text: len(tokenizer.encode(text))) for length in lengths]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def every_backend(report: Report, model: str, short: list[TokenIds], long: list[TokenIds]) -> None:
    full: dict[tuple[str, str], list[TokenIds]] = {}
    for backend, mode in DRY_BACKENDS if report.dry else BACKENDS:
        how = options(backend, mode, dry=report.dry)
        try:
            with both(model, settings("cake", 0.1), **how) as (off, on):
                pair = Pair(report, backend, mode, off, on)
                full[backend, mode] = pair.check_all(short, long)
        except Exception as e:  # the other pairs may still run
            report.failed(f"{backend}, {mode}", f"{type(e).__name__}: {e}")
    every_feature(report, model, long)
    for (backend, mode), answers in full.items():  # bfloat16 need not agree
        share = equal_tokens(full.get(DEFAULT, answers), answers)
        where = f"{backend}, {mode}"
        report.row("full cache against the default's", where=where, equal_tokens=share)


def every_feature(report: Report, model: str, long: list[TokenIds]) -> None:
    """What an engine must be started with: the default of CUDA does it all at once."""
    dry = report.dry
    backend, mode = DRY_BACKENDS[0] if dry else DEFAULT
    chosen = settings("cake-chunk", 0.2) | (DRY_FEATURES if dry else FEATURES)
    try:
        with both(model, chosen, **options(backend, mode, dry=dry)) as (off, on):
            Pair(report, backend, f"{mode}, all features", off, on).check_features(long)
    except Exception as e:
        report.failed(f"{backend}, all features", f"{type(e).__name__}: {e}")


@dataclass(frozen=True, slots=True)
class Pair:
    """vLLM without the plugin and with it, on one attention backend."""

    report: Report
    backend: str
    mode: str
    off: EngineProcess
    on: EngineProcess

    @property
    def where(self) -> str:
        return f"{self.backend}, {self.mode}"

    def check_all(self, short: list[TokenIds], long: list[TokenIds]) -> list[TokenIds]:
        """Returns the full cache's answers to `long`."""
        report, dry = self.report, self.report.dry
        for name, engine in (("vLLM", self.off), ("plugin", self.on)):
            report.row("engines", engine=name, asked=self.where, **engine.ask("about"))
        self._same("short prompts at budget 0.1", *self._both(short, alone=False))
        self._use(settings("cake", 1.0))
        full, whole = self._both(long, alone=False)
        self._same("long prompts at budget 1.0", full, whole)
        self._use(settings("cake", 0.1, least=NEVER))
        alone, idle = self._both(long, alone=True)
        self._same("long prompts under the threshold, one by one", alone, idle)
        self._count("compressed so far", self.on.ask("compressed"), 0)
        for budget in BUDGETS[:1] if dry else BUDGETS:
            self._at_budget(budget, long, alone)
        self._use(settings("cake", 0.1))
        if (self.backend, self.mode) == DEFAULT or dry:
            self._syncs(long, 4 if dry else 16)
        if self.mode == GRAPHS or dry:
            self._graphs(long)
        return [answer["ids"] for answer in full]

    def check_features(self, long: list[TokenIds]) -> None:
        """Prompts in pieces that their answers judge, which are bounded: no waits, FULL graphs."""
        new = DRY_BOUNDED if self.report.dry else BOUNDED
        before = self.on.ask("compressed")
        answers = [
            engine.ask("answer", prompts=long, tokens=new, alone=False)
            for engine in (self.off, self.on)
        ]
        # of prompts in pieces it has seen what the pieces left
        firsts = equal_tokens(*([x["ids"][:1] for x in some] for some in answers))
        self.report.row("first tokens of prompts in pieces", where=self.where, equal_tokens=firsts)
        self._count("compressed", self.on.ask("compressed") - before, len(long))
        for what, times in self.on.ask("packings").items():
            self.report.check(f"{self.where}: {what}", times, (">=", 1))
        self._syncs(long, new)
        self._graphs(long)

    def _use(self, chosen: dict[str, Any]) -> None:
        self.on.ask("configure", settings=chosen)

    def _answers(self, engine: EngineProcess, prompts: list[TokenIds], *, alone: bool) -> Any:
        new = 8 if self.report.dry else NEW
        return engine.ask("answer", prompts=prompts, tokens=new, alone=alone)

    def _both(self, prompts: list[TokenIds], *, alone: bool) -> list[list[Answer]]:
        return [self._answers(engine, prompts, alone=alone) for engine in (self.off, self.on)]

    def _count(self, name: str, figure: Any, wanted: int, **how: Any) -> None:
        self.report.check(f"{self.where}: {name}", figure, ("==", wanted), **how)

    def _same(self, name: str, wanted: Sequence[Answer], got: Sequence[Answer]) -> None:
        share = equal_tokens(*([answer["ids"] for answer in some] for some in (wanted, got)))
        name = f"{self.where}: {name}: share of equal tokens"
        self.report.check(name, share, ("==", 1.0), note=differences(wanted, got))

    def _at_budget(self, budget: float | int, long: list[TokenIds], full: Sequence[Answer]) -> None:
        """The first token has seen the whole prompt; the others see what is kept of it."""
        self._use(settings("cake", budget))
        before = self.on.ask("compressed")
        answers = self._answers(self.on, long, alone=True)
        firsts = [[x | {"ids": x["ids"][:1]} for x in some] for some in (full, answers)]
        self._same(f"first tokens at budget {budget}", *firsts)
        self._count(f"compressed at {budget}", self.on.ask("compressed") - before, len(long))
        share = equal_tokens(*([x["ids"] for x in some] for some in (full, answers)))
        self.report.row("texts at a budget", where=self.where, budget=budget, equal_tokens=share)

    def _syncs(self, long: list[TokenIds], new: int) -> None:
        """What prefills, compressions and decodes make the host wait for, against vLLM alone."""
        off, on = (e.ask("syncs", prompts=long, tokens=new) for e in (self.off, self.on))
        for name, seen in (("vLLM", off), ("plugin", on)):
            self.report.row("host syncs in the worker's steps", engine=name, **seen)
        self._count("requests compressed while syncs were counted", on["compressed"], len(long))
        self._count("host syncs made by the plugin", on["ours"], 0, measured=True)
        name = f"{self.where}: host syncs more than without the plugin"
        self.report.check(name, on["all"] - off["all"], ("<=", 0), measured=True)

    def _graphs(self, long: list[TokenIds]) -> None:
        """Decode steps of compressed requests must replay FULL graphs, by vLLM's log."""
        steps = 4 if self.report.dry else DECODES
        for name, engine in (("vLLM", self.off), ("plugin", self.on)):
            seen = engine.ask("graphs", prompts=long, steps=steps)
            share = seen["modes"].get("FULL", 0) / max(sum(seen["modes"].values()), 1)
            check = f"{self.where}: {name}: decode steps in FULL graphs"
            note = str(seen["modes"])
            self.report.check(check, share, ("==", 1.0), measured=True, note=note)
            log = " / ".join(seen["log"])
            self.report.row("vLLM's log of its graphs", where=self.where, engine=name, log=log)


def equal_tokens(a: Sequence[TokenIds], b: Sequence[TokenIds]) -> float:
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


def first_difference(a: TokenIds, b: TokenIds) -> int:
    pairs = enumerate(zip(a, b, strict=True))
    return next((i for i, (x, y) in pairs if x != y), len(a))
