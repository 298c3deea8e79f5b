"""Stage `tokens`: compare tokens of the demo model with and without the plugin.

For each attention backend, eager and with CUDA graphs, two engines get the same prompts. Tokens
must be equal at budget 1.0 and for prompts under the threshold, and the first token must be equal
at any budget. With graphs, vLLM's log must show FULL graphs for all decode steps. On the default
CUDA backend, the plugin must add no host syncs, and all checks of decode steps run again with
prompts in pieces, look-aheads and output budgets.
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
from benchmarks.gpu.engine import TokenIds
from benchmarks.gpu.engine_process import NEVER, EngineProcess, engine_pair
from benchmarks.gpu.models import DRY as DRY_MODEL
from benchmarks.gpu.report import Report
from vllm_kvcompress.compare.measures import shared_length

Output = dict[str, Any]  # a result of `Engine.generate`
ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".cache" / "smollm2-135m-instruct"
EAGER, GRAPHS = "eager", "graphs"
DEFAULT = ("FLASH_ATTN", GRAPHS)
BACKENDS = (*product(("FLASH_ATTN", "TRITON_ATTN"), (GRAPHS, EAGER)),)
DRY_BACKENDS = (("CPU_ATTN", EAGER),)
BUDGETS: tuple[float | int, ...] = (0.5, 0.1, 100)
SHORT, LONG = (
    (20, 70, 130, 200, 250),
    (900, 1500, 2047, 2500, 3000, 3500),
)  # prompt lengths in tokens
DRY_SHORT, DRY_LONG = (20, 130), (300, 420)
MIN_PROMPT = 256
OUTPUT_TOKENS = 48
GRAPH_STEPS = 40  # decode steps whose graph modes are checked
FEATURES = {"lookahead": 32, "max_whole": 2048, "piece": 512}
FEATURES |= {"decode_budget": 512, "decode_interval": 128}
LONG_OUTPUT_TOKENS = 550  # enough for the output to be packed again
DRY_FEATURES = {"lookahead": 8, "max_whole": 256, "piece": 96, "window": 8}
DRY_FEATURES |= {"decode_budget": 64, "decode_interval": 32}
DRY_LONG_OUTPUT_TOKENS = 80


def settings(method: str, budget: float | int, *, min_prompt: int = MIN_PROMPT) -> dict[str, Any]:
    return {"compress": method, "budget": budget, "min_prompt": min_prompt, "lookahead": 0}


def options(backend: str, mode: str, *, dry: bool) -> dict[str, Any]:
    """Return arguments of vLLM's `LLM`: long prompts need several chunks, default graph mode."""
    common: dict[str, Any] = {
        "max_model_len": 4096,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 32,
        "disable_log_stats": False,
        "cudagraph_metrics": True,
        "enforce_eager": mode == EAGER,
    }
    if dry:
        dry_options = {"dtype": "float32", "num_gpu_blocks_override": 512, "block_size": 32}
        dry_options |= {"load_format": "dummy", "skip_tokenizer_init": True}
        return {**common, **dry_options, "distributed_executor_backend": "uni"}
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
            check_backends(report, DRY_MODEL.write(Path(folder)), short, long)
        return
    if not (MODEL / "config.json").exists():
        report.failed("the demo model", f"{MODEL} is missing; run `make model`")
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    short, long = (english(tokenizer, lengths, report.seed) for lengths in (SHORT, LONG))
    check_backends(report, str(MODEL), short, long)


def english(tokenizer: Any, lengths: Sequence[int], seed: int) -> list[TokenIds]:
    """Return passages of CPython's manual with these lengths in tokens, as token ids."""
    rng = random.Random(seed)
    texts = [passage(length, rng, lambda text: len(tokenizer.encode(text))) for length in lengths]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def check_backends(report: Report, model: str, short: list[TokenIds], long: list[TokenIds]) -> None:
    full: dict[tuple[str, str], list[TokenIds]] = {}
    for backend, mode in DRY_BACKENDS if report.dry else BACKENDS:
        llm_options = options(backend, mode, dry=report.dry)
        try:
            with engine_pair(model, settings("cake", 0.1), **llm_options) as (off, on):
                pair = Pair(report, backend, mode, off, on)
                full[backend, mode] = pair.check_all(short, long)
        except Exception as e:  # run the other backends
            report.failed(f"{backend}, {mode}", f"{type(e).__name__}: {e}")
    check_all_features(report, model, long)
    for (backend, mode), outputs in full.items():  # not a check: bfloat16 results may differ
        share = equal_tokens(full.get(DEFAULT, outputs), outputs)
        where = f"{backend}, {mode}"
        report.row("full cache against the default's", where=where, equal_tokens=share)


def check_all_features(report: Report, model: str, long: list[TokenIds]) -> None:
    """Check all startup-only features together on the default CUDA backend."""
    dry = report.dry
    backend, mode = DRY_BACKENDS[0] if dry else DEFAULT
    all_features = settings("cake-chunk", 0.2) | (DRY_FEATURES if dry else FEATURES)
    try:
        with engine_pair(model, all_features, **options(backend, mode, dry=dry)) as (off, on):
            Pair(report, backend, f"{mode}, all features", off, on).check_features(long)
    except Exception as e:
        report.failed(f"{backend}, all features", f"{type(e).__name__}: {e}")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines on one attention backend: vLLM without (`off`) and with (`on`) the plugin."""

    report: Report
    backend: str
    mode: str
    off: EngineProcess
    on: EngineProcess

    @property
    def where(self) -> str:
        return f"{self.backend}, {self.mode}"

    def check_all(self, short: list[TokenIds], long: list[TokenIds]) -> list[TokenIds]:
        """Run all checks and return the full cache's output tokens for `long`."""
        report, dry = self.report, self.report.dry
        for name, engine in (("vLLM", self.off), ("plugin", self.on)):
            report.row("engines", engine=name, asked=self.where, **engine.call("about"))
        self._check_same("short prompts at budget 0.1", *self._both(short, alone=False))
        self._use(settings("cake", 1.0))
        full, uncompressed = self._both(long, alone=False)
        self._check_same("long prompts at budget 1.0", full, uncompressed)
        self._use(settings("cake", 0.1, min_prompt=NEVER))
        alone, idle = self._both(long, alone=True)
        self._check_same("long prompts under the threshold, one by one", alone, idle)
        self._check_count("compressed so far", self.on.call("compressed"), 0)
        for budget in BUDGETS[:1] if dry else BUDGETS:
            self._at_budget(budget, long, alone)
        self._use(settings("cake", 0.1))
        if (self.backend, self.mode) == DEFAULT or dry:
            self._syncs(long, 4 if dry else 16)
        if self.mode == GRAPHS or dry:
            self._graphs(long)
        return [output["ids"] for output in full]

    def check_features(self, long: list[TokenIds]) -> None:
        """Check pieces, look-aheads and output budgets: packings, host syncs and FULL graphs."""
        output_tokens = DRY_LONG_OUTPUT_TOKENS if self.report.dry else LONG_OUTPUT_TOKENS
        before = self.on.call("compressed")
        outputs = [
            engine.call("generate", prompts=long, tokens=output_tokens, alone=False)
            for engine in (self.off, self.on)
        ]
        # Not a check: the last piece reads compressed pieces, so the first token may differ.
        firsts = equal_tokens(*([x["ids"][:1] for x in of_engine] for of_engine in outputs))
        self.report.row("first tokens of prompts in pieces", where=self.where, equal_tokens=firsts)
        self._check_count("compressed", self.on.call("compressed") - before, len(long))
        for packing, times in self.on.call("packings").items():
            self.report.check(f"{self.where}: {packing}", times, (">=", 1))
        self._syncs(long, output_tokens)
        self._graphs(long)

    def _use(self, new_settings: dict[str, Any]) -> None:
        self.on.call("configure", settings=new_settings)

    def _outputs(self, engine: EngineProcess, prompts: list[TokenIds], *, alone: bool) -> Any:
        output_tokens = 8 if self.report.dry else OUTPUT_TOKENS
        return engine.call("generate", prompts=prompts, tokens=output_tokens, alone=alone)

    def _both(self, prompts: list[TokenIds], *, alone: bool) -> list[list[Output]]:
        return [self._outputs(engine, prompts, alone=alone) for engine in (self.off, self.on)]

    def _check_count(self, name: str, figure: Any, expected: int, **options: Any) -> None:
        self.report.check(f"{self.where}: {name}", figure, ("==", expected), **options)

    def _check_same(self, name: str, expected: Sequence[Output], got: Sequence[Output]) -> None:
        share = equal_tokens(
            *([output["ids"] for output in outputs] for outputs in (expected, got))
        )
        name = f"{self.where}: {name}: share of equal tokens"
        self.report.check(name, share, ("==", 1.0), note=differences(expected, got))

    def _at_budget(self, budget: float | int, long: list[TokenIds], full: Sequence[Output]) -> None:
        """Check the first token, which the full cache computes, and report the share of others."""
        self._use(settings("cake", budget))
        before = self.on.call("compressed")
        outputs = self._outputs(self.on, long, alone=True)
        firsts = [[x | {"ids": x["ids"][:1]} for x in of_engine] for of_engine in (full, outputs)]
        self._check_same(f"first tokens at budget {budget}", *firsts)
        self._check_count(f"compressed at {budget}", self.on.call("compressed") - before, len(long))
        share = equal_tokens(*([x["ids"] for x in of_engine] for of_engine in (full, outputs)))
        self.report.row("texts at a budget", where=self.where, budget=budget, equal_tokens=share)

    def _syncs(self, long: list[TokenIds], output_tokens: int) -> None:
        """Check that the plugin adds no host syncs to prefill, compression and decode."""
        arguments = {"prompts": long, "tokens": output_tokens}
        off, on = (e.call("syncs", **arguments) for e in (self.off, self.on))
        for name, syncs in (("vLLM", off), ("plugin", on)):
            self.report.row("host syncs in the worker's steps", engine=name, **syncs)
        self._check_count(
            "requests compressed while syncs were counted", on["compressed"], len(long)
        )
        self._check_count("host syncs made by the plugin", on["ours"], 0, measured=True)
        name = f"{self.where}: host syncs more than without the plugin"
        self.report.check(name, on["all"] - off["all"], ("<=", 0), measured=True)

    def _graphs(self, long: list[TokenIds]) -> None:
        """Check in vLLM's log that decode steps of compressed requests replay FULL graphs."""
        steps = 4 if self.report.dry else GRAPH_STEPS
        for name, engine in (("vLLM", self.off), ("plugin", self.on)):
            graphs = engine.call("graphs", prompts=long, steps=steps)
            share = graphs["modes"].get("FULL", 0) / max(sum(graphs["modes"].values()), 1)
            check = f"{self.where}: {name}: decode steps in FULL graphs"
            note = str(graphs["modes"])
            self.report.check(check, share, ("==", 1.0), measured=True, note=note)
            log = " / ".join(graphs["log"])
            self.report.row("vLLM's log of its graphs", where=self.where, engine=name, log=log)


def equal_tokens(a: Sequence[TokenIds], b: Sequence[TokenIds]) -> float:
    """Return the share of tokens before the first difference of each pair."""
    same = sum(shared_length(x, y) for x, y in zip(a, b, strict=True))
    return same / max(sum(len(x) for x in a), 1)


def differences(expected: Sequence[Output], got: Sequence[Output]) -> str:
    """Describe each first difference and vLLM's margin there; rounding can flip small margins."""
    found = []
    for number, (a, b) in enumerate(zip(expected, got, strict=True)):
        index = shared_length(a["ids"], b["ids"])
        if index < len(a["ids"]):
            found.append(f"prompt {number} at token {index}, margin {a['margins'][index]:.2g} nats")
    return "; ".join(found)
