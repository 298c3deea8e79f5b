"""The method that settings describe, and the state that an engine keeps for it."""

from functools import lru_cache

from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.method import Method
from vllm_kvcompress.methods.presets import min_window
from vllm_kvcompress.methods.scorers import SCORERS
from vllm_kvcompress.methods.selectors import TopK
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.lookahead import scores_by_window
from vllm_kvcompress.settings.packed_dtype import AUTO


@lru_cache(maxsize=128)
def method_of(settings: CompressionConfig, *, scored_by_output: bool = False) -> Method:
    """Return the method that these settings describe. Built once per settings.

    Args:
        settings: settings of the engine or of a request.
        scored_by_output: return the method that compresses after the look-ahead. Some presets use
            another scorer there (`Preset.output_scorer`).
    """
    scorer_name = settings.parts.output_scorer if scored_by_output else ""
    return Method(
        allocator=settings.build_allocator(),
        scorer=SCORERS[scorer_name]() if scorer_name else settings.build_scorer(),
        selector=TopK() if scorer_name else settings.build_selector(),
        merge=settings.parts.merge,
    )


def compresses_repeatedly(settings: CompressionConfig) -> bool:
    """Return whether a request can be compressed more than once: pieces or a decode budget."""
    return settings.decode_budget is not None or settings.max_whole is not None


def sums_output_attention(settings: CompressionConfig) -> bool:
    """Return whether a decode budget is set and the scorer sums attention over all queries."""
    return settings.decode_budget is not None and sums_attention(settings)


def sums_attention(settings: CompressionConfig) -> bool:
    """Return whether repeated compression needs the sum of attention over all queries."""
    return compresses_repeatedly(settings) and Reads.COLUMN_SUMS in method_of(settings).reads


def probe_tokens(settings: CompressionConfig) -> int:
    """Return the length in tokens of the probe that scores each piece of a prompt.

    0 if each piece is scored with its own tokens: without pieces, for methods that do not score by
    a window, and for merging methods, which would merge tokens into the probe's, which are dropped.
    """
    method = method_of(settings)
    if settings.max_whole is None or method.merge or not scores_by_window(method.reads):
        return 0
    return settings.probe_first + settings.probe


def scoring_query_counts(settings: CompressionConfig) -> tuple[int, int]:
    """Return the number of first and of last prompt tokens that score a piece, for reports.

    Both are 0 if a piece is scored with its own tokens, or not at all (in k4v3). If the engine's
    own method is off, they are those of the longest probe that a request can choose.
    """
    variants = [settings] if settings.enabled else settings.variants
    scored = [variant for variant in variants if variant.resolved_packed_dtype == AUTO]
    num_queries = max(map(probe_tokens, scored), default=0)
    num_first = settings.num_first_probe_tokens(num_queries)
    return num_first, num_queries - num_first


def num_allocator_queries(settings: CompressionConfig, probe: int) -> int | None:
    """Return how many of a probe's last tokens decide the tokens kept per layer; None for all.

    If the first tokens decided too, layers would keep fewer tokens that the last ones attend to.

    Args:
        settings: settings of the request.
        probe: length of the probe in tokens.
    """
    num_last = probe - settings.num_first_probe_tokens(probe)
    return num_last if min_window(method_of(settings).reads) <= num_last < probe else None


def merges(settings: CompressionConfig) -> bool:
    """Return whether a method that merges tokens can compress a request more than once."""
    return compresses_repeatedly(settings) and bool(method_of(settings).merge)


def lookahead_window(settings: CompressionConfig) -> int:
    """Return the number of output and prompt queries that score the prompt after a look-ahead."""
    prompt_window = settings.parts.prompt_window
    return (
        settings.resolved_lookahead + prompt_window if prompt_window else settings.resolved_window
    )


def ring_window(settings: CompressionConfig) -> int:
    """Return the number of last queries that the engine stores per request; 0 for none."""
    with_lookahead = [variant for variant in settings.variants if variant.resolved_lookahead]
    windows = [0, *(lookahead_window(variant) for variant in with_lookahead)]
    if settings.decode_budget is not None:
        windows += [variant.resolved_decode_window for variant in settings.variants]
        if any(sums_output_attention(variant) for variant in settings.variants):
            windows.append(settings.decode_interval)
    return max(windows)
