"""Measure the CPU time of vLLM's scheduler with and without the plugin.

    python benchmarks/bench_scheduler.py --json after.json
    python benchmarks/bench_scheduler.py --before ../other-checkout

No model runs: the benchmark calls `schedule` and `update_from_output` of real schedulers, and
returns one random token per request in place of the workers. Times are CPU times of the thread, in
microseconds per call. Configurations and cases take turns, so that other load affects all of them.
`--before` measures another checkout too, in a process of its own that takes turns with this one.

Configurations:

* vllm: vLLM without the plugin
* idle: plugin on, all prompts below the threshold
* compressing: every prompt is compressed

Cases:

* one_long: the step that computes one new prompt of 6,001 to 8,000 tokens
* many_short: the step that computes 16 new prompts of 385 to 512 tokens
* decode: a step in which 16 requests decode, after `many_short`
"""

import argparse
import gc
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_bench import print_result, replace_kernels_once, use_one_process
from json_process import JsonProcess, Replies

CONFIGURATIONS = ("vllm", "idle", "compressing")
CALLS = ("schedule", "update_from_output")
LONG, SHORT, BATCH = 8000, 512, 16
MAX_TOKENS = 8192  # of a request, and of a step

VOCABULARY = 512
Times = dict[str, dict[str, list[float]]]
"""Microseconds by case and call."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--method", default="cake")
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--lookahead", type=int, default=0, help="output tokens before compression")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=10, help="rounds that are not counted")
    parser.add_argument("--decode-steps", type=int, default=32, help="decode steps per round")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--block", type=int, default=32, help="tokens in a KV block")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--before", type=Path, help="another checkout of this repository")
    parser.add_argument("--json", type=Path, help="write the result as JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


@dataclass(slots=True)
class Schedulers:
    """The schedulers of one checkout, each in a small engine of its own."""

    args: argparse.Namespace
    engines: dict[str, Any]
    generator: random.Random = field(default_factory=lambda: random.Random(0))
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def run_round(self) -> dict[str, Times]:
        """Return the times of one round by configuration."""
        names = list(self.engines)
        self.generator.shuffle(names)
        times: dict[str, Times] = {}
        for name in names:
            times[name] = defaultdict(lambda: defaultdict(list))
            engine = self.engines[name]
            with self._requests(engine, 1, LONG):
                self._step(engine, times[name]["one_long"])
            with self._requests(engine, BATCH, SHORT):
                self._step(engine, times[name]["many_short"])
                for _ in range(self.args.decode_steps):
                    self._step(engine, times[name]["decode"])
        return times

    @contextmanager
    def _requests(self, engine: Any, count: int, length: int) -> Iterator[None]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, detokenize=False)
        scheduler = engine.engine_core.engine_core.scheduler
        for _ in range(count):
            tokens = length - self.generator.randrange(length // 4)
            prompt = {"prompt_token_ids": self.generator.choices(range(3, VOCABULARY), k=tokens)}
            engine.add_request(str(next(self.numbers)), prompt, params)
        yield
        assert len(scheduler.running) == count, "a request is missing; lower --block"
        engine.abort_request(list(scheduler.requests), internal=True)
        # A step without requests reports the aborted ones to the workers.
        self._step(engine, defaultdict(list))

    def _step(self, engine: Any, times: dict[str, list[float]]) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        scheduler = engine.engine_core.engine_core.scheduler
        output = timed(times["schedule"], scheduler.schedule)
        request_ids = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=[[self.generator.randrange(3, VOCABULARY)] for _ in request_ids],
        )
        if (plan := getattr(output, "kvcompress", None)) is not None:
            from vllm_kvcompress.engine.messages.step import StepReport, attach_report

            attach_report(result, StepReport(executed_plan=plan.number, packed=()))
        timed(times["update_from_output"], scheduler.update_from_output, output, result)


def timed(times: list[float], function: Callable[..., Any], *args: Any) -> Any:
    """Call a function, append the thread's CPU time in microseconds, and return its result."""
    start = time.thread_time_ns()
    result = function(*args)
    times.append((time.thread_time_ns() - start) / 1e3)
    return result


def build_engine(name: str, model: Path, args: argparse.Namespace) -> Any:
    """Return vLLM's engine for one configuration, with random weights."""
    from vllm import LLM

    settings: dict[str, Any] = {
        "compress": args.method,
        "budget": args.budget,
        "lookahead": args.lookahead,
        "min_prompt": MAX_TOKENS if name == "idle" else 128,
    }
    blocks = 1 + 2 * BATCH * (SHORT + 100 + args.block) // args.block
    llm = LLM(
        str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend="uni",
        block_size=args.block,
        num_gpu_blocks_override=blocks,
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=MAX_TOKENS,
        max_num_seqs=2 * BATCH,
        enable_prefix_caching=not args.no_prefix_caching,
        disable_log_stats=False,
        **({} if name == "vllm" else {"additional_config": {"kvcompress": settings}}),
    )
    return llm.llm_engine


def write_model(folder: Path, layers: int) -> None:
    """Write the configuration of a tiny Llama. vLLM makes up its weights."""
    from transformers import LlamaConfig

    config: Any = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)


def serve(args: argparse.Namespace) -> None:
    """Run one round for each line of standard input, and write its times as one line of JSON."""
    from origin import commit, machine

    replies = Replies()  # vLLM prints to standard output
    use_one_process(cache_gib=1)
    replace_kernels_once()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.layers)
        engines = {name: build_engine(name, Path(folder), args) for name in CONFIGURATIONS}
        schedulers = Schedulers(args, engines)
        gc.collect()
        gc.freeze()
        gc.disable()
        replies.send({"machine": machine(), "commit": commit()})
        for _ in sys.stdin:
            replies.send(schedulers.run_round())
            gc.collect()
        for engine in engines.values():
            engine.engine_core.shutdown()


def checkout(root: Path) -> JsonProcess:
    """Start a process that measures the schedulers of one checkout."""
    paths = [str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")]
    arguments = [__file__, "--serve", *sys.argv[1:]]
    return JsonProcess(arguments, PYTHONPATH=os.pathsep.join(filter(None, paths)))


def summary(rounds: list[dict[str, Times]]) -> dict[str, Any]:
    """Return the best and median times of all rounds by configuration, case and call."""
    result: dict[str, Any] = {}
    for name, case in itertools.product(CONFIGURATIONS, rounds[0][CONFIGURATIONS[0]]):
        for call in CALLS:
            times = [value for times in rounds for value in times[name][case][call]]
            result.setdefault(name, {}).setdefault(case, {})[call] = {
                "best_us": round(min(times), 1),
                "median_us": round(statistics.median(times), 1),
            }
    return result


def main() -> None:
    args = parse_args()
    if args.serve:
        serve(args)
        return
    here = Path(__file__).resolve().parents[1]
    roots = {"after": here} if args.before is None else {"before": args.before, "after": here}
    checkouts = {name: checkout(root.resolve()) for name, root in roots.items()}
    about = {name: process.read() for name, process in checkouts.items()}
    rounds: dict[str, list[dict[str, Times]]] = {name: [] for name in checkouts}
    for number in range(args.warm_up + args.rounds):
        for name, process in checkouts.items():
            times = process.ask("a round")
            if number >= args.warm_up:
                rounds[name].append(times)
    for process in checkouts.values():
        process.close()
    result = {
        "machine": about["after"]["machine"],
        "command": " ".join(["python", "benchmarks/bench_scheduler.py", *sys.argv[1:]]),
        "commits": {name: each["commit"] for name, each in about.items()},
        "shapes": {
            **{"method": args.method, "budget": args.budget, "lookahead": args.lookahead},
            **{"layers": args.layers, "block_tokens": args.block, "rounds": args.rounds},
            **{"prefix_caching": not args.no_prefix_caching, "decode_steps": args.decode_steps},
        },
        "microseconds": {name: summary(times) for name, times in rounds.items()},
    }
    print_result(result, args.json)


if __name__ == "__main__":
    main()
