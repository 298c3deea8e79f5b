"""Run a method: observe a request's layers, divide the pages among them, select the kept slots.

The engine and `offline.compress` run the same steps: `Method.observe` for each batch of layers that
is scored together, then `Method.layer_pages` and `kept_slots` once all of them are observed. Each
layer's share stays on the device of the statistics: the host launches the work and reads no value.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch.nn.functional import pad

from kvcompress_kernels import apportion as budgets
from kvcompress_kernels.window_scores import WindowScores, window_scores_of_rows
from vllm_kvcompress.devices import to_device
from vllm_kvcompress.methods.attention import (
    move_window_last,
    split_window_scores,
    zero_after_past,
)
from vllm_kvcompress.methods.base import Allocator, Reads, Scorer, Selector
from vllm_kvcompress.methods.budget_spec import AttentionStats, LayerStats, PagedKeys, PagedValues
from vllm_kvcompress.methods.kept_slots import (
    append_tail,
    kept_in_pages,
    kept_slots,
    max_kept_in_pages,
    prepend_leading,
)
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.paged_layers import PagedLayers
from vllm_kvcompress.methods.parts.pooling import column_means
from vllm_kvcompress.methods.preset import Merge
from vllm_kvcompress.methods.protected import ProtectedTokens

_UNDECLARED = "its scorer does not declare needs_whole_prompt = ''"


def join_observations(parts: Sequence[LayerStats], counts: Sequence[int]) -> LayerStats:
    """Return the statistics of consecutive layers in one object.

    Args:
        parts: statistics of the first layers, of the next layers and so on.
        counts: number of layers in each part.
    """
    if len(parts) == 1:
        return parts[0]
    return LayerStats(
        scores=_joined_scores(parts, counts),
        entropy=_joined(part.entropy for part in parts),
        shift=_joined(part.shift for part in parts),
        column_variance=_joined(part.column_variance for part in parts),
    )


def _joined_scores(parts: Sequence[LayerStats], counts: Sequence[int]) -> torch.Tensor | None:
    """Return the scores of all layers; rows of layers without scores are not initialised."""
    scores = _present(part.scores for part in parts)
    if not scores or len(scores) == len(parts):
        return torch.cat(scores) if scores else None
    all_scores = scores[0].new_empty(sum(counts), *scores[0].shape[1:])
    start = 0
    for part, count in zip(parts, counts, strict=True):
        if part.scores is not None:
            all_scores[start : start + count].copy_(part.scores)
        start += count
    return all_scores


def _joined(parts: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    present = _present(parts)
    return torch.cat(present) if present else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method: an allocator, a scorer and a selector.

    Args:
        merge: whether evicted tokens are merged into their nearest kept tokens; "values" merges
            only their values.
    """

    allocator: Allocator
    scorer: Scorer
    selector: Selector
    merge: Merge

    @property
    def values_only(self) -> bool:
        """Return whether merging changes only values and leaves keys unchanged."""
        return self.merge == "values"

    @property
    def reads(self) -> Reads:
        return self.allocator.reads | self.scorer.reads

    @property
    def needs_whole_prompt(self) -> str:
        """Return why this method needs all tokens of a prompt at once; empty if it does not.

        Such a method cannot score a request that has already lost tokens.
        """
        reason = getattr(self.scorer, "needs_whole_prompt", _UNDECLARED)
        if reason := reason or self.allocator.needs_whole_prompt:
            return str(reason)
        reuses = any(self.selector.source(layer) != layer for layer in range(8))
        return "its layers reuse another layer's ranking" if reuses else ""

    def scores_layer(self, layer: int) -> bool:
        """Return whether this layer is scored, instead of only reusing another layer's ranking."""
        return self.selector.source(layer) == layer or Reads.SCORES in self.allocator.reads

    def reads_of(self, layer: int) -> Reads:
        """Return the statistics to compute for one layer.

        They are fewer if the layer reuses another layer's scores.
        """
        return self.reads if self.scores_layer(layer) else self.allocator.reads

    def attention(
        self,
        layers: PagedLayers,
        query: torch.Tensor,
        allocator_window: int | None = None,
        *,
        scored_by_output: bool = False,
        row_log_sums: torch.Tensor | None = None,
    ) -> WindowScores:
        """Return the attention of the last queries of several layers to the tokens before them.

        Args:
            query: ``[N, w, Hq, D]``, the last w queries of each layer in order of position.
            allocator_window, scored_by_output: as in `PagePlan`. Entropy and shift use the last
                `allocator_window` queries. A scorer with `Reads.PROMPT_MAXIMUM` takes only the
                maximum from the prompt's queries when output tokens score the prompt.
            row_log_sums: ``[N, Hq, w]`` float32, the natural logarithm of each query's softmax sum
                over the scaled logits; None if it is not known.
        """
        last, grouped = (flag in self.scorer.reads for flag in (Reads.LAST, Reads.KV_HEADS))
        cache_args = layers.key_pages, layers.pages, layers.max_tokens, layers.scale
        if (
            scored_by_output
            and allocator_window is not None
            and Reads.PROMPT_MAXIMUM in self.scorer.reads
        ):
            return split_window_scores(layers, query, allocator_window, last=last, grouped=grouped)
        if Reads.VARIANCE not in self.allocator.reads:
            allocator_window = None
        reads = self.reads if allocator_window is None else self.scorer.reads
        scores = window_scores_of_rows(
            query,
            *cache_args,
            lengths=layers.lengths,
            variance=Reads.VARIANCE in reads,
            maximum=Reads.MAXIMUM in reads,
            pooled=Reads.POOLED in reads,
            last=last,
            grouped=grouped,
            sinks=layers.sinks,
            offsets=layers.offsets,
            row_log_sums=row_log_sums,
        )
        if allocator_window is None:
            return scores
        last_queries = query[:, query.shape[1] - allocator_window :]
        if row_log_sums is not None:
            row_log_sums = row_log_sums[:, :, query.shape[1] - allocator_window :]
        allocator_scores = window_scores_of_rows(
            last_queries,
            *cache_args,
            lengths=layers.lengths,
            variance=True,
            last=False,
            grouped=True,
            sinks=layers.sinks,
            offsets=layers.offsets,
            row_log_sums=row_log_sums,
        )
        return scores._replace(entropy=allocator_scores.entropy, shift=allocator_scores.shift)

    def observe(
        self,
        layers: PagedLayers,
        window: int,
        attention: WindowScores | None,
        sums: torch.Tensor | None,
        *,
        scored: bool = True,
    ) -> LayerStats:
        """Score several layers whose keys and values are all in their pages.

        Args:
            window: last tokens of each layer, always kept, w.
            attention: result of `attention`; None if the method reads no attention.
            sums: column sums of the causal attention so far, ``[N, Hq, max_tokens]`` float32. If
                the layers have lengths, ``[N, Hkv, max_tokens]``: the means over each KV head's
                query heads. None if the method reads no sums.
            scored: whether to compute scores, and not only the allocator's statistics.

        Returns:
            The layers' observations. The first ``length - w`` columns of a layer's scores ``[Hkv,
            max_tokens - w]`` are valid.

        Raises:
            ValueError: the scorer does not return float32 scores of the expected shape.
        """
        entropy = shift = variance = None
        if attention is not None and Reads.VARIANCE in self.allocator.reads:
            entropy, shift = attention.entropy, attention.shift
        if sums is not None and Reads.COLUMN_SUMS in self.allocator.reads:
            means = Reads.COLUMN_MEANS in self.allocator.reads
            variance = _variances(column_means(sums) if means else sums, layers.lengths)
        return LayerStats(
            scores=self._scores_of(layers, window, attention, sums) if scored else None,
            entropy=entropy,
            shift=shift,
            column_variance=variance,
        )

    def _scores_of(
        self,
        layers: PagedLayers,
        window: int,
        attention: WindowScores | None,
        sums: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the ``[N, Hkv, max_tokens - w]`` scores of all layers."""
        num_layers, heads = len(layers), layers.key_pages.shape[1]
        past, tokens = layers.max_tokens - window, layers.max_tokens
        stats = AttentionStats(
            num_kv_heads=num_layers * heads,
            num_layers=num_layers,
            lengths=layers.lengths,
            past=past,
            device=layers.key_pages.device,
            layers=layers.layers,
            sums=_folded(sums),
        )
        if Reads.KEYS in self.scorer.reads:
            keys = PagedKeys(key_pages=layers.key_pages, pages=layers.pages, tokens=tokens)
            stats = replace(stats, keys=keys)
        if Reads.VALUES in self.scorer.reads:
            values = PagedValues(
                value_pages=layers.value_pages,
                pages=layers.pages,
                tokens=tokens,
                scale=layers.value_scale,
            )
            stats = replace(stats, values=values)
        if attention is not None:
            stats = _with_attention(stats, _align_columns(attention, layers, window))
        return self._score(stats).view(num_layers, heads, past)

    def _score(self, stats: AttentionStats) -> torch.Tensor:
        """Return the scorer's scores after checking shape and dtype.

        Without the check, a wider result would be read as if it fitted.
        """
        scores = self.scorer.score(stats)
        expected_shape = (stats.num_kv_heads, stats.past)
        if scores.shape != expected_shape or scores.dtype != torch.float32:
            raise ValueError(
                f"scorer {type(self.scorer).__name__} must return float32 scores {expected_shape},"
                f" one row per KV head and one column per past token; got {scores.dtype}"
                f" {tuple(scores.shape)}"
            )
        return scores

    def layer_pages(
        self, plan: PagePlan, layers: LayerStats, caps: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``[L]`` int64, the pages that each layer keeps (`layer_pages`)."""
        return layer_pages(self.allocator, plan, self._stats(layers, plan), caps)

    def _stats(self, layers: LayerStats, plan: PagePlan) -> LayerStats | None:
        if not self.allocator.reads:
            return None
        scores = None
        if Reads.SCORES in self.allocator.reads:
            assert layers.scores is not None
            scores, past = layers.scores, plan.tokens - plan.window
            protected = ProtectedTokens.of(plan.always_kept_spans, past, scores.device)
            if protected is not None:
                scores = protected.unprotected_scores(scores)
        return replace(layers, scores=scores)

    def select(self, layers: LayerStats, plan: PagePlan, pages: torch.Tensor) -> torch.Tensor:
        """Return the positions that the layers of an uncompressed prompt keep, in pages or not.

        Returns:
            ``[L, Hkv, n]`` int32, ascending, with -1 after the `PagePlan.layer_tokens` kept
            positions.
        """
        scores = self.scores(layers)
        in_pages = kept_in_pages(plan, to_device(pages, torch.int32, scores.device))
        kept = kept_slots(
            scores,
            plan.tokens,
            in_pages,
            window=plan.window,
            tail=plan.tail,
            width=max_kept_in_pages(plan, pages),
            selector=self.selector,
            protected=ProtectedTokens.of(
                plan.spans, plan.tokens - plan.kept_after, scores.device, plan.leading_tokens
            ),
            leading=plan.leading_tokens,
        )
        kept = prepend_leading(kept, plan.leading_tokens)
        return append_tail(kept, plan.tokens, in_pages + plan.leading_tokens, plan.tail)

    def protected_scores(
        self, layers: LayerStats, plan: PagePlan, pages: torch.Tensor
    ) -> torch.Tensor:
        """Return the scores used for selection, with +inf for always-kept tokens.

        Returns:
            ``[L, Hkv, S]`` float32.
        """
        scores, kept_after = self.scores(layers), plan.kept_after
        in_pages = kept_in_pages(plan, to_device(pages, torch.int32, scores.device))
        keep = plan.leading_tokens + in_pages - max(plan.window - plan.tail, 0)
        past = plan.tokens - kept_after
        protected = ProtectedTokens.of(plan.always_kept_spans, past, scores.device)
        if protected is None:
            best = self.selector.protect(scores[..., :past], keep, kept_after)
        else:
            free = protected.unprotected_scores(scores[..., :past])
            free = self.selector.protect(free, keep - protected.slots.shape[2], kept_after)
            best = torch.full_like(scores[..., :past], torch.inf)
            best[..., protected.unprotected_slots(past)[0, 0]] = free
        return pad(best, (0, kept_after), value=torch.inf)

    def scores(self, layers: LayerStats) -> torch.Tensor:
        """Return the scores that each layer selects by.

        Returns:
            ``[N, Hkv, W]`` float32, W a multiple of 16. Columns after the past tokens are not
            initialised.
        """
        scores = layers.scores
        assert scores is not None
        num_layers, heads, past = scores.shape
        sources = [self.selector.source(layer) for layer in range(num_layers)]
        reuses = sources != list(range(num_layers))
        if not reuses and past % 16 == 0:
            return scores
        aligned = scores.new_empty(num_layers, heads, -(-past // 16) * 16)
        if reuses:
            torch.stack([scores[source] for source in sources], out=aligned[..., :past])
        else:
            aligned[..., :past].copy_(scores)
        return aligned


def _present(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _folded(part: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``[N, Hq, n]`` reshaped to ``[N * Hq, n]``, or None for None."""
    return None if part is None else part.flatten(0, 1)


def _align_columns(attention: WindowScores, layers: PagedLayers, window: int) -> WindowScores:
    """Return the attention with past columns first and the window last, as `AttentionStats` needs.

    Args:
        attention: as `window_scores_of_rows` returns it. If the maximum comes from another window
            (`split_window_scores`), the other statistics cover fewer queries, whose past includes
            tokens of the window.
    """
    past, lengths = layers.max_tokens - window, layers.lengths
    total, variance, maximum = attention.total, attention.variance, attention.maximum
    if total.shape[2] > past:
        total = zero_after_past(total, layers, window)
        variance = None if variance is None else zero_after_past(variance, layers, window)
    if maximum is not None and lengths is not None:
        maximum = move_window_last(maximum, lengths, window)
    return attention._replace(total=total, variance=variance, maximum=maximum)


def _with_attention(stats: AttentionStats, attention: WindowScores) -> AttentionStats:
    return replace(
        stats,
        num_queries=attention.recent.shape[-1],
        total=_folded(attention.total),
        variance=_folded(attention.variance),
        recent=_folded(attention.recent),
        last=_folded(attention.last),
        maximum=_folded(attention.maximum),
    )


def _variances(sums: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """Return ``[N, H]``, the sample variance over each layer's own tokens, as in D2O's code."""
    if lengths is None:
        return sums.var(-1)
    count = lengths[:, None, None]
    valid = torch.arange(sums.shape[2], device=sums.device) < count
    mean = sums.where(valid, 0).sum(-1, keepdim=True) / count
    return (sums - mean).where(valid, 0).square().sum(-1) / (count[..., 0] - 1)


def layer_pages(
    allocator: Allocator,
    plan: PagePlan,
    stats: LayerStats | None,
    caps: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the pages that each layer keeps, with sum `plan.pages`.

    Args:
        caps: ``[L]`` pages that each layer has; None means all pages of the prompt. Pages that
            exceed a layer's cap go to the other layers, in proportion to their shares.

    Returns:
        ``[L]`` int64 on the statistics' device, at least `plan.floor_pages` each.
    """
    if stats is None and caps is None:
        return _cached_layer_pages(allocator, plan)
    spec = plan.budget_spec
    past = allocator.allocate(spec, stats)
    if caps is not None:
        outside_pages = plan.leading_tokens + plan.tail
        max_past = (caps * plan.page_tokens + outside_pages - spec.always_kept).clamp(min=0)
        past = to_device(past, torch.int64, caps.device)
        past = budgets.apportion(past, past.sum(), max_past)
    return round_to_pages(past, plan, caps, always_kept=spec.always_kept)


@lru_cache(maxsize=256)
def _cached_layer_pages(allocator: Allocator, plan: PagePlan) -> torch.Tensor:
    """Return the pages per layer of an allocator without statistics, int64 on the CPU, cached."""
    spec = plan.budget_spec
    past = allocator.allocate(spec, None)
    return round_to_pages(past, plan, None, always_kept=spec.always_kept)


def round_to_pages(
    tokens: torch.Tensor,
    plan: PagePlan,
    caps: torch.Tensor | None = None,
    *,
    always_kept: int = 0,
) -> torch.Tensor:
    """Return the pages per layer for token budgets, with sum exactly `plan.pages`.

    See `kvcompress_kernels.apportion.round_to_pages`.

    Args:
        tokens: ``[L]`` int64, budget of each layer n_l, without `always_kept`.
        plan: the prompt's plan.
        caps: ``[L]`` int64, pages that each layer has; None means all pages of the prompt.
        always_kept: tokens that each layer keeps in addition to `tokens`.

    Returns:
        ``[L]`` int64.
    """
    return budgets.round_to_pages(
        tokens,
        pages=plan.pages,
        page_tokens=plan.page_tokens,
        tail=plan.leading_tokens + plan.tail - always_kept,
        floor_pages=plan.floor_pages,
        max_pages=plan.full_pages if caps is None else caps,
    )
