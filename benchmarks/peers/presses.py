"""kvpress's side: run its presses on the prompts of our side. Runs in kvpress's environment.

    .cache/peers/bin/python -m benchmarks.peers.presses --model DIR --run DIR

A prompt is prefilled once. Each press then compresses the recorded keys and values with its own
`compress`, and the model decodes from that cache with kvpress's patched attention. KVzip replays
the prompt, so it has its own prefill.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, DynamicCache

from benchmarks.peers import counts, exchange
from benchmarks.peers.decoding import (
    Prefilled,
    as_cache,
    cache_bytes,
    load,
    measure,
    prefill,
)

# Some presses that do not run here import these packages at module level, so stub them.
for _name, _attribute in (("datasets", "load_dataset"), ("fire", "Fire")):
    sys.modules.setdefault(_name, ModuleType(_name)).__dict__.setdefault(_attribute, None)

import kvpress

WINDOW, KERNEL = counts.WINDOW, 7


def _snapkv(ratio: float) -> Any:
    return kvpress.SnapKVPress(compression_ratio=ratio, window_size=WINDOW, kernel_size=KERNEL)


def _pyramidkv(ratio: float) -> Any:
    return kvpress.PyramidKVPress(compression_ratio=ratio, window_size=WINDOW, kernel_size=KERNEL)


def _chunkkv(ratio: float) -> Any:
    inner = kvpress.SnapKVPress(compression_ratio=ratio, window_size=WINDOW, kernel_size=1)
    return kvpress.ChunkKVPress(press=inner, chunk_length=counts.CHUNK)


def _adakv_over_expected_attention(ratio: float) -> Any:
    inner = kvpress.ExpectedAttentionPress(compression_ratio=ratio, epsilon=1e-2)
    return kvpress.AdaKVPress(inner)


PRESSES: Mapping[str, Callable[[float], Any]] = {
    "SnapKV": _snapkv,
    "SnapKV, its defaults": kvpress.SnapKVPress,
    "PyramidKV": _pyramidkv,
    "TOVA": kvpress.TOVAPress,
    "StreamingLLM": kvpress.StreamingLLMPress,
    "ChunkKV": _chunkkv,
    "KeyDiff": kvpress.KeyDiffPress,
    "LagKV": kvpress.LagKVPress,
    "ExpectedAttention": kvpress.ExpectedAttentionPress,
    "AdaKV over ExpectedAttention": _adakv_over_expected_attention,
    "AdaKV over SnapKV": lambda ratio: kvpress.AdaKVPress(_snapkv(ratio)),
    "CriticalKV over SnapKV": lambda ratio: kvpress.CriticalKVPress(_snapkv(ratio)),
}
"""By name: a function that creates the press at a compression ratio."""
MASKING = ("AdaKV over ExpectedAttention", "AdaKV over SnapKV")
"""Presses that keep all entries and mask dropped ones (`masked_key_indices`)."""
KVZIP = "KVzip"


@dataclass(slots=True)
class PressedCache:
    """A cache compressed by a press.

    Args:
        cache: the cache to decode from.
        counts: ``[L, Hkv]`` entries that attention still reads.
        nbytes: bytes of the cache, including masked entries.
        note: a remark for the report.
    """

    cache: DynamicCache
    counts: torch.Tensor
    nbytes: int
    note: str = ""


def attentions(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def ratio_of(name: str, press: Any, model: Any, tokens: int, kept: int) -> tuple[float, int]:
    """Return the ratio at which a press keeps `kept` tokens per layer, and its actual number.

    ChunkKV keeps as many complete chunks as fit. PyramidKV rounds in each layer, so it gets the
    ratio with the closest total.
    """
    if name == "ChunkKV":
        chunks, chunk_tokens = counts.complete_chunks(tokens, kept)
        return counts.chunk_ratio(tokens, chunks), chunk_tokens
    if name == "PyramidKV":
        modules = attentions(model)

        def kept_at(ratio: float) -> int:
            press.compression_ratio = ratio
            return sum(press.get_layer_budget(module, tokens) for module in modules)

        return counts.closest_ratio(len(modules) * kept, tokens, kept_at), kept
    return counts.ratio_for(tokens, kept), kept


@torch.inference_mode()
def compress(name: str, model: Any, full: Prefilled, kept: int) -> PressedCache:
    """Apply a press to a prefilled prompt.

    Raises:
        AssertionError: the press kept another number of tokens than expected.
    """
    tokens = full.hidden[0].shape[0]
    press = PRESSES[name](0.5)
    press.post_init_from_model(model)
    ratio, expected = ratio_of(name, press, model, tokens, kept)
    press.compression_ratio = ratio
    layers, masked = [], []
    for module, hidden, (keys, values) in zip(
        attentions(model), full.hidden, full.layers, strict=True
    ):
        module.rotary_emb, module.masked_key_indices = model.model.rotary_emb, None
        with_positions = {"position_embeddings": full.embeddings, "hidden_states": hidden[None]}
        k, v = press.compress(module, hidden[None], keys[None], values[None], None, with_positions)
        layers.append((k[0], v[0]))
        masked.append(module.masked_key_indices)
    result = PressedCache(cache=as_cache(layers), counts=torch.empty(0), nbytes=cache_bytes(layers))
    if name in MASKING:
        result.counts = remaining(masked, full.layers)
        result.note = "frees no memory: each step masks the dropped tokens"
    else:
        heads = layers[0][0].shape[0]
        result.counts = torch.tensor([[k.shape[1]] * heads for k, _ in layers])
    if name == "PyramidKV":
        flat = bool((result.counts == result.counts[0]).all())
        result.note = "falls back to SnapKV: its smallest layer would be below the window" * flat
        assert abs(float(result.counts.float().mean()) - expected) <= 1, "PyramidKV's count"
    else:
        means = result.counts.float().mean(1)
        assert bool((means == expected).all()), f"{name} kept {means.tolist()}, not {expected}"
    return result


def remaining(masked: Sequence[Any], layers: Sequence[Any]) -> torch.Tensor:
    """Return the unmasked entries ``[L, Hkv]`` of a press that masks."""
    out = []
    for indices, (keys, _) in zip(masked, layers, strict=True):
        heads, tokens, _ = keys.shape
        num_masked = torch.bincount(indices[1], minlength=heads)
        out.append(tokens - num_masked)
    return torch.stack(out)


class ReusedKVzip(kvpress.KVzipPress):
    """KVzip that computes its scores once and reuses them for all budgets."""

    saved_scores: torch.Tensor | None = None

    def compress_post(self, model: Any) -> None:
        self.saved_scores = self.score_val.clone()

    def drop(self, model: Any, kept: int) -> list[Any]:
        """Return the masked indices of each layer at an average of `kept` tokens per layer."""
        assert self.saved_scores is not None
        self.score_val = self.saved_scores.clone()
        layers, _, heads, tokens = self.score_val.shape
        self.compression_ratio = (layers * heads * (tokens - kept) + 0.5) / self.score_val.numel()
        super().compress_post(model)
        return [module.masked_key_indices for module in attentions(model)]


@torch.inference_mode()
def kvzip_caches(
    model: Any, ids: Sequence[int], budgets: Sequence[float]
) -> Iterator[tuple[float, PressedCache]]:
    """Yield KVzip's caches of a chat prompt, one per budget; the prompt is replayed once."""
    press, cache = ReusedKVzip(compression_ratio=0.5), DynamicCache()
    with press(model):
        model.model(input_ids=torch.tensor([ids]), past_key_values=cache)
    layers = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
    for budget in budgets:
        kept = counts.kept_tokens(len(ids), budget)
        kept_counts = remaining(press.drop(model, kept), layers)
        assert abs(float(kept_counts.float().mean()) - kept) < 1e-3, (
            f"KVzip kept {kept_counts.float().mean()}"
        )
        note = "frees no memory: each step masks the dropped tokens"
        yield (
            budget,
            PressedCache(
                cache=as_cache(layers), counts=kept_counts, nbytes=cache_bytes(layers), note=note
            ),
        )


def run(args: argparse.Namespace) -> None:
    """Measure all missing results, prompt by prompt."""
    model, tokenizer = load(args.model), AutoTokenizer.from_pretrained(args.model)
    reference = load_file(args.run / "full.safetensors")
    results = args.run / "kvpress.jsonl"
    done = {result.key for result in exchange.read(results, exchange.Result)}
    for prompt in exchange.read(args.run / "prompts.jsonl", exchange.Prompt):
        methods = methods_for(prompt, args)
        pending = [(n, b) for n, b in methods if (n, b, prompt.name) not in done]
        if not pending:
            continue
        full = prefill(model, prompt.ids)
        for name, budget, result in caches(model, prompt, full, pending):
            reference_logits = reference.get(prompt.name)
            measurements = measure(model, tokenizer, prompt, full, result.cache, reference_logits)
            line = exchange.Result(
                side=exchange.KVPRESS,
                method=name,
                budget=budget,
                kept=tuple(result.counts.float().mean(1).tolist()),
                cache_bytes=result.nbytes,
                note=result.note,
                **measurements,
            )
            exchange.append(results, line)
        print(f"kvpress: {prompt.name}, {len(prompt.ids)} tokens", flush=True)


def methods_for(prompt: exchange.Prompt, args: argparse.Namespace) -> list[tuple[str, float]]:
    """Return presses and budgets for a prompt; the full cache uses the first budget as its key.

    KVzip replays the prompt as a chat turn, so it runs only on the shorter needles.
    """
    pairs = [(exchange.FULL, args.budgets[0])]
    pairs += [(name, budget) for name in PRESSES for budget in args.budgets]
    if prompt.kind == exchange.NEEDLE and len(prompt.ids) <= args.kvzip_tokens:
        pairs += [(KVZIP, budget) for budget in args.budgets]
    return pairs


def caches(
    model: Any, prompt: exchange.Prompt, full: Prefilled, pending: Sequence[tuple[str, float]]
) -> Iterator[tuple[str, float, PressedCache]]:
    """Yield the compressed cache of each press. Use a cache before you advance the iterator."""
    for name, budget in pending:
        if name == exchange.FULL:
            full_counts = torch.tensor([[k.shape[1]] * k.shape[0] for k, _ in full.layers])
            result = PressedCache(
                cache=as_cache(full.layers), counts=full_counts, nbytes=cache_bytes(full.layers)
            )
            yield name, budget, result
        elif name != KVZIP:
            kept = counts.kept_tokens(len(prompt.ids), budget)
            yield name, budget, compress(name, model, full, kept)
    kvzip_budgets = [budget for name, budget in pending if name == KVZIP]
    if kvzip_budgets:
        for budget, result in kvzip_caches(model, prompt.ids, kvzip_budgets):
            yield KVZIP, budget, result
    for module in attentions(model):
        module.masked_key_indices = None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True, help="folder that the processes share")
    parser.add_argument("--budgets", nargs="+", type=float, required=True)
    parser.add_argument(
        "--kvzip-tokens", type=int, required=True, help="maximum prompt length for KVzip"
    )
    run(parser.parse_args())


if __name__ == "__main__":
    main()
