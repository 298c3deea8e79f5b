"""Measure engine steps with and without compression.

    python benchmarks/bench_engine.py --model .cache/smollm2-135m-instruct

All configurations run in one process and take turns step by step, so that other load affects all of
them. The benchmark times steps, not runs. A prefill step computes a part of a prompt; a decode step
computes only decodes.

* off: vLLM without the plugin
* on: with compression; with `--lookahead`, decode steps before the compression are timed separately
* bound: vLLM alone with prompts of budget x prompt tokens: the maximum speedup that compression can
  reach on this machine
* k4v3: as many tokens as with on, packed in k4v3
* idle: plugin on, all prompts below the threshold
* ready: like idle, with a decode budget and prompts in pieces that no request reaches
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_bench import (
    blocks_in_use,
    print_result,
    replace_kernels_once,
    use_one_process,
    write_eagle_head,
)
from origin import commit, machine

CONFIGURATIONS = ("off", "on", "bound", "k4v3", "idle", "ready")
NEVER = 1_000_000  # tokens; a limit that no request reaches


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--method", default="cake")
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--lookahead", type=int, default=0, help="output tokens before compression")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=6000, help="tokens per prompt")
    parser.add_argument("--steps", type=int, default=48, help="decode steps to time")
    parser.add_argument("--only", nargs="*", default=CONFIGURATIONS[:3], choices=CONFIGURATIONS)
    parser.add_argument(
        "--drafts", type=int, default=0, help="drafts of an EAGLE head per step; random weights"
    )
    parser.add_argument("--dtype", default="auto", help="auto uses the dtype of the checkpoint")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--cache-gib", type=int, default=4, help="KV cache of each engine")
    parser.add_argument(
        "--cpu-time", action="store_true", help="time the process's CPU, for a busy machine"
    )
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    return parser.parse_args()


@dataclass(slots=True)
class MeasuredEngine:
    """One engine with its batch of prompts and the seconds of its steps."""

    llm: Any
    clock: Callable[[], float] = time.perf_counter
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    compression: list[float] = field(default_factory=list)

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def prefilling(self) -> bool:
        running = self.scheduler.running
        waits = bool(self.scheduler.waiting) or not running
        return waits or any(request.is_prefill_chunk for request in running)

    def step(self) -> None:
        times = self.prefill if self.prefilling else self.decode
        start = self.clock()
        self.llm.llm_engine.step()
        times.append(self.clock() - start)


def build_engine(name: str, args: argparse.Namespace) -> MeasuredEngine:
    """Return an engine with submitted prompts that has not run any step."""
    from vllm import LLM, SamplingParams

    from vllm_kvcompress.serving.text import english

    settings = {"compress": args.method, "budget": args.budget, "lookahead": args.lookahead}
    if name in ("idle", "ready"):
        settings["min_prompt"] = NEVER
    if name == "ready":
        settings |= {"decode_budget": NEVER, "max_whole": NEVER}
    if name == "k4v3":
        settings["packed_dtype"] = "k4v3"
    drafting: dict[str, Any] = {}
    if args.drafts:
        folder = Path(tempfile.mkdtemp(prefix="eagle-"))
        head = {"method": "eagle", "model": write_eagle_head(args.model, folder)}
        drafting["speculative_config"] = head | {"num_speculative_tokens": args.drafts}
    compressed = name not in ("off", "bound")
    llm = LLM(
        args.model,
        max_model_len=8192,
        enforce_eager=not args.compile,
        dtype=args.dtype,
        distributed_executor_backend="uni",
        enable_prefix_caching=False,
        **drafting,
        **({"additional_config": {"kvcompress": settings}} if compressed else {}),
    )
    engine = MeasuredEngine(llm, time.process_time if args.cpu_time else time.perf_counter)
    if name in ("on", "k4v3"):
        time_compression(engine)
    length = int(args.budget * args.prompt) if name == "bound" else args.prompt
    ids = llm.get_tokenizer().encode(english()[: args.batch * args.prompt * 8])
    # No request may finish while steps are timed.
    max_tokens = (1 + args.drafts) * (args.lookahead + args.steps + args.batch * 8 + 64)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for i in range(args.batch):
        prompt = ids[i * length : (i + 1) * length]
        if len(prompt) < length:
            raise SystemExit(f"the text has {len(ids)} tokens; lower --batch or --prompt")
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    return engine


def time_compression(engine: MeasuredEngine) -> None:
    """Record the seconds inside `after_attention` and `end_step` of the worker's compressor."""
    executor = engine.llm.llm_engine.engine_core.engine_core.model_executor
    compressor = executor.driver_worker.worker.compressor
    for name in ("after_attention", "end_step"):
        inner = getattr(compressor, name)

        def timed(*a: Any, _inner: Any = inner, **k: Any) -> Any:
            start = engine.clock()
            try:
                return _inner(*a, **k)
            finally:
                engine.compression.append(engine.clock() - start)

        setattr(compressor, name, timed)


def step_in_turns(engines: dict[str, MeasuredEngine], steps: int) -> None:
    """Run all prefills in turns, then `steps` decode steps in turns.

    Engines whose prefill ends first decode while others prefill, which warms them up. The first
    decode steps are those of a look-ahead.
    """
    while any(engine.prefilling for engine in engines.values()):
        for engine in engines.values():
            if engine.prefilling:
                engine.step()
    for _ in range(steps):
        for engine in engines.values():
            engine.step()


def report(args: argparse.Namespace, engines: dict[str, MeasuredEngine]) -> dict[str, Any]:
    decode = {name: engine.decode[-args.steps :] for name, engine in engines.items()}
    lookahead = {name: engine.decode[: args.lookahead] for name, engine in engines.items()}

    def ratio(a: str, b: str) -> float:
        """Return the median ratio of consecutive steps."""
        pairs = zip(decode[a], decode[b], strict=True)
        return round(statistics.median(x / y for x, y in pairs), 3)

    ratios: dict[str, float] = {}
    if "on" in engines:
        on = engines["on"]
        ratios["compression_share_of_prefill"] = round(sum(on.compression) / sum(on.prefill), 4)
    if {"on", "k4v3"} <= engines.keys():
        packed = engines["k4v3"]
        ratios["k4v3_compression"] = round(
            sum(packed.compression) / sum(engines["on"].compression), 3
        )
        ratios["k4v3_share_of_prefill"] = round(sum(packed.compression) / sum(packed.prefill), 4)
        ratios["k4v3_decode_step"] = ratio("k4v3", "on")
    if {"off", "on"} <= engines.keys():
        ratios["decode_speedup"] = ratio("off", "on")
    if {"off", "bound"} <= engines.keys():
        ratios["decode_speedup_bound"] = ratio("off", "bound")
    for name in {"on", "idle", "ready"} & engines.keys() if "off" in engines else ():
        pairs = zip(engines[name].prefill, engines["off"].prefill, strict=True)
        ratios[f"{name}_prefill_step"] = round(statistics.median(x / y for x, y in pairs), 3)
    for name in {"idle", "ready"} & engines.keys() if "off" in engines else ():
        ratios[f"{name}_decode_step"] = ratio(name, "off")
    if args.lookahead and {"off", "on"} <= engines.keys():
        pairs = zip(lookahead["on"], lookahead["off"], strict=True)
        ratios["lookahead_decode_step"] = round(statistics.median(x / y for x, y in pairs), 3)
    return {
        "machine": machine(),
        "command": " ".join(["python", "benchmarks/bench_engine.py", *sys.argv[1:]]),
        "commit": commit(),
        "shapes": {
            **{"batch": args.batch, "prompt_tokens": args.prompt, "budget": args.budget},
            **{"method": args.method, "lookahead": args.lookahead, "drafts": args.drafts},
            **{"dtype": args.dtype, "compiled": args.compile, "decode_steps": args.steps},
            "cpu_time": args.cpu_time,
        },
        "configurations": {
            name: {
                "decode_step_ms": round(statistics.median(decode[name]) * 1e3, 2),
                "prefill_s": round(sum(engine.prefill), 2),
                "compression_s": round(sum(engine.compression), 3),
                "blocks_in_use": blocks_in_use(engine.llm),
                "block_tokens": engine.llm.llm_engine.vllm_config.cache_config.block_size,
            }
            for name, engine in engines.items()
        },
        "ratios": ratios,
    }


def main() -> None:
    args = parse_args()
    use_one_process(cache_gib=args.cache_gib)
    replace_kernels_once()
    engines = {name: build_engine(name, args) for name in args.only}
    step_in_turns(engines, args.lookahead + args.steps)
    result = report(args, engines)
    print_result(result, args.output)


if __name__ == "__main__":
    main()
