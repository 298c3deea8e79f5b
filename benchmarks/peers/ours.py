"""Our side: make the prompts and the full cache's outputs, and run our methods on them.

    python -m benchmarks.peers.ours RUN

The methods run through `vllm_kvcompress.offline`: the engine's pipeline on plain tensors. Pages
have one token, so that each layer keeps exactly its number of tokens.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer
from transformers.models.llama.modeling_llama import rotate_half

from benchmarks.evidence.reference_model import encode
from benchmarks.evidence.texts import text_items
from benchmarks.peers import counts, exchange
from benchmarks.peers.decoding import (
    ANSWER_TOKENS,
    TEXT_TOKENS,
    Compressed,
    Methods,
    Prefilled,
    as_cache,
    cache_bytes,
    decode,
    load,
    logits_along,
    measure_prompts,
    prefill,
    stop_tokens,
)
from vllm_kvcompress.compare.tasks import build_items
from vllm_kvcompress.methods.registry import PRESETS
from vllm_kvcompress.offline import compress

SHORTEST, LONGEST = 1000, 2000  # prompt length in tokens
TASK = "niah-multikey-1"
ATTEMPTS = 6  # prompts to try per needle until the full cache answers one
# kvpress has no counterpart, and their column sums take longer on a CPU than all other methods.
EXCLUDED = ("h2o", "d2o")


def _average_pooled(allocator: str) -> dict[str, Any]:
    """Return settings for SnapKV with kvpress's pooling, an average over 7 tokens."""
    return {
        "compress": "custom",
        "allocator": allocator,
        "scorer": "snapkv",
        "window": counts.WINDOW,
        "scorer_params": {"pooling": "avg", "kernel": 7},
    }


METHODS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"compress": name, "lookahead": 0} for name in PRESETS if name not in EXCLUDED},
    "snapkv, pooled as kvpress": _average_pooled("uniform"),
    "pyramidkv, pooled as kvpress": _average_pooled("pyramid"),
    "keydiff, no window": {
        "compress": "custom",
        "allocator": "uniform",
        "scorer": "keydiff",
        "window": 0,
    },
}


def lengths(count: int) -> list[int]:
    """Return `count` evenly spaced lengths from SHORTEST to LONGEST."""
    return [SHORTEST + (LONGEST - SHORTEST) * i // max(count - 1, 1) for i in range(count)]


def rotated_queries(model: Any, full: Prefilled) -> torch.Tensor:
    """Return all queries after RoPE ``[L, Hq, S, D]`` float32."""
    cosines, sines = (x[0] for x in full.embeddings)
    out = []
    for layer, hidden in zip(model.model.layers, full.hidden, strict=True):
        flat = layer.self_attn.q_proj(hidden)
        queries = flat.view(hidden.shape[0], -1, layer.self_attn.head_dim).transpose(0, 1)
        out.append(queries * cosines + rotate_half(queries) * sines)
    return torch.stack(out)


def make_prompts(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write needle prompts that the full cache answers, text prompts, and the texts' logits.

    Raises:
        RuntimeError: the full cache answers none of the attempts for a needle.
    """
    model, tokenizer = load(settings["model"]), AutoTokenizer.from_pretrained(settings["model"])
    ends, prompts, logits = stop_tokens(model), [], {}

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    for index, tokens in enumerate(lengths(settings["needles"])):
        attempts = build_items(
            [TASK],
            count=ATTEMPTS,
            tokens=tokens,
            seed=settings["seed"] + 1000 * index,
            question="last",
            count_tokens=count,
            questions_per_text=1,
        )
        for item in attempts:
            ids = encode(tokenizer, item.messages)
            full = prefill(model, ids)
            out = decode(model, as_cache(full.layers), full.logits, len(ids), ANSWER_TOKENS, ends)
            if item.answers[0] in tokenizer.decode(out.output_ids):
                break
        else:
            raise RuntimeError(f"the full cache answers none of {ATTEMPTS} needles of {tokens}")
        prompts.append(
            exchange.Prompt(
                name=f"needle{index}",
                kind=exchange.NEEDLE,
                ids=tuple(ids),
                output_ids=tuple(out.output_ids),
                answer=item.answers[0],
            )
        )
        print(f"needle {index}: {len(ids)} tokens", flush=True)
    for index, tokens in enumerate(lengths(settings["texts"])):
        (text,) = text_items(
            count=1, tokens=tokens, seed=settings["seed"] + 1000 * index, count_tokens=count
        )
        ids = encode(tokenizer, text.messages)
        full = prefill(model, ids)
        out = decode(model, as_cache(full.layers), full.logits, len(ids), TEXT_TOKENS)
        name = f"text{index}"
        cache = as_cache(full.layers)
        logits[name] = logits_along(model, cache, full.logits, len(ids), out.output_ids)
        prompts.append(
            exchange.Prompt(
                name=name, kind=exchange.TEXT, ids=tuple(ids), output_ids=tuple(out.output_ids)
            )
        )
        print(f"text {index}: {len(ids)} tokens", flush=True)
    save_file(logits, folder / "full.safetensors")
    exchange.write(folder / "prompts.jsonl", prompts)


@torch.inference_mode()
def compress_all(
    model: Any, prompt: exchange.Prompt, full: Prefilled, pending: Methods
) -> Iterator[tuple[str, float, Compressed]]:
    """Yield the compressed cache of each of our methods."""
    full_cache: dict[str, Any] = {
        "queries": rotated_queries(model, full),
        "keys": torch.stack([k for k, _ in full.layers]),
        "values": torch.stack([v for _, v in full.layers]),
    }
    for name, budget in pending:
        layers: Any = full.layers
        if name != exchange.FULL:
            kept = counts.kept_tokens(len(prompt.ids), budget)
            compressed = compress(**full_cache, policy=METHODS[name], budget=kept)
            layers = list(zip(compressed.keys, compressed.values, strict=True))
            total = sum(compressed.budgets)
            assert total == kept * len(layers), (
                f"{name} kept {total} tokens, expected {kept} per layer"
            )
        kept_entries = [float(keys.shape[1]) for keys, _ in layers]
        cache = as_cache(layers)
        yield name, budget, Compressed(cache=cache, kept=kept_entries, nbytes=cache_bytes(layers))


def run(folder: Path) -> None:
    """Make the prompts of the run in a folder, and measure all missing results."""
    settings = exchange.run_settings(folder)
    if not (folder / "prompts.jsonl").exists():
        make_prompts(folder, settings)
    budgets: list[float] = settings["budgets"]
    methods = [(exchange.FULL, budgets[0])]
    methods += [(name, budget) for name in METHODS for budget in budgets]
    measure_prompts(exchange.OURS, folder, lambda _: methods, compress_all)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
