"""Measure n-gram drafts with and without compression: accepted drafts and KV blocks.

    python benchmarks/bench_drafts.py --model .cache/smollm2-135m-instruct

Engines in one process answer the same prompts greedily: a text, and a request to repeat it, which
suits n-gram drafts best. Each engine writes its own output, so outputs may differ where compression
changes them.

* taken: share of drafted tokens that were accepted
* tokens_a_step: output tokens per decode step
* blocks: maximum blocks of a request while it decoded, with its drafts
* same: number of outputs with drafts that equal those without, at the same budget
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_bench import blocks_in_use, print_result, use_one_process
from origin import commit, machine

BLOCK = 32
DRAFTS = 4


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--method", default="cake-chunk")
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.5, 0.2])
    parser.add_argument("--count", type=int, default=8, help="prompts")
    parser.add_argument("--tokens", type=int, default=1500, help="maximum tokens per prompt")
    parser.add_argument("--answer", type=int, default=128, help="output tokens")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    return parser.parse_args()


@dataclass(slots=True)
class MeasuredEngine:
    """One engine with its measurements."""

    llm: Any
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0
    blocks: int = 0
    outputs: list[list[int]] = field(default_factory=list)

    def count_drafts(self) -> None:
        """Count drafts from now on."""
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        make_stats = scheduler.make_spec_decoding_stats

        def counting(
            stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, **named: Any
        ) -> Any:
            self.drafted_tokens += num_draft_tokens
            self.accepted_tokens += num_accepted_tokens
            return make_stats(stats, num_draft_tokens, num_accepted_tokens, *args, **named)

        scheduler.make_spec_decoding_stats = counting

    def generate(self, name: str, prompt: Sequence[int], tokens: int) -> None:
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        scheduler = engine.engine_core.engine_core.scheduler
        while engine.has_unfinished_requests():
            results = engine.step()
            for request in scheduler.running:
                if request.num_output_tokens:
                    self.steps += 1
                    self.blocks = max(self.blocks, blocks_in_use(self.llm))
            finished = [output for output in results if output.finished]
            self.outputs += [list(output.outputs[0].token_ids) for output in finished]


def allow_several_engines() -> None:
    """Make vLLM register its Triton kernel overrides only once per process.

    It scans all modules for kernels to replace, and fails on its drafter's compiled module if an
    engine starts after one with drafts.
    """
    from vllm.platforms.cpu import CpuPlatform

    once = functools.cache(CpuPlatform.register_triton_kernel_overrides)
    setattr(CpuPlatform, "register_triton_kernel_overrides", staticmethod(once))  # noqa: B010


def build_engine(budget: float | None, drafts: bool, args: argparse.Namespace) -> MeasuredEngine:
    from vllm import LLM

    options: dict[str, Any] = {}
    if budget is not None:
        options["additional_config"] = {
            "kvcompress": {"compress": args.method, "budget": budget, "lookahead": 0}
        }
    if drafts:
        options["speculative_config"] = {
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
        **options,
    )
    engine = MeasuredEngine(llm)
    if drafts:
        engine.count_drafts()
    return engine


def prompts_of(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    from vllm_kvcompress.serving.text import english

    ids = tokenizer.encode(english(), add_special_tokens=False)
    instruction = "\n\nWrite the text above out again, word for word:\n\n"
    instruction_ids = tokenizer.encode(instruction, add_special_tokens=False)
    length = args.tokens - len(instruction_ids) - 32
    prompts = []
    for index in range(args.count):
        text = ids[index * length : (index + 1) * length]
        # The first words of the text start the output, so that the model repeats the text.
        prompts.append([*text, *instruction_ids, *text[:32]])
    return prompts


def main() -> None:
    args = parse_args()
    use_one_process(cache_gib=1)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    allow_several_engines()
    budgets = {"off": None, **{f"{args.method} {budget:g}": budget for budget in args.budgets}}
    found = {
        (name, drafts): build_engine(budget, drafts, args)
        for name, budget in budgets.items()
        for drafts in (False, True)
    }
    prompts = prompts_of(args, found["off", False].llm.get_tokenizer())
    for index, prompt in enumerate(prompts):
        for engine in found.values():
            engine.generate(str(index), prompt, args.answer)
        print(f"{index + 1} of {len(prompts)}: {len(prompt)} tokens", flush=True)
    rows = {}
    for name in budgets:
        plain, drafted = found[name, False], found[name, True]
        same = [a == b for a, b in zip(plain.outputs, drafted.outputs, strict=True)]
        rows[name] = {
            "judged": drafted.drafted_tokens,
            "taken": round(drafted.accepted_tokens / max(drafted.drafted_tokens, 1), 3),
            "tokens_a_step": round(
                statistics.fmean(map(len, drafted.outputs)) * len(prompts) / drafted.steps, 2
            ),
            "blocks": [plain.blocks, drafted.blocks],
            "same": sum(same),
        }
    print_result(
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
