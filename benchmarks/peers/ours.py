"""Our side: the prompts, the full cache's tokens, and our methods on the same prompts.

    python -m benchmarks.peers.ours --model DIR --run DIR

The methods run through `vllm_kvcompress.offline`, the engine's pipeline on plain tensors, with
pages of one token, so that a layer keeps exactly what it was given.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.models.llama.modeling_llama import rotate_half

from benchmarks.evidence.reader import encode
from benchmarks.evidence.texts import text_items
from benchmarks.peers import counts, exchange
from benchmarks.peers.decoding import (
    ANSWER,
    FORCED,
    Prefilled,
    cached,
    decode,
    forced,
    held,
    load,
    measured,
    prefill,
    stop_tokens,
)
from vllm_kvcompress.compare.tasks import build_items
from vllm_kvcompress.methods.presets import PRESETS
from vllm_kvcompress.offline import compress

SHORTEST, LONGEST = 1000, 2000  # tokens of a prompt
TASK = "niah-multikey-1"
ATTEMPTS = 6  # prompts to try for a needle until the full cache answers one
# No press stands beside them, and on a CPU their column sums take longer than all the others.
LEFT_OUT = ("h2o", "d2o")


def _averaged(allocator: str) -> dict[str, Any]:
    """SnapKV's scores with the pooling that kvpress has, an average of 7."""
    return {
        "compress": "custom",
        "allocator": allocator,
        "scorer": "snapkv",
        "window": counts.WINDOW,
        "scorer_params": {"pooling": "avg", "kernel": 7},
    }


METHODS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"compress": name, "lookahead": 0} for name in PRESETS if name not in LEFT_OUT},
    "snapkv, pooled as kvpress": _averaged("uniform"),
    "pyramidkv, pooled as kvpress": _averaged("pyramid"),
    "keydiff, no window": {
        "compress": "custom",
        "allocator": "uniform",
        "scorer": "keydiff",
        "window": 0,
    },
}

TWINS: Mapping[str, str] = {
    "SnapKV": "snapkv, pooled as kvpress",
    "TOVA": "tova",
    "StreamingLLM": "streamingllm",
    "ChunkKV": "chunkkv",
    "KeyDiff": "keydiff, no window",
}
"""Presses that are set as one of our methods and must keep the same positions."""


def lengths(count: int) -> list[int]:
    """`count` lengths from SHORTEST to LONGEST, evenly."""
    return [SHORTEST + (LONGEST - SHORTEST) * i // max(count - 1, 1) for i in range(count)]


def rotated_queries(model: Any, full: Prefilled) -> torch.Tensor:
    """``[L, Hq, S, D]`` float32, as the attention had them."""
    cosines, sines = (x[0] for x in full.embeddings)
    out = []
    for layer, hidden in zip(model.model.layers, full.hidden, strict=True):
        flat = layer.self_attn.q_proj(hidden)
        queries = flat.view(hidden.shape[0], -1, layer.self_attn.head_dim).transpose(0, 1)
        out.append(queries * cosines + rotate_half(queries) * sines)
    return torch.stack(out)


def make_prompts(model: Any, tokenizer: Any, args: argparse.Namespace) -> None:
    """Write the prompts, needles that the full cache answers and texts, and the texts' logits.

    Raises:
        RuntimeError: the full cache answers none of a needle's attempts.
    """
    ends, made, logits = stop_tokens(model), [], {}

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    for index, tokens in enumerate(lengths(args.needles)):
        tries = build_items(
            [TASK],
            count=ATTEMPTS,
            tokens=tokens,
            seed=args.seed + 1000 * index,
            question="last",
            count_tokens=count,
            questions_per_text=1,
        )
        for asked in tries:
            ids = encode(tokenizer, asked.messages)
            full = prefill(model, ids)
            out = decode(model, cached(full.layers), full.logits, len(ids), ANSWER, ends)
            if asked.answers[0] in tokenizer.decode(out.said):
                break
        else:
            raise RuntimeError(f"the full cache answers none of {ATTEMPTS} needles of {tokens}")
        made.append(
            exchange.Prompt(
                name=f"needle{index}",
                kind=exchange.NEEDLE,
                ids=tuple(ids),
                said=tuple(out.said),
                answer=asked.answers[0],
            )
        )
        print(f"needle {index}: {len(ids)} tokens", flush=True)
    for index, tokens in enumerate(lengths(args.texts)):
        (text,) = text_items(
            count=1, tokens=tokens, seed=args.seed + 1000 * index, count_tokens=count
        )
        ids = encode(tokenizer, text.messages)
        full = prefill(model, ids)
        out = decode(model, cached(full.layers), full.logits, len(ids), FORCED)
        name = f"text{index}"
        again = cached(full.layers)
        logits[name] = forced(model, again, full.logits, len(ids), out.said)
        made.append(
            exchange.Prompt(name=name, kind=exchange.TEXT, ids=tuple(ids), said=tuple(out.said))
        )
        print(f"text {index}: {len(ids)} tokens", flush=True)
    save_file(logits, args.run / "full.safetensors")
    exchange.write(args.run / "prompts.jsonl", made)


@torch.inference_mode()
def agreements(
    prompt: exchange.Prompt, theirs: Mapping[str, torch.Tensor], whole: Mapping[str, Any]
) -> dict[str, dict[str, int]]:
    """``press@budget`` to the counts of `Agreement`, over all layers, of one prompt."""
    out: dict[str, dict[str, int]] = {}
    for key, positions in theirs.items():
        press = key.rpartition("@")[0]
        if press not in TWINS:
            continue
        method = METHODS[TWINS[press]]
        made = compress(**whole, policy=method, budget=positions.shape[-1])
        found = counts.Agreement()
        for layer, kept in enumerate(made.positions):
            mine = kept, positions[layer], made.scores[layer]
            if press == "ChunkKV":
                chunks, _ = counts.whole_chunks(len(prompt.ids), positions.shape[-1])
                found += counts.compare_chunks(*mine, chunks)
            else:
                found += counts.compare(*mine)
        out[key] = {
            "kept": found.kept,
            "equal": found.equal,
            "named": found.named,
            "rounding": found.rounding,
            "unexplained": found.unexplained,
        }
    return out


def run(args: argparse.Namespace) -> None:
    model, tokenizer = load(args.model), AutoTokenizer.from_pretrained(args.model)
    args.run.mkdir(parents=True, exist_ok=True)
    if not (args.run / "prompts.jsonl").exists():
        make_prompts(model, tokenizer, args)
    if args.prompts_only:
        return
    reference = load_file(args.run / "full.safetensors")
    results = args.run / "ours.jsonl"
    have = {result.key for result in exchange.read(results, exchange.Result)}
    wanted = [(exchange.FULL, args.budgets[0])]
    wanted += [(name, budget) for name in METHODS for budget in args.budgets]
    for prompt in exchange.read(args.run / "prompts.jsonl", exchange.Prompt):
        pack_request = [(n, b) for n, b in wanted if (n, b, prompt.name) not in have]
        compared = args.run / f"agreement-{prompt.name}.json"
        theirs = args.run / f"positions-{prompt.name}.safetensors"
        if not pack_request and compared.exists():
            continue
        full = prefill(model, prompt.ids)
        with torch.inference_mode():
            whole: dict[str, Any] = {
                "queries": rotated_queries(model, full),
                "keys": torch.stack([k for k, _ in full.layers]),
                "values": torch.stack([v for _, v in full.layers]),
            }
        for name, budget in pack_request:
            layers: Any = full.layers
            if name != exchange.FULL:
                kept = counts.kept_tokens(len(prompt.ids), budget)
                made = compress(**whole, policy=METHODS[name], budget=kept)
                layers = list(zip(made.keys, made.values, strict=True))
                total = sum(made.budgets)
                assert total == kept * len(layers), f"{name} kept {total}, not {kept} a layer"
            target = reference.get(prompt.name)
            line = exchange.Result(
                side=exchange.OURS,
                method=name,
                budget=budget,
                kept=tuple(float(keys.shape[1]) for keys, _ in layers),
                cache_bytes=held(layers),
                **measured(model, tokenizer, prompt, full, cached(layers), target),
            )
            exchange.append(results, line)
        if theirs.exists():
            compared.write_text(json.dumps(agreements(prompt, load_file(theirs), whole)) + "\n")
        print(f"ours: {prompt.name}, {len(prompt.ids)} tokens", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True, help="folder that both sides share")
    parser.add_argument("--budgets", nargs="+", type=float, required=True)
    parser.add_argument("--needles", type=int, required=True)
    parser.add_argument("--texts", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts-only", action="store_true")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
