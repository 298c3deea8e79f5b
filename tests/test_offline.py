"""Every preset on plain tensors, against docs/methods.md in float64."""

import math

import numpy as np
import pytest
import torch

import methods_reference as ref
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.presets import PRESETS
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


def budgets_of(preset, layers, scores, base, ratio, w, allocator_window, guarded=0):
    """Of the tokens that are neither the window's nor protected."""
    tokens = layers[0][1].shape[1]
    past = tokens - w - guarded
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
        total = round(ratio * tokens * len(layers)) - guarded * len(layers)
        return ref.d2o_budgets(sums, total, past)
    return [base] * len(layers)


def check_layer(preset, got, layer, score, past, w, size, guarded=()):
    """One layer's positions, ranked by `score` up to float32's rounding at the boundary.

    Those of protected tokens are kept besides, and the method sees the others side by side.
    """
    kv_heads, tokens = got.keys[layer].shape[0], score.shape[1] + w
    others = [j for j in range(tokens - w) if j not in guarded]
    place = {j: number for number, j in enumerate(others)}
    score = score[:, others]
    for head in range(kv_heads):
        kept = got.positions[layer][head].tolist()
        assert kept == sorted(set(kept))
        assert set(guarded) | set(range(tokens - w, tokens)) <= set(kept)
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


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "random"])
@pytest.mark.parametrize("ratio", [0.5, 0.37])
def test_equals_the_reference(preset, shape, ratio):
    equals_the_reference(preset, shape, ratio)


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "random"])
def test_equals_the_reference_where_a_sink_takes_part_of_every_row(preset):
    """gpt-oss's: from next to nothing to nearly all, another one for every head and layer."""
    layers, heads, *_ = SHAPES["gqa"]
    order = np.random.RandomState(3).permutation(layers * heads)
    sinks = torch.linspace(-30, 12, layers * heads)[order]
    equals_the_reference(preset, "gqa", 0.5, sinks.view(layers, heads))


@pytest.mark.parametrize("answered", [8, 40])
@pytest.mark.parametrize("preset", ["cake", "cake-chunk", "tova", "pyramidkv", "fastcaote"])
def test_equals_the_reference_where_the_answer_judges(preset, answered):
    """Its tokens are kept beside the prompt's budget.

    No query of the prompt is read, but by `cake-chunk`, which keeps the runs that its last 16 ask
    for.
    """
    equals_the_reference(preset, "gqa", 0.5, answered=answered)
    if answered > 32:
        equals_the_reference(preset, "smol", 0.37, answered=answered)


@pytest.mark.parametrize("preset", ["cake", "cake-chunk", "snapkv"])
def test_equals_the_reference_where_the_prompts_end_judges_beside_the_answer(preset):
    """But not how much each layer keeps: the answer's queries alone tell that."""
    equals_the_reference(preset, "gqa", 0.5, answered=8, window=20)


def test_a_look_ahead_needs_a_prompt_before_its_answer():
    q, k, v = inputs(*SHAPES["gqa"], seed=1)
    with pytest.raises(ValueError, match=r"lookahead=101 says; got 101 tokens. Give more"):
        compress(q, k, v, policy={"compress": "cake", "lookahead": 101}, budget=0.5)


@pytest.mark.parametrize("preset", ["snapkv", "h2o"])
def test_a_scale_may_be_a_whole_number(preset):
    q, k, v = inputs(*SHAPES["gqa"], seed=1)
    whole, same = (compress(q, k, v, policy=preset, budget=0.5, scale=n) for n in (1, 1.0))
    for own, other in zip(whole.positions, same.positions, strict=True):
        assert torch.equal(own, other)


SPANS = {
    "begin": [[0, 9]],
    "apart": [[3, 5], [20, 23], [5, 7]],
    "into the window": [[11, 14], [62, 80]],
}


@pytest.mark.parametrize("spans", list(SPANS.values()), ids=list(SPANS))
@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "random"])
def test_equals_the_reference_where_spans_are_protected(preset, spans):
    equals_the_reference(preset, "gqa", 0.5, spans=spans)


@pytest.mark.parametrize("preset", ["cake", "cake-chunk", "tova", "pyramidkv"])
def test_spans_are_protected_where_the_answer_judges(preset):
    equals_the_reference(preset, "smol", 0.5, answered=24, spans=[[1, 4], [30, 37]])


def equals_the_reference(preset, shape, ratio, sinks=None, answered=0, window=None, spans=()):
    w = WINDOWS.get(preset, 32)
    if answered:
        w = min(w if preset == "tova" else 32, answered)
    w = own = window or w
    if answered and preset in ref.BY_ANSWER and not window:
        w, own = answered + 16, min(16, answered)
    layers, heads, kv_heads, tokens, dim, sink = SHAPES[shape]
    q, k, v = inputs(layers, heads, kv_heads, tokens, dim, sink, seed=len(preset) + tokens)
    policy = {"compress": preset, **({"lookahead": answered} if answered else {})}
    policy |= {"window": window} if window else {}
    got = compress(q, k, v, policy=policy, budget=ratio, sinks=sinks, protect=spans)
    protected = {j for start, stop in spans for j in range(start, stop)}
    guarded = sorted(j for j in protected if j < tokens - w)
    others = [j for j in range(tokens - w) if j not in protected]
    exact = [tuple(x[i].double().numpy() for x in (q, k, v)) for i in range(layers)]
    if sinks is not None:
        of_heads = sinks.double().numpy()
        exact = [(ref.with_sinks(q, of_heads[i]), k, v) for i, (q, k, v) in enumerate(exact)]
    by_answer = ref.BY_ANSWER.get(preset) if answered else None
    latest = answered if answered < w else None
    scores = [
        by_answer(*layer, w, latest) if by_answer else scores_of(preset, *layer, w)
        for layer in exact
    ]
    size = None if by_answer else CHUNKS.get(preset)
    base = max(math.floor(ratio * (tokens - answered)), own + 1) + answered - w - len(guarded)
    allocator_window = min(answered, w) if answered else w
    free_scores = [score[:, others] for score in scores]
    shared = base, ratio, w, allocator_window, len(guarded)
    budgets = budgets_of(preset, exact, free_scores, *shared)
    assert got.budgets == [b + w + len(guarded) for b in budgets]
    for layer, score in enumerate(scores):
        found = got.scores[layer]
        assert found.shape == (kv_heads, tokens)
        assert found.dtype == torch.float32
        assert torch.isinf(found[:, tokens - w :]).all()
        assert (found[:, guarded] == torch.inf).all()
        free = ~torch.isinf(found[:, : tokens - w])
        np.testing.assert_allclose(
            found[:, : tokens - w][free].numpy(), score[free.numpy()], rtol=1e-4, atol=1e-6
        )
        check_layer(preset, got, layer, score, budgets[layer], w, size, guarded)
        for head in range(kv_heads):
            kept = got.positions[layer][head]
            want = k[layer, head, kept], v[layer, head, kept]
            if preset == "d2o":
                merged = ref.merge(exact[layer][1][head], exact[layer][2][head], kept.tolist())
                whole = torch.tensor([j in protected for j in kept.tolist()])[:, None]
                want = tuple(
                    a.where(whole, torch.from_numpy(b).float())
                    for a, b in zip(want, merged, strict=True)
                )
            torch.testing.assert_close(got.keys[layer][head], want[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(got.values[layer][head], want[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("base", ["snapkv", "tova", "h2o"])
@pytest.mark.parametrize("how", ["mean", "l2"])
@pytest.mark.parametrize("fast", [False, True])
def test_caote_over_every_base(base, how, fast):
    q, k, v = inputs(*SHAPES["gqa"], seed=4)
    policy = {
        "compress": "fastcaote" if fast else "caote",
        "base": base,
        "scorer_params": {"reduce": how},
    }
    got = compress(q, k, v, policy=policy, budget=0.5)
    w = 1 if base == "tova" else 32
    for layer in range(len(k)):
        exact = (x[layer].double().numpy() for x in (q, k, v))
        want = ref.caote(*exact, w, base=base, how=how, fast=fast)
        np.testing.assert_allclose(
            got.scores[layer][:, : want.shape[1]].numpy(), want, rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("norm", ["layer_minmax", "head_minmax", "raw"])
@pytest.mark.parametrize("ratio", [0.2, 0.5])
def test_d2o_budgets_of_every_norm(norm, ratio):
    q, k, v = inputs(*SHAPES["gqa"], seed=6)
    policy = {"compress": "d2o", "allocator_params": {"norm": norm}}
    got = compress(q, k, v, policy=policy, budget=ratio)
    sums = [
        ref.column_sums(a.double().numpy(), b.double().numpy()) for a, b in zip(q, k, strict=True)
    ]
    total = round(ratio * 101 * 6)
    assert got.budgets == ref.d2o_budgets(sums, total, 101, norm)
    assert sum(got.budgets) == total


def test_chunks_of_any_size_shared_or_not_and_reused():
    q, k, v = inputs(*SHAPES["gqa"], seed=8)
    w, tokens = 32, 101
    scores = [
        ref.snapkv(*(x[i].double().numpy() for x in (q, k, v)), w, kernel=1) for i in range(6)
    ]
    for size, shared, reuse in ((1, True, 1), (3, False, 1), (20, True, 2), (10, False, 4)):
        policy = {
            "compress": "chunkkv",
            "allocator": "pyramid",
            "selector_params": {"size": size, "shared": shared, "reuse": reuse},
        }
        got = compress(q, k, v, policy=policy, budget=0.5)
        assert got.budgets == [b + w for b in ref.pyramid_budgets(6, 50 - w, tokens - w)]
        for layer, n in enumerate(got.budgets):
            leader = scores[layer // reuse * reuse]
            for head in range(2):
                t = leader.sum(0) if shared else leader[head]
                want = [*ref.chunks(t, n - w, size), *range(tokens - w, tokens)]
                assert got.positions[layer][head].tolist() == want


# -- what holds for every preset ------------------------------------------------------------------


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_two_prompts_in_a_row_are_two_prompts(preset):
    one, two = inputs(*SHAPES["gqa"], seed=1), inputs(*SHAPES["gqa"], seed=2)
    first = compress(*one, policy=preset, budget=0.4)
    compress(*two, policy=preset, budget=0.4)
    again = compress(*one, policy=preset, budget=0.4)
    assert first.budgets == again.budgets
    for a, b in zip(first.keys, again.keys, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_half_precision_inputs_are_read_in_float32(preset, dtype):
    given = inputs(*SHAPES["gqa"], seed=3, dtype=dtype)
    half = compress(*given, policy=preset, budget=0.4)
    full = compress(*(x.float() for x in given), policy=preset, budget=0.4)
    assert half.budgets == full.budgets
    for a, b in zip(half.positions, full.positions, strict=True):
        assert torch.equal(a, b)
    assert {x.dtype for x in [*half.keys, *half.values]} == {dtype}


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"random", "streamingllm"}))
def test_repeated_kv_heads_choose_as_one(preset):
    """G query heads that are copies, over one KV head or over G copies of it."""
    q, k, v = inputs(3, 1, 1, 80, 8, 0.0, seed=5)
    grouped = compress(q.expand(-1, 4, -1, -1), k, v, policy=preset, budget=0.5)
    apart = compress(*(x.expand(-1, 4, -1, -1) for x in (q, k, v)), policy=preset, budget=0.5)
    assert grouped.budgets == apart.budgets
    for one, four in zip(grouped.positions, apart.positions, strict=True):
        assert torch.equal(one.expand(4, -1), four)


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 34, 65])
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_prompts_around_the_window(preset, tokens):
    q, k, v = inputs(2, 2, 1, tokens, 4, 0.0, seed=tokens)
    got = compress(q, k, v, policy=preset, budget=0.01)
    assert all(1 <= n <= tokens for n in got.budgets)


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (9, 3)])
@pytest.mark.parametrize("preset", ["snapkv", "pyramidkv", "dynamickv", "tova", "chunkkv", "cake"])
def test_equal_columns_keep_the_first(preset, heads):
    """Ties at every length: vector code sums the last columns in another order."""
    w = WINDOWS.get(preset, 32)
    for tokens in range(43, 140, 7):
        shape = (2, heads[0], heads[1], tokens, 4, 0.0)
        q, k, v = inputs(*shape, seed=tokens)
        got = compress(torch.zeros_like(q), torch.ones_like(k), v, policy=preset, budget=w + 6)
        if preset == "cake":  # average pooling pads with zeros: the edges rank last
            assert got.scores[0][0, 2 : tokens - w - 2].unique().numel() <= 1
            continue
        for layer, n in enumerate(got.budgets):
            want = [*range(n - w), *range(tokens - w, tokens)]
            assert got.positions[layer].tolist() == [want] * heads[1], (tokens, layer)


@pytest.mark.parametrize("preset", ["h2o", "d2o", "cake", "caote"])
def test_no_graph_is_kept(preset):
    q, k, v = (x.requires_grad_() for x in inputs(*SHAPES["gqa"], seed=1))
    got = compress(q, k, v, policy=preset, budget=0.5)
    assert not got.keys[0].requires_grad


@pytest.mark.parametrize("budget", [np.int64(50), np.int32(50), np.float32(0.5), "0.5", "50"])
def test_budgets_of_other_libraries(budget):
    q, k, v = inputs(*SHAPES["gqa"], seed=1)
    got = compress(q, k, v, policy="snapkv", budget=budget)
    assert got.budgets == [50] * 6


def test_layers_that_reuse_a_ranking_are_not_read():
    q, k, v = inputs(*SHAPES["gqa"], seed=1)
    policy = {"compress": "chunkkv", "selector_params": {"reuse": 3}}
    want = compress(q, k, v, policy=policy, budget=0.5)
    q[1:3] = k[4:6] = torch.nan
    got = compress(q, k, v, policy=policy, budget=0.5)
    for a, b in zip(got.positions, want.positions, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(policy="off"), "must be a method"),
        (dict(policy="caek"), "did you mean 'cake'"),
        (dict(budget=1.5), "ratio in"),
        (dict(budget=20), "cannot hold the observation window of 32"),
        (dict(page_size=0), "page_size must be a whole number, at least 1"),
        (dict(page_size=2.0), "page_size must be a whole number"),
        (dict(scale=float("nan")), "scale must be a finite number"),
        (dict(scale="1"), "scale must be a finite number"),
        (dict(policy=None), "must be an object"),
        (dict(policy={"allocator": "dynamickv", "scorer": "random"}), "compares scores"),
        (dict(policy={"compress": "streamingllm", "selector": "chunks"}), "ranks by attention"),
        (dict(policy={"compress": "h2o", "base": "tova"}), "needs one of the scorers"),
        (dict(policy={"compress": "caote", "base": "cake"}), "caote.base must be one of"),
        (dict(protect=[[0, 102]]), r"within the prompt's 101 tokens, got \[0, 102\]"),
        (dict(protect=[[5, 5]]), "must begin before it ends"),
        (dict(protect=[[9, 12], [0, 10]]), r"must not overlap, got \[0, 10\] and \[9, 12\]"),
        (dict(protect=[3]), "must be a pair of whole numbers"),
        (dict(protect=[[0, 2.5]]), "must be a pair of whole numbers"),
        (dict(protect=[[0, True]]), "must be a pair of whole numbers"),
    ],
)
def test_bad_settings(change, message):
    q, k, v = inputs(*SHAPES["gqa"], seed=1)
    with pytest.raises((ConfigError, ValueError), match=message):
        compress(q, k, v, **{"policy": "cake", "budget": 0.5, **change})


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda q, k, v: (q.numpy(), k, v), "queries must be a torch tensor"),
        (lambda q, k, v: (q[0], k, v), r"queries must be \[L, H, S, D\]"),
        (lambda q, k, v: (q, k, v[:, :, :-1]), "values must be"),
        (lambda q, k, v: (q[:, :3], k, v), "Hq must be a multiple of Hkv=2"),
        (lambda q, k, v: (q[:, :, 1:], k, v), "queries must be"),
        (lambda q, k, v: (q.long(), k, v), "queries must be one of"),
        (lambda q, k, v: (q[:, :0], k, v), "Hq must be a multiple"),
        (lambda q, k, v: (q[:, :, :0], k[:, :, :0], v[:, :, :0]), "must not be empty"),
    ],
)
def test_bad_tensors(cut, message):
    with pytest.raises(ValueError, match=message):
        compress(*cut(*inputs(*SHAPES["gqa"], seed=1)), policy="cake", budget=0.5)


@pytest.mark.parametrize("base", ["tova", "snapkv", "h2o"])
@pytest.mark.parametrize("scorer", ["caote", "fastcaote"])
@pytest.mark.parametrize("seed", range(5))
def test_caote_of_equal_tokens_keeps_the_first(scorer, base, seed):
    """Two keys and values in turn: the twins of the heaviest token score what it scores."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.arange(40) % 2
    q = torch.randn(1, 1, 40, 8, generator=generator)
    k, v = torch.randn(2, 1, 1, 2, 8, generator=generator)[..., turn, :]
    kept = compress(q, k, v, policy={"compress": scorer, "base": base, "window": 1}, budget=6)
    if base != "h2o":  # whose sums favour early tokens
        scores = kept.scores[0][0, :39]
        assert len(scores[::2].unique()) == len(scores[1::2].unique()) == 1
        best = sorted(range(39), key=lambda j: (-scores[j].item(), j))[:5]
        assert kept.positions[0][0].tolist() == [*sorted(best), 39]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("preset", ["snapkv", "cake", "d2o", "dynamickv", "chunkkv"])
def test_a_budget_that_cannot_hold_what_is_protected_is_raised(preset, page_size):
    q, k, v = inputs(2, 4, 2, 400, 8, 0.0, seed=2)
    span = [10, 110]
    got = compress(
        q, k, v, policy=preset, budget=0.1, page_size=page_size, protect=[span]
    )  # fmt: skip
    w = WINDOWS.get(preset, 32)
    least = -(-(100 + w) // page_size) * page_size
    assert sum(got.budgets) == 2 * (least + page_size)
    for kept in got.positions:
        assert all(set(range(*span)) <= set(row) for row in kept.tolist())


def test_what_is_mostly_protected_comes_back_whole():
    q, k, v = inputs(*SHAPES["gqa"], seed=1)
    half = compress(q, k, v, policy="snapkv", budget=0.4, protect=[[0, 50]])
    assert half.budgets == [83] * 6  # the window's 32 and the 50, and one more
    whole = compress(q, k, v, policy="snapkv", budget=0.4, protect=[[0, 51]])
    assert whole.budgets == [101] * 6


def test_nothing_protected_is_what_was_asked_for():
    q, k, v = inputs(*SHAPES["gqa"], seed=1)
    one, other = (
        compress(q, k, v, policy="cake-chunk", budget=0.5, page_size=4, protect=spans)
        for spans in ((), [[85, 101]])  # the window
    )
    assert one.budgets == other.budgets
    for a, b in zip(one.positions, other.positions, strict=True):
        assert torch.equal(a, b)
