"""Compare the engine's kept positions, bytes and budgets with docs/methods.md in float64.

The reference gets the queries, keys and values that the attention layers received. The engine's
side is read back from the pages that decode steps will read.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import pad

from checkpoints import HYBRIDS, MIXTURES, SHAPES, STATEFUL, WIDE, make, tokens
from engines import BLOCK, V2, engine, model_runner_v1_only, settings
from kvcompress_kernels import k4v3
from recordings import packed_pages
from vllm_kvcompress.methods.budget_spec import LayerStats
from vllm_kvcompress.methods.method import round_to_pages
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.methods.parts.allocators import Uniform
from vllm_kvcompress.methods.published.cake import Cake
from vllm_kvcompress.methods.published.pyramidkv import Pyramid
from vllm_kvcompress.settings.config import CompressionConfig

WINDOW = 32
FLOAT32_EPS = torch.finfo(torch.float32).eps
ALLOCATORS = {"cake": Cake(), "snapkv": Uniform(), "pyramidkv": Pyramid()}
NAMES = [] if V2 else ["llama-gqa", "llama-mha", "llama-mqa", "llama-d80", "qwen3"]
CASES = [(name, method) for name in NAMES for method in ("cake", "snapkv")]
if V2:
    CASES = [("llama-gqa", "cake")]
else:  # PyramidKV has SnapKV's scores, and budgets from lengths alone
    CASES += [("llama-gqa", "pyramidkv"), ("qwen3-moe", "cake"), ("mixtral", "snapkv")]
# the last two have blocks of 96 tokens
STATES = ["qwen3-next"] if V2 else ["granite", "nemotron", "granite-96", "qwen3-next"]
CASES += [(name, "cake") for name in STATES]
CASES += [("gpt-oss", "cake")] if V2 else [(n, m) for n in HYBRIDS for m in ("cake", "snapkv")]
PROMPT = tokens(417, seed=33)


def softmax(logits: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Return the softmax over the last dim, with a sink's logit that has no column."""
    if sink is None:
        return logits.softmax(-1)
    sink_column = sink.expand(*logits.shape[:-1], 1)
    return torch.cat([logits, sink_column], -1).softmax(-1)[..., :-1]


def reference(
    q: torch.Tensor, k: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, tuple]:
    """Return the window's mean and variance ``[Hq, P]``, and (H, V), in float64.

    docs/methods.md 1.4 and 2.3.
    """
    heads, group, past = q.shape[1], q.shape[1] // k.shape[1], len(k) - WINDOW
    q, k = q.double()[-WINDOW:], k.double()
    mean, variance, entropy = [], [], 0.0
    for head in range(heads):
        logits = q[:, head] @ k[:, head // group].T / math.sqrt(q.shape[-1])
        for row in range(WINDOW):
            logits[row, past + row + 1 :] = -math.inf
        a = softmax(logits, None if sinks is None else sinks[head])[:, :past]
        mean.append(a.mean(0))
        variance.append(a.var(0, correction=1))
        entropy -= torch.special.xlogy(a, a).sum().item()
    shift = torch.stack(variance).sum().item()
    return torch.stack(mean), torch.stack(variance), (entropy, shift)


def scores_of(method: str, mean: torch.Tensor, variance: torch.Tensor, heads: int) -> torch.Tensor:
    """Return ``[Hkv, P]`` scores, pooled by plain loops."""
    per_head = mean + 200 * variance if method == "cake" else mean * WINDOW
    grouped = per_head.view(heads, -1, per_head.shape[-1]).mean(1)
    reach = 2 if method == "cake" else 3
    out = torch.empty_like(grouped)
    for j in range(grouped.shape[-1]):
        near = grouped[:, max(j - reach, 0) : j + reach + 1]
        out[:, j] = near.sum(1) / 5 if method == "cake" else near.amax(1)
    return out


def assert_decode_reads_kept_tokens(
    seen, held, shape, tokens: int, packed_end: int | None = None
) -> None:
    """Check that every decode step attends exactly to kept tokens, the tail and decoded tokens.

    Args:
        packed_end: tokens before the tail; None for those of the full blocks.
    """
    if packed_end is None:
        packed_end = tokens // shape.block * shape.block
    for layer, (keys, values) in enumerate(held):
        q, k, v, out = (
            torch.cat([part.flatten(1) for part in seen[layer][name]]).double()
            for name in ("q", "k", "v", "out")
        )
        q, k, v, out = (x.view(len(q), -1, shape.head_dim) for x in (q, k, v, out))
        sinks = seen[layer]["sinks"]
        assert len(q) > tokens + 4
        for position in range(tokens, len(q)):
            for head in range(shape.heads):
                kv = head // (shape.heads // shape.kv_heads)
                all_k = torch.cat([keys[kv].double(), k[packed_end : position + 1, kv]])
                all_v = torch.cat([values[kv].double(), v[packed_end : position + 1, kv]])
                logits = all_k @ q[position, head] / math.sqrt(shape.head_dim)
                # float32 rounding of logits becomes a relative error of the softmax
                reach = (all_k.norm(dim=-1).amax() * q[position, head].norm()).item()
                rounding = 2 * FLOAT32_EPS * reach / math.sqrt(shape.head_dim)
                # rounding of outputs written in bfloat16
                output_eps = 0 if shape.dtype == "float32" else torch.finfo(torch.bfloat16).eps
                bound = (1e-6 + rounding + output_eps) * all_v.abs().amax().item()
                weights = softmax(logits, None if sinks is None else sinks[head])
                assert (out[position, head] - weights @ all_v).abs().amax() <= bound


def packed_groups(llm, leading_blocks):
    """Step until a prompt is packed in k4v3, and return each layer's tokens, keys and values.

    Args:
        leading_blocks: ordinary blocks that each layer must read before its other ordinary blocks.

    Returns:
        number of packed tokens of each layer, its groups, and the keys and values ``[Hkv, n, D]``
        in float64 that they stand for.
    """
    while not llm.compressor.compressed:
        unfinished = llm.llm.llm_engine.has_unfinished_requests()
        assert unfinished, "the request ended without being packed"
        llm.step()
    pool = llm.compressor.pool
    (slot,) = pool._slots.values()
    counts, groups, held = pool._group_tokens[slot].tolist(), [], []
    assert pool._num_packed[slot].tolist() == [leading_blocks] * len(counts)
    page_tokens = k4v3.page_tokens(pool.block_size, pool.itemsize)
    for layer, count in enumerate(counts):
        pages = pool._packed[slot, layer, 1 : 1 - (-count // page_tokens)].long()
        layer_groups = k4v3.read_pages(pool.byte_pages, pages, pool.itemsize)
        parts = k4v3.dequantise(layer_groups, torch.float64)
        groups.append(layer_groups)
        held.append([part.transpose(0, 1).flatten(1, 3)[:, :count] for part in parts])
    return counts, groups, held


def assert_groups_equal_reference(groups, kept, counts, keys, values) -> None:
    """Check codes, scales and minima of one layer's groups against float64.

    Args:
        groups: ``[pages, Hkv, groups, ...]``.
        kept: ``[Hkv, n]`` positions.
        keys, values: ``[S, Hkv, D]`` float64, as attention received them.
    """
    for head in range(keys.shape[1]):
        for number, start in enumerate(range(0, counts, k4v3.GROUP)):
            positions = kept[head, start : min(start + k4v3.GROUP, counts)].long()
            k, v = keys[positions, head], values[positions, head]
            padding = (0, 0, 0, k4v3.GROUP - len(k))
            want = k4v3.quantise(pad(k, padding), pad(v, padding), len(k))
            got = k4v3.Group(*(part.transpose(0, 1)[head].flatten(0, 1)[number] for part in groups))
            for name, actual, expected in zip(want._fields, got, want, strict=True):
                if "codes" not in name:
                    # float32 and float64 may round to neighbouring float16 numbers
                    valid = slice(None) if "key" in name else slice(len(k))
                    torch.testing.assert_close(
                        actual[valid], expected[valid], rtol=1e-3, atol=1e-7, msg=name
                    )
            steps = got.key_scale, got.value_scale[: len(v), None]
            minima = got.key_minimum, got.value_minimum[: len(v), None]
            for x, codes, step, minimum in zip(
                (k, v), (got.key_codes, got.value_codes), steps, minima, strict=True
            ):
                exact = (x - minimum.double()) / step.double().clamp(min=1e-12)
                error = (codes[: len(x)].double() - exact).abs()
                top = 15 if codes is got.key_codes else 7
                inside = (exact >= 0) & (exact <= top)
                assert (error[inside] <= 0.5 + 1e-3).all()
                assert (codes[: len(x)][exact < 0] == 0).all()
                assert (codes[: len(x)][exact > top] == top).all()


def packed(llm):
    """Step until a prompt is packed, and return its page counts, keys and values.

    Returns:
        pages of each layer, and each layer's packed keys and values ``[Hkv, n, D]``.
    """
    while not llm.compressor.compressed:
        llm.step()
    (slot,) = llm.compressor.pool._slots.values()
    return llm.compressor.pool._num_packed[slot].tolist(), packed_pages(llm)


def assert_equals_reference(config, seen, counts, held, shape, tokens: int) -> None:
    """Check that a prompt's pages hold what the method keeps in float64."""
    assert_decode_reads_kept_tokens(seen, held, shape, tokens)
    plan = page_plan(config.budget_spec(shape.layers, tokens), shape.block)
    assert_selection_equals_reference(config, seen, counts, held, shape, plan)


def assert_selection_equals_reference(config, seen, counts, held, shape, plan) -> None:
    """Check that the layers' pages and tokens are those that the method keeps in float64."""
    tokens = plan.tokens
    unpacked_from = tokens - plan.tail
    q, k, v = (
        [torch.cat(seen[i][part])[:tokens].float() for i in range(shape.layers)] for part in "qkv"
    )
    q, k, v = ([x.view(tokens, -1, shape.head_dim) for x in layers] for layers in (q, k, v))
    found = [reference(q[i], k[i], seen[i]["sinks"]) for i in range(shape.layers)]
    entropy, shift = torch.tensor([pair for *_, pair in found], dtype=torch.float64).T
    past = ALLOCATORS[config.compress].allocate(
        plan.budget_spec, LayerStats(entropy=entropy, shift=shift)
    )
    assert counts == round_to_pages(past + WINDOW + plan.leading_tokens, plan).tolist()
    for layer, (keys, values) in enumerate(held):
        mean, variance, _ = found[layer]
        scores = scores_of(config.compress, mean, variance, shape.kv_heads)
        for head in range(shape.kv_heads):
            where = {row.numpy().tobytes(): i for i, row in enumerate(k[layer][:, head])}
            assert len(where) == tokens, "keys must identify positions"
            kept = [where[row.numpy().tobytes()] for row in keys[head].float()]
            assert kept == sorted(kept)
            assert torch.equal(values[head].float(), v[layer][kept, head])
            protected = {*range(tokens - WINDOW, unpacked_from), *range(plan.leading_tokens)}
            assert protected <= set(kept)
            ranked = scores[head][: min(unpacked_from, tokens - WINDOW)]
            scored = range(plan.leading_tokens, len(ranked))
            order = sorted(scored, key=lambda j: (-ranked[j].item(), j))
            best = order[: len(kept) - len(protected)]
            # float32 and float64 may rank only equal scores differently
            boundary = ranked[best[-1]].item()
            for j in set(best) ^ (set(kept) - protected):
                assert ranked[j].item() == pytest.approx(boundary, rel=1e-5), (layer, head, j)
            assert len(set(best) ^ (set(kept) - protected)) <= 4


@pytest.mark.parametrize(("name", "method"), CASES)
def test_pages_contain_the_tokens_that_the_method_selects(
    name, method, checkpoints_folder, request
):
    if name in STATEFUL:
        request.getfixturevalue("states_are_served")
    shape = {**SHAPES, **MIXTURES, **HYBRIDS, **STATEFUL}[name]
    block = shape.block
    # with long blocks a small budget keeps so few pages that there is no choice
    config = settings(method, 0.3 if block == BLOCK else 0.7, window=WINDOW)
    with engine(
        make(name, checkpoints_folder),
        additional_config=config,
        dtype=shape.dtype,
        mamba_ssm_cache_dtype="float32",  # only for states, whatever the processor supports
        enable_prefix_caching=False,
        max_num_batched_tokens=150,
        max_num_seqs=4,
        max_model_len=1024,
    ) as llm:
        seen = llm.record_attention()
        llm.submit("r", PROMPT, 8)
        counts, held = packed(llm)
        assert llm.compressor.pool.block_size == block
        llm.drain()

    shape = replace(shape, layers=len(seen))  # the full-attention layers
    config = CompressionConfig.parse(config["kvcompress"])
    assert_equals_reference(config, seen, counts, held, shape, len(PROMPT))


GROUP_CASES = [
    ("qwen3", "cake", 0.4, "float32", 32),
    ("qwen3", "snapkv", 0.6, "float32", 128),
    ("qwen3", "snapkv", 0.3, "bfloat16", 128),  # the first block would be too much of 450 tokens
    ("llama-mqa", "pyramidkv", 0.5, "bfloat16", 32),
    ("llama-d80", "cake", 0.8, "bfloat16", 32),
    ("gpt-oss-d64", "cake", 0.4, "float32", 32),
]


@model_runner_v1_only
@pytest.mark.parametrize(("name", "method", "budget", "dtype", "block"), GROUP_CASES)
def test_groups_hold_the_tokens_that_the_method_selects(
    name, method, budget, dtype, block, checkpoints_folder
):
    """Codes against float64, and each step's output against the tokens that they stand for."""
    shape = replace({**SHAPES, **WIDE}[name], block=block, dtype=dtype)
    config = settings(method, budget, window=WINDOW, packed_dtype="k4v3")
    prompt = tokens(1500, seed=34)
    with engine(
        make(name, checkpoints_folder),
        additional_config=config,
        dtype=dtype,
        block_size=block,
        enable_prefix_caching=False,
        max_num_batched_tokens=600,
        max_num_seqs=4,
        max_model_len=2048,
    ) as llm:
        seen = llm.record_attention()
        results = llm.watch_packing(lambda result: result)
        llm.submit("r", prompt, 8)
        itemsize = llm.compressor.pool.itemsize
        config = CompressionConfig.parse(config["kvcompress"])
        plan = page_plan(
            config.budget_spec(len(llm.compressor.pool.layer_offset), len(prompt)),
            block,
            page_tokens=k4v3.page_tokens(block, itemsize),
        )
        assert plan.leading_blocks == int(4 * block <= budget * len(prompt) - WINDOW)
        counts, groups, held = packed_groups(llm, plan.leading_blocks)
        shape = replace(shape, layers=len(seen))
        (request_id,) = llm.scheduler.requests
        assert 32 <= plan.tail < 32 + block
        unpacked_blocks = plan.leading_blocks - (-plan.tail // block)
        assert llm.num_blocks_held(request_id) == unpacked_blocks + plan.blocks
        llm.drain()

    (result,) = results
    unpacked = plan.leading_tokens + plan.tail
    assert counts == [plan.layer_tokens(pages) - unpacked for pages in result.counts.tolist()]
    exact, read = [], []
    for layer in range(shape.layers):
        k, v = (
            torch.cat(seen[layer][name])[: len(prompt)].view(len(prompt), -1, shape.head_dim)
            for name in "kv"
        )
        kept, count = result.kept[layer], counts[layer]
        assert_groups_equal_reference(groups[layer], kept, count, k.double(), v.double())
        leading = torch.arange(plan.leading_tokens).expand(len(kept), -1)
        index = torch.cat([leading, kept[:, :count].long()], 1)
        head = torch.arange(len(kept))[:, None]
        exact.append((k[index, head], v[index, head]))
        read.append(
            [
                torch.cat([part[leading, head].double(), stored], 1)
                for part, stored in zip((k, v), held[layer], strict=True)
            ]
        )
    assert_decode_reads_kept_tokens(seen, read, shape, len(prompt), plan.packed_end)
    assert_selection_equals_reference(config, seen, result.counts.tolist(), exact, shape, plan)
