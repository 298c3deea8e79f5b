"""Long answers with and without a decode budget: blocks, step times, and what they lose.

    python benchmarks/bench_answers.py --model .cache/smollm2-135m-instruct

First vLLM alone writes each answer (sampled with a seed, since greedy long answers of a small model
only repeat themselves). Then engines are made to write the same tokens, side by side in one process
and step by step: vLLM alone, and each method under the decode budget. So times are of the same
work, and probabilities are along the same text:

* blocks: held by all requests, the most over all steps
* step: the median of the ratios of steps that follow each other, vLLM's over the method's; for the
  parts of the answer too, since it grows
* KL: from vLLM alone, in nats per token, a lower bound by the 20 most likely tokens, by position
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_bench import LIKELY, blocks_in_use, in_this_process, likely_tokens, tell, writing
from origin import commit, machine

FULL = "off"
PART = 500
"""Tokens of an answer that are put together in the result."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--methods", nargs="*", default=["cake-chunk", "streamingllm"])
    parser.add_argument("--decode-budget", type=int, default=512)
    parser.add_argument("--decode-interval", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=500, help="tokens per prompt")
    parser.add_argument("--answer", type=int, default=2000, help="tokens per answer")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    return parser.parse_args()


@dataclass(slots=True)
class Contender:
    """One engine, and what was seen of it."""

    llm: Any
    steps: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    likely: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    answers: dict[str, list[int]] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def submit(
        self, prompts: list[list[int]], tokens: int, answers: list[list[int]] | None
    ) -> None:
        """Give all prompts, with the answers to write, or free to sample."""
        from vllm import SamplingParams

        for i, prompt in enumerate(prompts):
            own = {} if answers is None else {"write": answers[i]}
            params = SamplingParams(
                temperature=0.8,
                seed=i,
                max_tokens=tokens,
                ignore_eos=True,
                logprobs=None if answers is None else LIKELY,
                extra_args=own,
            )
            self.llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, params)

    def step(self) -> None:
        start = time.perf_counter()
        done = self.llm.llm_engine.step()
        self.steps.append(time.perf_counter() - start)
        self.blocks.append(blocks_in_use(self.llm))
        for output in done:
            if output.finished:
                answer = output.outputs[0]
                self.answers[output.request_id] = list(answer.token_ids)
                self.likely[output.request_id] = likely_tokens(answer)


def contender(name: str, args: argparse.Namespace) -> Contender:
    from vllm import LLM

    settings = {
        "compress": name,
        "lookahead": 0,
        "decode_budget": args.decode_budget,
        "decode_interval": args.decode_interval,
    }
    return Contender(
        LLM(
            args.model,
            max_model_len=8192,
            enforce_eager=True,
            dtype=args.dtype,
            distributed_executor_backend="uni",
            enable_prefix_caching=False,
            max_num_seqs=args.batch,
            logits_processors=[writing()],
            max_logprobs=LIKELY,
            **({} if name == FULL else {"additional_config": {"kvcompress": settings}}),
        )
    )


def race(contenders: dict[str, Contender]) -> None:
    """All in turns, so that what else the machine does falls on all of them."""
    while any(one.busy for one in contenders.values()):
        for one in contenders.values():
            if one.busy:
                one.step()


def divergence(args: argparse.Namespace, full: Contender, other: Contender) -> list[float]:
    """KL per token in each part of the answers."""
    from vllm_kvcompress.compare.measures import coarse_kl

    assert full.answers == other.answers, "an engine did not write what it was given"
    found = []
    for start in range(0, args.answer, PART):
        places = [
            coarse_kl(p, q)
            for name, own in full.likely.items()
            for p, q in zip(
                own[start : start + PART], other.likely[name][start : start + PART], strict=True
            )
        ]
        found.append(round(statistics.fmean(places), 4))
    return found


def report(args: argparse.Namespace, contenders: dict[str, Contender]) -> dict[str, Any]:
    full = contenders[FULL]
    # the prompts' steps are as many in all of them
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
        "most_blocks": {name: max(one.blocks) for name, one in contenders.items()},
        "step_ms": {
            name: round(statistics.fmean(one.steps[first:]) * 1e3, 2)
            for name, one in contenders.items()
        },
        "methods": {},
    }
    for name, one in contenders.items():
        if name == FULL:
            continue
        ratios = [a / b for a, b in zip(full.steps[first:], one.steps[first:], strict=True)]
        result["methods"][name] = {
            "decode_speedup": round(statistics.median(ratios), 3),
            "of_all_steps": round(sum(full.steps[first:]) / sum(one.steps[first:]), 3),
            "last_part": round(statistics.median(ratios[-PART:]), 3),
            "kl_by_part": divergence(args, full, one),
        }
    return result


def main() -> None:
    args = parse_args()
    in_this_process(cache_gib=2)
    from vllm_kvcompress.serving.text import english

    contenders = {name: contender(name, args) for name in (FULL, *args.methods)}
    full = contenders[FULL]
    ids = full.llm.get_tokenizer().encode(english()[: args.batch * args.prompt * 8])
    prompts = [ids[i * args.prompt : (i + 1) * args.prompt] for i in range(args.batch)]
    full.submit(prompts, args.answer, None)
    while full.busy:
        full.step()
    answers = [full.answers[str(i)] for i in range(args.batch)]
    contenders[FULL] = Contender(full.llm)
    for one in contenders.values():
        one.submit(prompts, args.answer, answers)
    race(contenders)
    result = report(args, contenders)
    tell(result, args.output)


if __name__ == "__main__":
    main()
