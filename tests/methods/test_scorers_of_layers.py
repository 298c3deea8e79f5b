"""Scoring layers together gives each layer's own scores, and does not take more launches."""

import os
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from host_sync import launches
from vllm_kvcompress.methods.base import build
from vllm_kvcompress.methods.budget_spec import AttentionStats, PagedKeys, PagedValues
from vllm_kvcompress.methods.registry import SCORERS

HEADS, KV_HEADS, DIM, BLOCK, WINDOW = 6, 2, 8, 16, 9
LAYERS = (3, 4, 9)
SCALES = (0.7, 1.0, 3.1)
PARAMS = {
    "streamingllm": [{}],
    "h2o": [{}, {"per_query": True}],
    "tova": [{}],
    "snapkv": [
        {},
        {"aggregate": "max", "pooling": "avg"},
        {"aggregate": "defensive", "value_norm": True},
    ],
    "cake": [{}],
    "runs": [{"size": 7, "attention": 2.0}],
    "caote": [{}, {"base": "tova", "reduce": "l2"}, {"base": "h2o"}, {"aggregate": "max"}],
    "fastcaote": [{}, {"base": "h2o", "reduce": "l2"}],
    "keydiff": [{}],
    "lagkv": [{}, {"sinks": 0, "lag": 7}],
    "random": [{"seed": 5}],
}
SETTINGS = [(name, params) for name, options in PARAMS.items() for params in options]


def scorer_of(name, params):
    return build("scorer", SCORERS, name, {}, params.items())


def stats_of(num_layers, tokens, device="cpu"):
    """Return random statistics of several layers, whose pages are in one cache."""
    generator = torch.Generator().manual_seed(tokens)

    def numbers(*shape):
        return torch.rand(shape, generator=generator).to(device)

    heads, past, width = num_layers * HEADS, tokens - WINDOW, -(-tokens // BLOCK)
    order = torch.randperm(num_layers * width, generator=generator).view(num_layers, width)
    pages = order.to(device)
    cache = numbers(2, num_layers * width, KV_HEADS, BLOCK, DIM) - 0.4
    scale = torch.tensor(SCALES[:num_layers]).to(device) if num_layers > 1 else SCALES[0]
    counts = {"num_kv_heads": num_layers * KV_HEADS, "num_queries": WINDOW, "past": past}
    attention = {name: numbers(heads, past) for name in ("total", "variance")}
    attention["recent"] = numbers(heads, WINDOW)
    attention |= {name: numbers(heads, tokens) for name in ("last", "maximum", "sums")}
    return AttentionStats(
        **counts,
        **attention,
        device=torch.device(device),
        num_layers=num_layers,
        layers=LAYERS[:num_layers],
        keys=PagedKeys(key_pages=cache[0].mT, pages=pages, tokens=tokens),
        values=PagedValues(value_pages=cache[1], pages=pages, tokens=tokens, scale=scale),
    )


def one_layer(stats, index):
    """Return the statistics of one layer of `stats`, as they are without the other layers."""
    names = ("total", "variance", "recent", "last", "maximum", "sums")
    parts = {name: getattr(stats, name).view(len(LAYERS), HEADS, -1)[index] for name in names}
    return replace(
        stats,
        num_kv_heads=KV_HEADS,
        num_layers=1,
        layers=LAYERS[index : index + 1],
        keys=replace(stats.keys, pages=stats.keys.pages[index]),
        values=replace(stats.values, pages=stats.values.pages[index], scale=SCALES[index]),
        **parts,
    )


def test_every_scorer_is_tested():
    assert set(PARAMS) == set(SCORERS)


@pytest.mark.parametrize(("name", "params"), SETTINGS)
@pytest.mark.parametrize("tokens", [75, 160, 401])
def test_layers_together_score_as_alone(name, params, tokens):
    """Scores are equal bit for bit."""
    scorer, stats = scorer_of(name, params), stats_of(len(LAYERS), tokens)
    together = scorer.score(stats)
    assert together.shape == (len(LAYERS) * KV_HEADS, tokens - WINDOW)
    alone = [scorer.score(one_layer(stats, index)) for index in range(len(LAYERS))]
    assert torch.equal(together, torch.cat(alone))


class DeviceOperators(TorchDispatchMode):
    """Count the operators that return a tensor on the meta device, which represents a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        self.count += any(isinstance(x, torch.Tensor) and x.is_meta for x in tree_leaves(result))
        return result


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="uses meta tensors")
@pytest.mark.parametrize(("name", "params"), SETTINGS)
def test_number_of_launches_does_not_depend_on_the_layers(name, params, monkeypatch):
    launched, scorer = launches(monkeypatch), scorer_of(name, params)
    counts = []
    for num_layers in (2, 3):
        stats = stats_of(num_layers, 160, "meta")
        launched.clear()
        with DeviceOperators() as operators:
            scorer.score(stats)
        counts.append((operators.count, list(launched)))
    assert counts[0] == counts[1]
