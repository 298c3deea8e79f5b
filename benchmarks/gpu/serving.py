"""Stage `serving`: full cache against budgets of 0.1 and 1024 tokens, with the same KV pool size.

Two engines with random weights stay up and take turns; one runs without the plugin. Goals:

* Compression costs at most 2 % of the time to first token.
* Five times as many requests fit into the pool.
* Short prompts, which are not compressed, lose at most 1 %.
"""

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engine_process import EngineProcess, engine_pair
from benchmarks.gpu.models import DRY as DRY_MODEL
from benchmarks.gpu.models import Model, largest
from benchmarks.gpu.report import Report

FULL = "full cache"
MAX_POOL_TOKENS = 147_456
FULL_AT_ONCE = 18  # uncompressed long prompts that fit into the pool
MAX_OUTPUT_TOKENS = 256
RESERVE = 6 << 30  # bytes that an engine needs in addition to weights and pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the workloads.

    Args:
        pool: tokens that the KV pool holds, in blocks of `block`.
        alone: (prompt length, rounds) of workloads with a single request.
        together: (requests, prompt length, rounds) of workloads that decode together.
        short: requests, prompt length and rounds of the workload that is not compressed.
        crowd: requests, prompt length and output tokens of the workload that exceeds the pool.
        steps: decode steps to time per workload.
        budget_tokens: the budget in tokens per layer.
        min_prompt: the plugin's threshold in tokens.
    """

    pool: int
    block: int = 16
    alone: tuple[tuple[int, int], ...]
    together: tuple[tuple[int, int, int], ...]
    short: tuple[int, int, int] = (16, 512, 7)
    crowd: tuple[int, int, int]
    steps: int = 48
    budget_tokens: int = 1024
    min_prompt: int = 1024

    @property
    def budgets(self) -> dict[str, float | int]:
        return {"0.1": 0.1, f"{self.budget_tokens} tokens": self.budget_tokens}


def sizes(pool: int) -> Sizes:
    """Return sizes for a pool of `pool` tokens: 8k, 32k and 128k prompts for the largest pool."""
    long = pool // FULL_AT_ONCE
    longer, longest = 4 * long, pool - 2 * long - MAX_OUTPUT_TOKENS
    return Sizes(
        pool=pool,
        alone=((long, 7), (longer, 4), (longest, 1)),
        together=((FULL_AT_ONCE - 2, long, 1), (4, longer, 1)),
        crowd=(6 * FULL_AT_ONCE, long, 192),
    )


DRY = Sizes(
    pool=1280,
    block=32,
    alone=((256, 1),),
    together=((2, 256, 1),),
    short=(2, 64, 1),
    crowd=(6, 256, 8),
    steps=4,
    budget_tokens=64,
    min_prompt=128,
)


def fit_model(free: int) -> tuple[Model, Sizes]:
    """Return the largest model that two engines with a pool each can run in `free` bytes.

    Raises:
        RuntimeError: no model fits.
    """
    per_engine = free // 2 - RESERVE
    model = largest(per_engine)
    spare = per_engine - model.weights
    pool = (
        min(MAX_POOL_TOKENS, spare // model.token_bytes) // (16 * FULL_AT_ONCE) * 16 * FULL_AT_ONCE
    )
    return model, sizes(pool)


def options(model: Model, workload: Sizes, *, dry: bool) -> dict[str, Any]:
    """Return arguments of vLLM's `LLM`: its defaults except for the pool and random weights."""
    common: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_num_seqs": 128,
        "block_size": workload.block,
        "max_model_len": max(length for length, _ in workload.alone) + MAX_OUTPUT_TOKENS,
    }
    if dry:
        return {
            **common,
            "dtype": "float32",
            "num_gpu_blocks_override": workload.pool // workload.block,
            "enforce_eager": True,
            "max_num_batched_tokens": 512,
            "distributed_executor_backend": "uni",
        }
    return {
        **common,
        "dtype": "bfloat16",
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": workload.pool * model.token_bytes,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 96, 128]},
    }


def run(report: Report, device: torch.device) -> None:
    model, workload = DRY_MODEL, DRY
    if not report.dry:
        model, workload = fit_model(torch.cuda.mem_get_info(device)[0])
    settings = {"compress": "cake", "budget": 0.1, "min_prompt": workload.min_prompt}
    llm_options = options(model, workload, dry=report.dry)
    with tempfile.TemporaryDirectory() as folder:
        path = model.write(Path(folder))
        with engine_pair(path, settings, **llm_options) as (off, on):
            for name, engine in ((FULL, off), ("plugin", on)):
                about = engine.call("about")
                report.row("engines", engine=name, model=model.name, pool=workload.pool, **about)
            turns = Turns(report, off, on, settings, workload)
            turns.short_prompts()
            for length, rounds in workload.alone[:2]:
                turns.single(length, rounds)
            turns.crowd()
            for count, length, rounds in workload.together:
                turns.batch(count, length, rounds)
            for length, rounds in workload.alone[2:]:
                turns.single(length, rounds)


@dataclass(frozen=True, slots=True)
class Turns:
    """Runs the same workloads on both engines, one after the other."""

    report: Report
    off: EngineProcess
    on: EngineProcess
    settings: dict[str, Any]
    sizes: Sizes

    def short_prompts(self) -> None:
        """Measure the plugin's cost for prompts under the threshold."""
        count, length, rounds = self.sizes.short
        arguments = {"count": count, "length": length, "steps": 4 * self.sizes.steps}
        found = self._rounds(
            rounds,
            {FULL: self._decoding(self.off, **arguments)}
            | {"idle": self._decoding(self.on, **arguments)},
        )
        workload = f"{count} prompts of {length}, nothing to compress"
        self._rows(workload, found)
        self._ratio(f"{workload}: decode step", found, "idle", "step_ms", 1.01)
        self._ratio(f"{workload}: first tokens", found, "idle", "first_token_s", 1.01)

    def single(self, length: int, rounds: int) -> None:
        """Measure time to first token and decode step of a single request."""
        self._compare(1, length, rounds, check_first_token=True)

    def batch(self, count: int, length: int, rounds: int) -> None:
        """Measure the decode step of a batch that fills the pool."""
        self._compare(count, length, rounds, check_first_token=False)

    def _compare(self, count: int, length: int, rounds: int, *, check_first_token: bool) -> None:
        arguments = {"count": count, "length": length, "steps": self.sizes.steps}
        workloads, budgets = {FULL: self._decoding(self.off, **arguments)}, self.sizes.budgets
        for name, budget in budgets.items():
            workloads[name] = self._decoding(self.on, budget=budget, **arguments)
        before = self.on.call("compressed")
        found = self._rounds(rounds, workloads)
        workload = f"{count} x {length}"
        self._rows(workload, found)
        expected = count * len(budgets) * (rounds + 1)
        compressed = self.on.call("compressed") - before
        self.report.check(f"{workload}: requests compressed", compressed, ("==", expected))
        for name in budgets:
            speedup = median(found[FULL], "step_ms") / median(found[name], "step_ms")
            self.report.row("decode steps", batch=count, tokens=length, budget=name, faster=speedup)
            if check_first_token:
                check = f"{workload}: first token, budget {name}"
                self._ratio(check, found, name, "first_token_s", 1.02)

    def crowd(self) -> None:
        """Measure concurrency and throughput with more requests than the full cache holds."""
        count, length, output_tokens = self.sizes.crowd
        arguments = {
            "count": count,
            "length": length,
            "output_tokens": output_tokens,
            "seed": self.report.seed,
        }
        self._use(0.1)
        found = {
            name: engine.call("serve", **arguments)
            for name, engine in ((FULL, self.off), ("0.1", self.on))
        }
        workload = f"{count} requests of {length}, one pool"
        for name, figures in found.items():
            self.report.row(
                "one pool", requests=count, tokens=length, new=output_tokens, cache=name, **figures
            )
        goals = {"most_at_once": 5.0, "decode_tokens_per_s": 5.0, "tokens_per_s": 1.0}
        for figure, goal in goals.items():
            ratio = found["0.1"][figure] / max(found[FULL][figure], 1e-9)
            self.report.check(f"{workload}: {figure}, times", ratio, (">=", goal), measured=True)

    # -- turns ---------------------------------------------------------------------------------

    def _use(self, budget: float | int) -> None:
        self.on.call("configure", settings={**self.settings, "budget": budget})

    def _decoding(
        self, engine: EngineProcess, *, budget: float | int | None = None, **arguments: Any
    ) -> Callable[[int], dict[str, Any]]:
        """Return a function that runs `Engine.decode` for a round number."""

        def run_round(number: int) -> dict[str, Any]:
            if budget is not None:
                self._use(budget)
            figures: dict[str, Any] = engine.call(
                "decode", seed=self.report.seed + number, **arguments
            )
            return figures

        return run_round

    def _rounds(
        self, rounds: int, workloads: dict[str, Callable[[int], dict[str, Any]]]
    ) -> dict[str, list[dict[str, Any]]]:
        """Run every workload in every round, in alternating order, after one warm-up round."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in workloads}
        for number in range(rounds + 1):
            order = list(workloads) if number % 2 else list(reversed(workloads))
            for name in order:
                figures = workloads[name](number)
                if number:
                    found[name].append(figures)
        return found

    def _rows(self, workload: str, found: dict[str, list[dict[str, Any]]]) -> None:
        for name, rounds in found.items():
            medians = {key: median(rounds, key) for key in rounds[0]}
            self.report.row("requests", of=workload, cache=name, rounds=len(rounds), **medians)

    def _ratio(
        self,
        name: str,
        found: dict[str, list[dict[str, Any]]],
        cache: str,
        figure: str,
        goal: float,
    ) -> None:
        """Check the median over rounds of a figure relative to the full cache's in that round."""
        pairs = zip(found[cache], found[FULL], strict=True)
        ratios = [compressed[figure] / full[figure] for compressed, full in pairs]
        note = f"{min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} rounds"
        self.report.check(name, statistics.median(ratios), ("<=", goal), measured=True, note=note)


def median(rounds: list[dict[str, Any]], figure: str) -> float:
    middle: float = statistics.median(figures[figure] for figures in rounds)
    return middle
