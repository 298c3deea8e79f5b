"""Stages that compare vLLM without and with the plugin, with equal KV pools.

Both engines have random weights and stay up, and variants alternate in each round (`rounds.py`).

* switches: time to first token of a compressed prompt, with and without single changes; goal 2 %
* long: the same for a prompt four times as long
* gaps: the longest wait for a token while look-aheads of other requests end
* idle: the plugin's cost for prompts under the threshold; goal 1 %
* batches: how many requests one pool holds, decode steps of batches, and the longest prompt
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu.engine_process import EngineProcess, engine_pair
from benchmarks.gpu.models import DRY as DRY_MODEL
from benchmarks.gpu.report import Report
from benchmarks.gpu.rounds import (
    Figures,
    Variants,
    alternate,
    difference,
    median,
    report_difference,
    report_rounds,
)
from benchmarks.gpu.switches import SWITCHES
from benchmarks.gpu.workloads import DRY, Sizes, fit_model, options

FULL, PLUGIN = "full cache", "plugin"
AT_PROMPT_END = {"compress": "cake", "budget": 0.1}
AFTER_LOOK_AHEAD = {"compress": "cake-chunk", "budget": 0.2}
"""The recommended preset. Its prompts are packed in a decode step, after 32 output tokens."""


def run_switches(report: Report, device: torch.device) -> None:
    with turns(report, device, AT_PROMPT_END) as found:
        found.first_tokens(*found.sizes.prompt_8k)
        found.trace(found.sizes.prompt_8k[0])


def run_long(report: Report, device: torch.device) -> None:
    with turns(report, device, AT_PROMPT_END) as found:
        found.first_tokens(*found.sizes.prompt_32k)


def run_gaps(report: Report, device: torch.device) -> None:
    with turns(report, device, AFTER_LOOK_AHEAD) as found:
        for count, length, rounds in found.sizes.look_aheads:
            found.gaps(count, length, rounds)


def run_idle(report: Report, device: torch.device) -> None:
    with turns(report, device, AT_PROMPT_END) as found:
        found.short_prompts()


def run_batches(report: Report, device: torch.device) -> None:
    with turns(report, device, AT_PROMPT_END) as found:
        found.crowd()
        for count, length, rounds in found.sizes.together:
            found.decode_steps(count, length, rounds)
        found.decode_steps(1, *found.sizes.prompt_128k)


@contextmanager
def turns(
    report: Report, device: torch.device, settings: dict[str, Any], drafts: int = 0
) -> Iterator["Turns"]:
    """Start both engines with the largest model that fits, and report what they are.

    Args:
        report: where they are reported.
        device: of the engines.
        settings: of the plugin.
        drafts: drafts of an EAGLE head per step; 0 without one.
    """
    model, sizes = DRY_MODEL, DRY
    if not report.dry:
        model, sizes = fit_model(torch.cuda.mem_get_info(device)[0])
    settings = {**settings, "min_prompt": sizes.min_prompt}
    # The same path in every stage, because vLLM's compile cache depends on it.
    folder = report.folder / "model"
    folder.mkdir(exist_ok=True)
    llm_options = options(model, sizes, dry=report.dry)
    if drafts:
        head = report.folder / "head"
        head.mkdir(exist_ok=True)
        speculative = {"method": "eagle", "model": replace(model, layers=1).write(head)}
        llm_options["speculative_config"] = speculative | {"num_speculative_tokens": drafts}
    with engine_pair(model.write(folder), settings, **llm_options) as (off, on):
        for name, engine in ((FULL, off), (PLUGIN, on)):
            about = engine.call("about")
            report.row("engines", engine=name, model=model.name, pool=sizes.pool, **about)
        yield Turns(report, off, on, settings, sizes)


@dataclass(frozen=True, slots=True)
class Turns:
    """Runs the same workloads on both engines, one after the other."""

    report: Report
    off: EngineProcess
    on: EngineProcess
    settings: dict[str, Any]
    sizes: Sizes

    def first_tokens(self, length: int, rounds: int) -> None:
        """Measure a single request: vLLM, the plugin, and the plugin without each switch."""
        arguments = {"count": 1, "length": length, "steps": self.sizes.steps}
        variants = {FULL: self._decoding(self.off, **arguments)}
        variants[PLUGIN] = self._decoding(self.on, **arguments)
        absent = [name for name in SWITCHES if not self.on.call("switch", name=name, on=True)]
        for name in absent:
            self.report.absent(f"without {name}", "this commit has no such switch")
        present = [name for name in SWITCHES if name not in absent]
        for name in present:
            variants[f"without {name}"] = self._without(name, variants[PLUGIN])
        workload = f"1 x {length}"
        found = self._compressing(workload, rounds, variants, prompts=len(variants) - 1)
        self._check(f"{workload}: first token", found, PLUGIN, "first_token_s", 0.02)
        for figure in ("first_token_s", "step_ms"):
            for name in present:
                report_difference(self.report, workload, found, f"without {name}", PLUGIN, figure)
            report_difference(self.report, workload, found, PLUGIN, FULL, figure)

    def trace(self, length: int) -> None:
        """Save a profile of one prompt: from its forward pass to the copy of its first token."""
        path = self.report.folder / f"trace_{length}.json.gz"
        self.on.call("trace", length=length, path=str(path), seed=self.report.seed)
        self.report.row("traces", of=f"1 x {length}", file=path.name)

    def gaps(self, count: int, length: int, rounds: int) -> None:
        """Measure the longest wait for a token while all requests decode and are packed."""
        arguments = {"count": count, "length": length, "output_tokens": self.sizes.gap_tokens}
        variants = {
            name: self._calling(engine, "gaps", **arguments)
            for name, engine in ((FULL, self.off), (PLUGIN, self.on))
        }
        workload = f"{count} x {length}, decoding"
        found = self._compressing(workload, rounds, variants, prompts=count)
        for figure in ("longest_gap_ms", "median_gap_ms"):
            report_difference(self.report, workload, found, PLUGIN, FULL, figure)

    def short_prompts(self) -> None:
        """Measure the plugin's cost for prompts under the threshold."""
        count, length, rounds = self.sizes.short
        arguments = {"count": count, "length": length, "steps": 4 * self.sizes.steps}
        variants = {
            name: self._decoding(engine, **arguments)
            for name, engine in ((FULL, self.off), (PLUGIN, self.on))
        }
        workload = f"{count} x {length}, nothing to compress"
        found = self._compressing(workload, rounds, variants, prompts=0)
        self._check(f"{workload}: decode step", found, PLUGIN, "step_ms", 0.01)
        self._check(f"{workload}: first tokens", found, PLUGIN, "first_token_s", 0.01)

    def decode_steps(self, count: int, length: int, rounds: int) -> None:
        """Measure the decode step of a batch, by budget."""
        arguments = {"count": count, "length": length, "steps": self.sizes.steps}
        variants, budgets = {FULL: self._decoding(self.off, **arguments)}, self.sizes.budgets
        for name, budget in budgets.items():
            variants[name] = self._decoding(self.on, budget=budget, **arguments)
        workload = f"{count} x {length}"
        found = self._compressing(workload, rounds, variants, prompts=count * len(budgets))
        for name in budgets:
            faster = median(found[FULL], "step_ms") / median(found[name], "step_ms")
            self.report.row("decode steps", batch=count, tokens=length, budget=name, faster=faster)

    def crowd(self) -> None:
        """Measure concurrency and throughput with more requests than the full cache holds."""
        count, length, output_tokens = self.sizes.crowd
        arguments = {"count": count, "length": length, "output_tokens": output_tokens}
        found = {
            name: engine.call("serve", seed=self.report.seed, **arguments)
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

    # -- variants ------------------------------------------------------------------------------

    def _calling(
        self, engine: EngineProcess, method: str, **arguments: Any
    ) -> Callable[[int], Figures]:
        """Return a function that calls a method of `Engine` for a round number."""

        def run_round(number: int) -> Figures:
            figures: Figures = engine.call(method, seed=self.report.seed + number, **arguments)
            return figures

        return run_round

    def _decoding(
        self, engine: EngineProcess, *, budget: float | int | None = None, **arguments: Any
    ) -> Callable[[int], Figures]:
        """Return a function that runs `Engine.decode` for a round number."""
        decode = self._calling(engine, "decode", **arguments)
        if budget is None:
            return decode

        def run_round(number: int) -> Figures:
            self.on.call("configure", settings={**self.settings, "budget": budget})
            return decode(number)

        return run_round

    def _without(self, switch: str, inner: Callable[[int], Figures]) -> Callable[[int], Figures]:
        """Return `inner` with a switch of the plugin turned off while it runs."""

        def run_round(number: int) -> Figures:
            self.on.call("switch", name=switch, on=False)
            try:
                return inner(number)
            finally:
                self.on.call("switch", name=switch, on=True)

        return run_round

    # -- results -------------------------------------------------------------------------------

    def _compressing(
        self, workload: str, rounds: int, variants: Variants, *, prompts: int
    ) -> dict[str, list[Figures]]:
        """Run the rounds, report all figures, and check how many prompts each compressed."""
        before = self.on.call("compressed")
        found = alternate(rounds, variants)
        compressed = self.on.call("compressed") - before
        expected = prompts * (rounds + 1)
        self.report.check(f"{workload}: requests compressed", compressed, ("==", expected))
        report_rounds(self.report, workload, found)
        return found

    def _check(
        self, name: str, found: dict[str, list[Figures]], variant: str, figure: str, goal: float
    ) -> None:
        """Check that a figure exceeds the full cache's by at most `goal`."""
        result = difference(found, variant, FULL, figure)
        undecided = result.low <= goal < result.high
        note = f"{result}; the interval contains the goal" if undecided else str(result)
        self.report.check(
            f"{name}, increase", result.median, ("<=", goal), measured=True, note=note
        )
