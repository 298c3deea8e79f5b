"""The engine's pipeline on plain tensors, for research and for checks. It does not need vLLM.

from vllm_kvcompress.offline import compress

kept = compress(queries, keys, values, policy="cake", budget=0.1)
kept.budgets, kept.positions[0], kept.keys[0]
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcompress_kernels import k4v3
from kvcompress_kernels.column_sums import column_sums
from kvcompress_kernels.merge_evicted import merge_evicted
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import LayerStats
from vllm_kvcompress.methods.method import Method, join_observations
from vllm_kvcompress.methods.page_plan import PagePlan, page_plan
from vllm_kvcompress.methods.paged_layers import PagedLayers
from vllm_kvcompress.methods.spans import Spans, parse_spans
from vllm_kvcompress.planning.packed_pages import packed_page_tokens
from vllm_kvcompress.schedules.kv_footprint import KVFootprint
from vllm_kvcompress.schedules.lookahead import LookaheadSchedule
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.packed_dtype import K4V3

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """The kept tokens of a prompt, per layer l.

    Args:
        budgets: number of kept tokens, n_l.
        positions: ``[Hkv, n_l]`` int64, ascending.
        keys: ``[Hkv, n_l, D]`` in the input dtype; merged if the method merges keys. In k4v3, the
            numbers that the format stores.
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
    """Compress one prompt's KV cache as the engine does at the end of its prefill.

    A prompt that fits its budget, or that full pages would not shorten, is returned uncompressed,
    with all scores +inf.

    With `packed_dtype` k4v3 in the settings, kept keys and values are quantised in groups of 64
    tokens of a layer and head, in the order of their positions, and returned as the format stores
    them. With a `page_size` of 1, groups cover all kept tokens, at a budget of all tokens too. With
    larger pages, a page holds as many tokens as in an engine, and the tokens after the last full
    page stay as they are. So do those of the first page, as in an engine.

    Args:
        queries: ``[L, Hq, S, D]`` any float dtype, rotated; read in float32.
        keys: ``[L, Hkv, S, D]``, rotated.
        values: ``[L, Hkv, S, D]``.
        policy: a preset, or settings as in ``--kv-compress-config``. Settings that only an engine
            needs (`min_prompt`, `log_requests`) have no effect. All S tokens are the prompt's,
            unless the settings contain `lookahead`: then the last `lookahead` tokens are output
            tokens, which are kept and score the other tokens.
        budget: a ratio in (0, 1] or a whole number of tokens per layer, window included. A ratio is
            exact as written: 0.7 of 90 tokens is 63, where floating point gives 62.
        page_size: tokens that are kept or dropped together. 1 gives the method's exact budget; the
            engine's block size keeps what the engine keeps.
        scale: factor on the attention logits; None means ``D ** -0.5``.
        sinks: ``[L, Hq]`` any float dtype, each head's attention sink: a logit in every query's
            softmax without a key, as in gpt-oss. None without sinks.
        protect: spans of prompt tokens, ``[[first, after the last], ...]``, that every layer and
            head keeps, and that no dropped token is merged into. They count towards the budget. A
            budget that leaves less than half of it to other tokens is raised; with `protect` in the
            settings, other tokens keep their full share. A prompt of which more than half is
            protected is returned uncompressed.

    Raises:
        ConfigError: `policy`, `budget` or `protect` is wrong.
        ValueError: the tensors' shapes or dtypes do not match, `scale` is not finite, or k4v3 does
            not support the head dim or `page_size`.
    """
    _check(queries, keys, values, page_size, scale)
    if sinks is not None and (
        not isinstance(sinks, torch.Tensor)
        or sinks.dtype not in DTYPES
        or sinks.shape != queries.shape[:2]
    ):
        received = getattr(sinks, "shape", None), getattr(sinks, "dtype", type(sinks))
        raise ValueError(
            f"compress: sinks must be {tuple(queries.shape[:2])} of one of {DTYPES}; got {received}"
        )
    raw_settings: Any = {"compress": policy} if isinstance(policy, str) else policy
    if isinstance(raw_settings, Mapping):
        raw_settings = {"lookahead": 0, **raw_settings, "budget": budget}
    settings = CompressionConfig.parse(raw_settings)
    if not settings.enabled:
        raise ValueError(
            "policy must be a method, got 'off'; to compress nothing, use the cache as it is"
        )
    layers, _, tokens, dim = keys.shape
    spans = parse_spans(protect, tokens - settings.resolved_lookahead)
    page_tokens = _packed_page_tokens(settings, keys, page_size)
    plan = _plan(settings, layers, tokens, page_size, spans, page_tokens)
    packs = settings.resolved_packed_dtype == K4V3
    if plan is None:
        prompt = tokens - settings.resolved_lookahead
        keeps_all = settings.tokens_per_layer(prompt) >= prompt
        kept = _uncompressed(keys, values)
        return _quantised_layers(kept) if packs and page_size == 1 and keeps_all else kept
    if plan.cell is not None:
        return _quantised_layers(_uncompressed(keys, values), plan.tail, plan.leading_tokens)
    method = settings.method.method_for(scored_by_output=plan.scored_by_output)
    paged = _paged_layers(
        keys, values, page_size, dim**-0.5 if scale is None else float(scale), sinks
    )
    observed = _observe(method, plan, paged, queries)
    kept = _collect(method, plan, paged, observed, keys, values)
    return _quantised_layers(kept, plan.tail, plan.leading_tokens) if packs else kept


def _packed_page_tokens(
    settings: CompressionConfig, keys: torch.Tensor, page_size: int
) -> int | None:
    """Return the tokens in a packed page; None if it holds the tokens of an ordinary page.

    Raises:
        ValueError: k4v3 does not support the head dim or the page size.
    """
    if settings.resolved_packed_dtype != K4V3:
        return None
    itemsize = keys.dtype.itemsize
    block_size = k4v3.rows_per_group(itemsize) if page_size == 1 else page_size
    if reason := k4v3.refusal(keys.shape[-1], block_size, itemsize):
        raise ValueError(f"compress: {reason}; set packed_dtype to auto")
    return None if page_size == 1 else packed_page_tokens(settings, page_size, itemsize)


def _plan(
    settings: CompressionConfig,
    layers: int,
    tokens: int,
    page_size: int,
    spans: Spans,
    page_tokens: int | None,
) -> PagePlan | None:
    """Return how many of `tokens` tokens are kept; None if all are."""
    lookahead = settings.resolved_lookahead
    if not lookahead:
        spec = settings.budget_spec(layers, tokens)
        return page_plan(
            spec,
            page_size,
            spans,
            full_share=settings.protection.full_share,
            page_tokens=page_tokens,
            cell=page_tokens,
            recent_tokens=settings.recent_tokens,
        )
    prompt = tokens - lookahead
    if prompt < 1:
        raise ValueError(
            f"compress: with lookahead={lookahead} the tensors must hold a prompt and {lookahead}"
            f" output tokens; got {tokens} tokens. Give more tokens, or set lookahead to 0"
        )
    schedule = LookaheadSchedule(
        settings=settings,
        num_layers=layers,
        block_size=page_size,
        prompt=prompt,
        max_tokens=tokens + 2,
        prefilled=prompt,
        spans=spans,
        page_tokens=page_tokens,
    )
    return schedule.plan(KVFootprint(num_layers=layers, block_size=page_size), tokens)


def _paged_layers(
    keys: torch.Tensor,
    values: torch.Tensor,
    page_size: int,
    scale: float,
    sinks: torch.Tensor | None,
) -> PagedLayers:
    """Return the layers of one prompt, each in its own pages."""
    layers, heads, tokens, _ = keys.shape
    count = -(-tokens // page_size)
    # The pages of a layer's first head are consecutive, followed by those of its other heads.
    first = torch.arange(layers, device=keys.device)[:, None] * heads * count
    return PagedLayers(
        key_pages=_paged(keys, page_size).transpose(2, 3),
        value_pages=_paged(values, page_size),
        pages=first + torch.arange(count, device=keys.device),
        lengths=None,
        max_tokens=tokens,
        scale=scale,
        layers=range(layers),
        sinks=None if sinks is None else sinks.float(),
    )


def _paged(cache: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return ``[L, Hkv, S, D]`` as pages ``[n, Hkv, page_size, D]``, padded at each layer's end."""
    layers, heads, tokens, dim = cache.shape
    count = -(-tokens // page_size)
    padded = torch.nn.functional.pad(cache, (0, 0, 0, count * page_size - tokens)).contiguous()
    page = page_size * dim
    return padded.as_strided(
        ((layers - 1) * heads * count + count, heads, page_size, dim), (page, count * page, dim, 1)
    )


def _observe(
    method: Method, plan: PagePlan, paged: PagedLayers, queries: torch.Tensor
) -> LayerStats:
    """Return the observations of all layers, observed one after another."""
    observed: list[LayerStats] = []
    for layer, query in enumerate(queries.transpose(1, 2)):  # [S, Hq, D]
        one_layer, reads = paged.subset(slice(layer, layer + 1)), method.reads_of(layer)
        attention = sums = None
        if Reads.WINDOW in reads:
            window_queries = query[None, plan.tokens - plan.window :]
            attention = method.attention(
                one_layer,
                window_queries,
                plan.allocator_window,
                scored_by_output=plan.scored_by_output,
            )
        if Reads.COLUMN_SUMS in reads:
            assert isinstance(one_layer.scale, float)
            head_sinks = None if one_layer.sinks is None else one_layer.sinks[0]
            sums = column_sums(
                query,
                one_layer.key_pages,
                one_layer.pages[0],
                plan.tokens,
                one_layer.scale,
                head_sinks,
            )[None]
        observed.append(
            method.observe(
                one_layer, plan.window, attention, sums, scored=method.scores_layer(layer)
            )
        )
    return join_observations(observed, [1] * len(observed))


def _collect(
    method: Method,
    plan: PagePlan,
    paged: PagedLayers,
    observed: LayerStats,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> Compressed:
    pages = method.layer_pages(plan, observed)
    stacked = method.select(observed, plan, pages)
    out = Compressed(
        budgets=[plan.layer_tokens(count) for count in pages.tolist()],
        positions=[],
        keys=[],
        values=[],
        scores=list(method.protected_scores(observed, plan, pages)),
    )
    protected = torch.zeros(plan.tokens, dtype=torch.bool, device=keys.device)
    for start, stop in plan.always_kept_spans:
        protected[start:stop] = True
    for layer, count in enumerate(out.budgets):
        kept = stacked[layer, :, :count].long()
        index = kept[..., None].expand(-1, -1, keys.shape[-1])
        unmerged = [cache[layer].gather(1, index) for cache in (keys, values)]
        if method.merge:
            merged = merge_evicted(
                paged.key_pages,
                paged.value_pages,
                paged.pages[layer : layer + 1],
                plan.tokens,
                kept[None],
                torch.full((1,), count, dtype=torch.int32, device=kept.device),
                min_kept=count,
                values_only=method.values_only,
            )
            k, v = merged.keys[0].to(keys.dtype), merged.values[0].to(values.dtype)
            is_protected = protected[kept][..., None]
            k, v = (
                new.where(~is_protected, old) for new, old in zip((k, v), unmerged, strict=True)
            )
        else:
            k, v = unmerged
        out.positions.append(kept)
        out.keys.append(k)
        out.values.append(v)
    return out


def _quantised_layers(kept: Compressed, tail: int = 0, leading: int = 0) -> Compressed:
    pairs = [
        quantised(keys, values, tail, leading)
        for keys, values in zip(kept.keys, kept.values, strict=True)
    ]
    return replace(kept, keys=[keys for keys, _ in pairs], values=[values for _, values in pairs])


def quantised(
    keys: torch.Tensor, values: torch.Tensor, tail: int = 0, leading: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values ``[Hkv, n, D]``, quantised in k4v3 and dequantised.

    Args:
        tail: tokens at the end that stay exact.
        leading: tokens at the start that stay exact.
    """
    heads, tokens, dim = keys.shape
    packed = slice(leading, tokens - tail)
    num_packed = tokens - leading - tail
    num_groups = -(-num_packed // k4v3.GROUP)
    padding = num_groups * k4v3.GROUP - num_packed
    keys_in_groups, values_in_groups = (
        torch.nn.functional.pad(tensor[:, packed], (0, 0, 0, padding)).reshape(
            heads, num_groups, k4v3.GROUP, dim
        )
        for tensor in (keys, values)
    )
    group_tokens = torch.full((num_groups,), k4v3.GROUP, device=keys.device)
    group_tokens[-1:] -= padding
    groups = k4v3.quantise(keys_in_groups, values_in_groups, group_tokens.expand(heads, num_groups))
    stored = k4v3.dequantise(groups, torch.promote_types(keys.dtype, torch.float32))
    keys, values = keys.clone(), values.clone()
    for tensor, part in zip((keys, values), stored, strict=True):
        tensor[:, packed] = part.flatten(1, 2)[:, :num_packed]
    return keys, values


def _uncompressed(keys: torch.Tensor, values: torch.Tensor) -> Compressed:
    """Return all tokens of the prompt, with scores of +inf."""
    layers, heads, tokens, _ = keys.shape
    positions = torch.arange(tokens, device=keys.device).expand(heads, tokens)
    scores = torch.full((heads, tokens), torch.inf, device=keys.device)
    return Compressed(
        budgets=[tokens] * layers,
        positions=[positions.clone() for _ in range(layers)],
        keys=[k.clone() for k in keys],
        values=[v.clone() for v in values],
        scores=[scores.clone() for _ in range(layers)],
    )


def _check(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_size: int,
    scale: float | None,
) -> None:
    def require(condition: bool, rule: str, got: object) -> None:
        if not condition:
            raise ValueError(f"compress: {rule}; got {got}")

    for name, tensor in (("queries", queries), ("keys", keys), ("values", values)):
        require(isinstance(tensor, torch.Tensor), f"{name} must be a torch tensor", type(tensor))
        require(tensor.dim() == 4, f"{name} must be [L, H, S, D]", tuple(tensor.shape))
        require(tensor.dtype in DTYPES, f"{name} must be one of {DTYPES}", tensor.dtype)
    require(keys.shape == values.shape, f"values must be {tuple(keys.shape)}", tuple(values.shape))
    layers, kv_heads, tokens, dim = keys.shape
    require(math.prod(keys.shape) > 0, "keys must not be empty", tuple(keys.shape))
    heads = queries.shape[1]
    is_multiple = heads > 0 and heads % kv_heads == 0
    require(is_multiple, f"Hq must be a multiple of Hkv={kv_heads}", heads)
    expected = (layers, heads, tokens, dim)
    require(queries.shape == expected, f"queries must be {expected}", tuple(queries.shape))
    valid_page_size = isinstance(page_size, int) and page_size >= 1
    require(valid_page_size, "page_size must be a whole number, at least 1", page_size)
    finite = scale is None or (isinstance(scale, (int, float)) and math.isfinite(scale))
    require(finite, "scale must be a finite number, or None for D ** -0.5", scale)
