"""From a finished prefill to packed pages: score every layer, choose, move. Nothing syncs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from kvcompress_kernels.move_kept import move_kept
from kvcompress_kernels.window_scores import WindowScores, window_scores_of_layers
from vllm_kvcompress.devices import to_device
from vllm_kvcompress.engine.compression.merging import Held, merged_pages, merged_rows
from vllm_kvcompress.engine.messages.step import Compression
from vllm_kvcompress.engine.pages.layouts import Opened, PageViews, Strided
from vllm_kvcompress.engine.pages.pool import PagePool
from vllm_kvcompress.engine.pages.scales import Scales
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.scorers.pooling import group_mean
from vllm_kvcompress.pipeline import Method, Observed, PagedLayer
from vllm_kvcompress.planning.memory import layers_at_once


@dataclass(slots=True, kw_only=True)
class Finished:
    """A prompt whose prefill ended in this step.

    Args:
        todo: its place in the scheduler's plan.
        method: what compresses it.
        blocks: ``[ceil(S / bs)]`` int64, vLLM block ids of the prompt.
        queries: per layer that is shown its window, the last ``[w, Hq, D]`` queries.
        sums: per layer that is shown them, column sums ``[Hq, S]`` float32.
        grows: its answer is bounded: what its method remembers is kept.
    """

    todo: Compression
    method: Method
    blocks: torch.Tensor
    queries: Mapping[int, torch.Tensor]
    sums: Mapping[int, torch.Tensor]
    grows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What all layers of one prompt keep, and where it goes.

    Args:
        prompt: ``[L, ceil(S / bs)]`` int64, pages of the prompt.
        kept: ``[L, Hkv, n]`` int32 positions; those of the tail among them if tokens merge.
        counts: ``[L]`` int32, pages without the tail.
        targets: ``[L, n // bs]`` int32, where those go.
        values_only: keys stay as they are where tokens merge.
    """

    prompt: torch.Tensor
    kept: torch.Tensor
    counts: torch.Tensor
    targets: torch.Tensor
    values_only: bool


class Packer:
    """Packs prompts within the page pool of one worker, whose pages ops read and write themselves.

    Prompts are packed one after the other, after the whole forward pass: what one prompt's scores
    take is free again before the next one's are made, however many end in the same step.

    Args:
        pool: the page pool of this worker's layers.
        layout: how keys and values lie in its pages.
        scales: of each layer.
        num_layers: layers on this worker, L.
    """

    def __init__(
        self,
        pool: PagePool,
        layout: Strided,
        *,
        scales: Scales,
        num_layers: int,
    ) -> None:
        self.pool, self.num_layers = pool, num_layers
        self.keys, self.values = layout.views(pool.elements)
        self.scales, self._longest = scales, pool.longest

    def read(self, pages: torch.Tensor) -> PageViews:
        """A copy of the keys ``[n, Hkv, D, bs]`` and values ``[n, Hkv, bs, D]`` in flat pages."""
        return self.keys[pages], self.values[pages]

    def opened(self, pages: torch.Tensor) -> Opened:
        """Flat pages of any shape, int64, where ops may read them."""
        return Opened(self.keys, self.values, pages)

    def where(self, layer: int, blocks: torch.Tensor, reads: Reads) -> PagedLayer:
        """One layer of a prompt in its blocks ``[n]`` int64, for a method that `reads` of it."""
        return PagedLayer(
            layer=layer,
            key_pages=self.keys,
            value_pages=self.values,
            pages=self.pool.flat_ids(layer, blocks),
            scale=self.scales.logits[layer],
            value_scale=self.scales.values[layer],
            sinks=self.scales.sinks_of(layer),
        )

    def pack(self, finished: Finished) -> torch.Tensor:
        """Move what all layers keep; how much that is stays on the device.

        Returns:
            ``[L]`` int64: pages that each layer keeps.
        """
        todo, plan, method = finished.todo, finished.todo.plan, finished.method
        layers = self.observe(finished)
        pages = method.layer_pages(plan, layers)
        counts = to_device(pages, torch.int32, self.pool.pages.device)
        free = self.pool.destination(todo.destination)[: plan.pages]
        targets = self.pool.assign(todo.request_id, free, counts, plan.full_blocks)
        prompt = self.pool.every_layer(finished.blocks)
        kept = method.select(layers, plan, pages, tail=bool(method.merge))
        del layers
        move = Move(
            prompt=prompt,
            kept=kept,
            counts=counts,
            targets=targets[:, : kept.shape[2] // plan.block_size],
            values_only=method.values_only,
        )
        thresholds = self._move(finished, move)
        if finished.grows:
            self._remember(finished, move, thresholds)
        return pages

    def _remember(self, finished: Finished, move: Move, thresholds: torch.Tensor | None) -> None:
        """Keep the attention that kept tokens were paid, and how near a dropped one must be."""
        pool, plan = self.pool, finished.todo.plan
        if thresholds is not None and pool.thresholds is not None:
            pool.thresholds.write(pool.slots([finished.todo.request_id]), thresholds[None])
        if not finished.sums or pool.sums is None:
            return
        paid = self._paid(finished.sums, pool.sums.kv_heads)
        kept = move.kept[..., : move.targets.shape[1] * plan.block_size].clamp(min=0).long()
        pool.sums.write(move.targets, move.counts, paid.gather(2, kept))
        if plan.tail:
            last = paid[..., plan.full_blocks * plan.block_size :]
            pool.sums.write(move.prompt[:, -1:], torch.ones_like(move.counts), last)

    def remember_whole(self, blocks: torch.Tensor, sums: Mapping[int, torch.Tensor]) -> None:
        """Keep the attention that a prompt's tokens were paid, where it stays as it is.

        Args:
            blocks: ``[ceil(S / bs)]`` int64, vLLM block ids of the prompt.
            sums: column sums ``[Hq, S]`` of every layer.
        """
        own = self.pool.sums
        assert own is not None
        pages, paid = self.pool.every_layer(blocks), self._paid(sums, own.kv_heads)
        own.write(pages, pages.new_full((len(pages),), pages.shape[1]), paid)

    def _paid(self, sums: Mapping[int, torch.Tensor], kv_heads: int) -> torch.Tensor:
        """``[L, Hkv, S]`` float32 of column sums ``[Hq, S]`` of every layer."""
        return torch.stack([group_mean(sums[layer], kv_heads) for layer in range(self.num_layers)])

    def _move(self, finished: Finished, move: Move) -> torch.Tensor | None:
        """Write what is kept to its pages; returns thresholds ``[L, Hkv]`` if tokens merge."""
        plan, method = finished.todo.plan, finished.method
        if finished.todo.in_place:
            return self._in_place(plan, method, move)
        cache = self.keys, self.values
        if method.merge:
            return self._merge(plan, move, move.targets, cache)
        move_kept(*cache, move.prompt, move.kept, move.counts, move.targets, into=cache)
        return None

    def observe(self, finished: Finished) -> list[Observed]:
        """Score every layer of a prompt (`Method.observe`), `layers_at_once`."""
        observed: list[Observed] = []
        at_once = layers_at_once(self._longest, finished.todo.plan.tokens)
        for start in range(0, self.num_layers, at_once):
            layers = range(start, min(start + at_once, self.num_layers))
            observed += self._observe_together(finished, layers)
        return observed

    def _observe_together(self, finished: Finished, layers: range) -> Iterator[Observed]:
        method, plan = finished.method, finished.todo.plan
        reads = [method.reads_of(layer) for layer in layers]
        places = [
            self.where(layer, finished.blocks, read)
            for layer, read in zip(layers, reads, strict=True)
        ]
        watched = [place for place, read in zip(places, reads, strict=True) if Reads.WINDOW in read]
        windows = dict[int, WindowScores]()
        if watched:
            scores = window_scores_of_layers(
                [self._window_queries(finished, place.layer) for place in watched],
                watched[0].key_pages,
                torch.stack([place.pages for place in watched]),
                plan.tokens,
                self.scales.of_layers([place.layer for place in watched]),
                variance=Reads.VARIANCE in method.reads,
                maximum=Reads.MAXIMUM in method.reads,
                pooled=Reads.POOLED in method.reads,
                sinks=self.scales.sinks_of_layers([place.layer for place in watched]),
            )
            windows = {place.layer: window for place, window in zip(watched, scores, strict=True)}
        for place, read in zip(places, reads, strict=True):
            sums = finished.sums[place.layer] if Reads.COLUMN_SUMS in read else None
            yield method.observe(place, plan, windows.get(place.layer), sums)

    @staticmethod
    def _window_queries(finished: Finished, layer: int) -> torch.Tensor:
        """``[w, Hq, D]``."""
        query, plan = finished.queries.get(layer), finished.todo.plan
        if query is None or len(query) != plan.window:
            kept = 0 if query is None else len(query)
            raise RuntimeError(
                f"request {finished.todo.request_id}: {kept} window queries were kept at the end"
                f" of prefill, {plan.window} are needed"
            )
        return query

    def move_in_place(
        self,
        cache: Opened,
        kept: torch.Tensor,
        counts: torch.Tensor,
        targets: torch.Tensor,
        total: int,
    ) -> None:
        """Write what N rows keep to their pages, which may be those that they are read from.

        Args:
            cache: with the rows' pages ``[N, W]``.
            kept: ``[N, Hkv, n]`` int32 slots.
            counts: ``[N]`` int32 pages, with sum `total`.
            targets: ``[N, n // bs]`` int32 flat pages.
        """
        staging_pages = _staging(counts, targets.shape[1])
        for head in range(self.keys.shape[1]):
            one = slice(head, head + 1)
            part = self.keys[:, one], self.values[:, one]
            staged = _like(part[0].mT, total).mT, _like(part[1], total)
            move_kept(*part, cache.pages, kept[:, one], counts, staging_pages, into=staged)
            move_kept(*staged, staging_pages, None, counts, targets, into=part)

    def merge_in_place(
        self,
        cache: Opened,
        held: Held,
        kept: torch.Tensor,
        counts: torch.Tensor,
        targets: torch.Tensor,
        total: int,
    ) -> torch.Tensor:
        """The same with what is dropped folded in, where it is near enough.

        Returns:
            ``[N, Hkv]`` float32, how near that is from now on.
        """
        staging_pages, thresholds = _staging(counts, targets.shape[1]), []
        staged = _like(self.keys.mT, total).mT, _like(self.values, total)
        at_once = layers_at_once(self._longest, kept.shape[2])
        for start in range(0, len(kept), at_once):
            some = slice(start, start + at_once)
            (keys, values), tails, near = merged_rows(
                cache, some, held, kept, counts, self.pool.block_size
            )
            for part, tokens in zip((self.keys.mT, self.values), tails, strict=True):
                # a tail's block is the request's own: no hash, no other reader
                part[:, :, : held.tail][held.tail_pages[some]] = tokens
            own = torch.arange(len(keys), device=kept.device).view(len(near), -1)
            to = staging_pages[some]
            move_kept(keys.mT, values, own, None, counts[some], to, into=staged)
            thresholds.append(near)
        move_kept(*staged, staging_pages, None, counts, targets, into=(self.keys, self.values))
        return torch.cat(thresholds)

    def _in_place(self, plan: PagePlan, method: Method, move: Move) -> torch.Tensor | None:
        """Through a staging buffer: a layer's target may be another layer's source.

        All is read before any is written. KV heads do not meet, so they take turns in a buffer of
        one head's pages; merged tokens are staged together.
        """
        counts = move.counts
        staging_pages = _staging(counts, move.targets.shape[1])
        heads, thresholds = [slice(h, h + 1) for h in range(self.keys.shape[1])], None
        if method.merge:
            heads = [slice(None)]
        for head in heads:
            part = self.keys[:, head], self.values[:, head]
            staged = _like(part[0].mT, plan.pages).mT, _like(part[1], plan.pages)
            if method.merge:
                thresholds = self._merge(plan, move, staging_pages, staged)
            else:
                move_kept(
                    *part, move.prompt, move.kept[:, head], counts, staging_pages, into=staged
                )
            move_kept(*staged, staging_pages, None, counts, move.targets, into=part)
        return thresholds

    def _merge(
        self, plan: PagePlan, move: Move, targets: torch.Tensor, into: PageViews
    ) -> torch.Tensor:
        """Write kept tokens, merged, to their pages; those of the tail where they are.

        Layer by layer, since merged tokens are float32 and the host knows only how many they can
        be at most.

        Args:
            move: `kept` has the tail's positions among its own.
            targets: ``[L, n // bs]`` int, where the pages go, in the key and value pages `into`.

        Returns:
            ``[L, Hkv]`` float32, how near a dropped token was at least that was merged.
        """
        thresholds = []
        own = torch.arange(targets.shape[1], device=targets.device)[None]
        for layer in range(self.num_layers):
            row = slice(layer, layer + 1)
            prompt, kept, counts = move.prompt[row], move.kept[row], move.counts[row]
            pages, tail, threshold = merged_pages(
                plan, self.keys, self.values, prompt, kept, counts, move.values_only
            )
            last = prompt[0, -1:]
            for part, tokens in zip((self.keys.mT, self.values), tail, strict=True):
                # the tail's block is the request's own: no hash, no other reader
                part[:, :, : plan.tail][last] = tokens[None]
            keys, values = pages
            move_kept(keys.mT, values, own, None, counts, targets[row], into=into)
            thresholds.append(threshold)
        return torch.cat(thresholds)


def _staging(counts: torch.Tensor, most: int) -> torch.Tensor:
    """``[N, most]``: pages of a buffer that rows fill one after the other."""
    column = torch.arange(most, device=counts.device)
    return (counts.cumsum(0) - counts)[:, None] + column


def _like(pages: torch.Tensor, count: int) -> torch.Tensor:
    """`count` pages like these, contiguous."""
    return pages.new_empty(count, *pages.shape[1:])
