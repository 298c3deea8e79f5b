"""A method at work: what a request holds -> statistics -> pages of each layer -> kept slots.

The engine and `offline.compress` run the same steps: `Method.observe` for as many rows as are
scored together, then `Method.layer_pages` and `kept_slots` once all rows were seen. How much each
layer keeps stays on the device of the statistics: the host launches the work and learns no value.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from kvcompress_kernels.window_scores import WindowScores, window_scores_of_rows
from vllm_kvcompress.devices import to_device
from vllm_kvcompress.methods.attention import apart, cut, past_of, window_last
from vllm_kvcompress.methods.base import Allocator, Reads, Scorer, Selector
from vllm_kvcompress.methods.budget_spec import AttentionStats, LayerStats, PagedKeys, PagedValues
from vllm_kvcompress.methods.budgets import apportion, round_to_pages
from vllm_kvcompress.methods.kept_slots import kept_slots, most_pages, with_tail
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.paged_layers import PagedLayers
from vllm_kvcompress.methods.presets import Merge
from vllm_kvcompress.methods.protected import Guarded
from vllm_kvcompress.methods.scorers.accumulated import column_means

_UNDECLARED = "its scorer does not declare that it can judge what is left of a prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerObservation:
    """What the attention of one row leaves behind until all rows were seen; on the device.

    Args:
        scores: ``[Hkv, P]`` float32; None where the selector uses another layer's.
        entropy, shift: scalars float32, CAKE's H and V (`LayerStats`); None unless the allocator
            reads them.
        column_variance: ``[Hq]`` float32, D2O's, likewise; ``[Hkv]`` where only the mean over a KV
            head's query heads is known.
    """

    scores: torch.Tensor | None
    entropy: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    column_variance: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One allocator, scorer and selector at work.

    Args:
        merge: fold evicted tokens into their nearest kept ones, or their values alone.
    """

    allocator: Allocator
    scorer: Scorer
    selector: Selector
    merge: Merge

    @property
    def values_only(self) -> bool:
        """Whether keys stay as they are where tokens merge."""
        return self.merge == "values"

    @property
    def reads(self) -> Reads:
        return self.allocator.reads | self.scorer.reads

    @property
    def why_whole(self) -> str:
        """Why this method needs all tokens of a prompt at once; empty where it does not.

        Such a method cannot judge a request of which tokens were dropped already.
        """
        reason = getattr(self.scorer, "needs_whole_prompt", _UNDECLARED)
        if reason := reason or self.allocator.needs_whole_prompt:
            return str(reason)
        reuses = any(self.selector.source(layer) != layer for layer in range(8))
        return "its layers reuse a ranking" if reuses else ""

    def scores_layer(self, layer: int) -> bool:
        """Whether this layer is scored, or uses another one's ranking only."""
        return self.selector.source(layer) == layer or Reads.SCORES in self.allocator.reads

    def reads_of(self, layer: int) -> Reads:
        """What must be shown of one layer: less where it uses another layer's scores."""
        return self.reads if self.scores_layer(layer) else self.allocator.reads

    def attention(
        self,
        rows: PagedLayers,
        query: torch.Tensor,
        allocator_window: int | None = None,
        *,
        scored_by_output: bool = False,
    ) -> WindowScores:
        """What the last queries of some rows think of the tokens before them.

        Args:
            query: ``[N, w, Hq, D]``, the last w of each row in the order of positions.
            allocator_window, scored_by_output: as in `PagePlan`. Entropy and shift use the last
                `allocator_window` queries. A scorer with `Reads.APART` takes only the maximum from
                the prompt's queries when output tokens score the prompt.
        """
        places = rows.key_pages, rows.pages, rows.most, rows.scale
        if scored_by_output and allocator_window is not None and Reads.APART in self.scorer.reads:
            return apart(rows, query, allocator_window)
        if Reads.VARIANCE not in self.allocator.reads:
            allocator_window = None
        reads = self.reads if allocator_window is None else self.scorer.reads
        found = window_scores_of_rows(
            query,
            *places,
            lengths=rows.lengths,
            variance=Reads.VARIANCE in reads,
            maximum=Reads.MAXIMUM in reads,
            pooled=Reads.POOLED in reads,
            sinks=rows.sinks,
        )
        if allocator_window is None:
            return found
        latest = query[:, query.shape[1] - allocator_window :]
        figures = window_scores_of_rows(
            latest, *places, lengths=rows.lengths, variance=True, sinks=rows.sinks
        )
        return found._replace(entropy=figures.entropy, shift=figures.shift)

    def observe(
        self,
        rows: PagedLayers,
        window: int,
        attention: WindowScores | None,
        sums: torch.Tensor | None,
        *,
        scored: bool = True,
    ) -> list[LayerObservation]:
        """Score some rows, whose keys and values are all in their pages.

        Args:
            window: last tokens of each row that are kept in any case, w.
            attention: of the observation window, or of its last rows and a maximum of the others
                (`attention`); None where the method reads none.
            sums: ``[N, Hq, most]`` float32 column sums of the causal attention so far, or
                ``[N, Hkv, most]``, their mean over a KV head's query heads, where rows have
                lengths; None where the method reads none.
            scored: make scores, and not only what the allocator reads.

        Returns:
            One for each row. Of scores ``[Hkv, most - w]`` the first ``length - w`` count.

        Raises:
            ValueError: the scorer returns something else than ``[Hkv, P]`` float32.
        """
        entropy = shift = variance = None
        if attention is not None and Reads.VARIANCE in self.allocator.reads:
            entropy, shift = attention.entropy, attention.shift
        if sums is not None and Reads.COLUMN_SUMS in self.allocator.reads:
            means = Reads.COLUMN_MEANS in self.allocator.reads
            variance = _variances(column_means(sums) if means else sums, rows.lengths)
        scores: Iterable[torch.Tensor | None] = [None] * len(rows.pages)
        if scored and rows.lengths is None:
            scores = [self._score_one(rows, i, window, attention, sums) for i in range(len(rows))]
        elif scored:
            scores = self._score_together(rows, window, attention, sums)
        return [
            LayerObservation(
                scores=own,
                entropy=None if entropy is None else entropy[row],
                shift=None if shift is None else shift[row],
                column_variance=None if variance is None else variance[row],
            )
            for row, own in enumerate(scores)
        ]

    def _score_one(
        self,
        rows: PagedLayers,
        row: int,
        window: int,
        attention: WindowScores | None,
        sums: torch.Tensor | None,
    ) -> torch.Tensor:
        """``[Hkv, P]`` of a layer of which nothing was dropped yet."""
        keys = values = None
        if Reads.KEYS in self.scorer.reads:
            keys = PagedKeys(key_pages=rows.key_pages, pages=rows.pages[row], tokens=rows.most)
        if Reads.VALUES in self.scorer.reads:
            values = PagedValues(
                value_pages=rows.value_pages,
                pages=rows.pages[row],
                tokens=rows.most,
                scale=rows.value_scales[row],
            )
        own, past = None if attention is None else attention.row(row), rows.most - window
        return self._score(
            AttentionStats(
                num_kv_heads=rows.key_pages.shape[1],
                past=past,
                device=rows.key_pages.device,
                layer=rows.layers[row],
                rows=0 if own is None else own.recent.shape[-1],
                total=own and own.total[:, :past],
                variance=cut(own and own.variance, past),
                recent=own and own.recent,
                last=own and own.last,
                maximum=own and own.maximum,
                sums=None if sums is None else sums[row],
                keys=keys,
                values=values,
            )
        )

    def _score_together(
        self,
        rows: PagedLayers,
        window: int,
        attention: WindowScores | None,
        sums: torch.Tensor | None,
    ) -> torch.Tensor:
        """``[N, Hkv, most - w]`` of layers that may hold different numbers of tokens."""
        count, heads, own = len(rows), rows.key_pages.shape[1], attention
        assert rows.lengths is not None
        maximum = None if own is None else own.maximum
        if maximum is not None:
            maximum = window_last(maximum, rows.lengths, window)
        if own is not None and own.total.shape[2] > rows.most - window:
            # All but the maximum is of fewer rows, whose past reaches into the window.
            assert own.variance is not None
            total, variance = (past_of(part, rows, window) for part in (own.total, own.variance))
            own = own._replace(total=total, variance=variance)
        values = None
        if Reads.VALUES in self.scorer.reads:
            values = PagedValues(value_pages=rows.value_pages, pages=rows.pages, tokens=rows.most)
        scores = self._score(
            AttentionStats(
                num_kv_heads=count * heads,
                layers=count,
                lengths=rows.lengths,
                past=rows.most - window,
                device=rows.key_pages.device,
                rows=0 if own is None else own.recent.shape[-1],
                total=_folded(own and own.total),
                variance=_folded(own and own.variance),
                recent=_folded(own and own.recent),
                last=_folded(own and own.last),
                maximum=_folded(maximum),
                sums=_folded(sums),
                values=values,
            )
        )
        return scores.reshape(count, heads, -1)

    def _score(self, columns: AttentionStats) -> torch.Tensor:
        """The scorer's scores, held to its promise: a wider row would be read as if it fitted."""
        scores = self.scorer.score(columns)
        promised = (columns.num_kv_heads, columns.past)
        if scores.shape != promised or scores.dtype != torch.float32:
            raise ValueError(
                f"scorer {type(self.scorer).__name__} must return float32 scores {promised}, a row"
                f" for each KV head and a column for each past token; got {scores.dtype}"
                f" {tuple(scores.shape)}"
            )
        return scores

    def layer_pages(
        self, plan: PagePlan, layers: Sequence[LayerObservation], caps: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[L]`` int64: pages that each layer keeps (`layer_pages`)."""
        return layer_pages(self.allocator, plan, self._stats(layers, plan), caps)

    def _stats(self, layers: Sequence[LayerObservation], plan: PagePlan) -> LayerStats | None:
        if Reads.SCORES in self.allocator.reads:
            scores = torch.stack(_present(layer.scores for layer in layers))
            guarded = Guarded.of(plan.spans, plan.tokens - plan.window, scores.device)
            if guarded is not None:
                scores = guarded.without(scores)
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
        """Positions that the layers of a whole prompt keep, its tail's among them.

        Returns:
            ``[L, Hkv, n]`` int32, ascending; -1 behind the ``pages[l] * block_size + tail`` kept.
        """
        scores = self.scores(layers)
        counts = to_device(pages, torch.int32, scores.device)
        kept = kept_slots(
            scores,
            plan.tokens,
            counts,
            window=plan.window,
            tail=plan.tail,
            block_size=plan.block_size,
            most_pages=most_pages(plan, pages),
            selector=self.selector,
            guarded=Guarded.of(plan.spans, plan.tokens - plan.after, scores.device),
        )
        return with_tail(kept, plan.tokens, counts * plan.block_size, plan.tail)

    def protected_scores(
        self, layers: Sequence[LayerObservation], plan: PagePlan, pages: torch.Tensor
    ) -> torch.Tensor:
        """``[L, Hkv, S]`` float32 scores that were selected by, +inf where there was no choice."""
        scores, after = self.scores(layers), plan.after
        counts = to_device(pages, torch.int32, scores.device)
        keep = counts * plan.block_size - max(plan.window - plan.tail, 0)
        past = plan.tokens - after
        guarded = Guarded.of(plan.spans, past, scores.device)
        if guarded is None:
            best = self.selector.protect(scores[..., :past], keep, after)
        else:
            free = guarded.without(scores[..., :past])
            free = self.selector.protect(free, keep - guarded.own.shape[2], after)
            best = torch.full_like(scores[..., :past], torch.inf)
            best[..., guarded.others(past)[0, 0]] = free
        return pad(best, (0, after), value=torch.inf)

    def scores(self, rows: Sequence[LayerObservation]) -> torch.Tensor:
        """``[N, Hkv, W]`` float32 scores that each row is selected by, W a multiple of 16.

        What lies behind the past tokens is not initialised.
        """
        sources = (self.selector.source(row) for row in range(len(rows)))
        scores = _present(rows[source].scores for source in sources)
        heads, past = scores[0].shape
        stacked = scores[0].new_empty(len(rows), heads, -(-past // 16) * 16)
        torch.stack(scores, out=stacked[..., :past])
        return stacked


def _present(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _folded(part: torch.Tensor | None) -> torch.Tensor | None:
    """``[N, Hq, n]`` to ``[N * Hq, n]``."""
    return None if part is None else part.flatten(0, 1)


def _variances(sums: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """``[N, H]``: over a row's own tokens, the sample variance, as in the code of D2O's authors."""
    if lengths is None:
        return torch.stack([own.var(-1) for own in sums])
    count = lengths[:, None, None]
    held = torch.arange(sums.shape[2], device=sums.device) < count
    mean = sums.where(held, 0).sum(-1, keepdim=True) / count
    return (sums - mean).where(held, 0).square().sum(-1) / (count[..., 0] - 1)


def layer_pages(
    allocator: Allocator,
    plan: PagePlan,
    stats: LayerStats | None,
    caps: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[L]`` int64: pages that each layer keeps, where its statistics are; sum `plan.pages`.

    Each is between the window's pages and all, or what `caps` ``[L]`` says that the layer has: what
    it cannot hold goes to the others, in proportion to what they got.
    """
    prompt = plan.prompt
    past = allocator.allocate(prompt, stats)
    if caps is not None:
        room = (caps * plan.block_size + plan.tail - prompt.always_kept).clamp(min=0)
        past = to_device(past, torch.int64, caps.device)
        past = apportion(past, past.sum(), room)
    return round_to_pages(past + prompt.always_kept, plan, caps)
