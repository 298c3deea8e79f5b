"""One request whose cache is packed while a given output is fed to it, as the engine packs it.

Packing times, page counts, scores and kept slots come from the package's own code. Between two
packings the cache only grows, so all tokens of an interval are one forward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from benchmarks.evidence.cache_formats import CacheFormat
from benchmarks.evidence.compressed_cache import BLOCK, ITEMSIZE, PromptCompressor, packed
from benchmarks.evidence.random_outputs import output_scores, random_numbers
from benchmarks.evidence.reference_model import (
    LONGEST_WINDOW,
    CacheBatch,
    PrefilledPrompt,
    ReferenceModel,
)
from vllm_kvcompress.methods.base import Selector
from vllm_kvcompress.methods.kept_slots import kept_in_pages, kept_slots, max_kept_in_pages
from vllm_kvcompress.methods.method import LayerObservations, Method
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.paged_layers import PagedLayers
from vllm_kvcompress.methods.parts.topk import TopK
from vllm_kvcompress.planning.packed_pages import packed_page_tokens
from vllm_kvcompress.schedules.kv_footprint import KVFootprint
from vllm_kvcompress.schedules.outputs import OutputGroupSchedule, OutputSchedule
from vllm_kvcompress.settings.config import CompressionConfig

SCORED = "scored"
"""Output tokens are scored by the method. See `SimulatedRequest.kept_prompt`."""
CHUNK = 128
"""Tokens per forward pass of a cache that is not packed."""


@dataclass(slots=True, kw_only=True)
class SimulatedRequest:
    """A request after its prompt was packed, or left as it is; `feed` adds its output.

    Args:
        model: the model. All its layers must have full attention.
        footprint: the pages that the request holds.
        keys, values: per layer ``[Hkv, n_l, D]``.
        queries: per layer ``[<= LONGEST_WINDOW, Hq, D]``, the latest queries.
        computed: tokens of prompt and output computed so far.
        schedule: packs the output; None if its cache grows.
        cache_format: number format of the cache; None for an exact cache.
        counts: ``[L]`` pages of each layer once the output was packed, None before.
        kept_prompt: how output tokens are chosen if the prompt's kept tokens stay: at random with
            REDRAW or UNIFORM (`random_outputs`), or by the method's scores with SCORED. None if the
            method may drop prompt tokens, as in the engine.
        seed: seed of random draws.
        prompt_slots: ``[L]`` slots of each layer that hold the prompt, once it was packed.
        prompt_end: tokens computed when the prompt was packed, or the prompt's tokens.
        held: ordinary tokens over all layers that take the memory of the request's pages and
            blocks, after each computed output token.
    """

    model: ReferenceModel
    footprint: KVFootprint
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    queries: list[torch.Tensor]
    computed: int
    schedule: OutputSchedule | OutputGroupSchedule | None
    cache_format: CacheFormat | None = None
    counts: torch.Tensor | None = None
    kept_prompt: str | None = None
    seed: int = 0
    prompt_slots: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    prompt_end: int = 0
    held: list[int] = field(default_factory=list)

    @classmethod
    def begin(
        cls,
        model: ReferenceModel,
        settings: CompressionConfig,
        prompt: PrefilledPrompt,
        *,
        prompt_tokens: int,
        max_tokens: int,
        block_size: int = BLOCK,
        kept_prompt: str | None = None,
        seed: int = 0,
    ) -> "SimulatedRequest":
        """Return a request whose prompt is packed by `settings`, if it is not kept entirely.

        Args:
            prompt: the prompt, followed by the output tokens of its look-ahead if it is packed.
            prompt_tokens: tokens of the prompt alone.
            max_tokens: maximum tokens of prompt and output.
            kept_prompt, seed: as in the class.
        """
        assert all(window is None for window in model.sliding_windows)
        keys, values, plan = prompt.keys, prompt.values, None
        if settings.enabled:
            compressor = PromptCompressor(
                prompt, block_size, output_tokens=len(prompt.ids) - prompt_tokens
            )
            plan = compressor.plan(settings) if packs_prompt(settings) else None
            if plan is not None:
                cache = compressor.compress(settings)
                assert cache is not None
                keys, values = cache.keys, cache.values
        schedule = _output_schedule(settings, prompt_tokens, max_tokens, block_size)
        packs_first = plan is None and isinstance(schedule, OutputGroupSchedule)
        footprint = KVFootprint(
            num_layers=model.num_layers,
            block_size=block_size,
            leading_blocks=int(packs_first) if plan is None else plan.leading_blocks,
        )
        if plan is not None:
            footprint.pack(plan, plan.packed_end // block_size)
        return cls(
            model=model,
            footprint=footprint,
            keys=keys,
            values=values,
            queries=prompt.queries,
            computed=len(prompt.ids),
            schedule=schedule,
            cache_format=prompt.cache_format,
            kept_prompt=kept_prompt,
            seed=seed,
            prompt_slots=torch.tensor([layer_keys.shape[1] for layer_keys in keys]),
            prompt_end=len(prompt.ids),
        )

    def branch(self) -> "SimulatedRequest":
        """Return a copy that can be fed other tokens."""
        return replace(
            self,
            footprint=replace(self.footprint),
            schedule=None if self.schedule is None else replace(self.schedule),
            held=list(self.held),
        )

    def feed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Compute output tokens, pack when the schedule says so, and return hidden ``[T, d]``."""
        hidden, start = [], 0
        while start < len(tokens):
            stop, plan = self._next_packing(len(tokens) - start)
            hidden.append(self._compute(tokens[start : start + stop]))
            start += stop
            if plan is not None:
                self._pack(plan)
        return torch.cat(hidden)

    def _next_packing(self, tokens: int) -> tuple[int, PagePlan | None]:
        """Return how many of the next `tokens` tokens one pass computes, and the plan after it."""
        for count in range(1, min(tokens, CHUNK) + 1):
            self.held.append(self._held_after(count))
            if self.schedule is not None:
                plan = self.schedule.plan(self.footprint, self.computed + count)
                if plan is not None:
                    return count, plan
        return min(tokens, CHUNK), None

    def _held_after(self, count: int) -> int:
        """Return the ordinary tokens that the request's memory holds `count` tokens from now."""
        footprint = self.footprint
        packed_blocks = footprint.first_block - footprint.leading_blocks
        ordinary = self.computed + count - packed_blocks * footprint.block_size
        return footprint.pages * footprint.block_size + footprint.num_layers * ordinary

    def _compute(self, tokens: Sequence[int]) -> torch.Tensor:
        count = len(tokens)

        def with_space(caches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [torch.nn.functional.pad(cache, (0, 0, 0, count))[None] for cache in caches]

        lengths = [cache.shape[1] for cache in self.keys]
        batch = CacheBatch(
            keys=with_space(self.keys),
            values=with_space(self.values),
            lengths=[torch.tensor([length]) for length in lengths],
            starts=lengths,
            position=self.computed,
            sliding_windows=self.model.sliding_windows,
            cache_formats=[self.cache_format],
            queries=[[] for _ in lengths],
        )
        hidden = self.model.decode(batch, torch.tensor([tokens]), torch.arange(count)[None])
        assert batch.queries is not None
        self.keys = [keys[0] for keys in batch.keys]
        self.values = [values[0] for values in batch.values]
        self.queries = [
            torch.cat([earlier, *latest])[-LONGEST_WINDOW:]
            for earlier, latest in zip(self.queries, batch.queries, strict=True)
        ]
        self.computed += count
        return hidden[0]

    def _pack(self, plan: PagePlan) -> None:
        """Pack the output so far."""
        assert self.schedule is not None
        if not self.schedule.scored:
            self._quantise(plan)
            self.footprint.pack(plan, plan.packed_end // self.footprint.block_size)
            return
        method = self.schedule.settings.method
        pick = self._kept_slots if self.kept_prompt is None else self._slots_with_prompt
        kept, self.counts = pick(plan, method)
        for layer, count in enumerate((self.counts * plan.block_size).tolist()):
            index = kept[layer, :, :count, None].long()
            index = index.expand(-1, -1, self.keys[layer].shape[2])
            self.keys[layer] = self.keys[layer].gather(1, index)
            self.values[layer] = self.values[layer].gather(1, index)
        self.footprint.pack(plan, self.computed // plan.block_size, freeze=True)

    def _quantise(self, plan: PagePlan) -> None:
        """Round the tokens that the plan adds to the packed pages as the format k4v3 does."""
        start = self.footprint.first_block * self.footprint.block_size
        part = slice(start, plan.packed_end)
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            self.keys[layer], self.values[layer] = keys.clone(), values.clone()
            stored = packed(keys[:, part], values[:, part], 0)
            self.keys[layer][:, part], self.values[layer][:, part] = stored

    def _kept_slots(self, plan: PagePlan, method: Method) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the kept slots ``[L, Hkv, n]`` and the pages ``[L]`` of each layer."""
        lengths = self._lengths()
        observed = self._observed(plan, method)
        counts = self.counts
        if counts is None:
            counts = method.layer_pages(plan, observed, lengths.long() // plan.block_size)
        return _selected(method.scores(observed), lengths, counts, plan, method.selector), counts

    def _slots_with_prompt(
        self, plan: PagePlan, method: Method
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return kept slots and pages as `_kept_slots`: the prompt's, and output tokens after them.

        All layers drop equally many pages.
        """
        assert self.kept_prompt is not None
        lengths = self._lengths()
        blocks = self.computed // plan.block_size
        dropped = (self.footprint.pages_at(blocks) - plan.pages) // plan.num_layers
        counts = lengths.long() // plan.block_size - dropped
        assert (counts * plan.block_size >= self.prompt_slots + plan.window).all()
        if self.kept_prompt == SCORED:
            scores = method.scores(self._observed(plan, method))
            in_prompt = torch.arange(scores.shape[2]) < self.prompt_slots[:, None, None]
            scores = scores.where(~in_prompt, torch.inf)
            return _selected(scores, lengths, counts, plan, method.selector), counts
        numbers = random_numbers(
            self.seed, len(lengths), self.keys[0].shape[0], int(lengths.max()), self.computed
        )
        packed_end = self.footprint.first_block * plan.block_size
        sampled = 0
        if self.counts is not None:
            sampled = int((self.counts * plan.block_size - self.prompt_slots)[0])
        scores = output_scores(
            self.kept_prompt,
            self.prompt_slots,
            numbers,
            sampled_slots=sampled,
            sampled_share=sampled / max(packed_end - self.prompt_end, 1),
        )
        return _selected(scores, lengths, counts, plan, TopK()), counts

    def _lengths(self) -> torch.Tensor:
        return torch.tensor([keys.shape[1] for keys in self.keys], dtype=torch.int32)

    def _observed(self, plan: PagePlan, method: Method) -> LayerObservations:
        assert not method.merge, "this benchmark simulates methods that do not merge tokens"
        layers, attention = self._paged_layers(plan.block_size), None
        if plan.window:
            query = torch.stack([queries[-plan.window :] for queries in self.queries])
            attention = method.attention(layers, query)
        return method.observe(layers, plan.window, attention, None)

    def _paged_layers(self, block_size: int) -> PagedLayers:
        """Return the caches of all layers as pages of one array."""
        lengths = [keys.shape[1] for keys in self.keys]
        assert not any(length % block_size for length in lengths)
        counts = [length // block_size for length in lengths]
        pages = torch.zeros(len(counts), max(counts), dtype=torch.int64)
        for layer, count in enumerate(counts):
            pages[layer, :count] = torch.arange(count) + sum(counts[:layer])

        def paged(caches: Sequence[torch.Tensor]) -> torch.Tensor:
            joined = torch.cat(list(caches), 1)
            return joined.view(len(joined), -1, block_size, joined.shape[2]).transpose(0, 1)

        return PagedLayers(
            key_pages=paged(self.keys).mT,
            value_pages=paged(self.values),
            pages=pages,
            lengths=torch.tensor(lengths, dtype=torch.int32),
            max_tokens=max(lengths),
            scale=self.keys[0].shape[-1] ** -0.5,
        )


def _selected(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    plan: PagePlan,
    selector: Selector,
) -> torch.Tensor:
    """Return the kept slots ``[L, Hkv, n]`` of layers that keep `counts` pages."""
    return kept_slots(
        scores,
        lengths,
        kept_in_pages(plan, counts.int()),
        window=plan.window,
        tail=plan.tail,
        width=max_kept_in_pages(plan, counts),
        selector=selector,
    )


def packs_prompt(settings: CompressionConfig) -> bool:
    """Return whether `settings` pack prompts: with a budget of 1.0 only the format k4v3 does."""
    return settings.enabled and (settings.budget != 1.0 or settings.resolved_packed_dtype != "auto")


def _output_schedule(
    settings: CompressionConfig, prompt_tokens: int, max_tokens: int, block_size: int
) -> OutputSchedule | OutputGroupSchedule | None:
    if not settings.enabled:
        return None
    page_tokens = packed_page_tokens(settings, block_size, ITEMSIZE)
    if page_tokens is not None:
        return OutputGroupSchedule(
            settings=settings, max_tokens=max_tokens, page_tokens=page_tokens
        )
    if settings.decode.budget is None:
        return None
    return OutputSchedule(settings=settings, prefilled=prompt_tokens, max_tokens=max_tokens)
