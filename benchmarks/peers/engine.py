"""vLLM's own answer to the same wish, on the same prompts: an fp8 KV cache, and our engine's speed.

    PYTHONPATH=.:kernels python -m benchmarks.peers.engine --model DIR --run DIR

An fp8 cache takes half of a 16-bit one, so it stands beside our methods at a budget of 0.5. vLLM's
CPU build reads one where the processor has AVX-512 or AMX, with scales of 1 as no checkpoint brings
others. Model and full cache are float32, as everywhere in this comparison. Times of a decode step
are a lone request's after the longest text.
"""

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import exchange
from benchmarks.peers.exchange import Prompt

ANSWER, FORCED = 16, 32  # as in `decoding`, which this process does not import
FP8, METHOD = "fp8", "cake-chunk"
SPEED_TOKENS = 48


def engine(model: Path, cache: str, settings: Mapping[str, Any] | None, tape: Any) -> Any:
    """A float32 vLLM engine in this process; `tape` is filled with the logits of `record`."""
    from vllm import LLM

    from benchmarks.peers.recorder import recorder

    return LLM(
        str(model),
        dtype="float32",
        kv_cache_dtype=cache,
        max_model_len=4096,
        block_size=32,
        enforce_eager=True,
        distributed_executor_backend="uni",
        enable_prefix_caching=False,
        logits_processors=[recorder(tape)],
        seed=0,
        **({"additional_config": {"kvcompress": dict(settings)}} if settings else {}),
    )


def answer(llm: Any, prompts: Sequence[Prompt], tape: Any) -> dict[str, str]:
    """All prompts at once: greedy answers of needles by name, texts forced along their tokens."""
    from vllm import SamplingParams

    tape.clear()
    for prompt in prompts:
        text = prompt.kind == exchange.TEXT
        extra = {"record": prompt.name, "force": list(prompt.said)} if text else None
        tokens = FORCED if text else ANSWER
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=text, extra_args=extra)
        ids = {"prompt_token_ids": list(prompt.ids)}
        llm.llm_engine.add_request(prompt.name, ids, params)
    said = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                said[output.request_id] = output.outputs[0].text
    return said


def decode_step(llm: Any, ids: Sequence[int]) -> float:
    """Median seconds of a lone request's decode step."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=SPEED_TOKENS, ignore_eos=True)
    llm.llm_engine.add_request("speed", {"prompt_token_ids": list(ids)}, params)
    seconds: list[float] = []
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    while llm.llm_engine.has_unfinished_requests():
        waits = scheduler.waiting or any(r.is_prefill_chunk for r in scheduler.running)
        start = time.perf_counter()
        llm.llm_engine.step()
        if not waits:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[4:])  # the first may still compress or warm up


def rows(tape: Any, name: str) -> torch.Tensor:
    return torch.stack([tape[name, step] for step in range(FORCED)])


def run(args: argparse.Namespace) -> None:
    """Measure the full cache, fp8, and a decode step of ours at each budget, an engine each."""
    from benchmarks.evidence.answers import divergence

    prompts = exchange.read(args.run / "prompts.jsonl", Prompt)
    texts = [prompt for prompt in prompts if prompt.kind == exchange.TEXT]
    longest = max(texts or prompts, key=lambda prompt: len(prompt.ids))
    results = args.run / "vllm.jsonl"
    have = {(r.method, r.budget) for r in exchange.read(results, exchange.Result)}
    tape: dict[tuple[str, int], torch.Tensor] = {}
    cases: list[tuple[str, float, str, Mapping[str, Any] | None]] = [
        (exchange.FULL, 1.0, "auto", None),
        (FP8, 0.5, "fp8", None),
    ]
    ours = {"compress": METHOD, "lookahead": 0, "min_prompt": 64}
    cases += [(METHOD, b, "auto", {**ours, "budget": b}) for b in args.budgets]
    full: dict[str, torch.Tensor] = {}
    if all((name, budget) in have for name, budget, _, _ in cases):
        return
    results.unlink(missing_ok=True)  # what one engine says is compared with the first one's
    for name, budget, cache, settings in cases:
        llm = engine(args.model, cache, settings, tape)
        said = answer(llm, prompts, tape)
        if name == exchange.FULL:
            full = {prompt.name: rows(tape, prompt.name) for prompt in texts}
        kl = {
            p.name: divergence(full[p.name].double(), rows(tape, p.name).double())[1:].tolist()
            for p in texts
        }
        step = decode_step(llm, longest.ids)
        for prompt in prompts:
            tokens = len(prompt.ids)
            asked = prompt.kind == exchange.NEEDLE
            line = exchange.Result(
                side=exchange.VLLM,
                method=name,
                budget=budget,
                prompt=prompt.name,
                tokens=tokens,
                kept=(tokens if settings is None else tokens * budget,),
                answered=prompt.answer.lower() in said[prompt.name].lower() if asked else None,
                kl=tuple(kl.get(prompt.name, ())),
                decode_seconds=step,
                cache_bytes=round(tokens * budget),
                full_bytes=tokens,
                note="bytes are tokens of a 16-bit cache",
            )
            exchange.append(results, line)
        print(f"vllm: {name} {budget}, {step * 1e3:.1f} ms a step", flush=True)
        llm.llm_engine.engine_core.shutdown()
        del llm


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True, help="folder that both sides share")
    parser.add_argument("--budgets", nargs="+", type=float, required=True)
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
    )
    run(parser.parse_args())


if __name__ == "__main__":
    main()
