"""Prefill and decode with transformers, the same code in both environments: float32, one prompt."""

import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.peers.exchange import Prompt

ANSWER = 16  # tokens of an answer
FORCED = 32  # tokens of a text that are compared, the first included

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values ``[Hkv, n_l, D]`` of each layer; n_l may differ."""


@dataclass(slots=True)
class Prefilled:
    """What a prompt's prefill leaves, of the full cache.

    Args:
        logits: ``[vocabulary]`` float32 of its last token.
        layers: keys and values.
        hidden: ``[S, hidden size]`` that went into each layer's attention.
        embeddings: cosines and sines of the prompt's positions, as the model made them.
        seconds: that it took.
    """

    logits: torch.Tensor
    layers: Layers
    hidden: list[torch.Tensor]
    embeddings: tuple[torch.Tensor, torch.Tensor]
    seconds: float


@dataclass(slots=True)
class Decoded:
    """Tokens that were said, ``[vocabulary]`` float32 logits of each, seconds of each step."""

    said: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def step(self) -> float:
        return statistics.median(self.seconds) if self.seconds else 0.0


def load(folder: Path) -> Any:
    """The model in float32 with torch's own attention."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


def held(layers: Layers) -> int:
    """Bytes of these keys and values."""
    return sum(keys.nbytes + values.nbytes for keys, values in layers)


@torch.inference_mode()
def prefill(model: Any, ids: Sequence[int], cache: DynamicCache | None = None) -> Prefilled:
    """Compute a prompt whole, noting what goes into each attention.

    Args:
        cache: one that changes what is written to it; None takes an ordinary one.
    """
    hidden: list[torch.Tensor] = []
    embeddings: list[Any] = []

    def note(_: Any, args: Any, kwargs: Any) -> None:
        hidden.append(kwargs.get("hidden_states", args[0] if args else None)[0])
        embeddings.append(kwargs["position_embeddings"])

    hooks = [
        layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
        for layer in model.model.layers
    ]
    cache = DynamicCache() if cache is None else cache
    start = time.perf_counter()
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
        seconds=time.perf_counter() - start,
    )


def cached(layers: Layers) -> DynamicCache:
    """A cache that holds copies of these keys and values."""
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
    """Decode greedily, at the positions that the text has, whatever the cache holds.

    Args:
        first: logits of the prompt's last token; they decide the first token.
        start: the prompt's length.
        steps: tokens to say, at most.
        stop: tokens after which nothing is said.
    """
    out = Decoded(logits=[first])
    for step in range(steps):
        token = int(out.logits[-1].argmax())
        out.said.append(token)
        if step + 1 == steps or token in stop:
            break
        began = time.perf_counter()
        made = _step(model, cache, [token], start + step)
        out.seconds.append(time.perf_counter() - began)
        out.logits.append(made[-1])
    return out


@torch.inference_mode()
def forced(
    model: Any, cache: DynamicCache, first: torch.Tensor, start: int, said: Sequence[int]
) -> torch.Tensor:
    """``[steps, vocabulary]`` float32 logits along tokens that are said whatever the logits are.

    Where all layers hold the same number of tokens it is one pass over all of `said`. Otherwise it
    goes token by token: a causal mask for several tokens is made for all layers alike.

    Args:
        first: logits of the prompt's last token, the first row.
        said: a token for each row.
    """
    fed = list(said[:-1])
    even = len({layer.keys.shape[-2] for layer in cache.layers}) == 1
    runs = [fed] if even else [[token] for token in fed]
    rows, at = [first[None]], start
    for run in runs:
        rows.append(_step(model, cache, run, at))
        at += len(run)
    return torch.cat(rows)


def _step(model: Any, cache: DynamicCache, ids: Sequence[int], start: int) -> torch.Tensor:
    """``[tokens, vocabulary]`` float32 logits of tokens that follow each other from `start` on."""
    positions = torch.arange(start, start + len(ids))[None]
    made = model(torch.tensor([list(ids)]), past_key_values=cache, position_ids=positions)
    logits: torch.Tensor = made.logits[0].float()
    return logits


def measured(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    full: Prefilled,
    cache: DynamicCache,
    reference: torch.Tensor | None,
) -> dict[str, Any]:
    """What is decoded from a compressed cache: a needle's answer, or a text's distributions.

    Args:
        cache: what is left of the prompt; it is used up.
        reference: the full cache's logits of a text.

    Returns:
        Fields of `exchange.Result`.
    """
    fields: dict[str, Any] = {
        "prompt": prompt.name,
        "tokens": len(prompt.ids),
        "answered": None,
        "kl": (),
        "decode_seconds": 0.0,
        "full_bytes": held(full.layers),
    }
    if reference is not None:
        logits = forced(model, cache, full.logits, len(prompt.ids), prompt.said)
        return fields | {"kl": tuple(divergence(reference, logits)[1:].tolist())}
    stop = stop_tokens(model)
    out = decode(model, cache, full.logits, len(prompt.ids), ANSWER, stop)
    text = tokenizer.decode(out.said).lower()
    return fields | {"answered": prompt.answer.lower() in text, "decode_seconds": out.step}


def divergence(full: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``KL(full || other)`` in nats of each row of two ``[steps, vocabulary]`` logits, float64."""
    p, q = full.double().log_softmax(-1), other.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def stop_tokens(model: Any) -> set[int]:
    """Tokens that end an answer."""
    ends = model.generation_config.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends or ())
