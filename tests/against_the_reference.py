"""Compare a preset on plain tensors with docs/methods.md in float64."""

import math

import numpy as np
import pytest
import torch

import methods_reference as ref
from vllm_kvcompress.offline import compress

CHUNKS = {"chunkkv": 10, "cake-chunk": 20}
WINDOWS = {"cake-chunk": 16, "tova": 1, "streamingllm": 0, "dynamickv": 8, "d2o": 0}
SHAPES = {  # layers, Hq, Hkv, S, d, sink
    "mha": (3, 2, 2, 90, 8, 0.0),
    "gqa": (6, 4, 2, 101, 16, 0.0),
    "mqa": (2, 4, 1, 97, 8, 0.0),
    "smol": (5, 9, 3, 130, 16, 0.0),
    "one-layer": (1, 3, 1, 77, 4, 0.0),
    "sink": (4, 4, 2, 120, 8, 6.0),  # takes about 90 % of the attention
}


def inputs(layers, heads, kv_heads, tokens, dim, sink, seed, dtype=torch.float32):
    rs = np.random.RandomState(seed)
    q = rs.standard_normal((layers, heads, tokens, dim)) * 1.5
    k = rs.standard_normal((layers, kv_heads, tokens, dim))
    v = rs.standard_normal((layers, kv_heads, tokens, dim))
    q[:, :, :, 0] += sink
    k[:, :, 0, 0] += sink
    return tuple(torch.from_numpy(x).to(dtype) for x in (q, k, v))


def scores_of(preset, q, k, v, w):
    if preset in ("snapkv", "pyramidkv", "dynamickv"):
        return ref.snapkv(q, k, v, w)
    if preset == "chunkkv":
        return ref.snapkv(q, k, v, w, kernel=1)
    if preset == "cake-chunk":
        return ref.snapkv(q, k, v, w, aggregate="max")
    if preset in ("defensivekv", "layer-defensivekv"):
        return ref.snapkv(q, k, v, w, aggregate="defensive", value_norm=True)
    if preset in ("h2o", "d2o"):
        return ref.h2o(q, k, v, w)
    if preset in ("caote", "fastcaote"):
        return ref.caote(q, k, v, w, fast=preset == "fastcaote")
    return getattr(ref, preset)(q, k, v, w)


def budgets_of(preset, layers, scores, base, ratio, w, allocator_window, protected_past=0):
    """Return the layers' budgets of tokens that are neither in the window nor protected."""
    tokens = layers[0][1].shape[1]
    past = tokens - w - protected_past
    if preset == "pyramidkv":
        return ref.pyramid_budgets(len(layers), base, past)
    if preset in ("cake", "cake-chunk"):
        stats = [ref.cake_stats(q, k, allocator_window) for q, k, _ in layers]
        return ref.cake_budgets(stats, base, past)
    if preset == "dynamickv":
        return ref.dynamickv_budgets([s.astype(np.float32) for s in scores], base, past)
    if preset == "layer-defensivekv":
        return ref.global_budgets([s.astype(np.float32) for s in scores], base, past)
    if preset == "d2o":
        sums = [ref.column_sums(q, k) for q, k, _ in layers]
        total = round(ratio * tokens * len(layers)) - protected_past * len(layers)
        return ref.d2o_budgets(sums, total, past)
    return [base] * len(layers)


def check_layer(preset, got, layer, score, past, w, size, protected_past=()):
    """Check one layer's positions, ranked by `score` up to float32 rounding at the boundary.

    Protected tokens must be kept too, and the method sees the other tokens side by side.
    """
    kv_heads, tokens = got.keys[layer].shape[0], score.shape[1] + w
    unprotected = [j for j in range(tokens - w) if j not in protected_past]
    place = {j: number for number, j in enumerate(unprotected)}
    score = score[:, unprotected]
    for head in range(kv_heads):
        kept = got.positions[layer][head].tolist()
        assert kept == sorted(set(kept))
        assert set(protected_past) | set(range(tokens - w, tokens)) <= set(kept)
        kept = [place[j] for j in kept if j in place]
        assert len(kept) == past
        row = score[head]
        if size:
            want = ref.chunks(score.sum(0), past, size)
        elif preset == "d2o":
            want = ref.heavy_recent(row, past)
        else:
            want = ref.best(row, past)
        if kept != want and not size:
            low = min(row[j] for j in want if not math.isinf(row[j]))
            for j in set(kept) ^ set(want):
                assert row[j] == pytest.approx(low, rel=1e-4), (layer, head, j)
            assert len(set(kept) ^ set(want)) <= 4
        else:
            assert kept == want


def assert_equals_reference(preset, shape, ratio, sinks=None, lookahead=0, window=None, spans=()):
    """Check budgets, positions, scores, keys and values of a preset on one shape."""
    w = WINDOWS.get(preset, 32)
    if lookahead:
        w = min(w if preset == "tova" else 32, lookahead)
    w = settings_window = window or w
    if lookahead and preset in ref.OUTPUT_SCORERS and not window:
        w, settings_window = lookahead + 16, min(16, lookahead)
    layers, heads, kv_heads, tokens, dim, sink = SHAPES[shape]
    q, k, v = inputs(layers, heads, kv_heads, tokens, dim, sink, seed=len(preset) + tokens)
    policy = {"compress": preset, **({"lookahead": lookahead} if lookahead else {})}
    policy |= {"window": window} if window else {}
    got = compress(q, k, v, policy=policy, budget=ratio, sinks=sinks, protect=spans)
    protected = {j for start, stop in spans for j in range(start, stop)}
    protected_past = sorted(j for j in protected if j < tokens - w)
    unprotected = [j for j in range(tokens - w) if j not in protected]
    exact = [tuple(x[i].double().numpy() for x in (q, k, v)) for i in range(layers)]
    if sinks is not None:
        sink_logits = sinks.double().numpy()
        exact = [(ref.with_sinks(q, sink_logits[i]), k, v) for i, (q, k, v) in enumerate(exact)]
    output_scorer = ref.OUTPUT_SCORERS.get(preset) if lookahead else None
    num_output = lookahead if lookahead < w else None
    scores = [
        output_scorer(*layer, w, num_output) if output_scorer else scores_of(preset, *layer, w)
        for layer in exact
    ]
    size = None if output_scorer else CHUNKS.get(preset)
    budget = max(math.floor(ratio * (tokens - lookahead)), settings_window + 1) + lookahead
    base = budget - w - len(protected_past)
    allocator_window = min(lookahead, w) if lookahead else w
    free_scores = [score[:, unprotected] for score in scores]
    budget_args = base, ratio, w, allocator_window, len(protected_past)
    budgets = budgets_of(preset, exact, free_scores, *budget_args)
    assert got.budgets == [b + w + len(protected_past) for b in budgets]
    for layer, score in enumerate(scores):
        found = got.scores[layer]
        assert found.shape == (kv_heads, tokens)
        assert found.dtype == torch.float32
        assert torch.isinf(found[:, tokens - w :]).all()
        assert (found[:, protected_past] == torch.inf).all()
        free = ~torch.isinf(found[:, : tokens - w])
        np.testing.assert_allclose(
            found[:, : tokens - w][free].numpy(), score[free.numpy()], rtol=1e-4, atol=1e-6
        )
        check_layer(preset, got, layer, score, budgets[layer], w, size, protected_past)
        for head in range(kv_heads):
            kept = got.positions[layer][head]
            want = k[layer, head, kept], v[layer, head, kept]
            if preset == "d2o":
                merged = ref.merge(exact[layer][1][head], exact[layer][2][head], kept.tolist())
                is_protected = torch.tensor([j in protected for j in kept.tolist()])[:, None]
                want = tuple(
                    a.where(is_protected, torch.from_numpy(b).float())
                    for a, b in zip(want, merged, strict=True)
                )
            torch.testing.assert_close(got.keys[layer][head], want[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(got.values[layer][head], want[1], rtol=1e-4, atol=1e-5)
