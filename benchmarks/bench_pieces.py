"""Prompts packed piece by piece: blocks, time to the first token, and what they lose.

    python benchmarks/bench_pieces.py --model .cache/smollm2-135m-instruct

Engines side by side in one process, prompt by prompt: vLLM alone, the method on the whole prompt,
and the same packed after every piece, judged by the prompt's ends or by the piece's own (1024:0),
with no more held than the budget or with what max_whole leaves (1024@4096).
vLLM alone answers a built-in question; the others write the same answer, so that probabilities are
along the same text, and answer themselves where they would have chosen another token.

* blocks: taken at once for one prompt and its answer, the most, in the smallest pool that starts
* first token: seconds from the request to it, the median of the prompts, and the median of the
  ratios, vLLM's over the method's
* named: of the prompts whose answer vLLM alone names, those that name it
* KL: from vLLM alone, in nats per token, a lower bound by the 20 most likely tokens; of an answer
  that is judged by its first tokens, behind these
* same: of those tokens, the share that it would have chosen itself
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
    in_this_process,
    likely_tokens,
    most_blocks_in_use,
    tell,
    writing,
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
    parser.add_argument("--without-whole", action="store_true", help="pieces and vLLM alone")
    parser.add_argument("--lookahead", type=int, default=0)
    parser.add_argument("--answer", type=int, default=24, help="tokens that are compared, at most")
    parser.add_argument(
        "--least", type=int, default=0, help="tokens of vLLM's answer before it may end"
    )
    parser.add_argument("--task", default="niah-multikey-1")
    parser.add_argument("--count", type=int, default=20, help="prompts")
    parser.add_argument("--tokens", type=int, default=6000, help="of a prompt, about")
    parser.add_argument("--question", choices=("last", "first"), default="last")
    parser.add_argument(
        "--cached",
        action="store_true",
        help="vLLM alone finds a text again that an earlier question was about; the time to the"
        " first token is of the others",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    return parser.parse_args()


@dataclass(slots=True)
class Contender:
    """One engine, and what was seen of it."""

    llm: Any
    blocks: Callable[[], int]
    first: dict[str, float] = field(default_factory=dict)
    named: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    same: list[float] = field(default_factory=list)

    def answer(self, name: str, prompt: list[int], write: list[int] | int, least: int = 0) -> Any:
        """Answer one prompt alone, with so many tokens or as it is written; times the first one."""
        from vllm import SamplingParams

        greedy = isinstance(write, int)
        tokens = write if isinstance(write, int) else len(write)
        params = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            min_tokens=least if greedy else 0,
            ignore_eos=not greedy,
            logprobs=LIKELY,
            extra_args=None if greedy else {"write": write},
        )
        engine = self.llm.llm_engine
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
        start, first = time.perf_counter(), None
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if outputs and outputs[0].outputs[0].token_ids and first is None:
                first = time.perf_counter() - start
        assert first is not None
        if not outputs[0].num_cached_tokens:
            self.first[name] = first
        return outputs[0].outputs[0]


def contender(name: str, args: argparse.Namespace) -> Contender:
    from transformers import AutoConfig
    from vllm import LLM

    from vllm_kvcompress.planning.uncompressed_prompt import uncompressed_prompt_blocks
    from vllm_kvcompress.settings.config import CompressionConfig

    own: dict[str, Any] = {"compress": args.method, "budget": args.budget}
    own["lookahead"] = args.lookahead
    piece, _, whole = name.partition("@")
    size, *probe = piece.split(":")
    if size.isdigit():
        own |= {"max_whole": int(whole or max(int(size), 1024)), "piece": int(size)}
        own |= dict(zip(("probe", "probe_first"), map(int, probe), strict=False))
    longest = args.tokens + 256
    settings = CompressionConfig.parse(own)
    layers = AutoConfig.from_pretrained(args.model).num_hidden_layers
    llm = LLM(
        args.model,
        max_model_len=longest,
        # the smallest pool in which the longest prompt looks ahead, so that nothing else is taken
        num_gpu_blocks_override=1
        + uncompressed_prompt_blocks(settings, layers, BLOCK, longest)
        + -(-args.lookahead // BLOCK),
        block_size=BLOCK,
        enforce_eager=True,
        dtype=args.dtype,
        distributed_executor_backend="uni",
        enable_prefix_caching=args.cached and name == FULL,
        max_num_seqs=1,
        logits_processors=[writing()],
        max_logprobs=LIKELY,
        **cache_options(cache_gib=CACHE_GIB),
        **({} if name == FULL else {"additional_config": {"kvcompress": own}}),
    )
    return Contender(llm, most_blocks_in_use(llm))


def ask(args: argparse.Namespace, contenders: dict[str, Contender], tokenizer: Any) -> None:
    from benchmarks.evidence.reader import encode
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
    full = contenders[FULL]
    for at, item in enumerate(items):
        prompt = encode(tokenizer, item.messages)
        right = full.answer(item.name, prompt, args.answer, args.least)
        text = tokenizer.decode(right.token_ids[: item.max_tokens])
        known = score(item.answers, text)
        likely = likely_tokens(right)
        for name, one in contenders.items():
            if name == FULL:
                continue
            own = likely_tokens(one.answer(item.name, prompt, list(right.token_ids)))
            # the first token is the prefill's, and so is its distribution
            pairs = list(zip(likely, own, strict=True))[1 + args.lookahead :]
            if pairs:
                one.kl.append(statistics.fmean(coarse_kl(p, q) for p, q in pairs))
                one.same.append(statistics.fmean(next(iter(p)) == next(iter(q)) for p, q in pairs))
            if not known:
                continue
            chosen = [int(next(iter(place))) for place in own[: item.max_tokens]]
            if chosen != list(right.token_ids[: item.max_tokens]):
                again = one.answer(f"{item.name} again", prompt, args.answer, args.least)
                text_of_own = tokenizer.decode(again.token_ids[: item.max_tokens])
                one.named.append(score(item.answers, text_of_own))
            else:
                one.named.append(known)
        full.named.append(known)
        if args.output:
            # a long run that is broken off has told what it saw
            text = json.dumps(report(args, contenders, at + 1), indent=2)
            args.output.write_text(f"{text}\n")
        print(
            f"{at + 1} of {len(items)}: {len(prompt)} tokens;",
            *(f"{name} {one.first.get(item.name, 0):.1f} s" for name, one in contenders.items()),
            flush=True,
        )


def report(
    args: argparse.Namespace, contenders: dict[str, Contender], prompts: int
) -> dict[str, Any]:
    full = contenders[FULL]
    rows: dict[str, Any] = {}
    for name, one in contenders.items():
        # of the prompts that vLLM alone read itself
        ratios = [seconds / one.first[prompt] for prompt, seconds in full.first.items()]
        rows[name] = {
            "most_blocks": one.blocks(),
            "first_token_s": round(statistics.median(one.first[at] for at in full.first), 2),
            "first_token_speedup": round(statistics.median(ratios), 3),
            "named": round(sum(one.named), 2),
            "kl": round(statistics.fmean(one.kl), 4) if one.kl else None,
            "kl_by_prompt": [round(kl, 4) for kl in one.kl],
            "same": round(statistics.fmean(one.same), 3) if one.same else None,
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
    in_this_process(cache_gib=CACHE_GIB)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    made = [FULL, *([] if args.without_whole else [WHOLE]), *args.pieces]
    contenders = {piece: contender(piece, args) for piece in made}
    ask(args, contenders, contenders[FULL].llm.get_tokenizer())
    tell(report(args, contenders, args.count), args.output)


if __name__ == "__main__":
    main()
