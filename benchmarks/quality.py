"""What a model still knows when its prompts are compressed, measured through the real engine.

    python benchmarks/quality.py --model .cache/smollm2-135m-instruct

For each method and budget, the same prompts:

* needles: a fact hidden in English text, a question about it at the end. Only prompts that the full
  cache answers count, so the full cache scores 100 %.
* KL: divergence of the next tokens' distributions from the full cache's, in nats per token, along
  the full cache's own greedy text. A logits processor records every distribution and then forces
  the token, so that each step is an ordinary decode step on the compressed cache. The first token
  is computed by the prefill, from the full cache whatever the method: it must not differ.

All pairs run in one engine whose settings are exchanged in between. Its prefix cache then holds the
prompts, and only what a method must see of a prompt is computed again. ``--fresh`` gives each pair
an engine of its own without a prefix cache and takes the reference from vLLM without the plugin:
slower by all the prefills, the same figures.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from needles import FORCED, PHRASINGS, Job, Reference, reference
from origin import commit, machine
from quality_report import FULL, console_table, markdown
from rich.console import Console

BUDGETS = (0.5, 0.2, 0.1)
BLOCK = 32  # the CPU backend's smallest: pages round least
MIN_PROMPT = 256

Settings = Mapping[str, Any]
Tape = dict[tuple[str, int], torch.Tensor]
"""Logits ``[vocabulary]`` float32 of a job's step."""


class Engine:
    """A vLLM engine in this process: float32, greedy, blocks of 32 tokens.

    Args:
        settings: the plugin's, or None for vLLM without it.
        cache: keep prompts in the prefix cache.
    """

    def __init__(self, model: str, settings: Settings | None, *, cache: bool) -> None:
        from vllm import LLM

        self.tape: Tape = {}
        self.llm = LLM(
            model,
            dtype="float32",
            max_model_len=4096,
            max_num_seqs=64,
            block_size=BLOCK,
            enforce_eager=True,
            distributed_executor_backend="uni",
            enable_prefix_caching=cache,
            logits_processors=[recorder(self.tape)],
            seed=0,
            **({"additional_config": {"kvcompress": settings}} if settings else {}),
        )
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.worker = core.model_executor.driver_worker.worker
        self.plans: dict[str, Any] = {}  # request id -> PagePlan, of one run
        self.audits = 0  # steps of the run in which the blocks in use were those of the plans
        schedule = self.scheduler.schedule

        def noting(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            step = getattr(output, "kvcompress", None)
            self.plans.update({c.request_id: c.plan for c in step.compress} if step else {})
            return output

        self.scheduler.schedule = noting

    @property
    def compressed(self) -> int:
        return int(self.worker.compressor.compressed) if hasattr(self.worker, "compressor") else 0

    def switch(self, settings: Settings) -> None:
        """Exchange the plugin's settings while nothing runs; the prefix cache stays.

        Worker and scheduler are given what they would have been built with. `kept` then sees
        in every plan that both sides took it.
        """
        from vllm_kvcompress.engine.startup.configure import configure, settings_in
        from vllm_kvcompress.engine.worker.worker import bind_compressor

        assert not self.llm.llm_engine.has_unfinished_requests()
        configs = (self.llm.llm_engine.vllm_config, self.scheduler.vllm_config)
        for config in {id(c): c for c in (*configs, self.worker.vllm_config)}.values():
            config.additional_config["kvcompress"] = dict(settings)
            parsed = settings_in(config.additional_config)
            assert parsed is not None
            configure(config, parsed)
        worker, runner = self.worker, self.worker.model_runner
        worker.compressor = bind_compressor(
            worker.vllm_config, worker.settings, runner, runner.kv_cache_config
        )
        coordinator = self.scheduler.kv_cache_manager.coordinator
        manager = coordinator.single_type_managers[0]
        manager.use(worker.settings)

    def run(self, jobs: Sequence[Job]) -> dict[str, Any]:
        """All jobs at once; vLLM's outputs by name, each with what the prefix cache gave it."""
        from vllm import SamplingParams

        self.tape.clear()
        self.plans.clear()
        self.audits = self.cached = 0
        engine = self.llm.llm_engine
        for job in jobs:
            extra = {"record": job.name, "force": job.force} if job.record else None
            params = SamplingParams(
                temperature=0, max_tokens=job.tokens, ignore_eos=True, extra_args=extra
            )
            engine.add_request(job.name, {"prompt_token_ids": list(job.ids)}, params)
        done: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = output.outputs[0]
                    self.cached += output.num_cached_tokens or 0
            self._audit()
        for job in jobs:
            assert job.force is None or list(done[job.name].token_ids) == list(job.force)
        return done

    def logits(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """The last run's recorded logits, ``[FORCED, vocabulary]`` float32 by name."""
        assert len(self.tape) == len(names) * FORCED, "every step is recorded once"
        return {name: torch.stack([self.tape[name, i] for i in range(FORCED)]) for name in names}

    def _audit(self) -> None:
        """While all decode, the pool must have given out exactly the blocks of the plans."""
        running = self.scheduler.running
        prefilling = self.scheduler.waiting or any(r.is_prefill_chunk for r in running)
        if prefilling or not running or any(r.request_id not in self.plans for r in running):
            return
        pool = self.scheduler.kv_cache_manager.block_pool
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        plans = [(request, self.plans[request.request_id]) for request in running]
        due = sum(-(-r.num_computed_tokens // BLOCK) - p.full_blocks + p.blocks for r, p in plans)
        assert used == due, f"{used} blocks are in use, the plans say {due}"
        self.audits += 1

    def close(self) -> None:
        """End the engine and give its memory back; safe to call twice."""
        if vars(self):
            self.llm.llm_engine.engine_core.shutdown()
            vars(self).clear()
            gc.collect()


def recorder(tape: Tape) -> type[Any]:
    """A vLLM logits processor that copies a request's logits to `tape` before it forces a token.

    A request is recorded under ``extra_args["record"]``; a step that is computed again, as in the
    chunks of a prefill before the last, is overwritten.
    """
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class Recorder(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Callable[..., torch.Tensor] | None:
            extra = params.extra_args or {}
            name, force = extra.get("record"), extra.get("force")
            if name is None:
                return None

            def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
                step = len(output_ids)
                tape[name, step] = logits.to(torch.float32, copy=True)
                if force is None:
                    return logits
                forced = torch.full_like(logits, -torch.inf)
                forced[force[step]] = 0.0
                return forced

            return process

    return Recorder


def divergence(full: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``KL(full || other)`` in nats of each row of two ``[steps, vocabulary]`` logits, float64."""
    p, q = full.double().log_softmax(-1), other.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def measure(engine: Engine, settings: Settings, full: Reference) -> dict[str, Any]:
    """One pair's results.

    Raises:
        AssertionError: a prompt was not compressed, pages or blocks are not those of the budget,
            or the first token's distribution is not the full cache's.
    """
    start, jobs, before = time.perf_counter(), full.jobs(), engine.compressed
    said = engine.run(jobs)
    logits = engine.logits(list(full.texts))
    kl = [divergence(full.logits[name], logits[name]) for name in full.texts]
    first = max((float(rows[0]) for rows in kl), default=0.0)
    assert first < 1e-5, f"the first token's distribution differs by {first} nats"
    means = [float(rows[1:].mean()) for rows in kl]
    missed = [n for n in full.needles if not n.answered_by(said[f"needle{n.slot.index}"].text)]
    depths = Counter(n.slot.depth for n in missed)
    return {
        "needles_answered": len(full.needles) - len(missed),
        "needles": len(full.needles),
        "missed_by_depth": {str(depth): depths[depth] for depth in sorted(depths)},
        "kl": sum(means) / max(len(means), 1),
        "kl_of_each_text": [round(value, 6) for value in means],
        "kl_of_first_token": first,
        "prompts": len(jobs),
        **kept(engine, settings, len(jobs), engine.compressed - before),
        "prompt_tokens": sum(len(job.ids) for job in jobs),
        "prompt_tokens_from_prefix_cache": engine.cached,
        "seconds": round(time.perf_counter() - start, 1),
    }


def kept(engine: Engine, settings: Settings, prompts: int, compressed: int) -> dict[str, Any]:
    """Assert that every prompt was compressed to its budget; returns pages and blocks."""
    plans = list(engine.plans.values())
    if settings["budget"] == 1.0:
        assert compressed == len(plans) == 0
        return {"compressed": 0}
    assert compressed == len(plans) == prompts, f"{compressed} of {prompts} were compressed"
    assert engine.audits > 0, "the blocks in use were never compared with the plans"
    window = engine.worker.settings.resolved_window
    tokens = 0
    for plan in plans:
        assert plan.window == window
        layers = plan.num_layers
        tokens += plan.pages * BLOCK + layers * plan.tail
        stated = layers * max(settings["budget"] * plan.tokens, window + 1)
        over = stated - plan.pages * BLOCK - layers * plan.tail
        # rounded: a token per layer down, all layers together down to a page, not below windows
        assert -1 <= over < layers + BLOCK or plan.pages == layers * plan.floor_pages, plan
    tails = sum(plan.tail > 0 for plan in plans)
    return {
        "compressed": compressed,
        "pages_before": sum(plan.num_layers * plan.full_blocks for plan in plans),
        "pages_after": sum(plan.pages for plan in plans),
        "blocks_before": sum(plan.full_blocks for plan in plans) + tails,
        "blocks_after": sum(plan.blocks for plan in plans) + tails,
        "kept": round(tokens / sum(plan.num_layers * plan.tokens for plan in plans), 4),
    }


def measure_all(
    args: argparse.Namespace, results: dict[str, Any], save: Callable[[], None]
) -> None:
    """Fill in the pairs that `results` lacks, saving after each; the full cache checks itself."""
    methods: dict[str, Settings] = {name: {"compress": name} for name in args.presets}
    methods |= dict(args.settings)
    idle, *_ = methods.values()
    pairs: list[tuple[str, Settings, float]] = [(FULL, idle, 1.0)]
    pairs += [(name, made, budget) for name, made in methods.items() for budget in args.budgets]
    have = {(pair["method"], pair["budget"]) for pair in results["pairs"]}
    pairs = [pair for pair in pairs if (pair[0], pair[2]) not in have]
    if not pairs:
        return
    # Every prompt under the threshold: vLLM's own output (tests/engine/test_identity.py).
    idle = {**idle, "budget": 1.0, "min_prompt": 1_000_000}
    start, code = time.perf_counter(), commit()  # others may commit while this runs
    engine = Engine(args.model, None if args.fresh else idle, cache=not args.fresh)
    try:
        full, results["needles"] = reference(
            engine,
            needles=args.needles,
            texts=args.kl_prompts,
            phrasing=args.phrasing,
            seed=args.seed,
            known=results["needles"],
        )
        results["texts"] = {"tokens": [len(ids) for ids in full.texts.values()]}
        results["reference_seconds"] = round(time.perf_counter() - start, 1)
        for title, made, budget in pairs:
            settings = {**made, "budget": budget, "min_prompt": MIN_PROMPT}
            if args.fresh:
                engine.close()
                engine = Engine(args.model, settings, cache=False)
            else:
                engine.switch(settings)
            pair = measure(engine, settings, full)
            found = f"{pair['needles_answered']} of {pair['needles']} needles"
            print(
                f"{title} {budget}: {found}, KL {pair['kl']:.4f}, {pair['seconds']} s", flush=True
            )
            assert title != FULL or pair["kl"] < 1e-4, "the full cache differs from itself"
            assert title != FULL or pair["needles_answered"] == pair["needles"]
            pair |= {"fresh_engine": args.fresh, "commit": code}
            results["pairs"].append({"method": title, "budget": budget, **pair})
            save()
    finally:
        engine.close()


def named_settings(text: str) -> tuple[str, Settings]:
    """``NAME=JSON`` of the command line."""
    name, _, value = text.partition("=")
    return name, {"compress": "custom", **json.loads(value)}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    from vllm_kvcompress.policies.presets import PRESETS

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--presets", nargs="*", default=list(PRESETS), choices=list(PRESETS))
    parser.add_argument(
        "--settings",
        nargs="*",
        default=[],
        type=named_settings,
        metavar="NAME=JSON",
        help="other combinations, as in --kv-compress-config, under names of their own",
    )
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS)
    parser.add_argument("--needles", type=int, default=20, help="needle prompts, five depths")
    parser.add_argument("--kl-prompts", type=int, default=8, help="texts of the KL part")
    parser.add_argument("--phrasing", default="chat", choices=list(PHRASINGS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="an engine of its own for each pair")
    parser.add_argument("--resume", action="store_true", help="keep the pairs that --out has")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/quality.json"))
    return parser.parse_args(argv)


def begin(args: argparse.Namespace) -> dict[str, Any]:
    """Empty results, or with ``--resume`` those of the same prompts from an earlier run.

    Raises:
        SystemExit: the file to resume holds results of other prompts.
    """
    run = {
        **{"model": Path(args.model).name, "phrasing": args.phrasing, "seed": args.seed},
        **{"needles": args.needles, "texts": args.kl_prompts, "forced_tokens": FORCED},
        **{"block_size": BLOCK, "dtype": "float32"},
    }
    results: dict[str, Any] = {"run": run, "needles": {}, "texts": {}, "pairs": [], "commands": []}
    if args.resume and args.out.exists():
        results = json.loads(args.out.read_text())
        if results["run"] != run:
            raise SystemExit(f"{args.out} is of {results['run']}, not {run}; choose another --out")
    results["machine"] = machine()
    command = " ".join(["python", "benchmarks/quality.py", *sys.argv[1:]])
    results["commands"] = list(dict.fromkeys([*results["commands"], command]))
    results["date"] = datetime.now(UTC).date().isoformat()
    return results


def main() -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "6")  # GiB: all prompts stay in the cache
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
    )
    args = parse_args()
    results = begin(args)

    def save() -> None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=2) + "\n")
        args.out.with_suffix(".md").write_text(markdown(results))

    measure_all(args, results, save)
    save()
    Console().print(console_table(results))


if __name__ == "__main__":
    main()
