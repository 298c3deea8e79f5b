"""Measure the acceptance length of an EAGLE head, with vLLM alone and with compression.

    OMP_NUM_THREADS=1 python -m benchmarks.drafts --head .cache/drafts/smollm2-135m \\
        --out benchmarks/results/drafts_smollm2.jsonl

The requests are those whose uncompressed greedy outputs reach --output tokens. Each runs with every
setting, with drafts and without, and the outputs are compared token by token. The file gets two
lines per request and setting, and the command prints the table. With --report, it only does that.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.drafts.prompts import Prompt, engine, prompts
from benchmarks.drafts.tables import ALONE, tables
from benchmarks.engine_bench import replace_kernels_once, use_one_process
from benchmarks.jsonl import append, lines
from benchmarks.origin import commit, machine
from vllm_kvcompress.methods.registry import RECOMMENDED

_PLUGIN: Mapping[str, Any] = {
    "compress": RECOMMENDED,
    "budget": 0.2,
    "budget_bounds": "0.05:1.0",
    "allow_override": "all",
    "usage": True,
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    f"{RECOMMENDED}, {budget}{name}": {"kv_budget": budget, **lookahead}
    for budget in (1.0, 0.4, 0.2)
    for name, lookahead in (("", {}), (", lookahead 0", {"kv_lookahead": 0}))
    if budget < 1 or not lookahead
}
"""A request's arguments by setting. At 1.0, nothing is compressed."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drafts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct", help="the target")
    parser.add_argument("--head", help="folder of the head, which benchmarks.drafts.train wrote")
    parser.add_argument("--out", type=Path, help="JSONL file to append to")
    parser.add_argument(
        "--report", type=Path, help="print the tables of this file, and run nothing"
    )
    parser.add_argument("--count", type=int, default=16, help="requests")
    parser.add_argument(
        "--prompt", type=int, nargs=2, default=(1200, 2000), help="tokens of a text"
    )
    parser.add_argument("--output", type=int, default=200, help="output tokens")
    parser.add_argument("--drafts", type=int, default=3, help="drafts per step")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    if not args.report and not (args.head and args.out):
        parser.error("a run needs --head and --out, and got only one of them or none")
    return args


class Engines:
    """Engines of one run, which differ in drafts and compression and in nothing else."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._options = {
            "max_model_len": args.prompt[1] + args.output + 256,
            "max_num_seqs": args.count,
        }
        self._drafting = {
            "speculative_config": {
                "method": "eagle",
                "model": args.head,
                "num_speculative_tokens": args.drafts,
            },
            "per_request_spec_decode_metrics": "detailed",
        }

    def open(self, *, drafts: bool, compresses: bool) -> Any:
        """Return the context manager of an engine."""
        options = {**self._options, **(self._drafting if drafts else {})}
        if compresses:
            options["additional_config"] = {"kvcompress": dict(_PLUGIN)}
        return engine(self._args.model, **options)

    def outputs(self, llm: Any, given: Sequence[Prompt], extra: Mapping[str, Any]) -> list[Any]:
        """Return vLLM's greedy outputs of requests that are submitted together."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=self._args.output, extra_args=dict(extra) or None
        )
        inputs = [{"prompt_token_ids": prompt.ids} for prompt in given]
        found: list[Any] = llm.generate(inputs, params, use_tqdm=False)
        return found


def long_requests(args: argparse.Namespace, engines: Engines) -> tuple[list[Prompt], list[Any]]:
    """Return requests whose uncompressed outputs reach `args.output` tokens, and the outputs."""
    given: list[Prompt] = []
    outputs: list[Any] = []
    shortest, longest = args.prompt
    with engines.open(drafts=False, compresses=False) as llm:
        drawn = prompts(
            llm.get_tokenizer(), "measured", shortest=shortest, longest=longest, seed=args.seed
        )
        while len(given) < args.count:
            candidates = list(islice(drawn, args.count - len(given)))
            for prompt, output in zip(
                candidates, engines.outputs(llm, candidates, {}), strict=True
            ):
                if len(output.outputs[0].token_ids) == args.output:
                    given.append(prompt)
                    outputs.append(output)
    return given, outputs


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run all engines one after another, and yield the file's lines."""
    engines = Engines(args)
    given, alone = long_requests(args, engines)
    yield from _lines(ALONE, given, alone)
    with engines.open(drafts=True, compresses=False) as llm:
        yield from _lines(ALONE, given, engines.outputs(llm, given, {}))
    for drafts in (True, False):
        with engines.open(drafts=drafts, compresses=True) as llm:
            for name, extra in SETTINGS.items():
                yield from _lines(name, given, engines.outputs(llm, given, extra))


def _lines(name: str, given: Sequence[Prompt], outputs: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for prompt, output in zip(given, outputs, strict=True):
        (completion,) = output.outputs
        metrics = completion.spec_decode_metrics
        yield {
            "setting": name,
            "request": prompt.name,
            "prompt_tokens": len(prompt.ids),
            "output": list(completion.token_ids),
            "accepted": metrics and metrics.per_step_accepted,
            "kept": getattr(output, "kv_compress", None),
        }


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if args.report:
        print(tables(list(lines(args.report))))
        return
    use_one_process(cache_gib=4)
    replace_kernels_once()
    command = " ".join(["python -m benchmarks.drafts", *(sys.argv[1:] if argv is None else argv)])
    append(args.out, [{"machine": machine(), "commit": commit(), "command": command}])
    for line in measured(args):
        append(args.out, [line])
    print(tables(list(lines(args.out))))


if __name__ == "__main__":
    main()
