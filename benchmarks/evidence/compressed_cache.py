"""Compress a prefilled prompt with any method and budget, as the engine would.

`PromptCompressor` computes each scorer's scores once and reuses them for all budgets.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch

from benchmarks.evidence.cache_formats import CACHE_FORMATS, CacheFormat
from benchmarks.evidence.reference_model import LONGEST_WINDOW, CacheBatch, PrefilledPrompt
from kvcompress_kernels import k4v3
from kvcompress_kernels.merge_evicted import merge_evicted
from kvcompress_kernels.window_scores import WindowScores, window_scores_of_rows
from vllm_kvcompress.methods.attention import split_window_scores
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import LayerStats
from vllm_kvcompress.methods.method import Method, join_observations
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.paged_layers import PagedLayers
from vllm_kvcompress.offline import quantised
from vllm_kvcompress.planning.packed_pages import packed_page_tokens
from vllm_kvcompress.schedules.kv_footprint import KVFootprint
from vllm_kvcompress.schedules.lookahead import LookaheadSchedule
from vllm_kvcompress.settings.config import CompressionConfig

BLOCK = 16
"""Tokens per page: vLLM's default block size on a GPU."""
ITEMSIZE = 2
"""Bytes of a cached number: caches have 16 bits, although this benchmark computes in float32."""
_BUDGET_STEP = 0.001
_OWN_KEYS = frozenset({"cache", "bytes"})
"""Keys of `method_settings` that are this benchmark's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedCache:
    """The kept keys and values of a prompt.

    Args:
        keys, values: per layer ``[Hkv, n_l, D]``; n_l differs between layers.
        tokens: kept tokens per KV head, summed over the full-attention layers.
        share_of_bytes: bytes of these layers' kept tokens, scales included, relative to all tokens
            of the prompt in 16 bits. A page in the format k4v3 counts in full, even if it is partly
            filled.
        cache_format: number format of the engine's cache, also for output tokens; None if exact.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    tokens: int
    share_of_bytes: float = 1.0
    cache_format: CacheFormat | None = None


class PromptCompressor:
    """Compresses one prefilled prompt; scores are computed once and serve all budgets.

    Args:
        prompt: the prompt, followed by its first output tokens if the method has a look-ahead.
            Must have column sums if a method reads them.
        block_size: tokens per page.
        output_tokens: number of output tokens at the end of `prompt`; their queries score it.
    """

    def __init__(
        self, prompt: PrefilledPrompt, block_size: int = BLOCK, *, output_tokens: int = 0
    ) -> None:
        self.prompt = prompt
        self.output_tokens = output_tokens
        self.layers = prompt.full_layers
        self.block_size = block_size
        self._window_scores_by_key: dict[tuple[int, bool], list[WindowScores]] = {}
        self._observations_by_key: dict[tuple[Any, ...], LayerStats] = {}

    @cached_property
    def paged_layers(self) -> list[PagedLayers]:
        """Return the cache of each full-attention layer as pages, the last page zero-padded."""
        caches = [(self.prompt.keys[layer], self.prompt.values[layer]) for layer in self.layers]
        return [
            PagedLayers(
                key_pages=_paged(keys, self.block_size).mT,
                value_pages=_paged(values, self.block_size),
                pages=torch.arange(-(-keys.shape[1] // self.block_size))[None],
                lengths=None,
                max_tokens=keys.shape[1],
                scale=keys.shape[-1] ** -0.5,
                layers=[layer],
            )
            for layer, (keys, values) in enumerate(caches)
        ]

    def observations(self, method: Method, plan: PagePlan) -> LayerStats:
        """Return what `method` observes of each full-attention layer, cached by its inputs."""
        key = (method.scorer, method.allocator.reads, plan.window, plan.allocator_window)
        if key not in self._observations_by_key:
            paged_layers, latest = self.paged_layers, plan.allocator_window
            if (
                latest is not None
                and plan.scored_by_output
                and Reads.PROMPT_MAXIMUM in method.reads
            ):
                queries = (self.prompt.queries[layer][-plan.window :] for layer in self.layers)
                windows = [
                    split_window_scores(paged, query[None], latest)
                    for paged, query in zip(paged_layers, queries, strict=True)
                ]
            else:
                windows = self._window_scores(paged_layers, plan, method.reads)
                allocator_scores = windows
                if latest is not None:
                    allocator_scores = self._window_scores(
                        paged_layers, replace(plan, window=latest), method.reads
                    )
                windows = [
                    scores._replace(entropy=for_allocator.entropy, shift=for_allocator.shift)
                    for scores, for_allocator in zip(windows, allocator_scores, strict=True)
                ]
            sums = self.prompt.column_sums
            layer_sums = None
            if sums and Reads.COLUMN_SUMS in method.reads:
                layer_sums = [sums[layer] for layer in self.layers]
            observed = [
                method.observe(
                    paged,
                    plan.window,
                    windows[layer] if windows else None,
                    None if layer_sums is None else layer_sums[layer][None],
                )
                for layer, paged in enumerate(paged_layers)
            ]
            self._observations_by_key[key] = join_observations(observed, [1] * len(observed))
        return self._observations_by_key[key]

    def _window_scores(
        self, paged_layers: Sequence[PagedLayers], plan: PagePlan, reads: Reads
    ) -> list[WindowScores]:
        if Reads.WINDOW not in reads:
            return []
        # Pooling changes the maximum; all other scores can be shared between methods.
        pooled = Reads.POOLED in reads
        key = (plan.window, pooled)
        if key not in self._window_scores_by_key:
            self._window_scores_by_key[key] = [
                window_scores_of_rows(
                    self.prompt.queries[layer][None, -plan.window :],
                    paged.key_pages,
                    paged.pages,
                    plan.tokens,
                    paged.scale,
                    variance=plan.window > 1,
                    maximum=True,
                    pooled=pooled,
                )
                for layer, paged in zip(self.layers, paged_layers, strict=True)
            ]
        return self._window_scores_by_key[key]

    def plan(self, settings: CompressionConfig) -> PagePlan | None:
        """Return the engine's page plan for this prompt, or None if it would keep all tokens.

        Raises:
            AssertionError: the look-ahead of `settings` is not `output_tokens`.
        """
        tokens = len(self.prompt.ids)
        lookahead = LookaheadSchedule(
            settings=settings,
            num_layers=len(self.layers),
            block_size=self.block_size,
            prompt=tokens - self.output_tokens,
            max_tokens=tokens + 2,
            prefilled=tokens - self.output_tokens,
            page_tokens=packed_page_tokens(settings, self.block_size, ITEMSIZE),
        )
        assert lookahead.due == tokens
        assert settings.method.lookahead_window <= LONGEST_WINDOW, (
            f"the window must be at most {LONGEST_WINDOW} tokens"
        )
        footprint = KVFootprint(num_layers=len(self.layers), block_size=self.block_size)
        return lookahead.plan(footprint, tokens)

    def settings_within(self, raw: str, share_of_bytes: float) -> CompressionConfig:
        """Return the settings `raw` with the largest budget whose cache fits in the bytes.

        Args:
            share_of_bytes: bytes of the compressed prompt, relative to the prompt in 16 bits.

        Raises:
            ValueError: even the smallest budget of the method takes more.
        """
        itself = self._share_of_bytes([len(self.prompt.ids)] * len(self.layers))
        packed = k4v3.GROUP // self.block_size if method_settings(raw).get("packed_dtype") else 1
        steps = int(min(1.0, share_of_bytes / itself * packed) / _BUDGET_STEP)
        for step in range(steps, 0, -1):
            settings = settings_at(raw, round(step * _BUDGET_STEP, 6))
            plan = self.plan(settings)
            if plan is None:
                continue
            stored = plan.pages * self.block_size / len(self.layers)
            stored += plan.leading_tokens + plan.tail
            if self._share_of_bytes([stored] * len(self.layers)) <= share_of_bytes:
                return settings
        raise ValueError(f"{raw} takes more than {share_of_bytes} of the bytes at any budget")

    def compress(self, settings: CompressionConfig) -> CompressedCache | None:
        """Return the cache that the engine would keep, or None if it would keep all tokens.

        With compression off, it is the prompt's cache.
        """
        if not settings.enabled:
            all_tokens = [len(self.prompt.ids)] * len(self.layers)
            return self._cache(self.prompt.keys, self.prompt.values, all_tokens, all_tokens)
        plan = self.plan(settings)
        if plan is None:
            return None
        is_packed = plan.packed_page_tokens is not None
        if is_packed:
            assert self.prompt.cache_format is None, "k4v3 packs the pages of a 16-bit cache"
            reason = k4v3.refusal(self.prompt.keys[0].shape[-1], self.block_size, ITEMSIZE)
            assert not reason, reason
        if plan.cell is not None:
            return self._packed_in_cells(plan)
        method = settings.method.method_for(scored_by_output=plan.scored_by_output)
        observations = self.observations(method, plan)
        pages = method.layer_pages(plan, observations)
        kept_positions = method.select(observations, plan, pages)
        counts = [plan.layer_tokens(layer_pages) for layer_pages in pages.tolist()]
        keys, values = self._in_windows(self.prompt.keys), self._in_windows(self.prompt.values)
        for index, (layer, count) in enumerate(zip(self.layers, counts, strict=True)):
            kept = kept_positions[index, :, :count].long()
            if method.merge:
                keys[layer], values[layer] = self._merged(index, kept, method, plan)
            else:
                gathered = kept[..., None].expand(-1, -1, keys[layer].shape[-1])
                keys[layer] = keys[layer].gather(1, gathered)
                values[layer] = values[layer].gather(1, gathered)
            if is_packed:
                keys[layer], values[layer] = quantised(
                    keys[layer], values[layer], plan.tail, plan.leading_tokens
                )
        stored_tokens = counts
        if is_packed:
            unpacked = plan.leading_tokens + plan.tail
            stored_tokens = [n * self.block_size + unpacked for n in pages.tolist()]
        return self._cache(keys, values, counts, stored_tokens)

    def _packed_in_cells(self, plan: PagePlan) -> CompressedCache:
        """Return the cache of a plan that packs all tokens behind the first block."""
        keys, values = self._in_windows(self.prompt.keys), self._in_windows(self.prompt.values)
        for layer in self.layers:
            keys[layer], values[layer] = quantised(
                keys[layer], values[layer], plan.tail, plan.leading_tokens
            )
        stored_tokens = plan.blocks * self.block_size + plan.leading_tokens + plan.tail
        num_layers = len(self.layers)
        return self._cache(keys, values, [plan.tokens] * num_layers, [stored_tokens] * num_layers)

    def _cache(
        self,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        kept_tokens: Sequence[int],
        stored_tokens: Sequence[int],
    ) -> CompressedCache:
        """Return a cache; tokens are by full-attention layer, as in `_share_of_bytes`."""
        return CompressedCache(
            keys=keys,
            values=values,
            tokens=sum(kept_tokens),
            share_of_bytes=self._share_of_bytes(stored_tokens),
            cache_format=self.prompt.cache_format,
        )

    def _share_of_bytes(self, tokens: Sequence[float]) -> float:
        """Return the bytes of a cache relative to the prompt in 16 bits.

        Args:
            tokens: for each full-attention layer, the tokens of its ordinary pages.
        """
        cache_format, num_layers = self.prompt.cache_format, len(self.prompt.keys)
        shares = [1.0] * len(self.layers)
        if cache_format is not None:
            dim = self.prompt.keys[0].shape[-1]
            shares = [cache_format.share_of_bytes(i, num_layers, dim) for i in self.layers]
        stored = sum(count * share for count, share in zip(tokens, shares, strict=True))
        return stored / (len(self.prompt.ids) * len(self.layers))

    def _in_windows(self, caches: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return ``[Hkv, n, D]`` per layer; sliding-window layers keep their window's tokens."""
        pairs = zip(caches, self.prompt.sliding_windows, strict=True)
        return [cache if window is None else cache[:, -window:] for cache, window in pairs]

    def _merged(
        self, index: int, kept: torch.Tensor, method: Method, plan: PagePlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values ``[Hkv, n, D]`` at positions `kept`, dropped tokens merged in.

        No token is merged into the leading ones.

        Args:
            index: index among the full-attention layers.
            kept: ``[Hkv, n]`` int64.
        """
        paged, count = self.paged_layers[index], kept.shape[1]
        merged = merge_evicted(
            paged.key_pages,
            paged.value_pages,
            paged.pages,
            len(self.prompt.ids),
            kept[None].to(torch.int32),
            torch.tensor([count], dtype=torch.int32),
            count,
            values_only=method.values_only,
        )
        first, layer = plan.leading_tokens, self.layers[index]
        exact = self.prompt.keys[layer][:, :first], self.prompt.values[layer][:, :first]
        return (
            torch.cat([exact[0], merged.keys[0, :, first:]], 1),
            torch.cat([exact[1], merged.values[0, :, first:]], 1),
        )


def _paged(cache: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return ``[H, S, D]`` as zero-padded pages ``[pages, H, block_size, D]``."""
    heads, tokens, dim = cache.shape
    num_pages = -(-tokens // block_size)
    padded = torch.nn.functional.pad(cache, (0, 0, 0, num_pages * block_size - tokens))
    return padded.view(heads, num_pages, block_size, dim).transpose(0, 1)


def stack_caches(
    prompt: PrefilledPrompt, caches: Sequence[CompressedCache], output_capacity: int
) -> CacheBatch:
    """Return compressed caches of one prompt as a padded batch with space for output tokens.

    Args:
        output_capacity: output tokens that each cache can take.
    """
    keys, values, lengths, starts = [], [], [], []
    for layer in range(len(prompt.keys)):
        layer_caches = [(cache.keys[layer], cache.values[layer]) for cache in caches]
        counts = [k.shape[1] for k, _ in layer_caches]
        start = max(counts)
        heads, _, dim = layer_caches[0][0].shape
        both = torch.empty(2, len(layer_caches), heads, start + output_capacity, dim)
        for index, pair in enumerate(layer_caches):
            for padded, kept in zip(both[:, index], pair, strict=True):
                # Attention masks the padding, but 0 * NaN is NaN: the padding must be finite.
                padded[:, : start - kept.shape[1]] = 0
                padded[:, start - kept.shape[1] : start] = kept
                padded[:, start:] = 0
        keys.append(both[0])
        values.append(both[1])
        lengths.append(torch.tensor(counts))
        starts.append(start)
    return CacheBatch(
        keys=keys,
        values=values,
        lengths=lengths,
        starts=starts,
        position=len(prompt.ids),
        sliding_windows=prompt.sliding_windows,
        cache_formats=[cache.cache_format for cache in caches],
    )


def method_settings(raw: str) -> Mapping[str, Any]:
    """Return the settings of a method as this benchmark takes them.

    Args:
        raw: the name of a preset, or settings as ``--kv-compress-config`` takes them, with the
            benchmark's own keys "cache" (`cache_format_of`) and "bytes" (a list of shares of the
            bytes to fit into, instead of a budget), and optionally a list as "budget".
    """
    settings: Mapping[str, Any] = json.loads(raw) if raw.startswith("{") else {"compress": raw}
    return settings


@cache
def settings_at(raw: str, budget: float) -> CompressionConfig:
    """Return the settings of a method at a budget, for prompts of any length.

    Args:
        raw: as in `method_settings`.
        budget: share of the prompt's tokens to keep; replaces a budget in `raw`.

    Raises:
        SystemExit: `raw` protects parts of a chat.
    """
    settings = {k: value for k, value in method_settings(raw).items() if k not in _OWN_KEYS}
    if settings.get("protect"):
        raise SystemExit(
            f'"protect" is not measured here, got {settings["protect"]!r}: remove it, or measure a'
            " server with kvcompress compare --protect"
        )
    return CompressionConfig.parse({**settings, "budget": budget, "min_prompt": 0})


def cache_format_of(raw: str) -> CacheFormat | None:
    """Return the number format of the engine's KV cache; None for an exact cache.

    Raises:
        SystemExit: there is no format of this name.
    """
    name = method_settings(raw).get("cache")
    if name is not None and name not in CACHE_FORMATS:
        raise SystemExit(f'"cache" must be one of {", ".join(CACHE_FORMATS)}; got {name!r}')
    return None if name is None else CACHE_FORMATS[name]
