"""The engine's pipeline on plain tensors, for researchers and for checks. No vLLM.

from vllm_kvcompress.offline import compress

kept = compress(queries, keys, values, policy="cake", budget=0.1)
kept.budgets, kept.positions[0], kept.keys[0]
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvcompress_kernels.column_sums import column_sums
from kvcompress_kernels.merge_evicted import merge_evicted
from kvcompress_kernels.window_scores import window_scores
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.page_plan import PagePlan, page_plan
from vllm_kvcompress.pipeline import Method, Observed, PagedLayer, method_of
from vllm_kvcompress.settings.config import CompressionConfig

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """What is left of a prompt, per layer l.

    Args:
        budgets: tokens kept, n_l.
        positions: ``[Hkv, n_l]`` int64, ascending.
        keys: ``[Hkv, n_l, D]`` in the dtype given; merged where the method merges keys.
        values: as `keys`.
        scores: ``[Hkv, S]`` float32 of the scorer, +inf where a token is kept whatever its score.
            Chunks are ranked by their mean over all heads, from the layer whose ranking is used.
    """

    budgets: list[int]
    positions: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    scores: list[torch.Tensor]


@torch.no_grad()
def compress(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    policy: str | Mapping[str, Any],
    budget: float | int,
    page_size: int = 1,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> Compressed:
    """Compress one prompt's cache as the engine does at the end of its prefill.

    A prompt that its budget holds, or that whole pages would not shorten, comes back whole, all
    scores +inf.

    Args:
        queries: ``[L, Hq, S, D]`` any float dtype, rotated; read in float32.
        keys: ``[L, Hkv, S, D]``, rotated.
        values: ``[L, Hkv, S, D]``.
        policy: a preset, or settings as in ``--kv-compress-config``; those that only an engine
            needs (`min_prompt`, `log_requests`) have no effect.
        budget: a ratio in (0, 1] or whole tokens per layer, window included. A ratio is exact as
            written: 0.7 of 90 tokens is 63, where floating point says 62.
        page_size: tokens that are kept or dropped together; 1 is the method's exact budget, the
            engine's block size is what the engine keeps.
        scale: factor on the attention logits; None takes ``D ** -0.5``.
        sinks: ``[L, Hq]`` any float dtype, each head's sink: a logit in every row's softmax for no
            key, as gpt-oss has them. None without.

    Raises:
        ConfigError: `policy` or `budget` is wrong.
        ValueError: the tensors' shapes or dtypes do not fit each other, or `scale` is not finite.
    """
    _check(queries, keys, values, page_size, scale)
    if sinks is not None and (
        not isinstance(sinks, torch.Tensor)
        or sinks.dtype not in DTYPES
        or sinks.shape != queries.shape[:2]
    ):
        shape = getattr(sinks, "shape", None), getattr(sinks, "dtype", type(sinks))
        raise ValueError(
            f"compress: sinks must be {tuple(queries.shape[:2])} of one of {DTYPES}; got {shape}"
        )
    raw_settings: Any = {"compress": policy} if isinstance(policy, str) else policy
    if isinstance(raw_settings, Mapping):
        raw_settings = {**raw_settings, "budget": budget}
    settings = CompressionConfig.parse(raw_settings)
    if not settings.enabled:
        raise ValueError("policy must be a method, got 'off'; leave the cache as it is instead")
    method = method_of(settings)
    layers, _, tokens, dim = keys.shape
    plan = page_plan(settings.prompt(layers, tokens), page_size)
    if plan is None:
        return _whole(keys, values)
    rows = -(-tokens // page_size)
    pages = torch.arange(rows, device=keys.device)
    places = [
        PagedLayer(
            layer=layer,
            key_pages=_paged(keys[layer], page_size).transpose(2, 3),
            value_pages=_paged(values[layer], page_size),
            pages=pages,
            scale=dim**-0.5 if scale is None else scale,
            sinks=None if sinks is None else sinks[layer].float(),
        )
        for layer in range(layers)
    ]
    observed = [_observe(method, place, plan, queries[place.layer]) for place in places]
    return _collect(method, plan, places, observed, keys, values)


def _paged(cache: torch.Tensor, page_size: int) -> torch.Tensor:
    """``[Hkv, S, D]`` to ``[ceil(S / page_size), Hkv, page_size, D]``; the last page is filled."""
    heads, tokens, dim = cache.shape
    rows = -(-tokens // page_size)
    padded = torch.nn.functional.pad(cache, (0, 0, 0, rows * page_size - tokens))
    return padded.view(heads, rows, page_size, dim).transpose(0, 1)


def _observe(method: Method, where: PagedLayer, plan: PagePlan, queries: torch.Tensor) -> Observed:
    rows = queries.transpose(0, 1)  # [S, Hq, D]
    sums = None
    reads = method.reads_of(where.layer)
    if Reads.COLUMN_SUMS in reads:
        sums = column_sums(
            rows, where.key_pages, where.pages, plan.tokens, where.scale, where.sinks
        )
    window = None
    if Reads.WINDOW in reads:
        window = window_scores(
            rows[plan.tokens - plan.window :],
            where.key_pages,
            where.pages,
            plan.tokens,
            where.scale,
            variance=Reads.VARIANCE in method.reads,
            maximum=Reads.MAXIMUM in method.reads,
            pooled=Reads.POOLED in method.reads,
            sinks=where.sinks,
        )
    return method.observe(where, plan, window, sums)


def _collect(
    method: Method,
    plan: PagePlan,
    places: list[PagedLayer],
    observed: list[Observed],
    keys: torch.Tensor,
    values: torch.Tensor,
) -> Compressed:
    pages = method.layer_pages(plan, observed)
    stacked = method.select(observed, plan, pages, tail=True)
    budgets = pages * plan.block_size + plan.tail
    out = Compressed(
        budgets=budgets.tolist(),
        positions=[],
        keys=[],
        values=[],
        scores=list(method.protected_scores(observed, plan, pages)),
    )
    for place, count in zip(places, out.budgets, strict=True):
        kept = stacked[place.layer, :, :count].long()
        if method.merge:
            kept_tokens = torch.full((1,), count, dtype=torch.int32, device=kept.device)
            merged = merge_evicted(
                place.key_pages,
                place.value_pages,
                place.pages[None],
                plan.tokens,
                kept[None],
                kept_tokens,
                least=count,
                values_only=method.values_only,
            )
            k, v = merged.keys[0], merged.values[0]
            k, v = k.to(keys.dtype), v.to(values.dtype)
        else:
            index = kept[..., None].expand(-1, -1, keys.shape[-1])
            k, v = (x[place.layer].gather(1, index) for x in (keys, values))
        out.positions.append(kept)
        out.keys.append(k)
        out.values.append(v)
    return out


def _whole(keys: torch.Tensor, values: torch.Tensor) -> Compressed:
    layers, heads, tokens, _ = keys.shape
    every = torch.arange(tokens, device=keys.device).expand(heads, tokens)
    kept = torch.full((heads, tokens), torch.inf, device=keys.device)
    return Compressed(
        budgets=[tokens] * layers,
        positions=[every.clone() for _ in range(layers)],
        keys=[k.clone() for k in keys],
        values=[v.clone() for v in values],
        scores=[kept.clone() for _ in range(layers)],
    )


def _check(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_size: int,
    scale: float | None,
) -> None:
    def require(ok: bool, rule: str, got: object) -> None:
        if not ok:
            raise ValueError(f"compress: {rule}; got {got}")

    for name, tensor in (("queries", queries), ("keys", keys), ("values", values)):
        require(isinstance(tensor, torch.Tensor), f"{name} must be a torch tensor", type(tensor))
        require(tensor.dim() == 4, f"{name} must be [L, H, S, D]", tuple(tensor.shape))
        require(tensor.dtype in DTYPES, f"{name} must be one of {DTYPES}", tensor.dtype)
    require(keys.shape == values.shape, f"values must be {tuple(keys.shape)}", tuple(values.shape))
    layers, kv_heads, tokens, dim = keys.shape
    require(math.prod(keys.shape) > 0, "keys must not be empty", tuple(keys.shape))
    heads = queries.shape[1]
    multiple = heads > 0 and heads % kv_heads == 0
    require(multiple, f"Hq must be a multiple of Hkv={kv_heads}", heads)
    want = (layers, heads, tokens, dim)
    require(queries.shape == want, f"queries must be {want}", tuple(queries.shape))
    whole = isinstance(page_size, int) and page_size >= 1
    require(whole, "page_size must be a whole number, at least 1", page_size)
    finite = scale is None or (isinstance(scale, (int, float)) and math.isfinite(scale))
    require(finite, "scale must be a finite number, or None for D ** -0.5", scale)
