"""Layers with different numbers of tokens, scored and selected together."""

import numpy as np
import pytest
import torch

import methods_reference as ref
from layer_scores import kept_slots, observe_layers
from vllm_kvcompress.methods.method import layer_pages
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.paged_layers import PagedLayers, attention_to_slots
from vllm_kvcompress.methods.parts.allocators import Uniform
from vllm_kvcompress.methods.published.pyramidkv import Pyramid
from vllm_kvcompress.methods.registry import PRESETS
from vllm_kvcompress.settings.config import CompressionConfig

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 4
SCALE = DIM**-0.5


def cached_layers(lengths, window, seed, spare=3):
    """Return layers in one cache with NaN between them, and their keys, values and last queries."""
    rng = np.random.RandomState(seed)
    max_tokens = max(lengths)
    used = [-(-length // BLOCK) for length in lengths]
    order = rng.permutation(sum(used) + spare)
    cache = torch.full((len(order), KV_HEADS, DIM, BLOCK), torch.nan)
    pages = torch.full((len(lengths), -(-max_tokens // BLOCK)), 10**6, dtype=torch.int64)
    keys = [rng.standard_normal((KV_HEADS, length, DIM)) for length in lengths]
    values = [rng.standard_normal((KV_HEADS, length, DIM)) for length in lengths]
    query = rng.standard_normal((len(lengths), max(window, 1), HEADS, DIM))
    value_cache = torch.full((len(order), KV_HEADS, BLOCK, DIM), torch.nan)
    start = 0
    for layer, (key, value, count) in enumerate(zip(keys, values, used, strict=True)):
        layer_pages = torch.from_numpy(order[start : start + count].copy())
        start += count
        pages[layer, :count] = layer_pages
        for slot in range(key.shape[1]):
            page = layer_pages[slot // BLOCK]
            cache[page, :, :, slot % BLOCK] = torch.from_numpy(key[:, slot]).float()
            value_cache[page, :, slot % BLOCK] = torch.from_numpy(value[:, slot]).float()
    lengths = torch.tensor(lengths, dtype=torch.int32)
    sizes = {"pages": pages, "lengths": lengths, "max_tokens": max_tokens, "scale": SCALE}
    paged = PagedLayers(key_pages=cache, value_pages=value_cache, **sizes)
    return paged, list(zip(keys, values, strict=True)), query


def reference_scores(name, query, key, value, window):
    """Return the ``[Hkv, P]`` scores of one layer, with slots as positions."""
    q = np.zeros((HEADS, key.shape[1], DIM))
    if window:
        q[:, -window:] = query.transpose(1, 0, 2)
    if name == "average pooling":
        return ref.snapkv(q, key, value, window, kind="avg", kernel=5)
    if name in CAOTES:
        params = SETTINGS[name]["scorer_params"]
        options = {"base": params.get("base", "snapkv"), "how": params.get("reduce", "mean")}
        aggregate = params.get("aggregate", "mean")
        return ref.caote(q, key, value, window, **options, aggregate=aggregate)
    if name in RUNS:
        return ref.runs(q, key, value, window, RUNS[name], size=5, min_attention=MIN_ATTENTION)
    return ref.WINDOW_SCORERS[name](q, key, value, window)


CAOTES = {
    "caote over tova": {"base": "tova"},
    "caote, l2": {"reduce": "l2"},
    "caote of maxima": {"aggregate": "max"},
}
# number of output queries in the window, if prompt queries give only the maximum
RUNS, MIN_ATTENTION = {"runs": None, "runs by prompt queries": 2}, 1.0
SETTINGS = {
    **{name: name for name in ref.WINDOW_SCORERS},
    "average pooling": {"compress": "snapkv", "scorer_params": {"pooling": "avg", "kernel": 5}},
    **{name: {"compress": "caote", "scorer_params": params} for name, params in CAOTES.items()},
    **{
        name: {
            "compress": "cake",
            "scorer": "runs",
            "scorer_params": {"size": 5, "attention": MIN_ATTENTION},
        }
        for name in RUNS
    },
}


def method_by_name(name):
    raw_settings = SETTINGS[name]
    return CompressionConfig.parse(
        raw_settings if isinstance(raw_settings, dict) else {"compress": raw_settings}
    ).method


@pytest.mark.parametrize("lengths", [[40, 23, 36, 25], [13, 13], [61]], ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_layers_keep_what_the_reference_keeps(name, lengths):
    """For layers of one request or of several: no layer's scores depend on the other layers."""
    method = method_by_name(name)
    window = 0 if name == "streamingllm" else 4
    paged, tokens, query = cached_layers(lengths, window, seed=len(lengths))
    query *= 3 if name in RUNS else 1  # so that attention is concentrated on few tokens
    queries = torch.from_numpy(query).float() if window else None
    num_output = RUNS.get(name)
    scores, observed = observe_layers(method, paged, queries, window, at_once=3, latest=num_output)
    counts = [max(length // BLOCK // 2, 2) for length in lengths]
    kept = kept_slots(
        scores, paged, torch.tensor(counts), window, BLOCK, max(counts) + 1, method.selector
    )
    size, in_runs = ref.CHUNKS.get(name), []
    for layer, ((key, value), length, count) in enumerate(
        zip(tokens, lengths, counts, strict=True)
    ):
        want = reference_scores(name, query[layer], key, value, window)
        past, keep = length - window, count * BLOCK - window
        torch.testing.assert_close(
            scores[layer, :, :past].double(), torch.from_numpy(want), rtol=1e-4, atol=1e-6
        )
        for head in range(KV_HEADS):
            got = kept[layer, head]
            assert torch.equal(got[count * BLOCK :], torch.full_like(got[count * BLOCK :], -1))
            best = ref.chunks(want.sum(0), keep, size) if size else ref.best(want[head], keep)
            assert got[: count * BLOCK].tolist() == [*best, *range(past, length)]
        in_runs += [*(want >= 201).flatten()]
        if name in ("cake", "cake-chunk", *RUNS):
            q = np.zeros((HEADS, length, DIM))
            q[:, -window:] = query[layer].transpose(1, 0, 2)
            entropy, shift = ref.cake_stats(q, key, num_output or window)
            assert observed[layer].entropy.item() == pytest.approx(entropy, rel=1e-4)
            assert observed[layer].shift.item() == pytest.approx(shift, rel=1e-4)
    if name in RUNS and len(lengths) > 2:
        assert {*in_runs} == {True, False}, "runs, and other tokens"


def reference_attention(query, key):
    """Return ``[Hkv, S]``, the attention of the last queries ``[r, Hq, D]`` to the keys."""
    q = np.zeros((HEADS, key.shape[1], DIM))
    q[:, -len(query) :] = query.transpose(1, 0, 2)
    attention = ref.attention(q, key, range(key.shape[1] - len(query), key.shape[1]))
    return attention.sum(1).reshape(KV_HEADS, -1, key.shape[1]).mean(1)


@pytest.mark.parametrize("num_queries", [1, 7, 15])
def test_attention_of_the_latest_queries_to_slots(num_queries, monkeypatch):
    """However many queries are summed together, each sees the slots up to its own."""
    lengths = [40, num_queries + 1, 29]
    paged, tokens, query = cached_layers(lengths, num_queries, seed=num_queries)
    queries = torch.from_numpy(query).float()
    for queries_per_sum in (128, 4):
        monkeypatch.setattr("vllm_kvcompress.methods.paged_layers.QUERIES_PER_SUM", queries_per_sum)
        attention = attention_to_slots(paged, queries, layers_per_batch=2)
        for layer, ((key, _), length) in enumerate(zip(tokens, lengths, strict=True)):
            want = torch.from_numpy(reference_attention(query[layer], key))
            torch.testing.assert_close(
                attention[layer, :, :length].double(), want, rtol=1e-5, atol=1e-6
            )
            assert not attention[layer, :, length:].any()


def test_column_sums_are_read_up_to_each_layers_length():
    """H2O's scores and D2O's variances use the slots that a layer has, and ignore later sums."""
    lengths, rng = [40, 22, 31], np.random.RandomState(3)
    paged, _, _ = cached_layers(lengths, 0, seed=3)
    sums = rng.uniform(0, 9, (3, KV_HEADS, 40)).astype("float32")
    padded_sums = torch.from_numpy(sums.copy())
    for layer, length in enumerate(lengths):
        padded_sums[layer, :, length:] = 1e9
    window, method = 2, CompressionConfig.parse({"compress": "d2o"}).method
    scores, observed = observe_layers(method, paged, None, window, at_once=2, sums=padded_sums)
    for layer, length in enumerate(lengths):
        layer_sums = sums[layer, :, :length]
        assert scores[layer, :, : length - window].numpy() == pytest.approx(layer_sums[:, :-window])
        want = layer_sums.astype("float64").var(-1, ddof=1)
        assert observed[layer].column_variance.numpy() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_methods_that_need_the_entire_prompt(name):
    repackable = {"snapkv", "pyramidkv", "tova", "streamingllm", "cake", "chunkkv", "cake-chunk"}
    repackable |= {"caote", "fastcaote", "h2o", "d2o"}
    method = CompressionConfig.parse({"compress": name}).method
    assert bool(method.needs_whole_prompt) == (name not in repackable)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"compress": "caote", "scorer_params": {"base": "h2o"}}, "column sums per query head"),
        ({"compress": "h2o", "scorer_params": {"per_query": True}}, "queries that saw a token"),
        ({"compress": "d2o", "allocator_params": {"per_query": True}}, "queries that saw a token"),
        ({"compress": "caote", "scorer_params": {"aggregate": "defensive"}}, "with their mean"),
        ({"compress": "snapkv", "scorer_params": {"value_norm": True}}, "values' norms"),
        ({"compress": "lagkv"}, "compares the cached keys"),
    ],
)
def test_parts_give_the_reason_for_needing_the_entire_prompt(parts, reason):
    assert reason in CompressionConfig.parse(parts).method.needs_whole_prompt


@pytest.mark.parametrize("allocator", [Uniform(), Pyramid(beta=1.5)], ids=["uniform", "pyramid"])
@pytest.mark.parametrize("seed", range(8))
def test_no_layer_gets_more_pages_than_it_has(allocator, seed):
    """Full layers leave their pages to the other layers, and the sum is exact."""
    rng = np.random.RandomState(seed)
    layers = int(rng.randint(1, 9))
    caps = torch.from_numpy(rng.randint(2, 30, layers))
    pages = int(rng.randint(2 * layers, int(caps.sum()) + 1))
    max_tokens = int(caps.max()) * BLOCK
    budget = max(pages * BLOCK // layers, 6)
    sizes = {"num_layers": layers, "tokens": max_tokens, "block_size": BLOCK, "pages": pages}
    plan = PagePlan(**sizes, window=5, budget=budget)
    pages_per_layer = layer_pages(allocator, plan, None, caps)
    assert pages_per_layer.sum() == pages
    assert (pages_per_layer <= caps).all()
    assert (pages_per_layer >= plan.floor_pages).all()
