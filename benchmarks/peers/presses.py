"""kvpress's side: run its presses on the prompts of our side. Runs in kvpress's environment.

    .cache/peers/bin/python -m benchmarks.peers.presses RUN

A prompt is prefilled once. Each press then compresses the recorded keys and values with its own
`compress`, and the model decodes from that cache with kvpress's patched attention. KVzip replays
the prompt, so it has its own prefill.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.peers import counts, exchange
from benchmarks.peers.decoding import (
    Compressed,
    Layers,
    Methods,
    Prefilled,
    as_cache,
    cache_bytes,
    measure_prompts,
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
def compress(name: str, model: Any, full: Prefilled, kept: int) -> Compressed:
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
    result = compressed_to(layers, masked if name in MASKING else None)
    if name == "PyramidKV":
        flat = len(set(result.kept)) == 1
        result.note = "falls back to SnapKV: its smallest layer would be below the window" * flat
        assert abs(fmean(result.kept) - expected) <= 1, "PyramidKV's count"
    else:
        assert set(result.kept) == {expected}, f"{name} kept {result.kept}, not {expected}"
    return result


def compressed_to(layers: Layers, masked: Sequence[Any] | None = None) -> Compressed:
    """Return a cache of these layers.

    Args:
        masked: per layer the indices of masked entries, of a press that masks.
    """
    kept = [float(keys.shape[1]) for keys, _ in layers]
    note = ""
    if masked is not None:
        note = "frees no memory: each step masks the dropped tokens"
        heads = layers[0][0].shape[0]
        pairs = zip(kept, masked, strict=True)
        kept = [tokens - len(indices[1]) / heads for tokens, indices in pairs]
    return Compressed(cache=as_cache(layers), kept=kept, nbytes=cache_bytes(layers), note=note)


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
) -> Iterator[tuple[float, Compressed]]:
    """Yield KVzip's caches of a chat prompt, one per budget; the prompt is replayed once."""
    press, cache = ReusedKVzip(compression_ratio=0.5), DynamicCache()
    with press(model):
        model.model(input_ids=torch.tensor([ids]), past_key_values=cache)
    layers = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
    for budget in budgets:
        kept = counts.kept_tokens(len(ids), budget)
        result = compressed_to(layers, press.drop(model, kept))
        assert abs(fmean(result.kept) - kept) < 1e-3, f"KVzip kept {fmean(result.kept)}"
        yield budget, result


def methods_for(prompt: exchange.Prompt, settings: Mapping[str, Any]) -> Methods:
    """Return presses and budgets for a prompt; the full cache uses the first budget as its key.

    KVzip replays the prompt as a chat turn, so it runs only on the shorter needles.
    """
    budgets: list[float] = settings["budgets"]
    pairs = [(exchange.FULL, budgets[0])]
    pairs += [(name, budget) for name in PRESSES for budget in budgets]
    if prompt.kind == exchange.NEEDLE and len(prompt.ids) <= settings["kvzip_tokens"]:
        pairs += [(KVZIP, budget) for budget in budgets]
    return pairs


def compress_all(
    model: Any, prompt: exchange.Prompt, full: Prefilled, pending: Methods
) -> Iterator[tuple[str, float, Compressed]]:
    """Yield the compressed cache of each press. Use a cache before you advance the iterator."""
    for name, budget in pending:
        if name == exchange.FULL:
            yield name, budget, compressed_to(full.layers)
        elif name != KVZIP:
            kept = counts.kept_tokens(len(prompt.ids), budget)
            yield name, budget, compress(name, model, full, kept)
    kvzip_budgets = [budget for name, budget in pending if name == KVZIP]
    if kvzip_budgets:
        for budget, result in kvzip_caches(model, prompt.ids, kvzip_budgets):
            yield KVZIP, budget, result
    for module in attentions(model):
        module.masked_key_indices = None


def run(folder: Path) -> None:
    """Measure all missing results of the run in a folder."""
    settings = exchange.run_settings(folder)
    measure_prompts(
        exchange.KVPRESS, folder, lambda prompt: methods_for(prompt, settings), compress_all
    )


if __name__ == "__main__":
    run(Path(sys.argv[1]))
