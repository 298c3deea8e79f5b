"""Compare the engine's kept positions, bytes and budgets with docs/methods.md in float64.

The reference gets the queries, keys and values that the attention layers received. The engine's
side is read back from the pages that decode steps will read.
"""

import math
from dataclasses import replace

import pytest
import torch

from checkpoints import HYBRIDS, MIXTURES, SHAPES, STATEFUL, make, tokens
from engines import BLOCK, V2, engine, settings
from vllm_kvcompress.methods.allocators.cake import Cake
from vllm_kvcompress.methods.allocators.pyramid import Pyramid
from vllm_kvcompress.methods.allocators.uniform import Uniform
from vllm_kvcompress.methods.budget_spec import LayerStats
from vllm_kvcompress.methods.budgets import round_to_pages
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.settings.config import CompressionConfig

WINDOW = 32
FLOAT32_EPS = torch.finfo(torch.float32).eps
ALLOCATORS = {"cake": Cake(), "snapkv": Uniform(), "pyramidkv": Pyramid()}
NAMES = ["llama-gqa"] if V2 else ["llama-gqa", "llama-mha", "llama-mqa", "llama-d80", "qwen3"]
CASES = [(name, method) for name in NAMES for method in ("cake", "snapkv")]
CASES += [("llama-gqa", "pyramidkv")]  # SnapKV's scores, and budgets from lengths alone
CASES += [] if V2 else [("qwen3-moe", "cake"), ("mixtral", "snapkv")]
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


def assert_decode_reads_kept_tokens(seen, held, shape, tokens: int) -> None:
    """Check that every decode step attends exactly to kept tokens, the tail and decoded tokens."""
    full_block_tokens = tokens // shape.block * shape.block
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
                all_k = torch.cat([keys[kv].double(), k[full_block_tokens : position + 1, kv]])
                all_v = torch.cat([values[kv].double(), v[full_block_tokens : position + 1, kv]])
                logits = all_k @ q[position, head] / math.sqrt(shape.head_dim)
                # float32 rounding of logits becomes a relative error of the softmax
                reach = (all_k.norm(dim=-1).amax() * q[position, head].norm()).item()
                rounding = 2 * FLOAT32_EPS * reach / math.sqrt(shape.head_dim)
                # rounding of outputs written in bfloat16
                output_eps = 0 if shape.dtype == "float32" else torch.finfo(torch.bfloat16).eps
                bound = (1e-6 + rounding + output_eps) * all_v.abs().amax().item()
                weights = softmax(logits, None if sinks is None else sinks[head])
                assert (out[position, head] - weights @ all_v).abs().amax() <= bound


def packed(llm):
    """Step until a prompt is packed, and return its page counts, keys and values.

    Returns:
        pages of each layer, and each layer's packed keys and values ``[Hkv, n, D]``.
    """
    while not llm.compressor.compressed:
        llm.step()
    (slot,) = llm.compressor.pool._slots.values()
    pool, compressor = llm.compressor.pool, llm.compressor
    counts = pool._num_packed[slot].tolist()
    held = []
    for layer, count in enumerate(counts):
        pages = pool._packed[slot, layer, :count].long()
        keys, values = compressor.packer.mover.read(pages)
        held.append((keys.permute(1, 0, 3, 2).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)))
    return counts, held


def assert_equals_reference(config, seen, counts, held, shape, tokens: int) -> None:
    """Check that a prompt's pages hold what the method keeps in float64."""
    full_block_tokens = tokens // shape.block * shape.block
    assert_decode_reads_kept_tokens(seen, held, shape, tokens)
    q, k, v = (
        [torch.cat(seen[i][part])[:tokens].float() for i in range(shape.layers)] for part in "qkv"
    )
    q, k, v = ([x.view(tokens, -1, shape.head_dim) for x in layers] for layers in (q, k, v))
    found = [reference(q[i], k[i], seen[i]["sinks"]) for i in range(shape.layers)]
    plan = page_plan(config.budget_spec(shape.layers, tokens), shape.block)
    entropy, shift = torch.tensor([pair for *_, pair in found], dtype=torch.float64).T
    past = ALLOCATORS[config.compress].allocate(
        plan.budget_spec, LayerStats(entropy=entropy, shift=shift)
    )
    assert counts == round_to_pages(past + WINDOW, plan).tolist()
    for layer, (keys, values) in enumerate(held):
        mean, variance, _ = found[layer]
        scores = scores_of(config.compress, mean, variance, shape.kv_heads)
        for head in range(shape.kv_heads):
            where = {row.numpy().tobytes(): i for i, row in enumerate(k[layer][:, head])}
            assert len(where) == tokens, "keys must identify positions"
            kept = [where[row.numpy().tobytes()] for row in keys[head].float()]
            assert kept == sorted(kept)
            assert torch.equal(values[head].float(), v[layer][kept, head])
            protected = set(range(tokens - WINDOW, full_block_tokens))
            assert protected <= set(kept)
            ranked = scores[head][: min(full_block_tokens, tokens - WINDOW)]
            order = sorted(range(len(ranked)), key=lambda j: (-ranked[j].item(), j))
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
