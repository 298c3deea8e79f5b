"""Run a method: observe a request's layers, divide the pages among them, select the kept slots.

The engine and `offline.compress` run the same steps: `Method.observe` for each batch of layers that
is scored together, then `Method.layer_pages` and `kept_slots` once all of them are observed. Each
layer's share stays on the device of the statistics: the host launches the work and reads no value.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from kvcompress_kernels.window_scores import WindowScores, window_scores_of_rows
from vllm_kvcompress.devices import to_device
from vllm_kvcompress.methods.attention import (
    move_window_last,
    slice_past,
    split_window_scores,
    zero_after_past,
)
from vllm_kvcompress.methods.base import Allocator, Reads, Scorer, Selector
from vllm_kvcompress.methods.budget_spec import AttentionStats, LayerStats, PagedKeys, PagedValues
from vllm_kvcompress.methods.budgets import apportion, round_to_pages
from vllm_kvcompress.methods.kept_slots import append_tail, kept_slots, max_layer_pages
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.paged_layers import PagedLayers
from vllm_kvcompress.methods.presets import Merge
from vllm_kvcompress.methods.protected import ProtectedTokens
from vllm_kvcompress.methods.scorers.accumulated import column_means

_UNDECLARED = "its scorer does not declare needs_whole_prompt = ''"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerObservation:
    """Scores and statistics of one layer, kept on the device until all layers are observed.

    Args:
        scores: ``[Hkv, P]`` float32; None if the selector uses another layer's scores.
        entropy, shift: float32 scalars, CAKE's H and V (`LayerStats`); None unless the allocator
            reads them.
        column_variance: ``[Hq]`` float32, D2O's variance; ``[Hkv]`` if only the mean over a KV
            head's query heads is known; None unless the allocator reads it.
    """

    scores: torch.Tensor | None
    entropy: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    column_variance: torch.Tensor | None = None


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
    ) -> WindowScores:
        """Return the attention of the last queries of several layers to the tokens before them.

        Args:
            query: ``[N, w, Hq, D]``, the last w queries of each layer in order of position.
            allocator_window, scored_by_output: as in `PagePlan`. Entropy and shift use the last
                `allocator_window` queries. A scorer with `Reads.PROMPT_MAXIMUM` takes only the
                maximum from the prompt's queries when output tokens score the prompt.
        """
        cache_args = layers.key_pages, layers.pages, layers.max_tokens, layers.scale
        if (
            scored_by_output
            and allocator_window is not None
            and Reads.PROMPT_MAXIMUM in self.scorer.reads
        ):
            return split_window_scores(layers, query, allocator_window)
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
            sinks=layers.sinks,
        )
        if allocator_window is None:
            return scores
        last_queries = query[:, query.shape[1] - allocator_window :]
        allocator_scores = window_scores_of_rows(
            last_queries, *cache_args, lengths=layers.lengths, variance=True, sinks=layers.sinks
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
    ) -> list[LayerObservation]:
        """Score several layers whose keys and values are all in their pages.

        Args:
            window: last tokens of each layer, always kept, w.
            attention: result of `attention`; None if the method reads no attention.
            sums: column sums of the causal attention so far, ``[N, Hq, max_tokens]`` float32. If
                the layers have lengths, ``[N, Hkv, max_tokens]``: the means over each KV head's
                query heads. None if the method reads no sums.
            scored: whether to compute scores, and not only the allocator's statistics.

        Returns:
            One observation per layer. The first ``length - w`` columns of its scores ``[Hkv,
            max_tokens - w]`` are valid.

        Raises:
            ValueError: the scorer does not return ``[Hkv, P]`` float32.
        """
        entropy = shift = variance = None
        if attention is not None and Reads.VARIANCE in self.allocator.reads:
            entropy, shift = attention.entropy, attention.shift
        if sums is not None and Reads.COLUMN_SUMS in self.allocator.reads:
            means = Reads.COLUMN_MEANS in self.allocator.reads
            variance = _variances(column_means(sums) if means else sums, layers.lengths)
        scores: Iterable[torch.Tensor | None] = [None] * len(layers.pages)
        if scored and layers.lengths is None:
            scores = [
                self._score_one(layers, index, window, attention, sums)
                for index in range(len(layers))
            ]
        elif scored:
            scores = self._score_together(layers, window, attention, sums)
        return [
            LayerObservation(
                scores=layer_scores,
                entropy=None if entropy is None else entropy[index],
                shift=None if shift is None else shift[index],
                column_variance=None if variance is None else variance[index],
            )
            for index, layer_scores in enumerate(scores)
        ]

    def _score_one(
        self,
        layers: PagedLayers,
        index: int,
        window: int,
        attention: WindowScores | None,
        sums: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the ``[Hkv, P]`` scores of one layer that has lost no tokens."""
        keys = values = None
        if Reads.KEYS in self.scorer.reads:
            keys = PagedKeys(
                key_pages=layers.key_pages, pages=layers.pages[index], tokens=layers.max_tokens
            )
        if Reads.VALUES in self.scorer.reads:
            values = PagedValues(
                value_pages=layers.value_pages,
                pages=layers.pages[index],
                tokens=layers.max_tokens,
                scale=layers.value_scales[index],
            )
        past = layers.max_tokens - window
        window_scores = None if attention is None else attention.row(index)
        return self._score(
            AttentionStats(
                num_kv_heads=layers.key_pages.shape[1],
                past=past,
                device=layers.key_pages.device,
                layer=layers.layers[index],
                num_queries=0 if window_scores is None else window_scores.recent.shape[-1],
                total=window_scores and window_scores.total[:, :past],
                variance=slice_past(window_scores and window_scores.variance, past),
                recent=window_scores and window_scores.recent,
                last=window_scores and window_scores.last,
                maximum=window_scores and window_scores.maximum,
                sums=None if sums is None else sums[index],
                keys=keys,
                values=values,
            )
        )

    def _score_together(
        self,
        layers: PagedLayers,
        window: int,
        attention: WindowScores | None,
        sums: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return ``[N, Hkv, max_tokens - w]`` scores of layers that may differ in length."""
        num_layers, heads = len(layers), layers.key_pages.shape[1]
        window_scores = attention
        assert layers.lengths is not None
        maximum = None if window_scores is None else window_scores.maximum
        if maximum is not None:
            maximum = move_window_last(maximum, layers.lengths, window)
        if window_scores is not None and window_scores.total.shape[2] > layers.max_tokens - window:
            # All statistics but the maximum cover fewer queries, whose past includes window tokens.
            assert window_scores.variance is not None
            total, variance = (
                zero_after_past(part, layers, window)
                for part in (window_scores.total, window_scores.variance)
            )
            window_scores = window_scores._replace(total=total, variance=variance)
        values = None
        if Reads.VALUES in self.scorer.reads:
            values = PagedValues(
                value_pages=layers.value_pages, pages=layers.pages, tokens=layers.max_tokens
            )
        scores = self._score(
            AttentionStats(
                num_kv_heads=num_layers * heads,
                num_layers=num_layers,
                lengths=layers.lengths,
                past=layers.max_tokens - window,
                device=layers.key_pages.device,
                num_queries=0 if window_scores is None else window_scores.recent.shape[-1],
                total=_folded(window_scores and window_scores.total),
                variance=_folded(window_scores and window_scores.variance),
                recent=_folded(window_scores and window_scores.recent),
                last=_folded(window_scores and window_scores.last),
                maximum=_folded(maximum),
                sums=_folded(sums),
                values=values,
            )
        )
        return scores.reshape(num_layers, heads, -1)

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
        self, plan: PagePlan, layers: Sequence[LayerObservation], caps: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``[L]`` int64, the pages that each layer keeps (`layer_pages`)."""
        return layer_pages(self.allocator, plan, self._stats(layers, plan), caps)

    def _stats(self, layers: Sequence[LayerObservation], plan: PagePlan) -> LayerStats | None:
        if Reads.SCORES in self.allocator.reads:
            scores = torch.stack(_present(layer.scores for layer in layers))
            protected = ProtectedTokens.of(plan.spans, plan.tokens - plan.window, scores.device)
            if protected is not None:
                scores = protected.unprotected_scores(scores)
            return LayerStats(scores=scores)
        if not self.allocator.reads:
            return None
        if Reads.COLUMN_SUMS in self.allocator.reads:
            variances = torch.stack(_present(layer.column_variance for layer in layers))
            return LayerStats(column_variance=variances)
        return LayerStats(
            entropy=torch.stack(_present(layer.entropy for layer in layers)),
            shift=torch.stack(_present(layer.shift for layer in layers)),
        )

    def select(
        self, layers: Sequence[LayerObservation], plan: PagePlan, pages: torch.Tensor
    ) -> torch.Tensor:
        """Return the positions that the layers of an uncompressed prompt keep, including the tail.

        Returns:
            ``[L, Hkv, n]`` int32, ascending, with -1 after the `PagePlan.layer_tokens` kept
            positions.
        """
        scores = self.scores(layers)
        counts = to_device(pages, torch.int32, scores.device)
        kept = kept_slots(
            scores,
            plan.tokens,
            counts,
            window=plan.window,
            tail=plan.tail,
            page_tokens=plan.page_tokens,
            max_layer_pages=max_layer_pages(plan, pages),
            selector=self.selector,
            protected=ProtectedTokens.of(plan.spans, plan.tokens - plan.kept_after, scores.device),
        )
        in_pages = (counts * plan.page_tokens).clamp(max=plan.tokens - plan.tail)
        return append_tail(kept, plan.tokens, in_pages, plan.tail)

    def protected_scores(
        self, layers: Sequence[LayerObservation], plan: PagePlan, pages: torch.Tensor
    ) -> torch.Tensor:
        """Return the scores used for selection, with +inf for always-kept tokens.

        Returns:
            ``[L, Hkv, S]`` float32.
        """
        scores, kept_after = self.scores(layers), plan.kept_after
        counts = to_device(pages, torch.int32, scores.device)
        in_pages = (counts * plan.page_tokens).clamp(max=plan.tokens - plan.tail)
        keep = in_pages - max(plan.window - plan.tail, 0)
        past = plan.tokens - kept_after
        protected = ProtectedTokens.of(plan.spans, past, scores.device)
        if protected is None:
            best = self.selector.protect(scores[..., :past], keep, kept_after)
        else:
            free = protected.unprotected_scores(scores[..., :past])
            free = self.selector.protect(free, keep - protected.slots.shape[2], kept_after)
            best = torch.full_like(scores[..., :past], torch.inf)
            best[..., protected.unprotected_slots(past)[0, 0]] = free
        return pad(best, (0, kept_after), value=torch.inf)

    def scores(self, layers: Sequence[LayerObservation]) -> torch.Tensor:
        """Return the scores that each layer selects by.

        Returns:
            ``[N, Hkv, W]`` float32, W a multiple of 16. Columns after the past tokens are not
            initialised.
        """
        sources = (self.selector.source(layer) for layer in range(len(layers)))
        scores = _present(layers[source].scores for source in sources)
        heads, past = scores[0].shape
        stacked = scores[0].new_empty(len(layers), heads, -(-past // 16) * 16)
        torch.stack(scores, out=stacked[..., :past])
        return stacked


def _present(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _folded(part: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``[N, Hq, n]`` reshaped to ``[N * Hq, n]``, or None for None."""
    return None if part is None else part.flatten(0, 1)


def _variances(sums: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """Return ``[N, H]``, the sample variance over each layer's own tokens, as in D2O's code."""
    if lengths is None:
        return torch.stack([layer_sums.var(-1) for layer_sums in sums])
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
    spec = plan.budget_spec
    past = allocator.allocate(spec, stats)
    if caps is not None:
        max_past = (caps * plan.page_tokens + plan.tail - spec.always_kept).clamp(min=0)
        past = to_device(past, torch.int64, caps.device)
        past = apportion(past, past.sum(), max_past)
    return round_to_pages(past + spec.always_kept, plan, caps)
