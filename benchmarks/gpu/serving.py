"""Stage `serving`: one model with random weights, one size of KV pool, the full cache against
budgets of a tenth and of 1024 tokens.

Two engines stay up side by side, one without the plugin, and take turns. Goals: compressing costs
at most 2 % of the time to the first token, five times as many requests fit, and where nothing can
be won, in short prompts and an idle pool, at most 1 % is lost.
"""

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engine_process import EngineProcess, both
from benchmarks.gpu.models import DRY as DRY_MODEL
from benchmarks.gpu.models import Model, largest
from benchmarks.gpu.report import Report

FULL = "full cache"
POOL = 147_456  # tokens at most
FULL_AT_ONCE = 18  # long prompts that the pool holds uncompressed
ROOM = 256  # tokens of an answer at most
RESERVE = 6 << 30  # bytes of an engine beside its weights and its pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is asked.

    Args:
        pool: tokens that the KV pool holds, in blocks of `block`.
        alone: prompt lengths of single requests, and rounds.
        together: prompts that decode together, their length, and rounds.
        short: short prompts that decode together, their length, and rounds.
        crowd: more requests than fit, their length, and tokens of an answer.
        steps: decode steps of each.
        few: a budget in tokens per layer, and the plugin's threshold.
    """

    pool: int
    block: int = 16
    alone: tuple[tuple[int, int], ...]
    together: tuple[tuple[int, int, int], ...]
    short: tuple[int, int, int] = (16, 512, 7)
    crowd: tuple[int, int, int]
    steps: int = 48
    few: int = 1024
    least: int = 1024

    @property
    def budgets(self) -> dict[str, float | int]:
        return {"0.1": 0.1, f"{self.few} tokens": self.few}


def sizes(pool: int) -> Sizes:
    """For a pool of so many tokens; of the largest one the prompts are of 8k, 32k and 128k."""
    long = pool // FULL_AT_ONCE
    longer, longest = 4 * long, pool - 2 * long - ROOM
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
    few=64,
    least=128,
)


def fitting(free: int) -> tuple[Model, Sizes]:
    """The largest model of which two engines fit into so many bytes, with a pool of its own each.

    Raises:
        RuntimeError: none fits.
    """
    each = free // 2 - RESERVE
    model = largest(each)
    spare = each - model.weights
    pool = min(POOL, spare // model.token_bytes) // (16 * FULL_AT_ONCE) * 16 * FULL_AT_ONCE
    return model, sizes(pool)


def options(model: Model, asked: Sizes, *, dry: bool) -> dict[str, Any]:
    """Of vLLM's `LLM`: its defaults, but for the pool and what random weights ask for."""
    common: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_num_seqs": 128,
        "block_size": asked.block,
        "max_model_len": max(length for length, _ in asked.alone) + ROOM,
    }
    if dry:
        return {
            **common,
            "dtype": "float32",
            "num_gpu_blocks_override": asked.pool // asked.block,
            "enforce_eager": True,
            "max_num_batched_tokens": 512,
            "distributed_executor_backend": "uni",
        }
    return {
        **common,
        "dtype": "bfloat16",
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": asked.pool * model.token_bytes,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 96, 128]},
    }


def run(report: Report, device: torch.device) -> None:
    model, asked = DRY_MODEL, DRY
    if not report.dry:
        model, asked = fitting(torch.cuda.mem_get_info(device)[0])
    settings = {"compress": "cake", "budget": 0.1, "min_prompt": asked.least}
    how = options(model, asked, dry=report.dry)
    with tempfile.TemporaryDirectory() as folder:
        path = model.write(Path(folder))
        with both(path, settings, **how) as (off, on):
            for name, engine in ((FULL, off), ("plugin", on)):
                about = engine.ask("about")
                report.row("engines", engine=name, model=model.name, pool=asked.pool, **about)
            turns = Turns(report, off, on, settings, asked)
            turns.nothing_to_win()
            for length, rounds in asked.alone[:2]:
                turns.single(length, rounds)
            turns.crowd()
            for count, length, rounds in asked.together:
                turns.batch(count, length, rounds)
            for length, rounds in asked.alone[2:]:
                turns.single(length, rounds)


@dataclass(frozen=True, slots=True)
class Turns:
    """The two engines, asked the same one after the other."""

    report: Report
    off: EngineProcess
    on: EngineProcess
    settings: dict[str, Any]
    sizes: Sizes

    def nothing_to_win(self) -> None:
        """Prompts under the threshold: what the plugin costs where it does nothing."""
        count, length, rounds = self.sizes.short
        asked = {"count": count, "length": length, "steps": 4 * self.sizes.steps}
        found = self._rounds(
            rounds,
            {FULL: self._decoding(self.off, **asked)} | {"idle": self._decoding(self.on, **asked)},
        )
        where = f"{count} prompts of {length}, nothing to compress"
        self._rows(where, found)
        self._ratio(f"{where}: decode step", found, "idle", "step_ms", 1.01)
        self._ratio(f"{where}: first tokens", found, "idle", "first_token_s", 1.01)

    def single(self, length: int, rounds: int) -> None:
        """One request: time to its first token, and its decode step."""
        self._compare(1, length, rounds, costs=True)

    def batch(self, count: int, length: int, rounds: int) -> None:
        """A batch that fills the pool: its decode step."""
        self._compare(count, length, rounds, costs=False)

    def _compare(self, count: int, length: int, rounds: int, *, costs: bool) -> None:
        asked = {"count": count, "length": length, "steps": self.sizes.steps}
        kinds, budgets = {FULL: self._decoding(self.off, **asked)}, self.sizes.budgets
        for name, budget in budgets.items():
            kinds[name] = self._decoding(self.on, budget=budget, **asked)
        before = self.on.ask("compressed")
        found = self._rounds(rounds, kinds)
        where = f"{count} x {length}"
        self._rows(where, found)
        due = count * len(budgets) * (rounds + 1)
        got = self.on.ask("compressed") - before
        self.report.check(f"{where}: requests compressed", got, ("==", due))
        for name in budgets:
            speedup = median(found[FULL], "step_ms") / median(found[name], "step_ms")
            self.report.row("decode steps", batch=count, tokens=length, budget=name, faster=speedup)
            if costs:
                what = f"{where}: first token, budget {name}"
                self._ratio(what, found, name, "first_token_s", 1.02)

    def crowd(self) -> None:
        """More requests than the full cache holds: how many decode together, and how fast."""
        count, length, new = self.sizes.crowd
        asked = {"count": count, "length": length, "new": new, "seed": self.report.seed}
        self._use(0.1)
        found = {
            name: engine.ask("serve", **asked)
            for name, engine in ((FULL, self.off), ("0.1", self.on))
        }
        where = f"{count} requests of {length}, one pool"
        for name, figures in found.items():
            self.report.row(
                "one pool", requests=count, tokens=length, new=new, cache=name, **figures
            )
        goals = {"most_at_once": 5.0, "decode_tokens_per_s": 5.0, "tokens_per_s": 1.0}
        for what, goal in goals.items():
            ratio = found["0.1"][what] / max(found[FULL][what], 1e-9)
            self.report.check(f"{where}: {what}, times", ratio, (">=", goal), measured=True)

    # -- turns ---------------------------------------------------------------------------------

    def _use(self, budget: float | int) -> None:
        self.on.ask("configure", settings={**self.settings, "budget": budget})

    def _decoding(
        self, engine: EngineProcess, *, budget: float | int | None = None, **asked: Any
    ) -> Callable[[int], dict[str, Any]]:
        """A round of `Engine.decode`, by its number."""

        def ask(number: int) -> dict[str, Any]:
            if budget is not None:
                self._use(budget)
            figures: dict[str, Any] = engine.ask("decode", seed=self.report.seed + number, **asked)
            return figures

        return ask

    def _rounds(
        self, rounds: int, kinds: dict[str, Callable[[int], dict[str, Any]]]
    ) -> dict[str, list[dict[str, Any]]]:
        """Every kind in every round, in an order that turns around; a round before to warm up."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
        for number in range(rounds + 1):
            order = list(kinds) if number % 2 else list(reversed(kinds))
            for name in order:
                figures = kinds[name](number)
                if number:
                    found[name].append(figures)
        return found

    def _rows(self, where: str, found: dict[str, list[dict[str, Any]]]) -> None:
        for name, rounds in found.items():
            medians = {key: median(rounds, key) for key in rounds[0]}
            self.report.row("requests", of=where, cache=name, rounds=len(rounds), **medians)

    def _ratio(
        self, name: str, found: dict[str, list[dict[str, Any]]], kind: str, what: str, goal: float
    ) -> None:
        """The median over rounds of a figure against the full cache's of the same round."""
        pairs = zip(found[kind], found[FULL], strict=True)
        ratios = [ours[what] / theirs[what] for ours, theirs in pairs]
        note = f"{min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} rounds"
        self.report.check(name, statistics.median(ratios), ("<=", goal), measured=True, note=note)


def median(rounds: list[dict[str, Any]], what: str) -> float:
    middle: float = statistics.median(figures[what] for figures in rounds)
    return middle
