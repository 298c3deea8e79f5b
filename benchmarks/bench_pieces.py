"""Measure prompts packed piece by piece: KV blocks, time to first token, and quality.

    python benchmarks/bench_pieces.py --model .cache/smollm2-135m-instruct

Engines run in one process, prompt by prompt: vLLM alone, the method on the complete prompt, and the
method after every piece. Pieces are scored by the prompt's ends, or by their own last tokens
(1024:0). A prompt keeps only the budget, or up to max_whole tokens (1024@4096).
vLLM alone answers a built-in question. The other engines are forced to write the same output, so
that probabilities are for the same text. If an engine would have chosen another token, it also
writes its own answer.

* blocks: maximum blocks of one prompt and its output, in the smallest pool in which the engine
  starts
* first token: median seconds from the request to its first token, and the median ratio of vLLM's
  seconds to the method's
* named: number of prompts whose answer both vLLM alone and the method name
* KL: from vLLM alone, in nats per token; a lower bound from the 20 most likely tokens. With a
  look-ahead, only tokens after it count
* same: share of these tokens that the method would have chosen, too
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_bench import (
    LIKELY,
    cache_options,
    forced_output_processor,
    print_result,
    top_logprobs,
    track_max_blocks,
    use_one_process,
)
from origin import commit, machine

FULL, WHOLE = "off", "whole"
BLOCK = 128
CACHE_GIB = 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--method", default="cake-chunk")
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument(
        "--pieces",
        nargs="*",
        metavar="PIECE[:PROBE[:PROBE_FIRST]][@MAX_WHOLE]",
        default=["1024", "2048", "4096", "1024:0", "2048:0", "4096:0"],
    )
    parser.add_argument(
        "--without-whole", action="store_true", help="measure only pieces and vLLM alone"
    )
    parser.add_argument("--lookahead", type=int, default=0)
    parser.add_argument(
        "--answer", type=int, default=24, help="maximum number of compared output tokens"
    )
    parser.add_argument(
        "--least", type=int, default=0, help="minimum number of output tokens of vLLM alone"
    )
    parser.add_argument("--task", default="niah-multikey-1")
    parser.add_argument("--count", type=int, default=20, help="prompts")
    parser.add_argument("--tokens", type=int, default=6000, help="maximum tokens per prompt")
    parser.add_argument("--question", choices=("last", "first"), default="last")
    parser.add_argument(
        "--cached",
        action="store_true",
        help="vLLM alone caches texts of earlier questions; only prompts without a cache hit count"
        " for the time to first token",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    return parser.parse_args()


@dataclass(slots=True)
class MeasuredEngine:
    """One engine with its measurements."""

    llm: Any
    max_blocks: Callable[[], int]
    first_token: dict[str, float] = field(default_factory=dict)
    named: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    same: list[float] = field(default_factory=list)

    def generate(
        self, name: str, prompt: list[int], output: list[int] | int, min_tokens: int = 0
    ) -> Any:
        """Run one request alone, record the seconds to its first token, and return its output.

        Args:
            output: the tokens to force, or the maximum number of tokens for greedy decoding.
            min_tokens: minimum number of tokens for greedy decoding.
        """
        from vllm import SamplingParams

        greedy = isinstance(output, int)
        max_tokens = output if isinstance(output, int) else len(output)
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            min_tokens=min_tokens if greedy else 0,
            ignore_eos=not greedy,
            logprobs=LIKELY,
            extra_args=None if greedy else {"write": output},
        )
        engine = self.llm.llm_engine
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
        start, first_token = time.perf_counter(), None
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if outputs and outputs[0].outputs[0].token_ids and first_token is None:
                first_token = time.perf_counter() - start
        assert first_token is not None
        if not outputs[0].num_cached_tokens:
            self.first_token[name] = first_token
        return outputs[0].outputs[0]


def build_engine(name: str, args: argparse.Namespace) -> MeasuredEngine:
    from transformers import AutoConfig
    from vllm import LLM

    from vllm_kvcompress.planning.memory import uncompressed_prompt_blocks
    from vllm_kvcompress.settings.config import CompressionConfig

    settings: dict[str, Any] = {"compress": args.method, "budget": args.budget}
    settings["lookahead"] = args.lookahead
    piece, _, max_whole = name.partition("@")
    size, *probe = piece.split(":")
    if size.isdigit():
        settings |= {"max_whole": int(max_whole or max(int(size), 1024)), "piece": int(size)}
        settings |= dict(zip(("probe", "probe_first"), map(int, probe), strict=False))
    longest = args.tokens + 256
    config = CompressionConfig.parse(settings)
    layers = AutoConfig.from_pretrained(args.model).num_hidden_layers
    llm = LLM(
        args.model,
        max_model_len=longest,
        # The smallest pool that holds the longest prompt with its look-ahead, and nothing else.
        num_gpu_blocks_override=1
        + uncompressed_prompt_blocks(config, layers, BLOCK, longest)
        + -(-args.lookahead // BLOCK),
        block_size=BLOCK,
        enforce_eager=True,
        dtype=args.dtype,
        distributed_executor_backend="uni",
        enable_prefix_caching=args.cached and name == FULL,
        max_num_seqs=1,
        logits_processors=[forced_output_processor()],
        max_logprobs=LIKELY,
        **cache_options(cache_gib=CACHE_GIB),
        **({} if name == FULL else {"additional_config": {"kvcompress": settings}}),
    )
    return MeasuredEngine(llm, track_max_blocks(llm))


def compare_on_questions(
    args: argparse.Namespace, engines: dict[str, MeasuredEngine], tokenizer: Any
) -> None:
    """Run all prompts on all engines, and record the measurements in `engines`."""
    from benchmarks.evidence.reference_model import encode
    from vllm_kvcompress.compare.measures import coarse_kl
    from vllm_kvcompress.compare.tasks import build_items, score

    items = build_items(
        [args.task],
        count=args.count,
        tokens=args.tokens,
        seed=args.seed,
        question=args.question,
        count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
        questions_per_text=5,
    )
    full = engines[FULL]
    for index, item in enumerate(items):
        prompt = encode(tokenizer, item.messages)
        full_output = full.generate(item.name, prompt, args.answer, args.least)
        text = tokenizer.decode(full_output.token_ids[: item.max_tokens])
        full_score = score(item.answers, text)
        full_logprobs = top_logprobs(full_output)
        for name, engine in engines.items():
            if name == FULL:
                continue
            logprobs = top_logprobs(engine.generate(item.name, prompt, list(full_output.token_ids)))
            # The prefill computes the first token, so compression cannot change it.
            pairs = list(zip(full_logprobs, logprobs, strict=True))[1 + args.lookahead :]
            if pairs:
                engine.kl.append(statistics.fmean(coarse_kl(p, q) for p, q in pairs))
                engine.same.append(
                    statistics.fmean(next(iter(p)) == next(iter(q)) for p, q in pairs)
                )
            if not full_score:
                continue
            chosen = [int(next(iter(position))) for position in logprobs[: item.max_tokens]]
            if chosen != list(full_output.token_ids[: item.max_tokens]):
                own_output = engine.generate(f"{item.name} again", prompt, args.answer, args.least)
                own_text = tokenizer.decode(own_output.token_ids[: item.max_tokens])
                engine.named.append(score(item.answers, own_text))
            else:
                engine.named.append(full_score)
        full.named.append(full_score)
        if args.output:
            # Save after each prompt, so that an interrupted run keeps its results.
            text = json.dumps(report(args, engines, index + 1), indent=2)
            args.output.write_text(f"{text}\n")
        print(
            f"{index + 1} of {len(items)}: {len(prompt)} tokens;",
            *(
                f"{name} {engine.first_token.get(item.name, 0):.1f} s"
                for name, engine in engines.items()
            ),
            flush=True,
        )


def report(
    args: argparse.Namespace, engines: dict[str, MeasuredEngine], prompts: int
) -> dict[str, Any]:
    full = engines[FULL]
    rows: dict[str, Any] = {}
    for name, engine in engines.items():
        # Only prompts that vLLM alone did not find in its prefix cache.
        ratios = [
            seconds / engine.first_token[prompt] for prompt, seconds in full.first_token.items()
        ]
        rows[name] = {
            "most_blocks": engine.max_blocks(),
            "first_token_s": round(
                statistics.median(engine.first_token[prompt] for prompt in full.first_token), 2
            ),
            "first_token_speedup": round(statistics.median(ratios), 3),
            "named": round(sum(engine.named), 2),
            "kl": round(statistics.fmean(engine.kl), 4) if engine.kl else None,
            "kl_by_prompt": [round(kl, 4) for kl in engine.kl],
            "same": round(statistics.fmean(engine.same), 3) if engine.same else None,
        }
    return {
        "machine": machine(),
        "command": " ".join(["python", "benchmarks/bench_pieces.py", *sys.argv[1:]]),
        "commit": commit(),
        "shapes": {
            **{"task": args.task, "question": args.question, "prompts": prompts},
            **{"known": sum(map(bool, full.named)), "tokens": args.tokens, "method": args.method},
            **{"budget": args.budget, "dtype": args.dtype, "lookahead": args.lookahead},
            **{"cached": args.cached, "least": args.least},
        },
        "rows": rows,
    }


def main() -> None:
    args = parse_args()
    use_one_process(cache_gib=CACHE_GIB)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    names = [FULL, *([] if args.without_whole else [WHOLE]), *args.pieces]
    engines = {name: build_engine(name, args) for name in names}
    compare_on_questions(args, engines, engines[FULL].llm.get_tokenizer())
    print_result(report(args, engines, args.count), args.output)


if __name__ == "__main__":
    main()
