"""The engine's pipeline on plain tensors, for researchers and for checks. No vLLM.

from vllm_kvcompress.offline import compress

kept = compress(queries, keys, values, policy="cake", budget=0.1)
kept.budgets, kept.positions[0], kept.keys[0]
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcompress_kernels.column_sums import column_sums
from kvcompress_kernels.merge_evicted import merge_evicted
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.method import LayerObservation, Method
from vllm_kvcompress.methods.page_plan import PagePlan, page_plan
from vllm_kvcompress.methods.paged_layers import PagedLayers
from vllm_kvcompress.methods.spans import Spans, parse_spans
from vllm_kvcompress.planning.kv_footprint import KVFootprint
from vllm_kvcompress.planning.schedules import LookAhead
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.method_of import method_of

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
    protect: Sequence[Sequence[int]] = (),
) -> Compressed:
    """Compress one prompt's cache as the engine does at the end of its prefill.

    A prompt that its budget holds, or that whole pages would not shorten, comes back whole, all
    scores +inf.

    Args:
        queries: ``[L, Hq, S, D]`` any float dtype, rotated; read in float32.
        keys: ``[L, Hkv, S, D]``, rotated.
        values: ``[L, Hkv, S, D]``.
        policy: a preset, or settings as in ``--kv-compress-config``; those that only an engine
            needs (`min_prompt`, `log_requests`) have no effect. All S tokens are the prompt's,
            unless `lookahead` is among the settings: then the last so many are its answer's, which
            are kept, and judge the others.
        budget: a ratio in (0, 1] or whole tokens per layer, window included. A ratio is exact as
            written: 0.7 of 90 tokens is 63, where floating point says 62.
        page_size: tokens that are kept or dropped together; 1 is the method's exact budget, the
            engine's block size is what the engine keeps.
        scale: factor on the attention logits; None takes ``D ** -0.5``.
        sinks: ``[L, Hq]`` any float dtype, each head's sink: a logit in every row's softmax for no
            key, as gpt-oss has them. None without.
        protect: spans of the prompt's tokens, ``[[first, behind the last], ...]``, that every layer
            and head keeps, and that take in no dropped token. They count in the budget; one that
            would leave the others less than half of it is raised; with `protect` among the
            settings, so that they keep all of their share. A prompt of which more than half is
            protected comes back whole.

    Raises:
        ConfigError: `policy`, `budget` or `protect` is wrong.
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
        raw_settings = {"lookahead": 0, **raw_settings, "budget": budget}
    settings = CompressionConfig.parse(raw_settings)
    if not settings.enabled:
        raise ValueError("policy must be a method, got 'off'; leave the cache as it is instead")
    layers, _, tokens, dim = keys.shape
    spans = parse_spans(protect, tokens - settings.resolved_lookahead)
    plan = _plan(settings, layers, tokens, page_size, spans)
    if plan is None:
        return _whole(keys, values)
    method = method_of(settings, scored_by_output=plan.scored_by_output)
    rows = _rows(keys, values, page_size, dim**-0.5 if scale is None else float(scale), sinks)
    observed = _observe(method, plan, rows, queries)
    return _collect(method, plan, rows, observed, keys, values)


def _plan(
    settings: CompressionConfig, layers: int, tokens: int, page_size: int, spans: Spans
) -> PagePlan | None:
    """How much is kept of `tokens`; None where that is all."""
    answered = settings.resolved_lookahead
    if not answered:
        own = settings.prompt(layers, tokens)
        return page_plan(own, page_size, spans, full_share=settings.full_share)
    prompt = tokens - answered
    if prompt < 1:
        raise ValueError(
            f"compress: the tensors must hold a prompt and the {answered} tokens of its answer that"
            f" lookahead={answered} says; got {tokens} tokens. Give more of them, or set lookahead"
            " to 0"
        )
    ahead = LookAhead(
        settings=settings,
        num_layers=layers,
        block_size=page_size,
        prompt=prompt,
        last=tokens + 2,
        prefilled=prompt,
        spans=spans,
    )
    return ahead.plan(KVFootprint(num_layers=layers, block_size=page_size), tokens)


def _rows(
    keys: torch.Tensor,
    values: torch.Tensor,
    page_size: int,
    scale: float,
    sinks: torch.Tensor | None,
) -> PagedLayers:
    """The layers of one prompt, each in its own pages."""
    layers, heads, tokens, _ = keys.shape
    count = -(-tokens // page_size)
    # A layer's pages lie one behind the other, and those of its other heads behind them.
    first = torch.arange(layers, device=keys.device)[:, None] * heads * count
    return PagedLayers(
        key_pages=_paged(keys, page_size).transpose(2, 3),
        value_pages=_paged(values, page_size),
        pages=first + torch.arange(count, device=keys.device),
        lengths=None,
        most=tokens,
        scale=scale,
        layers=range(layers),
        value_scales=[1.0] * layers,
        sinks=None if sinks is None else sinks.float(),
    )


def _paged(cache: torch.Tensor, page_size: int) -> torch.Tensor:
    """``[L, Hkv, S, D]`` as pages ``[n, Hkv, page_size, D]``; a layer's last page is filled."""
    layers, heads, tokens, dim = cache.shape
    count = -(-tokens // page_size)
    padded = torch.nn.functional.pad(cache, (0, 0, 0, count * page_size - tokens)).contiguous()
    page = page_size * dim
    return padded.as_strided(
        ((layers - 1) * heads * count + count, heads, page_size, dim), (page, count * page, dim, 1)
    )


def _observe(
    method: Method, plan: PagePlan, rows: PagedLayers, queries: torch.Tensor
) -> list[LayerObservation]:
    """Score one layer after the other."""
    found: list[LayerObservation] = []
    for layer, query in enumerate(queries.transpose(1, 2)):  # [S, Hq, D]
        own, reads = rows.some(slice(layer, layer + 1)), method.reads_of(layer)
        attention = sums = None
        if Reads.WINDOW in reads:
            latest = query[None, plan.tokens - plan.window :]
            attention = method.attention(
                own, latest, plan.allocator_window, scored_by_output=plan.scored_by_output
            )
        if Reads.COLUMN_SUMS in reads:
            assert isinstance(own.scale, float)
            where = own.key_pages, own.pages[0], plan.tokens, own.scale
            sums = column_sums(query, *where, None if own.sinks is None else own.sinks[0])[None]
        found += method.observe(
            own, plan.window, attention, sums, scored=method.scores_layer(layer)
        )
    return found


def _collect(
    method: Method,
    plan: PagePlan,
    rows: PagedLayers,
    observed: list[LayerObservation],
    keys: torch.Tensor,
    values: torch.Tensor,
) -> Compressed:
    pages = method.layer_pages(plan, observed)
    stacked = method.select(observed, plan, pages)
    budgets = pages * plan.block_size + plan.tail
    out = Compressed(
        budgets=budgets.tolist(),
        positions=[],
        keys=[],
        values=[],
        scores=list(method.protected_scores(observed, plan, pages)),
    )
    guarded = torch.zeros(plan.tokens, dtype=torch.bool, device=keys.device)
    for start, stop in plan.spans:
        guarded[start:stop] = True
    for layer, count in enumerate(out.budgets):
        kept = stacked[layer, :, :count].long()
        index = kept[..., None].expand(-1, -1, keys.shape[-1])
        as_it_was = [x[layer].gather(1, index) for x in (keys, values)]
        if method.merge:
            merged = merge_evicted(
                rows.key_pages,
                rows.value_pages,
                rows.pages[layer : layer + 1],
                plan.tokens,
                kept[None],
                torch.full((1,), count, dtype=torch.int32, device=kept.device),
                min_kept=count,
                values_only=method.values_only,
            )
            k, v = merged.keys[0].to(keys.dtype), merged.values[0].to(values.dtype)
            own = guarded[kept][..., None]
            k, v = (x.where(~own, y) for x, y in zip((k, v), as_it_was, strict=True))
        else:
            k, v = as_it_was
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
