"""An EAGLE-1 head for Llama models, and its training (arXiv:2401.15077).

The head predicts the target's next feature from a feature and the embedding of the next token. A
feature is the target's hidden state after its final norm. The head shares the target's embedding
and output matrix.
"""

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

Loss = Literal["eagle", "tokens"]
"""What is minimised.

* eagle: the paper's loss, smooth L1 between features plus 0.1 times the cross entropy.
* tokens: the cross entropy between the target's distribution and the head's.
"""
FILE = "model.safetensors"
_ATTENTION, _MLP = "layers.0.self_attn", "layers.0.mlp"
_NORM = "layers.0.post_attention_layernorm.weight"
_NOISE = 0.1
"""Features get uniform noise of at most this share of their standard deviation, as in the paper."""
_NEGATIVES = 2048
"""Random tokens that each step's cross entropy adds to those of the training texts."""


class Example(NamedTuple):
    """A prompt with the target's output.

    Args:
        ids: token ids ``[n]`` int64.
        features: the target's features of all tokens but the last ``[n - 1, hidden]``.
        prompt: tokens of the prompt.
    """

    ids: Tensor
    features: Tensor
    prompt: int


class EagleHead:
    """One Llama layer without its input norm, behind a matrix over embedding and feature.

    Args:
        config: the target's ``config.json``.
        embedding: the target's embedding ``[vocab, hidden]``, which is not trained.
        output: the target's output matrix ``[vocab, hidden]``, which is not trained.
        size: root mean square of the target's features, which scales random weights.
        seed: seed of the random weights.

    Attributes:
        weights: the trained tensors, by their names in vLLM's checkpoint.
    """

    def __init__(
        self, config: Mapping[str, Any], embedding: Tensor, output: Tensor, size: float, seed: int
    ) -> None:
        self.embedding, self.output, self.config = embedding, output, config
        hidden, inner, self.dim = (
            config[name] for name in ("hidden_size", "intermediate_size", "head_dim")
        )
        queries = config["num_attention_heads"] * self.dim
        keys = config["num_key_value_heads"] * self.dim
        theta: float = config["rope_parameters"]["rope_theta"]
        self._frequencies = torch.exp(
            -math.log(theta) * torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        )
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int, scale: float) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * (scale / math.sqrt(columns))

        # Without an input norm, features of any size reach attention.
        small, text_size = 0.1 * size, float(embedding.square().mean().sqrt())
        mixed = matrix(hidden, hidden, small / text_size)
        self.weights = {
            # At first, the head passes features on nearly unchanged.
            "fc.weight": torch.cat([mixed, torch.eye(hidden)], 1),
            f"{_ATTENTION}.q_proj.weight": matrix(queries, hidden, 1 / size),
            f"{_ATTENTION}.k_proj.weight": matrix(keys, hidden, 1 / size),
            f"{_ATTENTION}.v_proj.weight": matrix(keys, hidden, 1 / size),
            f"{_ATTENTION}.o_proj.weight": matrix(hidden, queries, small),
            f"{_MLP}.gate_proj.weight": matrix(inner, hidden, 1.0),
            f"{_MLP}.up_proj.weight": matrix(inner, hidden, 1.0),
            f"{_MLP}.down_proj.weight": matrix(hidden, inner, small),
            _NORM: torch.ones(hidden),
        }
        for weight in self.weights.values():
            weight.requires_grad_()

    def predict(self, ids: Tensor, features: Tensor) -> Tensor:
        """Return predicted features ``[n, hidden]``: element i is that of the token ``ids[i]``.

        Args:
            ids: the token that follows each feature's ``[n]`` int64.
            features: the target's features ``[n, hidden]`` of consecutive tokens, from the first.
        """
        weights, count = self.weights, len(ids)
        x = F.linear(torch.cat([self.embedding[ids], features], -1), weights["fc.weight"])
        angles = torch.outer(torch.arange(count), self._frequencies)
        cos, sin = angles.cos(), angles.sin()

        def heads(name: str) -> Tensor:
            states = F.linear(x, weights[f"{_ATTENTION}.{name}.weight"])
            return states.view(count, -1, self.dim).transpose(0, 1)

        def rotated(states: Tensor) -> Tensor:
            first, second = states.chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        attended = F.scaled_dot_product_attention(
            rotated(heads("q_proj"))[None],
            rotated(heads("k_proj"))[None],
            heads("v_proj")[None],
            is_causal=True,
            enable_gqa=True,
        )[0]
        flat = attended.transpose(0, 1).reshape(count, -1)
        x = x + F.linear(flat, weights[f"{_ATTENTION}.o_proj.weight"])
        y = F.rms_norm(x, x.shape[-1:], weights[_NORM], self.config["rms_norm_eps"])
        gate = F.silu(F.linear(y, weights[f"{_MLP}.gate_proj.weight"]))
        inner = gate * F.linear(y, weights[f"{_MLP}.up_proj.weight"])
        return x + F.linear(inner, weights[f"{_MLP}.down_proj.weight"])

    def save(self, folder: Path) -> None:
        """Write a checkpoint in vLLM's layout. vLLM shares embedding and output matrix."""
        head = {"num_hidden_layers": 1, "tie_word_embeddings": False, "dtype": "float32"}
        (folder / "config.json").write_text(json.dumps({**self.config, **head}, indent=2))
        save_file({name: each.detach() for name, each in self.weights.items()}, folder / FILE)


def new_head(target: Path, features: Tensor, seed: int) -> EagleHead:
    """Return an untrained head for a target.

    Args:
        target: folder of the target's checkpoint.
        features: some of the target's features ``[n, hidden]``.
        seed: seed of the random weights.
    """
    config = json.loads((target / "config.json").read_text())
    weights = load_file(target / FILE)
    embedding = weights["model.embed_tokens.weight"].float()
    output = weights["lm_head.weight"].float() if "lm_head.weight" in weights else embedding
    size = float(features.float().square().mean().sqrt())
    return EagleHead(config, embedding, output, size, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a head is trained.

    Args:
        loss: what is minimised.
        epochs: passes over the examples.
        rate: highest learning rate; it rises over a twentieth of the steps, and falls as a cosine.
        batch: examples per step.
        seed: seed of order, noise and random tokens.
    """

    loss: Loss
    epochs: int
    rate: float
    batch: int
    seed: int


def train(
    head: EagleHead,
    examples: Sequence[Example],
    training: Training,
    report: Callable[[int, float], None],
) -> None:
    """Train a head in place.

    Output tokens and a quarter of the prompt tokens count in the loss.

    Args:
        head: the head.
        examples: prompts with outputs.
        training: how it is trained.
        report: called after each epoch with its number and mean loss.
    """
    rng, generator = random.Random(training.seed), torch.Generator().manual_seed(training.seed)
    optimizer = torch.optim.AdamW(
        head.weights.values(), lr=training.rate, betas=(0.9, 0.95), weight_decay=0
    )
    steps = training.epochs * -(-len(examples) // training.batch)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / steps)),
    )
    deviation = torch.cat([each.features[-64:] for each in examples]).float().std()
    seen = torch.cat([each.ids for each in examples]).unique()
    for epoch in range(training.epochs):
        order, total = rng.sample(range(len(examples)), len(examples)), 0.0
        for start in range(0, len(order), training.batch):
            vocab = torch.randint(len(head.output), (_NEGATIVES,), generator=generator)
            output = head.output[torch.cat([seen, vocab]).unique()]
            batch = [examples[number] for number in order[start : start + training.batch]]
            for example in batch:
                loss = _loss(head, example, output, deviation, training.loss, generator)
                (loss / len(batch)).backward()
                total += float(loss.detach())
            torch.nn.utils.clip_grad_norm_(head.weights.values(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        report(epoch, total / len(order))


def _loss(
    head: EagleHead,
    example: Example,
    output: Tensor,
    deviation: Tensor,
    kind: Loss,
    generator: torch.Generator,
) -> Tensor:
    features = example.features.float()
    noise = torch.rand(features.shape, generator=generator) * 2 - 1
    predicted = head.predict(example.ids[1:-1], (features + noise * (_NOISE * deviation))[:-1])
    counted = torch.rand(len(predicted), generator=generator) < 0.25
    counted[example.prompt - 1 :] = True
    predicted, wanted = predicted[counted], features[1:][counted]
    with torch.no_grad():
        probabilities = (wanted @ output.T).softmax(-1)
    entropy = F.cross_entropy(predicted @ output.T, probabilities)
    if kind == "tokens":
        return entropy
    return F.smooth_l1_loss(predicted / deviation, wanted / deviation) + 0.1 * entropy


@torch.no_grad()
def accepted(head: EagleHead, examples: Sequence[Example]) -> float:
    """Return the share of output tokens that the head's first draft predicts, without cache."""
    hits = tokens = 0
    for example in examples:
        predicted = head.predict(example.ids[1:-1], example.features[:-1].float())
        drafts = (predicted[example.prompt - 1 :] @ head.output.T).argmax(-1)
        hits += int((drafts == example.ids[example.prompt + 1 :]).sum())
        tokens += len(drafts)
    return hits / tokens
