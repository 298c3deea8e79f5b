"""Drafts out of the prompt, with and without compression: how many are taken, and what is held.

    python benchmarks/bench_drafts.py --model .cache/smollm2-135m-instruct

Engines side by side in one process answer the same prompts greedily: a text, and a request to write
it out again, where drafts are at their best. Each engine speaks for itself, so that texts differ
where compression changes them.

* taken: of the drafts that were judged, those that were right
* tokens a step: of the answer, per step that decoded
* blocks: the most that a request held while it decoded, drafts included
* same: whether answers with drafts are, to the token, those without, at the same budget
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_bench import blocks_in_use, in_this_process, tell
from origin import commit, machine

BLOCK = 32
DRAFTS = 4


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--method", default="cake-chunk")
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.5, 0.2])
    parser.add_argument("--count", type=int, default=8, help="prompts")
    parser.add_argument("--tokens", type=int, default=1500, help="of a prompt, about")
    parser.add_argument("--answer", type=int, default=128, help="tokens")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    return parser.parse_args()


@dataclass(slots=True)
class Contender:
    """One engine, and what was seen of it."""

    llm: Any
    judged: int = 0
    taken: int = 0
    steps: int = 0
    blocks: int = 0
    answers: list[list[int]] = field(default_factory=list)

    def watch(self) -> None:
        """Count drafts from now on."""
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        make_stats = scheduler.make_spec_decoding_stats

        def counting(
            stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, **named: Any
        ) -> Any:
            self.judged += num_draft_tokens
            self.taken += num_accepted_tokens
            return make_stats(stats, num_draft_tokens, num_accepted_tokens, *args, **named)

        scheduler.make_spec_decoding_stats = counting

    def answer(self, name: str, prompt: Sequence[int], tokens: int) -> None:
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        scheduler = engine.engine_core.engine_core.scheduler
        while engine.has_unfinished_requests():
            done = engine.step()
            for request in scheduler.running:
                if request.num_output_tokens:
                    self.steps += 1
                    self.blocks = max(self.blocks, blocks_in_use(self.llm))
            whole = [output for output in done if output.finished]
            self.answers += [list(output.outputs[0].token_ids) for output in whole]


def start_many_here() -> None:
    """vLLM looks for kernels to replace in every module, and stumbles over its drafter's compiler.

    Only where an engine starts after one that drafts. Once a process is enough.
    """
    from vllm.platforms.cpu import CpuPlatform

    once = functools.cache(CpuPlatform.register_triton_kernel_overrides)
    setattr(CpuPlatform, "register_triton_kernel_overrides", staticmethod(once))  # noqa: B010


def contender(budget: float | None, drafts: bool, args: argparse.Namespace) -> Contender:
    from vllm import LLM

    own: dict[str, Any] = {}
    if budget is not None:
        own["additional_config"] = {
            "kvcompress": {"compress": args.method, "budget": budget, "lookahead": 0}
        }
    if drafts:
        own["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": DRAFTS,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        }
    longest = args.tokens + args.answer + 256
    llm = LLM(
        args.model,
        max_model_len=longest,
        num_gpu_blocks_override=2 + -(-longest // BLOCK),
        block_size=BLOCK,
        enforce_eager=True,
        dtype=args.dtype,
        distributed_executor_backend="uni",
        enable_prefix_caching=False,
        max_num_seqs=1,
        **own,
    )
    made = Contender(llm)
    if drafts:
        made.watch()
    return made


def prompts_of(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    from vllm_kvcompress.serving.text import english

    every = tokenizer.encode(english(), add_special_tokens=False)
    asked = "\n\nWrite the text above out again, word for word:\n\n"
    ask = tokenizer.encode(asked, add_special_tokens=False)
    length = args.tokens - len(ask) - 32
    prompts = []
    for at in range(args.count):
        text = every[at * length : (at + 1) * length]
        # its first words, so that what follows is clear
        prompts.append([*text, *ask, *text[:32]])
    return prompts


def main() -> None:
    args = parse_args()
    in_this_process(cache_gib=1)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    start_many_here()
    budgets = {"off": None, **{f"{args.method} {budget:g}": budget for budget in args.budgets}}
    found = {
        (name, drafts): contender(budget, drafts, args)
        for name, budget in budgets.items()
        for drafts in (False, True)
    }
    prompts = prompts_of(args, found["off", False].llm.get_tokenizer())
    for at, prompt in enumerate(prompts):
        for one in found.values():
            one.answer(str(at), prompt, args.answer)
        print(f"{at + 1} of {len(prompts)}: {len(prompt)} tokens", flush=True)
    rows = {}
    for name in budgets:
        plain, drafted = found[name, False], found[name, True]
        same = [a == b for a, b in zip(plain.answers, drafted.answers, strict=True)]
        rows[name] = {
            "judged": drafted.judged,
            "taken": round(drafted.taken / max(drafted.judged, 1), 3),
            "tokens_a_step": round(
                statistics.fmean(map(len, drafted.answers)) * len(prompts) / drafted.steps, 2
            ),
            "blocks": [plain.blocks, drafted.blocks],
            "same": sum(same),
        }
    tell(
        {
            "machine": machine(),
            "command": " ".join(["python", "benchmarks/bench_drafts.py", *sys.argv[1:]]),
            "commit": commit(),
            "shapes": {
                **{"prompts": len(prompts), "tokens": args.tokens, "answer": args.answer},
                **{"drafts": DRAFTS, "dtype": args.dtype},
            },
            "rows": rows,
        },
        args.output,
    )


if __name__ == "__main__":
    main()
