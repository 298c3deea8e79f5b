"""Layers that hold different numbers of tokens, scored and chosen together."""

import numpy as np
import pytest
import torch

import methods_reference as ref
from observing import kept_slots, observe_rows
from vllm_kvcompress.methods.allocators.pyramid import Pyramid
from vllm_kvcompress.methods.allocators.uniform import Uniform
from vllm_kvcompress.methods.method import layer_pages
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.paged_layers import PagedLayers, attention_paid
from vllm_kvcompress.methods.presets import PRESETS
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.method_of import method_of

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 4
SCALE = DIM**-0.5


def held(lengths, window, seed, spare=3):
    """Rows in one cache, NaN between them; and each row's own keys, values and last queries."""
    rng = np.random.RandomState(seed)
    most = max(lengths)
    used = [-(-length // BLOCK) for length in lengths]
    order = rng.permutation(sum(used) + spare)
    cache = torch.full((len(order), KV_HEADS, DIM, BLOCK), torch.nan)
    pages = torch.full((len(lengths), -(-most // BLOCK)), 10**6, dtype=torch.int64)
    keys = [rng.standard_normal((KV_HEADS, length, DIM)) for length in lengths]
    values = [rng.standard_normal((KV_HEADS, length, DIM)) for length in lengths]
    query = rng.standard_normal((len(lengths), max(window, 1), HEADS, DIM))
    stored = torch.full((len(order), KV_HEADS, BLOCK, DIM), torch.nan)
    at = 0
    for row, (key, value, count) in enumerate(zip(keys, values, used, strict=True)):
        own = torch.from_numpy(order[at : at + count].copy())
        at += count
        pages[row, :count] = own
        for slot in range(key.shape[1]):
            page = own[slot // BLOCK]
            cache[page, :, :, slot % BLOCK] = torch.from_numpy(key[:, slot]).float()
            stored[page, :, slot % BLOCK] = torch.from_numpy(value[:, slot]).float()
    rows = PagedLayers(
        key_pages=cache,
        value_pages=stored,
        pages=pages,
        lengths=torch.tensor(lengths, dtype=torch.int32),
        most=most,
        scale=SCALE,
    )
    return rows, list(zip(keys, values, strict=True)), query


def reference_scores(name, query, key, value, window):
    """``[Hkv, P]`` of one row; a slot is what a position is to a prompt."""
    q = np.zeros((HEADS, key.shape[1], DIM))
    if window:
        q[:, -window:] = query.transpose(1, 0, 2)
    if name == "average pooling":
        return ref.snapkv(q, key, value, window, kind="avg", kernel=5)
    if name in CAOTES:
        own = SETTINGS[name]["scorer_params"]
        return ref.caote(
            q,
            key,
            value,
            window,
            base=own.get("base", "snapkv"),
            how=own.get("reduce", "mean"),
            aggregate=own.get("aggregate", "mean"),
        )
    if name in RUNS:
        return ref.runs(q, key, value, window, RUNS[name], size=5, attention_paid=PAID)
    return ref.WINDOW_SCORERS[name](q, key, value, window)


CAOTES = {
    "caote over tova": {"base": "tova"},
    "caote, l2": {"reduce": "l2"},
    "caote of maxima": {"aggregate": "max"},
}
# how many of the window's queries are an answer's, if the others judge apart
RUNS, PAID = {"runs": None, "runs of a prompt's end": 2}, 1.0
SETTINGS = {
    **{name: name for name in ref.WINDOW_SCORERS},
    "average pooling": {"compress": "snapkv", "scorer_params": {"pooling": "avg", "kernel": 5}},
    **{name: {"compress": "caote", "scorer_params": own} for name, own in CAOTES.items()},
    **{
        name: {
            "compress": "cake",
            "scorer": "runs",
            "scorer_params": {"size": 5, "attention": PAID},
        }
        for name in RUNS
    },
}


def made(name):
    given = SETTINGS[name]
    return method_of(
        CompressionConfig.parse(given if isinstance(given, dict) else {"compress": given})
    )


@pytest.mark.parametrize("lengths", [[40, 23, 36, 25], [13, 13], [61]], ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_rows_keep_what_the_reference_keeps(name, lengths):
    """Of layers of one request or of several: nobody's scores depend on the others."""
    method = made(name)
    window = 0 if name == "streamingllm" else 4
    rows, tokens, query = held(lengths, window, seed=len(lengths))
    query *= 3 if name in RUNS else 1  # so that they look at few tokens
    asked = torch.from_numpy(query).float() if window else None
    latest = RUNS.get(name)
    scores, observed = observe_rows(method, rows, asked, window, at_once=3, latest=latest)
    counts = [max(length // BLOCK // 2, 2) for length in lengths]
    kept = kept_slots(
        scores, rows, torch.tensor(counts), window, BLOCK, max(counts) + 1, method.selector
    )
    size, lifted = ref.CHUNKS.get(name), []
    for row, ((key, value), length, count) in enumerate(zip(tokens, lengths, counts, strict=True)):
        want = reference_scores(name, query[row], key, value, window)
        past, keep = length - window, count * BLOCK - window
        torch.testing.assert_close(
            scores[row, :, :past].double(), torch.from_numpy(want), rtol=1e-4, atol=1e-6
        )
        for head in range(KV_HEADS):
            got = kept[row, head]
            assert torch.equal(got[count * BLOCK :], torch.full_like(got[count * BLOCK :], -1))
            best = ref.chunks(want.sum(0), keep, size) if size else ref.best(want[head], keep)
            assert got[: count * BLOCK].tolist() == [*best, *range(past, length)]
        lifted += [*(want >= 201).flatten()]
        if name in ("cake", "cake-chunk", *RUNS):
            q = np.zeros((HEADS, length, DIM))
            q[:, -window:] = query[row].transpose(1, 0, 2)
            entropy, shift = ref.cake_stats(q, key, latest or window)
            assert observed[row].entropy.item() == pytest.approx(entropy, rel=1e-4)
            assert observed[row].shift.item() == pytest.approx(shift, rel=1e-4)
    if name in RUNS and len(lengths) > 2:
        assert {*lifted} == {True, False}, "runs, and other tokens"


def paid_by(query, key):
    """``[Hkv, S]``: what the last queries ``[r, Hq, D]`` paid the keys ``[Hkv, S, D]``."""
    q = np.zeros((HEADS, key.shape[1], DIM))
    q[:, -len(query) :] = query.transpose(1, 0, 2)
    rows = ref.attention(q, key, range(key.shape[1] - len(query), key.shape[1]))
    return rows.sum(1).reshape(KV_HEADS, -1, key.shape[1]).mean(1)


@pytest.mark.parametrize("latest", [1, 7, 15])
def test_attention_that_the_latest_queries_paid(latest, monkeypatch):
    """However many are added up together, each sees the slots up to its own."""
    lengths = [40, latest + 1, 29]
    rows, tokens, query = held(lengths, latest, seed=latest)
    asked = torch.from_numpy(query).float()
    for together in (128, 4):
        monkeypatch.setattr("vllm_kvcompress.methods.paged_layers.LATEST", together)
        paid = attention_paid(rows, asked, at_once=2)
        for row, ((key, _), length) in enumerate(zip(tokens, lengths, strict=True)):
            want = torch.from_numpy(paid_by(query[row], key))
            torch.testing.assert_close(paid[row, :, :length].double(), want, rtol=1e-5, atol=1e-6)
            assert not paid[row, :, length:].any()


def test_rows_are_ranked_and_compared_by_the_sums_that_they_have():
    """H2O's scores and D2O's variances, of the slots that a row has: what lies behind is left."""
    lengths, rng = [40, 22, 31], np.random.RandomState(3)
    rows, _, _ = held(lengths, 0, seed=3)
    sums = rng.uniform(0, 9, (3, KV_HEADS, 40)).astype("float32")
    given = torch.from_numpy(sums.copy())
    for row, length in enumerate(lengths):
        given[row, :, length:] = 1e9
    window, method = 2, method_of(CompressionConfig.parse({"compress": "d2o"}))
    scores, observed = observe_rows(method, rows, None, window, at_once=2, sums=given)
    for row, length in enumerate(lengths):
        own = sums[row, :, :length]
        assert scores[row, :, : length - window].numpy() == pytest.approx(own[:, :-window])
        want = own.astype("float64").var(-1, ddof=1)
        assert observed[row].column_variance.numpy() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_methods_that_cannot_say_why(name):
    can = {"snapkv", "pyramidkv", "tova", "streamingllm", "cake", "chunkkv", "cake-chunk"}
    can |= {"caote", "fastcaote", "h2o", "d2o"}
    method = method_of(CompressionConfig.parse({"compress": name}))
    assert bool(method.why_whole) == (name not in can)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"compress": "caote", "base": "h2o"}, "the sums of every query head"),
        ({"compress": "h2o", "scorer_params": {"per_query": True}}, "queries that saw a token"),
        ({"compress": "d2o", "allocator_params": {"per_query": True}}, "queries that saw a token"),
        ({"compress": "caote", "scorer_params": {"aggregate": "defensive"}}, "with their mean"),
        ({"compress": "snapkv", "scorer_params": {"value_norm": True}}, "values' norms"),
        ({"compress": "lagkv"}, "compares the cached keys"),
    ],
)
def test_parts_that_cannot_say_why(parts, reason):
    assert reason in method_of(CompressionConfig.parse(parts)).why_whole


@pytest.mark.parametrize("allocator", [Uniform(), Pyramid(beta=1.5)], ids=["uniform", "pyramid"])
@pytest.mark.parametrize("seed", range(8))
def test_no_layer_is_given_pages_that_it_has_not(allocator, seed):
    """Those that are full leave theirs to the others, and the sum is exact."""
    rng = np.random.RandomState(seed)
    layers = int(rng.randint(1, 9))
    caps = torch.from_numpy(rng.randint(2, 30, layers))
    pages = int(rng.randint(2 * layers, int(caps.sum()) + 1))
    most = int(caps.max()) * BLOCK
    plan = PagePlan(
        num_layers=layers,
        tokens=most,
        block_size=BLOCK,
        window=5,
        budget=max(pages * BLOCK // layers, 6),
        pages=pages,
    )
    given = layer_pages(allocator, plan, None, caps)
    assert given.sum() == pages
    assert (given <= caps).all()
    assert (given >= plan.floor_pages).all()
