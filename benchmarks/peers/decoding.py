"""Prefill and decode prompts with transformers in float32; both environments run this code."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.peers import exchange
from benchmarks.peers.exchange import Prompt

ANSWER_TOKENS = 16  # output tokens for a needle
TEXT_TOKENS = 32  # tokens of a text that are compared, including the first

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values ``[Hkv, n_l, D]`` of each layer; n_l may differ."""


@dataclass(slots=True)
class Prefilled:
    """Result of a prompt's prefill.

    Args:
        logits: ``[vocabulary]`` float32 for the first output token.
        layers: keys and values of the full cache.
        hidden: per layer ``[S, hidden size]``, the input of its attention.
        embeddings: RoPE cosines and sines of the prompt's positions.
    """

    logits: torch.Tensor
    layers: Layers
    hidden: list[torch.Tensor]
    embeddings: tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class Decoded:
    """Output tokens and their ``[vocabulary]`` float32 logits."""

    output_ids: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Compressed:
    """A method's cache of a prompt.

    Args:
        cache: the cache to decode from.
        kept: per layer the entries that attention still reads, averaged over KV heads.
        nbytes: bytes of the cache, including masked entries.
        note: a remark for the report.
    """

    cache: DynamicCache
    kept: list[float]
    nbytes: int
    note: str = ""


Methods = Sequence[tuple[str, float]]
"""Names of methods, each with a budget."""
CompressAll = Callable[[Any, Prompt, Prefilled, Methods], Iterable[tuple[str, float, Compressed]]]
"""Takes a model, a prompt with its full cache and methods; yields a cache for each method."""


def load(folder: Path | str) -> Any:
    """Load a model in float32 with PyTorch's attention."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


def cache_bytes(layers: Layers) -> int:
    """Return the bytes of keys and values."""
    return sum(keys.nbytes + values.nbytes for keys, values in layers)


@torch.inference_mode()
def prefill(model: Any, ids: Sequence[int], cache: DynamicCache | None = None) -> Prefilled:
    """Prefill a prompt in one pass and record the inputs of each attention.

    Args:
        cache: a cache to write to; None creates a `DynamicCache`.
    """
    hidden: list[torch.Tensor] = []
    embeddings: list[Any] = []

    def record(_: Any, args: Any, kwargs: Any) -> None:
        hidden.append(kwargs.get("hidden_states", args[0] if args else None)[0])
        embeddings.append(kwargs["position_embeddings"])

    hooks = [
        layer.self_attn.register_forward_pre_hook(record, with_kwargs=True)
        for layer in model.model.layers
    ]
    cache = DynamicCache() if cache is None else cache
    try:
        out = model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return Prefilled(
        logits=out.logits[0, -1].float(),
        layers=[(layer.keys[0], layer.values[0]) for layer in cache.layers],
        hidden=hidden,
        embeddings=embeddings[0],
    )


def as_cache(layers: Layers) -> DynamicCache:
    """Return a transformers cache with copies of keys and values."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys[None].clone(), values[None].clone(), index)
    return cache


@torch.inference_mode()
def decode(
    model: Any,
    cache: DynamicCache,
    first: torch.Tensor,
    start: int,
    steps: int,
    stop: Collection[int] = (),
) -> Decoded:
    """Decode greedily; positions continue the uncompressed prompt, whatever the cache has kept.

    Args:
        first: ``[vocabulary]`` logits for the first output token.
        start: prompt length in tokens.
        steps: maximum number of output tokens.
        stop: token ids that end the output.
    """
    out = Decoded(logits=[first])
    for step in range(steps):
        token = int(out.logits[-1].argmax())
        out.output_ids.append(token)
        if step + 1 == steps or token in stop:
            break
        out.logits.append(_step(model, cache, [token], start + step)[-1])
    return out


@torch.inference_mode()
def logits_along(
    model: Any, cache: DynamicCache, first: torch.Tensor, start: int, output_ids: Sequence[int]
) -> torch.Tensor:
    """Return ``[steps, vocabulary]`` float32 logits along given output tokens.

    If all layers keep the same number of tokens, one pass computes all steps. Otherwise tokens run
    one at a time, because transformers builds one causal mask for all layers.

    Args:
        first: ``[vocabulary]`` logits for the first output token, the first row of the result.
        start: prompt length in tokens.
        output_ids: the output tokens, one per row.
    """
    fed = list(output_ids[:-1])
    same_length = len({layer.keys.shape[-2] for layer in cache.layers}) == 1
    runs = [fed] if same_length else [[token] for token in fed]
    logits, position = [first[None]], start
    for run in runs:
        logits.append(_step(model, cache, run, position))
        position += len(run)
    return torch.cat(logits)


def _step(model: Any, cache: DynamicCache, ids: Sequence[int], start: int) -> torch.Tensor:
    """Return ``[tokens, vocabulary]`` float32 logits of consecutive tokens from `start` on."""
    positions = torch.arange(start, start + len(ids))[None]
    out = model(torch.tensor([list(ids)]), past_key_values=cache, position_ids=positions)
    logits: torch.Tensor = out.logits[0].float()
    return logits


def measure_prompts(
    side: str, folder: Path, methods_for: Callable[[Prompt], Methods], compress_all: CompressAll
) -> None:
    """Append the missing results of one side, prompt by prompt.

    Args:
        side: exchange.KVPRESS or exchange.OURS.
        folder: the folder that the processes share; it has the prompts.
        methods_for: returns the methods to measure on a prompt.
        compress_all: yields their caches. Each is used before the next one is made.
    """
    model_folder = exchange.run_settings(folder)["model"]
    model, tokenizer = load(model_folder), AutoTokenizer.from_pretrained(model_folder)
    reference = load_file(folder / "full.safetensors")
    results = folder / f"{side}.jsonl"
    done = {result.key for result in exchange.read(results, exchange.Result)}
    for prompt in exchange.read(folder / "prompts.jsonl", Prompt):
        pending = [each for each in methods_for(prompt) if (*each, prompt.name) not in done]
        if not pending:
            continue
        full = prefill(model, prompt.ids)
        for name, budget, compressed in compress_all(model, prompt, full, pending):
            answered, kl = _measured(
                model, tokenizer, prompt, full, compressed, reference.get(prompt.name)
            )
            line = exchange.Result(
                side=side,
                method=name,
                budget=budget,
                prompt=prompt.name,
                tokens=len(prompt.ids),
                kept=tuple(compressed.kept),
                answered=answered,
                kl=kl,
                cache_bytes=compressed.nbytes,
                full_bytes=cache_bytes(full.layers),
                note=compressed.note,
            )
            exchange.append(results, line)
        print(f"{side}: {prompt.name}, {len(prompt.ids)} tokens", flush=True)


def _measured(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    full: Prefilled,
    compressed: Compressed,
    reference: torch.Tensor | None,
) -> tuple[bool | None, tuple[float, ...]]:
    """Return whether a needle was answered, or the nats of a text (`exchange.Result`).

    Args:
        compressed: decoding extends its cache.
        reference: the full cache's logits for a text; None for a needle.
    """
    start, cache = len(prompt.ids), compressed.cache
    if reference is not None:
        logits = logits_along(model, cache, full.logits, start, prompt.output_ids)
        return None, tuple(divergence(reference, logits)[1:].tolist())
    out = decode(model, cache, full.logits, start, ANSWER_TOKENS, stop_tokens(model))
    return prompt.answer.lower() in tokenizer.decode(out.output_ids).lower(), ()


def divergence(full: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return ``KL(full || other)`` in nats ``[steps]`` of ``[steps, vocabulary]`` logits."""
    p, q = full.double().log_softmax(-1), other.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def stop_tokens(model: Any) -> set[int]:
    """Return the token ids that end an output."""
    ends = model.generation_config.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends or ())
