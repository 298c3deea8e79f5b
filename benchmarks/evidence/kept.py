"""What each method and budget keeps of a prompt that was read once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.evidence.reader import LONGEST_WINDOW, Prompt, Rows
from kvcompress_kernels.merge_evicted import merge_evicted
from kvcompress_kernels.window_scores import WindowScores, window_scores_of_rows
from vllm_kvcompress.methods.attention import apart
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.method import LayerObservation, Method
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.paged_layers import PagedLayers
from vllm_kvcompress.methods.spans import Spans, joined
from vllm_kvcompress.planning.kv_footprint import KVFootprint
from vllm_kvcompress.planning.schedules import LookAhead
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.method_of import lookahead_window, method_of

BLOCK = 16
"""Tokens of a page: vLLM's block on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What is left of a prompt, per layer ``[Hkv, n_l, D]``; `tokens` over all full layers."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    tokens: int


class Scored:
    """A prompt, and its scores by each scorer: made once, whatever the budgets.

    Args:
        prompt: with column sums, where a method reads them. With a look-ahead it ends with the
            answer's first tokens, whose queries judge it.
        block_size: tokens of a page.
        answered: tokens at its end that are the answer's.
        parts: the tokens of each part of the prompt that settings may protect.
    """

    def __init__(
        self,
        prompt: Prompt,
        block_size: int = BLOCK,
        *,
        answered: int = 0,
        parts: Mapping[str, Spans] = MappingProxyType({}),
    ) -> None:
        self.prompt = prompt
        self.parts = parts
        self.answered = answered
        self.layers = prompt.full_layers
        self.block_size = block_size
        self._windows: dict[tuple[int, bool], list[WindowScores]] = {}
        self._observed: dict[tuple[Any, ...], list[LayerObservation]] = {}

    @cached_property
    def places(self) -> list[PagedLayers]:
        """Each full layer's cache as pages; the last one is filled up."""
        own = [(self.prompt.keys[layer], self.prompt.values[layer]) for layer in self.layers]
        return [
            PagedLayers(
                key_pages=_paged(keys, self.block_size).mT,
                value_pages=_paged(values, self.block_size),
                pages=torch.arange(-(-keys.shape[1] // self.block_size))[None],
                lengths=None,
                most=keys.shape[1],
                scale=keys.shape[-1] ** -0.5,
                layers=[layer],
                value_scales=[1.0],
            )
            for layer, (keys, values) in enumerate(own)
        ]

    def observed(self, method: Method, plan: PagePlan) -> list[LayerObservation]:
        key = (method.scorer, method.allocator.reads, plan.window, plan.allocator_window)
        if key not in self._observed:
            places, latest = self.places, plan.allocator_window
            if latest is not None and plan.scored_by_output and Reads.APART in method.reads:
                queries = (self.prompt.queries[layer][-plan.window :] for layer in self.layers)
                windows = [
                    apart(place, query[None], latest)
                    for place, query in zip(places, queries, strict=True)
                ]
            else:
                windows = self._window(places, plan, method.reads)
                figures = windows
                if latest is not None:
                    figures = self._window(places, replace(plan, window=latest), method.reads)
                windows = [
                    one._replace(entropy=own.entropy, shift=own.shift)
                    for one, own in zip(windows, figures, strict=True)
                ]
            sums = self.prompt.sums
            added = None
            if sums and Reads.COLUMN_SUMS in method.reads:
                added = [sums[layer] for layer in self.layers]
            self._observed[key] = [
                method.observe(
                    place,
                    plan.window,
                    windows[layer] if windows else None,
                    None if added is None else added[layer][None],
                )[0]
                for layer, place in enumerate(places)
            ]
        return self._observed[key]

    def _window(
        self, places: Sequence[PagedLayers], plan: PagePlan, reads: Reads
    ) -> list[WindowScores]:
        if Reads.WINDOW not in reads:
            return []
        # A maximum of pooled rows is another figure; all else that is read lies side by side.
        pooled = Reads.POOLED in reads
        key = (plan.window, pooled)
        if key not in self._windows:
            self._windows[key] = [
                window_scores_of_rows(
                    self.prompt.queries[layer][None, -plan.window :],
                    place.key_pages,
                    place.pages,
                    plan.tokens,
                    place.scale,
                    variance=plan.window > 1,
                    maximum=True,
                    pooled=pooled,
                )
                for layer, place in zip(self.layers, places, strict=True)
            ]
        return self._windows[key]

    def plan(self, settings: CompressionConfig) -> PagePlan | None:
        """How much the engine would keep; None where that is all.

        Raises:
            AssertionError: the settings look ahead otherwise than this prompt.
        """
        tokens = len(self.prompt.ids)
        ahead = LookAhead(
            settings=settings,
            num_layers=len(self.layers),
            block_size=self.block_size,
            prompt=tokens - self.answered,
            last=tokens + 2,
            prefilled=tokens - self.answered,
            spans=joined(span for word in settings.protect for span in self.parts.get(word, ())),
        )
        assert ahead.due == tokens
        assert lookahead_window(settings) <= LONGEST_WINDOW, "so many queries were not kept"
        holding = KVFootprint(num_layers=len(self.layers), block_size=self.block_size)
        return ahead.plan(holding, tokens)

    def keep(self, settings: CompressionConfig) -> Kept | None:
        """What the engine would keep; None where it leaves all."""
        plan = self.plan(settings)
        if plan is None:
            return None
        method = method_of(settings, scored_by_output=plan.scored_by_output)
        observed = self.observed(method, plan)
        pages = method.layer_pages(plan, observed)
        chosen = method.select(observed, plan, pages)
        counts = (pages * self.block_size + plan.tail).tolist()
        # A sliding window keeps what it reaches.
        keys = [k if n is None else k[:, -n:] for k, n in self._caches(self.prompt.keys)]
        values = [v if n is None else v[:, -n:] for v, n in self._caches(self.prompt.values)]
        for row, (layer, count) in enumerate(zip(self.layers, counts, strict=True)):
            kept = chosen[row, :, :count].long()
            if method.merge:
                keys[layer], values[layer] = self._merged(row, kept, method, plan)
            else:
                index = kept[..., None].expand(-1, -1, keys[layer].shape[-1])
                keys[layer] = keys[layer].gather(1, index)
                values[layer] = values[layer].gather(1, index)
        return Kept(keys=keys, values=values, tokens=sum(counts))

    def _caches(self, cache: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int | None]]:
        return zip(cache, self.prompt.spans, strict=True)

    def _merged(
        self, row: int, kept: torch.Tensor, method: Method, plan: PagePlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[Hkv, n, D]`` at positions `kept`, with the others folded in."""
        assert not plan.spans, "a method that merges is measured without protection"
        place, count = self.places[row], kept.shape[1]
        merged = merge_evicted(
            place.key_pages,
            place.value_pages,
            place.pages,
            len(self.prompt.ids),
            kept[None].to(torch.int32),
            torch.tensor([count], dtype=torch.int32),
            count,
            values_only=method.values_only,
        )
        return merged.keys[0], merged.values[0]


def _paged(cache: torch.Tensor, block_size: int) -> torch.Tensor:
    heads, tokens, dim = cache.shape
    rows = -(-tokens // block_size)
    padded = torch.nn.functional.pad(cache, (0, 0, 0, rows * block_size - tokens))
    return padded.view(heads, rows, block_size, dim).transpose(0, 1)


def as_rows(prompt: Prompt, kept: Sequence[Kept], room: int) -> Rows:
    """The caches side by side, with `room` for an answer's tokens."""
    keys, values, lengths, starts = [], [], [], []
    for layer in range(len(prompt.keys)):
        parts = [(each.keys[layer], each.values[layer]) for each in kept]
        counts = [k.shape[1] for k, _ in parts]
        start = max(counts)
        heads, _, dim = parts[0][0].shape
        both = torch.empty(2, len(parts), heads, start + room, dim)
        for row, pair in enumerate(parts):
            for part, each in zip(both[:, row], pair, strict=True):
                # What nothing was written to is masked, and must be finite all the same.
                part[:, : start - each.shape[1]] = 0
                part[:, start - each.shape[1] : start] = each
                part[:, start:] = 0
        keys.append(both[0])
        values.append(both[1])
        lengths.append(torch.tensor(counts))
        starts.append(start)
    return Rows(
        keys=keys,
        values=values,
        lengths=lengths,
        starts=starts,
        position=len(prompt.ids),
        spans=prompt.spans,
    )


@cache
def settings_of(raw: str, budget: float) -> CompressionConfig:
    """Settings from a preset's name or a JSON object, at a budget."""
    import json

    made: Mapping[str, Any] = json.loads(raw) if raw.startswith("{") else {"compress": raw}
    return CompressionConfig.parse({**made, "budget": budget, "min_prompt": 0})
