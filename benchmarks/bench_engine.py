"""Engine steps with and without compression, side by side.

    python benchmarks/bench_engine.py --model .cache/smollm2-135m-instruct

All configurations run in one process and take turns step by step, so that whatever else the machine
does falls on all of them. Steps are timed, not runs: a step that computes a part of a prompt is a
prefill step, one that computes only decodes is a decode step.

* off: vLLM without the plugin's setting
* on: compressed; with `--lookahead` its answers' first steps are timed apart, before it is packed
* bound: vLLM alone with prompts of budget x prompt tokens: what decoding costs when nothing is
  left of the dropped tokens, so the most that any compression can win on this machine
* idle: plugin on, every prompt under the threshold
* ready: the same, with a decode budget and prompts in pieces, which no request reaches
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_bench import blocks_in_use, in_this_process, tell
from origin import commit, machine

CONFIGURATIONS = ("off", "on", "bound", "idle", "ready")
LONG = 1_000_000


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--method", default="cake")
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--lookahead", type=int, default=0, help="0 packs when a prefill ends")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=6000, help="tokens per prompt")
    parser.add_argument("--steps", type=int, default=48, help="decode steps to time")
    parser.add_argument("--only", nargs="*", default=CONFIGURATIONS[:3], choices=CONFIGURATIONS)
    parser.add_argument("--dtype", default="auto", help="auto is the checkpoint's")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    return parser.parse_args()


@dataclass(slots=True)
class Contender:
    """One engine with its batch of prompts, and the seconds of its steps."""

    llm: Any
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
        start = time.perf_counter()
        self.llm.llm_engine.step()
        times.append(time.perf_counter() - start)


def contender(name: str, args: argparse.Namespace) -> Contender:
    """An engine that has been given its prompts and has computed nothing yet."""
    from vllm import LLM, SamplingParams

    from vllm_kvcompress.serving.text import english

    settings = {"compress": args.method, "budget": args.budget, "lookahead": args.lookahead}
    if name in ("idle", "ready"):
        settings["min_prompt"] = LONG
    if name == "ready":
        settings |= {"decode_budget": LONG, "max_whole": LONG}
    compressed = name not in ("off", "bound")
    llm = LLM(
        args.model,
        max_model_len=8192,
        enforce_eager=not args.compile,
        dtype=args.dtype,
        distributed_executor_backend="uni",
        enable_prefix_caching=False,
        **({"additional_config": {"kvcompress": settings}} if compressed else {}),
    )
    made = Contender(llm)
    if name == "on":
        time_compression(made)
    length = int(args.budget * args.prompt) if name == "bound" else args.prompt
    ids = llm.get_tokenizer().encode(english()[: args.batch * args.prompt * 8])
    # nobody finishes while others are timed
    new = args.lookahead + args.steps + args.batch * 8 + 64
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    for i in range(args.batch):
        prompt = ids[i * length : (i + 1) * length]
        if len(prompt) < length:
            raise SystemExit(f"the text has {len(ids)} tokens; lower --batch or --prompt")
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    return made


def time_compression(made: Contender) -> None:
    """Note the seconds inside `after_attention` and `end_step` of the worker's compressor."""
    executor = made.llm.llm_engine.engine_core.engine_core.model_executor
    compressor = executor.driver_worker.worker.compressor
    for name in ("after_attention", "end_step"):
        inner = getattr(compressor, name)

        def timed(*a: Any, _inner: Any = inner, **k: Any) -> Any:
            start = time.perf_counter()
            try:
                return _inner(*a, **k)
            finally:
                made.compression.append(time.perf_counter() - start)

        setattr(compressor, name, timed)


def race(contenders: dict[str, Contender], steps: int) -> None:
    """Prefill everybody in turns, then decode everybody in turns.

    Those whose prefill ends first decode beside the others' prefills, which warms them up. Steps of
    a look-ahead are among the first.
    """
    while any(one.prefilling for one in contenders.values()):
        for one in contenders.values():
            if one.prefilling:
                one.step()
    for _ in range(steps):
        for one in contenders.values():
            one.step()


def report(args: argparse.Namespace, contenders: dict[str, Contender]) -> dict[str, Any]:
    decode = {name: one.decode[-args.steps :] for name, one in contenders.items()}
    ahead = {name: one.decode[: args.lookahead] for name, one in contenders.items()}

    def ratio(a: str, b: str) -> float:
        """Median over steps that followed each other."""
        pairs = zip(decode[a], decode[b], strict=True)
        return round(statistics.median(x / y for x, y in pairs), 3)

    ratios: dict[str, float] = {}
    if "on" in contenders:
        on = contenders["on"]
        ratios["compression_share_of_prefill"] = round(sum(on.compression) / sum(on.prefill), 4)
    if {"off", "on"} <= contenders.keys():
        ratios["decode_speedup"] = ratio("off", "on")
    if {"off", "bound"} <= contenders.keys():
        ratios["decode_speedup_bound"] = ratio("off", "bound")
    for name in {"on", "idle", "ready"} & contenders.keys() if "off" in contenders else ():
        pairs = zip(contenders[name].prefill, contenders["off"].prefill, strict=True)
        ratios[f"{name}_prefill_step"] = round(statistics.median(x / y for x, y in pairs), 3)
    for name in {"idle", "ready"} & contenders.keys() if "off" in contenders else ():
        ratios[f"{name}_decode_step"] = ratio(name, "off")
    if args.lookahead and {"off", "on"} <= contenders.keys():
        pairs = zip(ahead["on"], ahead["off"], strict=True)
        ratios["lookahead_decode_step"] = round(statistics.median(x / y for x, y in pairs), 3)
    return {
        "machine": machine(),
        "command": " ".join(["python", "benchmarks/bench_engine.py", *sys.argv[1:]]),
        "commit": commit(),
        "shapes": {
            **{"batch": args.batch, "prompt_tokens": args.prompt, "budget": args.budget},
            **{"method": args.method, "lookahead": args.lookahead},
            **{"dtype": args.dtype, "compiled": args.compile, "decode_steps": args.steps},
        },
        "configurations": {
            name: {
                "decode_step_ms": round(statistics.median(decode[name]) * 1e3, 2),
                "prefill_s": round(sum(one.prefill), 2),
                "compression_s": round(sum(one.compression), 3),
                "blocks_in_use": blocks_in_use(one.llm),
            }
            for name, one in contenders.items()
        },
        "ratios": ratios,
    }


def main() -> None:
    args = parse_args()
    in_this_process(cache_gib=4)
    contenders = {name: contender(name, args) for name in args.only}
    race(contenders, args.lookahead + args.steps)
    result = report(args, contenders)
    tell(result, args.output)


if __name__ == "__main__":
    main()
