"""With blocks of one token and an interval of one, answers are judged as the papers' decoding is.

Their rules (docs/methods.md 7) by loops in float64: a token comes, attends to what is held and to
itself, and one token goes. Beside them the functions that the engine packs answers with.
"""

import math

import numpy as np
import pytest
import torch

import methods_reference as ref
from kvcompress_kernels.merge_evicted import merge_evicted
from observing import kept_slots, observe_rows
from vllm_kvcompress.methods.paged_layers import PagedLayers, attention_paid
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.method_of import method_of

STEPS = 30
SHAPES = {"grouped": (6, 2, 8), "one KV head": (4, 1, 16), "9 over 3": (9, 3, 4)}
WINDOWS = {"tova": 1, "h2o": 1, "streamingllm": 0, "d2o": 0}


class Paper:
    """One layer, by the rules: what it holds, in the order of positions."""

    def __init__(self, name, k, v, q, budget):
        self.name, self.budget, self.k, self.v = name, budget, list(k), list(v)
        self.group = q.shape[1] // len(k)
        prompt = ref.column_sums(q.transpose(1, 0, 2), k)
        self.paid = [list(prompt[g * self.group :][: self.group].mean(0)) for g in range(len(k))]
        self.tau = [math.nan] * len(k)

    def step(self, q, k, v):
        rows = []
        for g in range(len(self.k)):
            self.k[g], self.v[g] = np.vstack([self.k[g], k[g]]), np.vstack([self.v[g], v[g]])
            logits = q[g * self.group :][: self.group] @ self.k[g].T / math.sqrt(len(k[g]))
            weights = np.exp(logits - logits.max(1, keepdims=True))
            rows.append(weights / weights.sum(1, keepdims=True))
            self.paid[g] = np.append(self.paid[g], 0) + rows[g].mean(0)
        length = len(self.k[0])
        if length <= self.budget:
            return
        whole = np.mean([row for rows_of in rows for row in rows_of], axis=0)
        for g in range(len(self.k)):
            sinks, recent = 4, min(self.budget - 4, self.budget // 4)
            candidates, score = {
                "tova": (range(length - 1), whole),
                "h2o": (range(length - 1), self.paid[g]),
                "streamingllm": (range(sinks, length), np.arange(length)),
                "d2o": (range(sinks, length - recent), self.paid[g]),
            }[self.name]
            self.evict(g, min(candidates, key=lambda j, score=score: score[j]))

    def evict(self, g, at):
        stay = [j for j in range(len(self.k[g])) if j != at]
        key, value = self.k[g][at], self.v[g][at]
        self.k[g], self.v[g], self.paid[g] = self.k[g][stay], self.v[g][stay], self.paid[g][stay]
        if self.name == "d2o":
            norms = np.linalg.norm(self.k[g], axis=1) * np.linalg.norm(key)
            near = self.k[g] @ key / norms
            into, u = int(near.argmax()), near.max()
            self.tau[g] = u if math.isnan(self.tau[g]) else 0.7 * u + 0.3 * self.tau[g]
            if u >= self.tau[g]:
                e, z = math.exp(u), math.e + math.exp(u)
                self.k[g][into] = (math.e * self.k[g][into] + e * key) / z
                self.v[g][into] = (math.e * self.v[g][into] + e * value) / z


class Packed:
    """The same by what the engine packs with: a page a token, each head's own tokens in it."""

    def __init__(self, name, k, v, paid, budget):
        self.method = method_of(CompressionConfig.parse({"compress": name}))
        self.window, self.budget = WINDOWS[name], budget
        self.k, self.v, self.paid = (torch.tensor(np.array(x)).float() for x in (k, v, paid))
        self.tau = torch.full((1, len(self.k)), torch.nan)

    def step(self, q, k, v):
        new = (torch.from_numpy(x).float()[:, None] for x in (k, v))
        self.k, self.v = (torch.cat([x, y], 1) for x, y in zip((self.k, self.v), new, strict=True))
        length = self.k.shape[1]
        rows = PagedLayers(
            key_pages=self.k.transpose(0, 1)[..., None],
            value_pages=self.v.transpose(0, 1)[:, :, None],
            pages=torch.arange(length)[None],
            lengths=torch.tensor([length], dtype=torch.int32),
            most=length,
            scale=self.k.shape[2] ** -0.5,
        )
        query = torch.from_numpy(q).float()[None, None]
        earlier = torch.nn.functional.pad(self.paid, (0, 1))
        self.paid = earlier + attention_paid(rows, query, at_once=1)[0]
        if length <= self.budget:
            return
        asked = query if self.window and self.method.scorer.reads else None
        scores, _ = observe_rows(self.method, rows, asked, self.window, 1, self.paid[None])
        counts = torch.tensor([self.budget])
        kept = kept_slots(scores, rows, counts, self.window, 1, self.budget, self.method.selector)
        at = kept[0].long()
        self.paid = self.paid.gather(1, at)
        if self.method.merge:
            merged = merge_evicted(
                rows.key_pages,
                rows.value_pages,
                rows.pages,
                length,
                kept,
                counts.int(),
                threshold=self.tau,
            )
            self.k, self.v, self.tau = merged.keys[0], merged.values[0], merged.threshold
        else:
            self.k, self.v = (
                x.gather(1, at[..., None].expand(-1, -1, x.shape[2])) for x in (self.k, self.v)
            )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("budget", [12, 17])
@pytest.mark.parametrize("name", WINDOWS)
def test_one_token_comes_and_one_goes(name, budget, shape):
    """Prompts below the budget and above it, which grow until they are at it."""
    heads, kv_heads, dim = shape
    rng = np.random.RandomState(budget + heads)
    prompt = 9
    k, v = (rng.standard_normal((kv_heads, prompt, dim)) + 0.3 for _ in range(2))
    paper = Paper(name, k, v, rng.standard_normal((prompt, heads, dim)), budget)
    packed = Packed(name, k, v, paper.paid, budget)
    for _ in range(STEPS):
        q = rng.standard_normal((heads, dim))
        coming = [rng.standard_normal((kv_heads, dim)) + 0.3 for _ in range(2)]
        paper.step(q, *coming)
        packed.step(q, *coming)
        np.testing.assert_allclose(packed.k, np.array(paper.k), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(packed.v, np.array(paper.v), rtol=1e-4, atol=1e-5)
    assert packed.k.shape[1] == budget
    if name == "d2o":
        np.testing.assert_allclose(packed.tau[0], paper.tau, rtol=1e-4)
