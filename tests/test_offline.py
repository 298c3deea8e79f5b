"""Compare every preset on plain tensors with docs/methods.md in float64."""

import numpy as np
import pytest
import torch

import methods_reference as ref
from against_the_reference import SHAPES, WINDOWS, assert_equals_reference, inputs
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.registry import PRESETS
from vllm_kvcompress.offline import compress


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "random"])
@pytest.mark.parametrize("ratio", [0.5, 0.37])
def test_equals_the_reference(preset, shape, ratio):
    assert_equals_reference(preset, shape, ratio)


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "random"])
def test_equals_the_reference_with_attention_sinks(preset):
    """As in gpt-oss, with shares from nearly 0 to nearly 1 that differ by head and layer."""
    layers, heads, *_ = SHAPES["gqa"]
    order = np.random.RandomState(3).permutation(layers * heads)
    sinks = torch.linspace(-30, 12, layers * heads)[order]
    assert_equals_reference(preset, "gqa", 0.5, sinks.view(layers, heads))


@pytest.mark.parametrize("lookahead", [8, 40])
@pytest.mark.parametrize("preset", ["cake", "cake-chunk", "tova", "pyramidkv", "fastcaote"])
def test_equals_the_reference_if_output_tokens_score(preset, lookahead):
    """The output tokens are kept in addition to the prompt's budget.

    Only `cake-chunk` reads prompt queries: it keeps the runs that the prompt's last 16 attend to.
    """
    assert_equals_reference(preset, "gqa", 0.5, lookahead=lookahead)
    if lookahead > 32:
        assert_equals_reference(preset, "smol", 0.37, lookahead=lookahead)


@pytest.mark.parametrize("preset", ["cake", "cake-chunk", "snapkv"])
def test_equals_the_reference_if_prompt_and_output_tokens_score(preset):
    """The output's queries alone decide how much each layer keeps."""
    assert_equals_reference(preset, "gqa", 0.5, lookahead=8, window=20)


def test_a_look_ahead_needs_prompt_tokens():
    q, k, v = inputs(*SHAPES["gqa"], seed=1)
    with pytest.raises(
        ValueError, match=r"lookahead=101 .* 101 output tokens; got 101 tokens. Give more"
    ):
        compress(q, k, v, policy={"compress": "cake", "lookahead": 101}, budget=0.5)


@pytest.mark.parametrize("preset", ["snapkv", "h2o"])
def test_a_scale_may_be_a_whole_number(preset):
    q, k, v = inputs(*SHAPES["gqa"], seed=1)
    from_int, from_float = (compress(q, k, v, policy=preset, budget=0.5, scale=n) for n in (1, 1.0))
    for one, other in zip(from_int.positions, from_float.positions, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("base", ["snapkv", "tova", "h2o"])
@pytest.mark.parametrize("how", ["mean", "l2"])
@pytest.mark.parametrize("fast", [False, True])
def test_caote_over_every_base(base, how, fast):
    q, k, v = inputs(*SHAPES["gqa"], seed=4)
    preset = "fastcaote" if fast else "caote"
    policy = {"compress": preset, "scorer_params": {"base": base, "reduce": how}}
    got = compress(q, k, v, policy=policy, budget=0.5)
    w = 1 if base == "tova" else 32
    for layer in range(len(k)):
        exact = (x[layer].double().numpy() for x in (q, k, v))
        want = ref.caote(*exact, w, base=base, how=how, fast=fast)
        np.testing.assert_allclose(
            got.scores[layer][:, : want.shape[1]].numpy(), want, rtol=1e-4, atol=1e-6
        )


def test_chunks_of_any_size_shared_or_not_and_reused():
    q, k, v = inputs(*SHAPES["gqa"], seed=8)
    w, tokens = 32, 101
    scores = [
        ref.snapkv(*(x[i].double().numpy() for x in (q, k, v)), w, kernel=1) for i in range(6)
    ]
    for size, shared, reuse in ((1, True, 1), (3, False, 1), (20, True, 2), (10, False, 4)):
        params = {"size": size, "shared": shared, "reuse": reuse}
        policy = {"compress": "chunkkv", "allocator": "pyramid", "selector_params": params}
        got = compress(q, k, v, policy=policy, budget=0.5)
        assert got.budgets == [b + w for b in ref.pyramid_budgets(6, 50 - w, tokens - w)]
        for layer, n in enumerate(got.budgets):
            leader = scores[layer // reuse * reuse]
            for head in range(2):
                t = leader.sum(0) if shared else leader[head]
                want = [*ref.chunks(t, n - w, size), *range(tokens - w, tokens)]
                assert got.positions[layer][head].tolist() == want


# -- kept tokens in k4v3 ---------------------------------------------------------------------------

K4V3 = {"compress": "cake", "packed_dtype": "k4v3"}


def stored(tokens, *, per_channel):
    """Return what k4v3 stores of up to 64 tokens ``[n, D]`` of one head, in loops."""
    out = torch.empty_like(tokens)
    lines, levels = (tokens.T, 16) if per_channel else (tokens, 8)
    for line, stored_line in zip(lines, out.T if per_channel else out, strict=True):
        low = line.min().half().to(line.dtype)
        step = ((line.max() - low) / (levels - 1)).half().to(line.dtype)
        codes = ((line - low) / step + 0.5).floor().clamp(0, levels - 1)
        stored_line.copy_(low + step * codes)
    return out


def assert_stored(kept, plain, tails, leading=0):
    """Assert that the tokens before each layer's tail are stored, in groups of 64.

    The first `leading` tokens and the tail are exact.
    """
    for layer, tail in enumerate(tails):
        for got, exact, per_channel in (
            (kept.keys[layer], plain.keys[layer], True),
            (kept.values[layer], plain.values[layer], False),
        ):
            end = exact.shape[1] - tail
            assert torch.equal(got[:, end:], exact[:, end:])
            assert torch.equal(got[:, :leading], exact[:, :leading])
            for head in range(len(exact)):
                for start in range(leading, end, 64):
                    group = slice(start, min(start + 64, end))
                    want = stored(exact[head, group].float(), per_channel=per_channel)
                    torch.testing.assert_close(got[head, group], want.to(got.dtype))
                    assert not torch.equal(got[head, group], exact[head, group])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [0.5, 1.0])
@pytest.mark.parametrize("preset", ["cake", "d2o"])
def test_k4v3_returns_the_stored_numbers(preset, budget, dtype):
    """With pages of one token, in groups of 64 kept tokens of a head. D2O merges before."""
    q, k, v = inputs(3, 4, 2, 200, 64, 0.0, seed=1, dtype=dtype)
    plain = compress(q, k, v, policy=preset, budget=budget)
    kept = compress(q, k, v, policy={**K4V3, "compress": preset}, budget=budget)
    assert (kept.budgets, kept.keys[0].dtype) == (plain.budgets, dtype)
    for a, b in zip(
        [*kept.positions, *kept.scores], [*plain.positions, *plain.scores], strict=True
    ):
        assert torch.equal(a, b)
    assert_stored(kept, plain, [0] * 3)


def test_k4v3_fills_pages_as_an_engine_does():
    """A page of 16 tokens in float32 holds 128, and the first page and the tail stay exact.

    The tail has at least 32 tokens.
    """
    q, k, v = inputs(3, 4, 2, 605, 64, 0.0, seed=2)
    kept, tail = compress(q, k, v, policy=K4V3, budget=0.4, page_size=16), 32 + 605 % 16
    assert sum(kept.budgets) == 3 * (16 + 2 * 128 + tail)
    assert {count % 128 for count in kept.budgets} == {16 + tail}
    assert all(torch.equal(x[:, :16], torch.arange(16).expand(2, -1)) for x in kept.positions)
    assert all(x[:, :16].isinf().all() for x in kept.scores)
    positions = [x[..., None].expand(-1, -1, 64) for x in kept.positions]
    plain = compress(q, k, v, policy="cake", budget=1.0)
    plain.keys[:] = [x.gather(1, index) for x, index in zip(plain.keys, positions, strict=True)]
    plain.values[:] = [x.gather(1, index) for x, index in zip(plain.values, positions, strict=True)]
    assert_stored(kept, plain, [tail] * 3, leading=16)
    every = compress(q, k, v, policy=K4V3, budget=1.0, page_size=16)
    assert every.budgets == [605] * 3
    # whole pages of 128 tokens behind the first page
    exact = compress(q, k, v, policy="cake", budget=1.0)
    assert_stored(every, exact, [(605 - 16) % 128] * 3, leading=16)


@pytest.mark.parametrize("preset", ["d2o", "streamingllm", "global-scores", "lookahead"])
def test_the_first_page_in_k4v3_is_kept_by_every_method(preset):
    """It counts towards the budget, is not scored, and nothing is merged into it."""
    q, k, v = inputs(3, 4, 2, 605, 64, 0.0, seed=2)
    policy = {
        "global-scores": {"compress": "layer-defensivekv"},
        "lookahead": {"compress": "cake-chunk", "lookahead": 20},
    }.get(preset, {"compress": preset})
    for protect in ((), [[4, 10], [60, 90]]):
        kept = compress(
            q, k, v, policy={**policy, "packed_dtype": "k4v3"}, budget=0.4, page_size=16,
            protect=protect,
        )  # fmt: skip
        # Tokens are merged into the last block only, so D2O packs all full blocks.
        tail = 605 % 16 + (0 if preset == "d2o" else 32)
        assert sum(kept.budgets) == 3 * (16 + 2 * 128 + tail)
        always = {*range(16), *(token for span in protect for token in range(*span))}
        for layer, positions in enumerate(kept.positions):
            assert torch.equal(kept.keys[layer][:, :16], k[layer, :, :16])
            assert torch.equal(kept.values[layer][:, :16], v[layer, :, :16])
            assert all(always <= set(head) for head in positions.tolist())
            assert all(len(set(head)) == kept.budgets[layer] for head in positions.tolist())


def test_k4v3_leaves_a_prompt_as_it_is_if_packing_frees_no_page():
    q, k, v = inputs(2, 2, 1, 40, 64, 0.0, seed=3)
    kept = compress(q, k, v, policy=K4V3, budget=1.0, page_size=32)
    assert torch.equal(kept.keys[0], k[0])
    protected = compress(q, k, v, policy=K4V3, budget=0.9, protect=[[0, 30]])
    assert torch.equal(protected.keys[0], k[0])


@pytest.mark.parametrize(
    ("dim", "page_size", "message"),
    [(16, 1, "this model has 16; set packed_dtype"), (64, 12, "got blocks of 12")],
)
def test_k4v3_needs_wide_heads_and_whole_groups(dim, page_size, message):
    q, k, v = inputs(2, 2, 1, 90, dim, 0.0, seed=3)
    with pytest.raises(ValueError, match=message):
        compress(q, k, v, policy=K4V3, budget=0.5, page_size=page_size)


# -- what holds for every preset ------------------------------------------------------------------


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_results_do_not_depend_on_earlier_prompts(preset):
    one, two = inputs(*SHAPES["gqa"], seed=1), inputs(*SHAPES["gqa"], seed=2)
    first = compress(*one, policy=preset, budget=0.4)
    compress(*two, policy=preset, budget=0.4)
    again = compress(*one, policy=preset, budget=0.4)
    assert first.budgets == again.budgets
    for a, b in zip(first.keys, again.keys, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_half_precision_inputs_are_read_as_float32(preset, dtype):
    tensors = inputs(*SHAPES["gqa"], seed=3, dtype=dtype)
    half = compress(*tensors, policy=preset, budget=0.4)
    full = compress(*(x.float() for x in tensors), policy=preset, budget=0.4)
    assert half.budgets == full.budgets
    for a, b in zip(half.positions, full.positions, strict=True):
        assert torch.equal(a, b)
    assert {x.dtype for x in [*half.keys, *half.values]} == {dtype}


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"random", "streamingllm"}))
def test_repeated_kv_heads_choose_the_same_tokens(preset):
    """G equal query heads, over one KV head or over G copies of it."""
    q, k, v = inputs(3, 1, 1, 80, 8, 0.0, seed=5)
    grouped = compress(q.expand(-1, 4, -1, -1), k, v, policy=preset, budget=0.5)
    repeated = compress(*(x.expand(-1, 4, -1, -1) for x in (q, k, v)), policy=preset, budget=0.5)
    assert grouped.budgets == repeated.budgets
    for one, four in zip(grouped.positions, repeated.positions, strict=True):
        assert torch.equal(one.expand(4, -1), four)


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 34, 65])
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_prompts_about_as_long_as_the_window(preset, tokens):
    q, k, v = inputs(2, 2, 1, tokens, 4, 0.0, seed=tokens)
    got = compress(q, k, v, policy=preset, budget=0.01)
    assert all(1 <= n <= tokens for n in got.budgets)


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (9, 3)])
@pytest.mark.parametrize("preset", ["snapkv", "pyramidkv", "dynamickv", "tova", "chunkkv", "cake"])
def test_equal_columns_keep_the_first_tokens(preset, heads):
    """Ties at every length: vectorised code sums the last columns in another order."""
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
def test_no_autograd_graph_is_kept(preset):
    q, k, v = (x.requires_grad_() for x in inputs(*SHAPES["gqa"], seed=1))
    got = compress(q, k, v, policy=preset, budget=0.5)
    assert not got.keys[0].requires_grad


@pytest.mark.parametrize("budget", [np.int64(50), np.int32(50), np.float32(0.5), "0.5", "50"])
def test_budgets_of_other_number_types(budget):
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
        (dict(policy={"compress": "caote", "base": "tova"}), "setting 'base' is unknown"),
        (dict(policy={"scorer": "caote", "scorer_params": {"base": "cake"}}), "caote.base must be"),
    ],
)
def test_bad_settings_are_refused(change, message):
    q, k, v = inputs(*SHAPES["gqa"], seed=1)
    with pytest.raises((ConfigError, ValueError), match=message):
        compress(q, k, v, **{"policy": "cake", "budget": 0.5, **change})


@pytest.mark.parametrize(
    ("change", "message"),
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
def test_bad_tensors_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        compress(*change(*inputs(*SHAPES["gqa"], seed=1)), policy="cake", budget=0.5)


@pytest.mark.parametrize("base", ["tova", "snapkv", "h2o"])
@pytest.mark.parametrize("scorer", ["caote", "fastcaote"])
@pytest.mark.parametrize("seed", range(5))
def test_caote_of_equal_tokens_keeps_the_first_tokens(scorer, base, seed):
    """Two keys and values alternate: all copies of the heaviest token have the same score."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.arange(40) % 2
    q = torch.randn(1, 1, 40, 8, generator=generator)
    k, v = torch.randn(2, 1, 1, 2, 8, generator=generator)[..., turn, :]
    policy = {"compress": scorer, "scorer_params": {"base": base}, "window": 1}
    kept = compress(q, k, v, policy=policy, budget=6)
    if base != "h2o":  # whose sums favour early tokens
        scores = kept.scores[0][0, :39]
        assert len(scores[::2].unique()) == len(scores[1::2].unique()) == 1
        best = sorted(range(39), key=lambda j: (-scores[j].item(), j))[:5]
        assert kept.positions[0][0].tolist() == [*sorted(best), 39]
