"""Stage `serving`: shapes of Llama-3.1-8B with random weights, one size of KV pool, full cache
against budgets of a tenth and of 1024 tokens.

Two engines stay up side by side, one without the plugin, and take turns. Goals: compressing costs
at most 2 % of the time to the first token, five times as many requests fit, and where nothing can
be won, in short prompts and an idle pool, at most 1 % is lost.
"""

import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from h200_report import Report
from h200_worker import Worker, workers

FULL = "full cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is asked.

    Args:
        blocks: of the KV pool, of `block` tokens each.
        alone: prompt lengths of single requests, and rounds.
        together: prompts that decode together, their length, and rounds.
        short: short prompts that decode together, their length, and rounds.
        crowd: more requests than fit, their length, and tokens of an answer.
        steps: decode steps of each.
        few: a budget in tokens per layer.
        least: the plugin's threshold.
    """

    blocks: int = 9216  # 147,456 tokens, 18 GiB
    block: int = 16
    alone: tuple[tuple[int, int], ...] = ((8192, 7), (32768, 4))
    together: tuple[tuple[int, int, int], ...] = ((16, 8192, 1), (4, 32768, 1))
    short: tuple[int, int, int] = (16, 512, 7)
    crowd: tuple[int, int, int] = (112, 8192, 192)
    longest: tuple[int, int] = (130_816, 1)
    steps: int = 48
    few: int = 1024
    least: int = 1024

    @property
    def budgets(self) -> dict[str, float | int]:
        return {"0.1": 0.1, f"{self.few} tokens": self.few}


DRY = Sizes(
    blocks=80,
    block=32,
    alone=((512, 1),),
    together=((2, 512, 1),),
    short=(2, 64, 1),
    crowd=(6, 512, 16),
    longest=(1024, 1),
    steps=4,
    few=64,
    least=256,
)


def model_folder(folder: Path, *, dry: bool) -> str:
    """The configuration of a Llama, to be loaded with random weights."""
    heads, kv_heads, dim, layers = (4, 2, 32, 2) if dry else (32, 8, 128, 32)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": heads * dim,
        "intermediate_size": 128 if dry else 14336,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": 512 if dry else 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32" if dry else "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def options(sizes: Sizes, *, dry: bool) -> dict[str, Any]:
    """Of vLLM's `LLM`: its defaults, but for the pool and what random weights ask for."""
    common: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_num_seqs": 128,
        "block_size": sizes.block,
    }
    if dry:
        more = {"dtype": "float32", "max_model_len": 2048, "num_gpu_blocks_override": sizes.blocks}
        return {
            **common,
            **more,
            "enforce_eager": True,
            "max_num_batched_tokens": 512,
            "distributed_executor_backend": "uni",
        }
    page = sizes.block * 8 * 2 * 128 * 2  # bytes of a layer's share of a block
    return {
        **common,
        "dtype": "bfloat16",
        "max_model_len": 131072,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": sizes.blocks * 32 * page,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 96, 128]},
    }


def serving(report: Report, device: torch.device) -> None:
    sizes = DRY if report.dry else Sizes()
    settings = {"compress": "cake", "budget": 0.1, "min_prompt": sizes.least}
    how = options(sizes, dry=report.dry)
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(Path(folder), dry=report.dry)
        made = Worker(model, None, **how), Worker(model, settings, **how)
        with workers(*made) as (off, on):
            for name, one in ((FULL, off), ("plugin", on)):
                report.row("engines", engine=name, **one.ask("about"))
            turns = Turns(report, off, on, settings, sizes)
            turns.nothing_to_win()
            for length, rounds in sizes.alone:
                turns.single(length, rounds)
            turns.crowd()
            for count, length, rounds in sizes.together:
                turns.batch(count, length, rounds)
            turns.single(*sizes.longest)


@dataclass(frozen=True, slots=True)
class Turns:
    """The two engines, asked the same one after the other."""

    report: Report
    off: Worker
    on: Worker
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
            name: one.ask("serve", **asked) for name, one in ((FULL, self.off), ("0.1", self.on))
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
        self, one: Worker, *, budget: float | int | None = None, **asked: Any
    ) -> Callable[[int], dict[str, Any]]:
        """A round of `Engine.decode`, by its number."""

        def ask(number: int) -> dict[str, Any]:
            if budget is not None:
                self._use(budget)
            figures: dict[str, Any] = one.ask("decode", seed=self.report.seed + number, **asked)
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
    return statistics.median(figures[what] for figures in rounds)
