"""Measure vLLM's fp8 KV cache and our engine's decode speed on the same prompts.

    PYTHONPATH=.:kernels python -m benchmarks.peers.engine --model DIR --run DIR

An fp8 cache takes half the memory of a 16-bit cache, so it is compared with our methods at budget
0.5. vLLM's CPU build reads fp8 caches on processors with AVX-512 or AMX; scales are 1, because the
checkpoint has none. Model and full cache are float32, as in the rest of this comparison. Decode
steps are timed for a single request with the longest text.
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

ANSWER_TOKENS, TEXT_TOKENS = 16, 32  # as in `decoding`, which this process does not import
FP8, METHOD = "fp8", "cake-chunk"
SPEED_TOKENS = 48


def engine(model: Path, cache: str, settings: Mapping[str, Any] | None, recorded: Any) -> Any:
    """Return a float32 vLLM engine in this process that records logits to `recorded`."""
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
        logits_processors=[recorder(recorded)],
        seed=0,
        **({"additional_config": {"kvcompress": dict(settings)}} if settings else {}),
    )


def generate(llm: Any, prompts: Sequence[Prompt], recorded: Any) -> dict[str, str]:
    """Run all prompts together and return output texts by name; texts get forced tokens."""
    from vllm import SamplingParams

    recorded.clear()
    for prompt in prompts:
        text = prompt.kind == exchange.TEXT
        extra = {"record": prompt.name, "force": list(prompt.output_ids)} if text else None
        tokens = TEXT_TOKENS if text else ANSWER_TOKENS
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=text, extra_args=extra)
        ids = {"prompt_token_ids": list(prompt.ids)}
        llm.llm_engine.add_request(prompt.name, ids, params)
    output_ids = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                output_ids[output.request_id] = output.outputs[0].text
    return output_ids


def decode_step(llm: Any, ids: Sequence[int]) -> float:
    """Return the median seconds of a single request's decode step."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=SPEED_TOKENS, ignore_eos=True)
    llm.llm_engine.add_request("speed", {"prompt_token_ids": list(ids)}, params)
    seconds: list[float] = []
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    while llm.llm_engine.has_unfinished_requests():
        prefilling = scheduler.waiting or any(r.is_prefill_chunk for r in scheduler.running)
        start = time.perf_counter()
        llm.llm_engine.step()
        if not prefilling:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[4:])  # the first steps may compress or warm up


def logits_of(recorded: Any, name: str) -> torch.Tensor:
    """Return the recorded logits ``[TEXT_TOKENS, vocabulary]`` of a text."""
    return torch.stack([recorded[name, step] for step in range(TEXT_TOKENS)])


def run(args: argparse.Namespace) -> None:
    """Measure the full cache, the fp8 cache and our method at each budget, one engine each."""
    from benchmarks.evidence.outputs import divergence

    prompts = exchange.read(args.run / "prompts.jsonl", Prompt)
    texts = [prompt for prompt in prompts if prompt.kind == exchange.TEXT]
    longest = max(texts or prompts, key=lambda prompt: len(prompt.ids))
    results = args.run / "vllm.jsonl"
    measured = {(r.method, r.budget) for r in exchange.read(results, exchange.Result)}
    recorded: dict[tuple[str, int], torch.Tensor] = {}
    cases: list[tuple[str, float, str, Mapping[str, Any] | None]] = [
        (exchange.FULL, 1.0, "auto", None),
        (FP8, 0.5, "fp8", None),
    ]
    ours = {"compress": METHOD, "lookahead": 0, "min_prompt": 64}
    cases += [(METHOD, b, "auto", {**ours, "budget": b}) for b in args.budgets]
    full: dict[str, torch.Tensor] = {}
    if all((name, budget) in measured for name, budget, _, _ in cases):
        return
    results.unlink(
        missing_ok=True
    )  # the first engine's logits are only in memory, so all engines run again
    for name, budget, cache, settings in cases:
        llm = engine(args.model, cache, settings, recorded)
        output_ids = generate(llm, prompts, recorded)
        if name == exchange.FULL:
            full = {prompt.name: logits_of(recorded, prompt.name) for prompt in texts}
        kl = {
            p.name: divergence(full[p.name].double(), logits_of(recorded, p.name).double())[
                1:
            ].tolist()
            for p in texts
        }
        step = decode_step(llm, longest.ids)
        for prompt in prompts:
            tokens = len(prompt.ids)
            is_needle = prompt.kind == exchange.NEEDLE
            line = exchange.Result(
                side=exchange.VLLM,
                method=name,
                budget=budget,
                prompt=prompt.name,
                tokens=tokens,
                kept=(tokens if settings is None else tokens * budget,),
                answered=prompt.answer.lower() in output_ids[prompt.name].lower()
                if is_needle
                else None,
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
    parser.add_argument("--run", type=Path, required=True, help="folder that the processes share")
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
