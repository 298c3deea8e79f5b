"""kvpress's side: its own presses, on prompts that our side made. Runs in kvpress's environment.

    .cache/peers/bin/python -m benchmarks.peers.presses --model DIR --run DIR

A prompt is prefilled once. Each press then compresses the noted keys and values by its own
`compress`, and the model decodes from what it left, by kvpress's own patched attention. KVzip
replays the prompt and so has a prefill of its own.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, DynamicCache

from benchmarks.peers import counts, exchange
from benchmarks.peers.decoding import (
    Prefilled,
    cached,
    held,
    load,
    measured,
    prefill,
)

# Presses that are not run here import these at their top: a data set and a command line.
for _name, _attribute in (("datasets", "load_dataset"), ("fire", "Fire")):
    sys.modules.setdefault(_name, ModuleType(_name)).__dict__.setdefault(_attribute, None)

import kvpress

WINDOW, KERNEL = counts.WINDOW, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A press of kvpress and how it is held to a count.

    Args:
        make: builds it at a compression ratio.
        settings: what is set beside the ratio, for the table.
        dropped: it leaves the cache whole and names what is not to be read (`masked_key_indices`).
    """

    make: Callable[[float], Any]
    settings: str
    dropped: bool = False


def _snapkv(ratio: float) -> Any:
    return kvpress.SnapKVPress(compression_ratio=ratio, window_size=WINDOW, kernel_size=KERNEL)


PRESSES: Mapping[str, Peer] = {
    "SnapKV": Peer(make=_snapkv, settings="window 32, kernel 7, set as ours"),
    "SnapKV, its defaults": Peer(make=kvpress.SnapKVPress, settings="window 64, kernel 5"),
    "PyramidKV": Peer(
        make=lambda r: kvpress.PyramidKVPress(
            compression_ratio=r, window_size=WINDOW, kernel_size=KERNEL
        ),
        settings="window 32, kernel 7, set as ours",
    ),
    "TOVA": Peer(make=kvpress.TOVAPress, settings="set as ours"),
    "StreamingLLM": Peer(make=kvpress.StreamingLLMPress, settings="4 sinks, set as ours"),
    "ChunkKV": Peer(
        make=lambda r: kvpress.ChunkKVPress(
            press=kvpress.SnapKVPress(compression_ratio=r, window_size=WINDOW, kernel_size=1),
            chunk_length=counts.CHUNK,
        ),
        settings="chunks of 10, window 32, kernel 1, set as ours",
    ),
    "KeyDiff": Peer(make=kvpress.KeyDiffPress, settings="no blocks, no window, set as ours"),
    "LagKV": Peer(make=kvpress.LagKVPress, settings="its defaults"),
    "ExpectedAttention": Peer(make=kvpress.ExpectedAttentionPress, settings="its defaults"),
    "AdaKV over ExpectedAttention": Peer(
        make=lambda r: kvpress.AdaKVPress(
            kvpress.ExpectedAttentionPress(compression_ratio=r, epsilon=1e-2)
        ),
        settings="epsilon 1e-2",
        dropped=True,
    ),
    "AdaKV over SnapKV": Peer(
        make=lambda r: kvpress.AdaKVPress(_snapkv(r)), settings="window 32, kernel 7", dropped=True
    ),
    "CriticalKV over SnapKV": Peer(
        make=lambda r: kvpress.CriticalKVPress(_snapkv(r)), settings="window 32, kernel 7"
    ),
}
KVZIP = "KVzip"


@dataclass(slots=True)
class Kept:
    """What a press left.

    Args:
        cache: to decode from.
        counts: ``[L, Hkv]`` entries that are still read.
        nbytes: that the cache holds.
        positions: ``[L, Hkv, n]``, where all layers and heads keep the same number.
        note: what a reader must know.
    """

    cache: DynamicCache
    counts: torch.Tensor
    nbytes: int
    positions: torch.Tensor | None = None
    note: str = ""


def attentions(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def fingerprints(rows: torch.Tensor) -> torch.Tensor:
    """``[..., D]`` float32 to ``[...]`` int64, equal for rows of equal bits."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (rows.shape[-1],), generator=generator) | 1
    return (rows.contiguous().view(torch.int32).long() * factors).sum(-1)


def positions_of(kept: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """``[Hkv, n]`` ascending places of `kept` rows among `whole` ones, ``[Hkv, S, D]``.

    Raises:
        AssertionError: a row is not found, or two are alike.
    """
    sought, (found, order) = fingerprints(kept), fingerprints(whole).sort(-1)
    assert bool((found[:, 1:] != found[:, :-1]).all()), "two tokens have the same key"
    at = torch.searchsorted(found, sought).clamp(max=found.shape[1] - 1)
    assert torch.equal(found.gather(1, at), sought), "a press changed a key"
    return order.gather(1, at).sort(-1).values


def ratio_of(name: str, press: Any, model: Any, tokens: int, kept: int) -> tuple[float, int]:
    """The ratio at which a press keeps `kept` tokens per layer, and how many it then keeps.

    ChunkKV keeps whole chunks: as many as fit. PyramidKV rounds in each layer: the closest total.
    """
    if name == "ChunkKV":
        chunks, held_tokens = counts.whole_chunks(tokens, kept)
        return counts.chunk_ratio(tokens, chunks), held_tokens
    if name == "PyramidKV":
        modules = attentions(model)

        def summed(ratio: float) -> int:
            press.compression_ratio = ratio
            return sum(press.get_layer_budget(module, tokens) for module in modules)

        return counts.closest_ratio(len(modules) * kept, tokens, summed), kept
    return counts.ratio_for(tokens, kept), kept


@torch.inference_mode()
def compress(name: str, peer: Peer, model: Any, full: Prefilled, kept: int) -> Kept:
    """Apply a press to a prefilled prompt.

    Raises:
        AssertionError: it did not keep the number of tokens that it was held to.
    """
    tokens = full.hidden[0].shape[0]
    press = peer.make(0.5)
    press.post_init_from_model(model)
    ratio, expected = ratio_of(name, press, model, tokens, kept)
    press.compression_ratio = ratio
    layers, dropped = [], []
    for module, hidden, (keys, values) in zip(
        attentions(model), full.hidden, full.layers, strict=True
    ):
        module.rotary_emb, module.masked_key_indices = model.model.rotary_emb, None
        with_positions = {"position_embeddings": full.embeddings, "hidden_states": hidden[None]}
        k, v = press.compress(module, hidden[None], keys[None], values[None], None, with_positions)
        layers.append((k[0], v[0]))
        dropped.append(module.masked_key_indices)
    made = Kept(cache=cached(layers), counts=torch.empty(0), nbytes=held(layers))
    if peer.dropped:
        made.counts = remaining(dropped, full.layers)
        made.note = "frees no memory: each step masks the dropped tokens"
    else:
        heads = layers[0][0].shape[0]
        made.counts = torch.tensor([[k.shape[1]] * heads for k, _ in layers])
    if not peer.dropped and bool((made.counts == expected).all()):
        pairs = zip(layers, full.layers, strict=True)
        made.positions = torch.stack([positions_of(k, whole) for (k, _), (whole, _) in pairs])
    if name == "PyramidKV":
        flat = bool((made.counts == made.counts[0]).all())
        made.note = "falls back to SnapKV: its smallest layer would be below the window" * flat
        assert abs(float(made.counts.float().mean()) - expected) <= 1, "PyramidKV's count"
    else:
        means = made.counts.float().mean(1)
        assert bool((means == expected).all()), f"{name} kept {means.tolist()}, not {expected}"
    return made


def remaining(dropped: Sequence[Any], whole: Sequence[Any]) -> torch.Tensor:
    """``[L, Hkv]`` entries that are left where a press names what it drops."""
    out = []
    for indices, (keys, _) in zip(dropped, whole, strict=True):
        heads, tokens, _ = keys.shape
        gone = torch.bincount(indices[1], minlength=heads)
        out.append(tokens - gone)
    return torch.stack(out)


class Zip(kvpress.KVzipPress):
    """KVzip whose scores are taken once and then serve every budget."""

    noted: torch.Tensor | None = None

    def compress_post(self, model: Any) -> None:
        self.noted = self.score_val.clone()

    def drop(self, model: Any, kept: int) -> list[Any]:
        """Name what is dropped at `kept` tokens per layer, in the mean over all layers."""
        assert self.noted is not None
        self.score_val = self.noted.clone()
        layers, _, heads, tokens = self.score_val.shape
        self.compression_ratio = (layers * heads * (tokens - kept) + 0.5) / self.score_val.numel()
        super().compress_post(model)
        return [module.masked_key_indices for module in attentions(model)]


@torch.inference_mode()
def zipped(
    model: Any, ids: Sequence[int], budgets: Sequence[float]
) -> Iterator[tuple[float, Kept]]:
    """KVzip's caches of a chat prompt, a budget each; it replays the prompt once."""
    press, cache = Zip(compression_ratio=0.5), DynamicCache()
    with press(model):
        model.model(input_ids=torch.tensor([ids]), past_key_values=cache)
    layers = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
    for budget in budgets:
        kept = counts.kept_tokens(len(ids), budget)
        left = remaining(press.drop(model, kept), layers)
        assert abs(float(left.float().mean()) - kept) < 1e-3, f"KVzip kept {left.float().mean()}"
        note = "frees no memory: each step masks the dropped tokens"
        yield budget, Kept(cache=cached(layers), counts=left, nbytes=held(layers), note=note)


def run(args: argparse.Namespace) -> None:
    """Measure what is not measured yet, prompt by prompt."""
    model, tokenizer = load(args.model), AutoTokenizer.from_pretrained(args.model)
    reference = load_file(args.run / "full.safetensors")
    results = args.run / "kvpress.jsonl"
    have = {result.key for result in exchange.read(results, exchange.Result)}
    for prompt in exchange.read(args.run / "prompts.jsonl", exchange.Prompt):
        pairs = wanted(prompt, args)
        stored = args.run / f"positions-{prompt.name}.safetensors"
        pack_request = [(n, b) for n, b in pairs if (n, b, prompt.name) not in have]
        if stored.exists() and not pack_request:
            continue
        full = prefill(model, prompt.ids)
        positions: dict[str, torch.Tensor] = {}
        # the positions of a prompt are written together: after an interruption, all of them again
        again = [p for p in pairs if p in pack_request or (p[0] in PRESSES and not stored.exists())]
        for name, budget, made in caches(model, prompt, full, again):
            if made.positions is not None:
                positions[f"{name}@{budget}"] = made.positions.to(torch.int32)
            if (name, budget) not in pack_request:
                continue
            target = reference.get(prompt.name)
            found = measured(model, tokenizer, prompt, full, made.cache, target)
            line = exchange.Result(
                side=exchange.KVPRESS,
                method=name,
                budget=budget,
                kept=tuple(made.counts.float().mean(1).tolist()),
                cache_bytes=made.nbytes,
                note=made.note,
                **found,
            )
            exchange.append(results, line)
        if not stored.exists():
            save_file(positions, stored)
        print(f"kvpress: {prompt.name}, {len(prompt.ids)} tokens", flush=True)


def wanted(prompt: exchange.Prompt, args: argparse.Namespace) -> list[tuple[str, float]]:
    """Presses and budgets for a prompt; the full cache stands under the first budget.

    KVzip replays the prompt and takes it for a chat turn: it is run on the shorter needles alone.
    """
    pairs = [(exchange.FULL, args.budgets[0])]
    pairs += [(name, budget) for name in PRESSES for budget in args.budgets]
    if prompt.kind == exchange.NEEDLE and len(prompt.ids) <= args.kvzip_tokens:
        pairs += [(KVZIP, budget) for budget in args.budgets]
    return pairs


def caches(
    model: Any, prompt: exchange.Prompt, full: Prefilled, pack_request: Sequence[tuple[str, float]]
) -> Iterator[tuple[str, float, Kept]]:
    """What each press leaves of a prompt; use one before you ask for the next."""
    for name, budget in pack_request:
        if name == exchange.FULL:
            whole = torch.tensor([[k.shape[1]] * k.shape[0] for k, _ in full.layers])
            made = Kept(cache=cached(full.layers), counts=whole, nbytes=held(full.layers))
            yield name, budget, made
        elif name != KVZIP:
            kept = counts.kept_tokens(len(prompt.ids), budget)
            yield name, budget, compress(name, PRESSES[name], model, full, kept)
    zips = [budget for name, budget in pack_request if name == KVZIP]
    if zips:
        for budget, made in zipped(model, prompt.ids, zips):
            yield KVZIP, budget, made
    for module in attentions(model):
        module.masked_key_indices = None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True, help="folder that both sides share")
    parser.add_argument("--budgets", nargs="+", type=float, required=True)
    parser.add_argument("--kvzip-tokens", type=int, required=True, help="longest prompt for KVzip")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
