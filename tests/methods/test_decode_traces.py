"""With pages of one token and an interval of one, outputs are scored as the papers decode.

The papers' rules (docs/methods.md 7) run as loops in float64: a token is added, attends to the held
tokens and itself, and one token is evicted. They are compared with the functions that the engine
packs outputs with.
"""

import math

import numpy as np
import pytest
import torch

import methods_reference as ref
from kvcompress_kernels.merge_evicted import merge_evicted
from layer_scores import kept_slots, observe_layers
from vllm_kvcompress.methods.paged_layers import PagedLayers, attention_to_slots
from vllm_kvcompress.settings.config import CompressionConfig

STEPS = 30
SHAPES = {"grouped": (6, 2, 8), "one KV head": (4, 1, 16), "9 over 3": (9, 3, 4)}
WINDOWS = {"tova": 1, "h2o": 1, "streamingllm": 0, "d2o": 0}


class Paper:
    """One layer by the papers' rules, with its held tokens in order of position."""

    def __init__(self, name, k, v, q, budget):
        self.name, self.budget, self.k, self.v = name, budget, list(k), list(v)
        self.group = q.shape[1] // len(k)
        prompt = ref.column_sums(q.transpose(1, 0, 2), k)
        self.attention = [
            list(prompt[g * self.group :][: self.group].mean(0)) for g in range(len(k))
        ]
        self.tau = [math.nan] * len(k)

    def step(self, q, k, v):
        rows = []
        for g in range(len(self.k)):
            self.k[g], self.v[g] = np.vstack([self.k[g], k[g]]), np.vstack([self.v[g], v[g]])
            logits = q[g * self.group :][: self.group] @ self.k[g].T / math.sqrt(len(k[g]))
            weights = np.exp(logits - logits.max(1, keepdims=True))
            rows.append(weights / weights.sum(1, keepdims=True))
            self.attention[g] = np.append(self.attention[g], 0) + rows[g].mean(0)
        length = len(self.k[0])
        if length <= self.budget:
            return
        layer_mean = np.mean([row for rows_of in rows for row in rows_of], axis=0)
        for g in range(len(self.k)):
            sinks, recent = 4, min(self.budget - 4, self.budget // 4)
            candidates, score = {
                "tova": (range(length - 1), layer_mean),
                "h2o": (range(length - 1), self.attention[g]),
                "streamingllm": (range(sinks, length), np.arange(length)),
                "d2o": (range(sinks, length - recent), self.attention[g]),
            }[self.name]
            self.evict(g, min(candidates, key=lambda j, score=score: score[j]))

    def evict(self, g, index):
        stay = [j for j in range(len(self.k[g])) if j != index]
        key, value = self.k[g][index], self.v[g][index]
        for held in (self.k, self.v, self.attention):
            held[g] = held[g][stay]
        if self.name == "d2o":
            norms = np.linalg.norm(self.k[g], axis=1) * np.linalg.norm(key)
            cosines = self.k[g] @ key / norms
            nearest, u = int(cosines.argmax()), cosines.max()
            self.tau[g] = u if math.isnan(self.tau[g]) else 0.7 * u + 0.3 * self.tau[g]
            if u >= self.tau[g]:
                e, z = math.exp(u), math.e + math.exp(u)
                self.k[g][nearest] = (math.e * self.k[g][nearest] + e * key) / z
                self.v[g][nearest] = (math.e * self.v[g][nearest] + e * value) / z


class Packed:
    """The same layer with the engine's functions, one token of each head per page."""

    def __init__(self, name, k, v, attention, budget):
        self.method = CompressionConfig.parse({"compress": name}).method
        self.window, self.budget = WINDOWS[name], budget
        self.k, self.v, self.attention = (
            torch.tensor(np.array(x)).float() for x in (k, v, attention)
        )
        self.tau = torch.full((1, len(self.k)), torch.nan)

    def step(self, q, k, v):
        new = (torch.from_numpy(x).float()[:, None] for x in (k, v))
        self.k, self.v = (torch.cat([x, y], 1) for x, y in zip((self.k, self.v), new, strict=True))
        length = self.k.shape[1]
        layers = PagedLayers(
            key_pages=self.k.transpose(0, 1)[..., None],
            value_pages=self.v.transpose(0, 1)[:, :, None],
            pages=torch.arange(length)[None],
            lengths=torch.tensor([length], dtype=torch.int32),
            max_tokens=length,
            scale=self.k.shape[2] ** -0.5,
        )
        query = torch.from_numpy(q).float()[None, None]
        earlier = torch.nn.functional.pad(self.attention, (0, 1))
        self.attention = earlier + attention_to_slots(layers, query, layers_per_batch=1)[0]
        if length <= self.budget:
            return
        window_query = query if self.window and self.method.scorer.reads else None
        scores, _ = observe_layers(
            self.method, layers, window_query, self.window, 1, self.attention[None]
        )
        counts = torch.tensor([self.budget])
        kept = kept_slots(scores, layers, counts, self.window, 1, self.budget, self.method.selector)
        index = kept[0].long()
        self.attention = self.attention.gather(1, index)
        if self.method.merge:
            cache = layers.key_pages, layers.value_pages, layers.pages, length
            merged = merge_evicted(*cache, kept, counts.int(), threshold=self.tau)
            self.k, self.v, self.tau = merged.keys[0], merged.values[0], merged.threshold
        else:
            self.k, self.v = (
                x.gather(1, index[..., None].expand(-1, -1, x.shape[2])) for x in (self.k, self.v)
            )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("budget", [12, 17])
@pytest.mark.parametrize("name", WINDOWS)
def test_each_step_adds_one_token_and_evicts_one(name, budget, shape):
    """Prompts start below the budget and grow until they reach it."""
    heads, kv_heads, dim = shape
    rng = np.random.RandomState(budget + heads)
    prompt = 9
    k, v = (rng.standard_normal((kv_heads, prompt, dim)) + 0.3 for _ in range(2))
    paper = Paper(name, k, v, rng.standard_normal((prompt, heads, dim)), budget)
    packed = Packed(name, k, v, paper.attention, budget)
    for _ in range(STEPS):
        q = rng.standard_normal((heads, dim))
        new_kv = [rng.standard_normal((kv_heads, dim)) + 0.3 for _ in range(2)]
        paper.step(q, *new_kv)
        packed.step(q, *new_kv)
        np.testing.assert_allclose(packed.k, np.array(paper.k), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(packed.v, np.array(paper.v), rtol=1e-4, atol=1e-5)
    assert packed.k.shape[1] == budget
    if name == "d2o":
        np.testing.assert_allclose(packed.tau[0], paper.tau, rtol=1e-4)
