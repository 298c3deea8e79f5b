"""The whole method in one screen: statistics -> budgets -> kept positions. No vLLM.

The engine and `offline.compress` run these same steps: `Method.observe` for each layer,
`Method.layer_pages` once all layers were seen, then `Method.select` for each layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from kvcompress_kernels import window_scores
from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.plan import Columns, LayerStats, PagedValues, PagePlan
from vllm_kvcompress.policies.base import Allocator, Reads, Scorer, Selector
from vllm_kvcompress.policies.budgets import round_to_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLayer:
    """One layer of one prompt in its pages.

    Args:
        layer: index of the layer.
        key_pages: ``[N, Hkv, D, block_size]``, any float dtype and strides.
        value_pages: ``[N, Hkv, block_size, D]``.
        pages: ``[ceil(S / block_size)]`` int64, the prompt's pages in order.
        scale: factor on the attention logits.
    """

    layer: int
    key_pages: torch.Tensor
    value_pages: torch.Tensor
    pages: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What one layer's attention leaves behind until all layers were seen; on the device.

    Args:
        scores: ``[Hkv, P]`` float32; None where the selector uses another layer's.
        figures: what the allocator needs as float32 numbers, ``[k]``; empty when it needs none.
    """

    scores: torch.Tensor | None
    figures: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One allocator, scorer and selector at work.

    Args:
        merge: fold evicted tokens into their nearest kept ones.
    """

    allocator: Allocator
    scorer: Scorer
    selector: Selector
    merge: bool

    @property
    def reads(self) -> Reads:
        return self.allocator.reads | self.scorer.reads

    def reads_of(self, layer: int) -> Reads:
        """What must be shown of one layer: less where it uses another layer's scores."""
        if self.selector.source(layer) == layer or Reads.SCORES in self.allocator.reads:
            return self.reads
        return self.allocator.reads

    def observe(
        self,
        where: PagedLayer,
        plan: PagePlan,
        query: torch.Tensor | None,
        sums: torch.Tensor | None,
    ) -> Observed:
        """Score one layer of a prompt whose keys and values are all in their pages.

        Args:
            query: ``[w, Hq, D]``, the window's queries, rotated; None unless `reads_of` the layer
                has WINDOW.
            sums: ``[Hq, S]`` float32 column sums; None unless it has COLUMN_SUMS.
        """
        past = plan.prompt.past
        columns = Columns(
            num_kv_heads=where.key_pages.shape[1],
            past=past,
            device=where.key_pages.device,
            layer=where.layer,
            sums=sums,
            values=PagedValues(
                value_pages=where.value_pages, pages=where.pages, tokens=plan.tokens
            ),
        )
        figures = None
        if query is not None:
            seen = window_scores(
                query,
                where.key_pages,
                where.pages,
                plan.tokens,
                where.scale,
                variance=Reads.VARIANCE in self.reads,
            )
            columns = replace(
                columns,
                rows=plan.window,
                total=seen.total,
                variance=seen.variance,
                recent=seen.recent,
                last=seen.last,
            )
            if Reads.VARIANCE in self.allocator.reads:
                figures = torch.stack([seen.entropy, seen.shift])
        if Reads.COLUMN_SUMS in self.allocator.reads and sums is not None:
            figures = sums.var(-1)  # ddof 1
        wanted = self.selector.source(where.layer) == where.layer
        if wanted or Reads.SCORES in self.allocator.reads:
            return Observed(scores=self.scorer.score(columns), figures=figures)
        return Observed(scores=None, figures=figures)

    def layer_pages(self, plan: PagePlan, layers: Sequence[Observed]) -> list[int]:
        """Pages that each layer keeps, with one copy of a few numbers to the host."""
        return layer_pages(self.allocator, plan, self._stats(layers))

    def _stats(self, layers: Sequence[Observed]) -> list[LayerStats] | None:
        if Reads.SCORES in self.allocator.reads:
            return [LayerStats(scores=layer.scores) for layer in layers]
        figures = [layer.figures for layer in layers if layer.figures is not None]
        if len(figures) < len(layers):
            return None
        numbers = torch.stack(figures).tolist()
        if Reads.COLUMN_SUMS in self.allocator.reads:
            return [LayerStats(column_variance=tuple(row)) for row in numbers]
        return [LayerStats(entropy=entropy, shift=shift) for entropy, shift in numbers]

    def select(
        self, layers: Sequence[Observed], layer: int, plan: PagePlan, pages: int
    ) -> torch.Tensor:
        """``[Hkv, pages * block_size]`` int64 positions that `layer` keeps (`kept_positions`)."""
        return kept_positions(self._scores(layers, layer), plan, pages, self.selector)

    def protected_scores(
        self, layers: Sequence[Observed], layer: int, plan: PagePlan, pages: int
    ) -> torch.Tensor:
        """``[Hkv, S]`` float32 scores that `layer` was selected by, +inf where it had no choice."""
        scores = self._scores(layers, layer)
        past, keep, after = competing(plan, pages)
        best = self.selector.protect(scores[:, :past], keep, after)
        kept = torch.full((len(scores), after), torch.inf, device=scores.device)
        return torch.cat([best, kept], dim=1)

    def _scores(self, layers: Sequence[Observed], layer: int) -> torch.Tensor:
        scores = layers[self.selector.source(layer)].scores
        assert scores is not None
        return scores


def with_tail(kept: torch.Tensor, plan: PagePlan) -> torch.Tensor:
    """`kept_positions` and the tail after them, ``[Hkv, pages * block_size + tail]``."""
    end = plan.full_blocks * plan.block_size
    tail = torch.arange(end, plan.tokens, device=kept.device).expand(len(kept), -1)
    return torch.cat([kept, tail], dim=1)


@lru_cache(maxsize=64)
def method_of(settings: CompressionConfig) -> Method:
    """The method that some settings stand for; built once."""
    return Method(
        allocator=settings.build_allocator(),
        scorer=settings.build_scorer(),
        selector=settings.build_selector(),
        merge=settings.names.merge,
    )


def layer_pages(
    allocator: Allocator, plan: PagePlan, stats: Sequence[LayerStats] | None
) -> list[int]:
    """Pages that each layer keeps: L ints between the window's pages and all, sum `plan.pages`."""
    past = allocator.allocate(plan.prompt, stats)
    return round_to_pages([b + plan.window for b in past], plan)


def competing(plan: PagePlan, pages: int) -> tuple[int, int, int]:
    """Past tokens that compete in a layer, how many of them stay, and how many follow them."""
    end = plan.full_blocks * plan.block_size
    past = min(plan.prompt.past, end)
    return past, pages * plan.block_size - (end - past), plan.tokens - past


def kept_positions(
    scores: torch.Tensor, plan: PagePlan, pages: int, selector: Selector
) -> torch.Tensor:
    """Positions of the prompt's full blocks that one layer keeps in `pages` pages.

    The window's part before the tail is always kept. The tail is kept by the engine itself, so
    past tokens that lie in it do not compete.

    Args:
        scores: ``[Hkv, P]`` float32 over the past tokens.

    Returns:
        ``[Hkv, pages * block_size]`` int64, ascending.
    """
    past, keep, after = competing(plan, pages)
    best = selector.select(scores[:, :past], keep, after)
    end = plan.full_blocks * plan.block_size
    window = torch.arange(past, end, device=scores.device).expand(len(scores), -1)
    return torch.cat([best, window], dim=1)
