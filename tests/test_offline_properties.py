"""Whatever the preset, budget and page size, the kept tokens are exact and in order."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from against_the_reference import inputs
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.methods.registry import PRESETS
from vllm_kvcompress.offline import compress
from vllm_kvcompress.settings.config import CompressionConfig

prop = settings(derandomize=True, deadline=None, max_examples=40)


@st.composite
def cases(draw):
    group = draw(st.sampled_from([1, 2, 3]))
    kv_heads = draw(st.integers(1, 3))
    layers, tokens = draw(st.integers(1, 6)), draw(st.integers(1, 90))
    q, k, v = inputs(layers, group * kv_heads, kv_heads, tokens, 4, 0.0, draw(st.integers(0, 99)))
    preset = draw(st.sampled_from(sorted(PRESETS)))
    ratio = st.sampled_from([0.05, 0.2, 0.5, 0.9, 1.0])
    budget = draw(ratio | st.integers(33, 120))
    edges = sorted(draw(st.sets(st.integers(0, tokens), max_size=6)))
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    return preset, (q, k, v), budget, draw(st.sampled_from([1, 4, 16])), spans


@prop
@given(cases())
def test_kept_tokens_are_exact_and_in_order(case):
    preset, (q, k, v), budget, page, _ = case
    layers, kv_heads, tokens, _ = k.shape
    config = CompressionConfig.parse({"compress": preset, "budget": budget, "lookahead": 0})
    got = compress(q, k, v, policy=preset, budget=budget, page_size=page)
    mean = config.tokens_per_layer(tokens)
    total = config.budget_spec(layers, tokens).kept
    if tokens <= mean:
        assert got.budgets == [tokens] * layers
        assert all(torch.isinf(s).all() for s in got.scores)
    elif page == 1:
        assert sum(got.budgets) == min(total, layers * tokens)
    else:
        plan = page_plan(config.budget_spec(layers, tokens), page)
        all_tokens = layers * tokens
        kept = all_tokens if plan is None else plan.pages * page + layers * plan.tail
        assert sum(got.budgets) == kept
    w = config.resolved_window
    for layer in range(layers):
        kept = got.positions[layer]
        assert kept.shape == (kv_heads, got.budgets[layer])
        assert (kept.diff(dim=1) > 0).all()
        window_tokens = set(range(max(tokens - w, 0), tokens))
        assert all(window_tokens <= set(row) for row in kept.tolist())
        if preset in ("streamingllm", "d2o") and got.budgets[layer] >= 4:
            assert all(row[:4] == [0, 1, 2, 3] for row in kept.tolist())
        if preset != "d2o":
            index = kept[..., None].expand(-1, -1, 4)
            assert torch.equal(got.keys[layer], k[layer].gather(1, index))
            assert torch.equal(got.values[layer], v[layer].gather(1, index))


@prop
@given(cases())
def test_protected_tokens_are_kept_in_every_layer_and_head(case):
    preset, (q, k, v), budget, page, spans = case
    layers, _, tokens, _ = k.shape
    got = compress(q, k, v, policy=preset, budget=budget, page_size=page, protect=spans)
    config = CompressionConfig.parse({"compress": preset, "budget": budget, "lookahead": 0})
    plan = page_plan(config.budget_spec(layers, tokens), page, tuple(spans))
    if plan is None:
        assert got.budgets == [tokens] * layers
        return
    assert sum(got.budgets) == plan.pages * page + layers * plan.tail
    assert all((n - plan.tail) % page == 0 for n in got.budgets)
    protected = [j for start, stop in spans for j in range(start, stop)]
    for layer, kept in enumerate(got.positions):
        assert (kept.diff(dim=1) > 0).all()
        always_kept = {*protected, *range(tokens - plan.kept_after, tokens)}
        assert all(always_kept <= {*row} for row in kept.tolist())
        if protected:
            places = torch.tensor([[row.index(j) for j in protected] for row in kept.tolist()])
            index = places[..., None].expand(-1, -1, 4)
            for kept_cache, cache in ((got.keys, k), (got.values, v)):
                assert torch.equal(kept_cache[layer].gather(1, index), cache[layer][:, protected])
