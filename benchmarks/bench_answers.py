"""Measure long outputs with and without a decode budget: KV blocks, step times and divergence.

    python benchmarks/bench_answers.py --model .cache/smollm2-135m-instruct

First vLLM alone samples an output per prompt, with a seed, because long greedy outputs of a small
model only repeat themselves. Then engines step in turns in engine process and are forced to write
these outputs: vLLM alone, and each method with the decode budget. So all engines do the same work,
and their probabilities are for the same text:

* blocks: maximum over all steps of the KV blocks that all requests hold
* step: median ratio of vLLM's step time to the method's for consecutive steps; also for the last
  part of the output, since the output grows
* KL: from vLLM alone by position, in nats per token; a lower bound from the 20 most likely tokens
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_bench import (
    LIKELY,
    blocks_in_use,
    forced_output_processor,
    print_result,
    top_logprobs,
    use_one_process,
)
from origin import commit, machine

FULL = "off"
PART = 500
"""Output tokens per part of the result."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--methods", nargs="*", default=["cake-chunk", "streamingllm"])
    parser.add_argument("--decode-budget", type=int, default=512)
    parser.add_argument("--decode-interval", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=500, help="tokens per prompt")
    parser.add_argument("--answer", type=int, default=2000, help="tokens per output")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    return parser.parse_args()


@dataclass(slots=True)
class MeasuredEngine:
    """One engine with its measurements."""

    llm: Any
    steps: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    logprobs: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def submit(
        self, prompts: list[list[int]], tokens: int, forced_outputs: list[list[int]] | None
    ) -> None:
        """Submit all prompts, with outputs to force, or None to sample."""
        from vllm import SamplingParams

        for i, prompt in enumerate(prompts):
            extra_args = {} if forced_outputs is None else {"write": forced_outputs[i]}
            params = SamplingParams(
                temperature=0.8,
                seed=i,
                max_tokens=tokens,
                ignore_eos=True,
                logprobs=None if forced_outputs is None else LIKELY,
                extra_args=extra_args,
            )
            self.llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, params)

    def step(self) -> None:
        start = time.perf_counter()
        results = self.llm.llm_engine.step()
        self.steps.append(time.perf_counter() - start)
        self.blocks.append(blocks_in_use(self.llm))
        for result in results:
            if result.finished:
                output = result.outputs[0]
                self.outputs[result.request_id] = list(output.token_ids)
                self.logprobs[result.request_id] = top_logprobs(output)


def build_engine(name: str, args: argparse.Namespace) -> MeasuredEngine:
    from vllm import LLM

    settings = {
        "compress": name,
        "lookahead": 0,
        "decode_budget": args.decode_budget,
        "decode_interval": args.decode_interval,
    }
    return MeasuredEngine(
        LLM(
            args.model,
            max_model_len=8192,
            enforce_eager=True,
            dtype=args.dtype,
            distributed_executor_backend="uni",
            enable_prefix_caching=False,
            max_num_seqs=args.batch,
            logits_processors=[forced_output_processor()],
            max_logprobs=LIKELY,
            **({} if name == FULL else {"additional_config": {"kvcompress": settings}}),
        )
    )


def step_in_turns(engines: dict[str, MeasuredEngine]) -> None:
    """Run the engines step by step in turns, so that other load affects all of them."""
    while any(engine.busy for engine in engines.values()):
        for engine in engines.values():
            if engine.busy:
                engine.step()


def divergence(
    args: argparse.Namespace, full: MeasuredEngine, other: MeasuredEngine
) -> list[float]:
    """Return the KL per token for each part of the outputs."""
    from vllm_kvcompress.compare.measures import coarse_kl

    assert full.outputs == other.outputs, "an engine did not write the forced output"
    found = []
    for start in range(0, args.answer, PART):
        kl = [
            coarse_kl(p, q)
            for name, of_full in full.logprobs.items()
            for p, q in zip(
                of_full[start : start + PART],
                other.logprobs[name][start : start + PART],
                strict=True,
            )
        ]
        found.append(round(statistics.fmean(kl), 4))
    return found


def report(args: argparse.Namespace, engines: dict[str, MeasuredEngine]) -> dict[str, Any]:
    full = engines[FULL]
    # All engines need the same number of prefill steps.
    first = len(full.steps) - args.answer + 1
    result: dict[str, Any] = {
        "machine": machine(),
        "command": " ".join(["python", "benchmarks/bench_answers.py", *sys.argv[1:]]),
        "commit": commit(),
        "shapes": {
            **{"batch": args.batch, "prompt_tokens": args.prompt, "answer_tokens": args.answer},
            **{"decode_budget": args.decode_budget, "decode_interval": args.decode_interval},
            "dtype": args.dtype,
        },
        "most_blocks": {name: max(engine.blocks) for name, engine in engines.items()},
        "step_ms": {
            name: round(statistics.fmean(engine.steps[first:]) * 1e3, 2)
            for name, engine in engines.items()
        },
        "methods": {},
    }
    for name, engine in engines.items():
        if name == FULL:
            continue
        ratios = [a / b for a, b in zip(full.steps[first:], engine.steps[first:], strict=True)]
        result["methods"][name] = {
            "decode_speedup": round(statistics.median(ratios), 3),
            "of_all_steps": round(sum(full.steps[first:]) / sum(engine.steps[first:]), 3),
            "last_part": round(statistics.median(ratios[-PART:]), 3),
            "kl_by_part": divergence(args, full, engine),
        }
    return result


def main() -> None:
    args = parse_args()
    use_one_process(cache_gib=2)
    from vllm_kvcompress.serving.text import english

    engines = {name: build_engine(name, args) for name in (FULL, *args.methods)}
    full = engines[FULL]
    ids = full.llm.get_tokenizer().encode(english()[: args.batch * args.prompt * 8])
    prompts = [ids[i * args.prompt : (i + 1) * args.prompt] for i in range(args.batch)]
    full.submit(prompts, args.answer, None)
    while full.busy:
        full.step()
    outputs = [full.outputs[str(i)] for i in range(args.batch)]
    engines[FULL] = MeasuredEngine(full.llm)
    for engine in engines.values():
        engine.submit(prompts, args.answer, outputs)
    step_in_turns(engines)
    result = report(args, engines)
    print_result(result, args.output)


if __name__ == "__main__":
    main()
