"""The whole method in one screen: statistics -> budgets -> kept positions. No vLLM.

The engine and `offline.compress` run these same steps: `Method.observe` for each layer, then
`Method.layer_pages` and `Method.select` once all layers were seen. How much each layer keeps stays
on the device of the statistics: the host launches the work and learns no value.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch.nn.functional import pad

from kvcompress_kernels.window_scores import WindowScores
from vllm_kvcompress.devices import to_device
from vllm_kvcompress.methods.base import Allocator, Reads, Scorer, Selector
from vllm_kvcompress.methods.budgets import apportion, round_to_pages
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.presets import Merge
from vllm_kvcompress.methods.prompt import Columns, LayerStats, PagedKeys, PagedValues
from vllm_kvcompress.methods.scorers.accumulated import column_means
from vllm_kvcompress.settings.config import CompressionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLayer:
    """One layer of one prompt in its pages.

    Args:
        layer: index of the layer.
        key_pages: ``[N, Hkv, D, block_size]``, any float dtype and strides.
        value_pages: ``[N, Hkv, block_size, D]``.
        pages: ``[ceil(S / block_size)]`` int64, the prompt's pages in order.
        scale: factor on the attention logits, that of a quantised key included.
        value_scale: factor on the cached values.
        sinks: ``[Hq]`` float32, the logits of the query heads' sinks; None without.
    """

    layer: int
    key_pages: torch.Tensor
    value_pages: torch.Tensor
    pages: torch.Tensor
    scale: float
    value_scale: float = 1.0
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What one layer's attention leaves behind until all layers were seen; on the device.

    Args:
        scores: ``[Hkv, P]`` float32; None where the selector uses another layer's.
        entropy, shift: scalars float32, CAKE's H and V (`LayerStats`); None unless the allocator
            reads them.
        column_variance: ``[Hq]`` float32, D2O's, likewise.
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

    def reads_of(self, layer: int) -> Reads:
        """What must be shown of one layer: less where it uses another layer's scores."""
        if self.selector.source(layer) == layer or Reads.SCORES in self.allocator.reads:
            return self.reads
        return self.allocator.reads

    def observe(
        self,
        where: PagedLayer,
        plan: PagePlan,
        window: WindowScores | None,
        sums: torch.Tensor | None,
    ) -> Observed:
        """Score one layer of a prompt whose keys and values are all in their pages.

        Args:
            window: what the observation window thinks of the layer's past, with its variance and
                maximum if `reads` has them; None unless `reads_of` the layer has WINDOW.
            sums: ``[Hq, S]`` float32 column sums; None unless it has COLUMN_SUMS.

        Raises:
            ValueError: the scorer returns something else than ``[Hkv, P]`` float32.
        """
        past = plan.prompt.past
        columns = Columns(
            num_kv_heads=where.key_pages.shape[1],
            past=past,
            device=where.key_pages.device,
            layer=where.layer,
            sums=sums,
        )
        if Reads.KEYS in self.scorer.reads:
            keys = PagedKeys(key_pages=where.key_pages, pages=where.pages, tokens=plan.tokens)
            columns = replace(columns, keys=keys)
        if Reads.VALUES in self.scorer.reads:
            values = PagedValues(
                value_pages=where.value_pages,
                pages=where.pages,
                tokens=plan.tokens,
                scale=where.value_scale,
            )
            columns = replace(columns, values=values)
        entropy = shift = column_variance = None
        if window is not None:
            columns = replace(
                columns,
                rows=plan.window,
                total=window.total,
                variance=window.variance,
                recent=window.recent,
                last=window.last,
                maximum=window.maximum,
            )
            if Reads.VARIANCE in self.allocator.reads:
                entropy, shift = window.entropy, window.shift
        if Reads.COLUMN_SUMS in self.allocator.reads and sums is not None:
            means = Reads.COLUMN_MEANS in self.allocator.reads
            # The sample variance, as in the code of D2O's authors.
            column_variance = (column_means(sums) if means else sums).var(-1)
        scored = self.selector.source(where.layer) == where.layer
        scored = scored or Reads.SCORES in self.allocator.reads
        return Observed(
            scores=self._score(columns) if scored else None,
            entropy=entropy,
            shift=shift,
            column_variance=column_variance,
        )

    def _score(self, columns: Columns) -> torch.Tensor:
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
        self, plan: PagePlan, layers: Sequence[Observed], caps: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[L]`` int64: pages that each layer keeps (`layer_pages`)."""
        return layer_pages(self.allocator, plan, self._stats(layers), caps)

    def _stats(self, layers: Sequence[Observed]) -> LayerStats | None:
        if Reads.SCORES in self.allocator.reads:
            return LayerStats(scores=torch.stack(_present(layer.scores for layer in layers)))
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
        self,
        layers: Sequence[Observed],
        plan: PagePlan,
        pages: torch.Tensor,
        *,
        tail: bool = False,
    ) -> torch.Tensor:
        """Positions that the layers keep in `pages`, and the tail's if asked (`kept_positions`)."""
        end = plan.tokens if tail else plan.full_blocks * plan.block_size
        return kept_positions(self._scores(layers), plan, pages, self.selector, end)

    def protected_scores(
        self, layers: Sequence[Observed], plan: PagePlan, pages: torch.Tensor
    ) -> torch.Tensor:
        """``[L, Hkv, S]`` float32 scores that were selected by, +inf where there was no choice."""
        scores = self._scores(layers)
        past, keep, after = competing(plan, to_device(pages, torch.int64, scores.device))
        best = self.selector.protect(scores[..., :past], keep, after)
        return pad(best, (0, after), value=torch.inf)

    def _scores(self, layers: Sequence[Observed]) -> torch.Tensor:
        """``[L, Hkv, W]`` float32 scores that each layer is selected by, W a multiple of 16.

        What lies behind the P past tokens is not initialised.
        """
        sources = (self.selector.source(layer) for layer in range(len(layers)))
        scores = _present(layers[source].scores for source in sources)
        heads, past = scores[0].shape
        stacked = scores[0].new_empty(len(layers), heads, -(-past // 16) * 16)
        torch.stack(scores, out=stacked[..., :past])
        return stacked


def _present(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


@lru_cache(maxsize=64)
def method_of(settings: CompressionConfig) -> Method:
    """The method that some settings stand for; built once."""
    return Method(
        allocator=settings.build_allocator(),
        scorer=settings.build_scorer(),
        selector=settings.build_selector(),
        merge=settings.parts.merge,
    )


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
    past = allocator.allocate(plan.prompt, stats)
    if caps is not None:
        room = (caps * plan.block_size + plan.tail - plan.window).clamp(min=0)
        past = to_device(past, torch.int64, caps.device)
        past = apportion(past, past.sum(), room)
    return round_to_pages(past + plan.window, plan, caps)


def most_pages(plan: PagePlan, pages: torch.Tensor) -> int:
    """A number of pages that no layer exceeds: the largest one where it costs nothing to ask."""
    return int(pages.max()) if pages.device.type == "cpu" else plan.most_pages


def competing(plan: PagePlan, pages: torch.Tensor) -> tuple[int, torch.Tensor, int]:
    """Past tokens that compete in a layer, how many of them stay, and how many follow them."""
    end = plan.full_blocks * plan.block_size
    past = min(plan.prompt.past, end)
    return past, pages * plan.block_size - (end - past), plan.tokens - past


def kept_positions(
    scores: torch.Tensor, plan: PagePlan, pages: torch.Tensor, selector: Selector, end: int
) -> torch.Tensor:
    """Positions before `end` that the layers keep when each has `pages` pages.

    The window is always kept, and so is the tail: the engine leaves it where it is, so past tokens
    that lie in it do not compete.

    Args:
        scores: ``[L, Hkv, W]`` float32, the past tokens first.
        pages: ``[L]`` int64, on the CPU or on the device of the scores.
        end: the end of the prompt's full blocks, or of its tail.

    Returns:
        ``[L, Hkv, most]`` int32, ascending; -1 behind the ``pages[l] * block_size`` kept ones, to
        which an `end` behind the tail adds the tail's. `most` follows from `most_pages`.
    """
    width = most_pages(plan, pages) * plan.block_size + end - plan.full_blocks * plan.block_size
    past, keep, after = competing(plan, to_device(pages, torch.int64, scores.device))
    best = selector.select(scores, past, keep, after, width)
    last = torch.arange(end - past, device=scores.device)
    slots = (keep[:, None, None] + last).expand(*scores.shape[:2], -1)
    return best.scatter(2, slots, (past + last).to(torch.int32).expand_as(slots))
