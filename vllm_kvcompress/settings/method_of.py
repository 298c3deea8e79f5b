"""The method that some settings stand for, and what an engine remembers for it."""

from functools import lru_cache

from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.method import Method
from vllm_kvcompress.methods.presets import least_window
from vllm_kvcompress.methods.scorers import SCORERS
from vllm_kvcompress.methods.selectors import TopK
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.lookahead import scores_by_window


@lru_cache(maxsize=128)
def method_of(settings: CompressionConfig, *, scored_by_output: bool = False) -> Method:
    """The method that some settings stand for; built once.

    Args:
        scored_by_output: the one that packs a prompt once its look-ahead is over; some presets have
            another scorer then (`Preset.answer_scorer`).
    """
    other = settings.parts.answer_scorer if scored_by_output else ""
    return Method(
        allocator=settings.build_allocator(),
        scorer=SCORERS[other]() if other else settings.build_scorer(),
        selector=TopK() if other else settings.build_selector(),
        merge=settings.parts.merge,
    )


def packs_again(settings: CompressionConfig) -> bool:
    """Whether an answer, or a prompt, is packed more than once."""
    return settings.decode_budget is not None or settings.max_whole is not None


def adds_up(settings: CompressionConfig) -> bool:
    """Whether a bounded answer is ranked by the attention of all its rows, which is added up."""
    return settings.decode_budget is not None and keeps_sums(settings)


def keeps_sums(settings: CompressionConfig) -> bool:
    """Whether what is packed more than once, answer or prompt, needs its attention added up."""
    return packs_again(settings) and Reads.COLUMN_SUMS in method_of(settings).reads


def probe_tokens(settings: CompressionConfig) -> int:
    """The prompt's tokens that judge a piece; 0 where its own do, or no latest queries.

    What merges tokens would fold them into a probe's, which are dropped.
    """
    method = method_of(settings)
    if settings.max_whole is None or method.merge or not scores_by_window(method.reads):
        return 0
    return settings.probe_first + settings.probe


def scoring_query_counts(settings: CompressionConfig) -> tuple[int, int]:
    """The prompt's first and last tokens that judge a piece, as a server tells of itself.

    They are its own method's, or the most that requests may ask for where that is off; 0 and 0
    where a piece's own tokens judge, whatever the settings say.
    """
    own = [settings] if settings.enabled else settings.variants
    rows = max(map(probe_tokens, own), default=0)
    first = settings.first_of_probe(rows)
    return first, rows - first


def allocator_rows(settings: CompressionConfig, probe: int) -> int | None:
    """Of a probe's rows the last ones, which alone say how much each layer keeps; None for all.

    First tokens that say so too cost what the last ones ask for.
    """
    last = probe - settings.first_of_probe(probe)
    return last if least_window(method_of(settings).reads) <= last < probe else None


def merges(settings: CompressionConfig) -> bool:
    """Whether tokens merge in what is packed more than once, so that it has a threshold."""
    return packs_again(settings) and bool(method_of(settings).merge)


def lookahead_window(settings: CompressionConfig) -> int:
    """Queries that judge once a look-ahead is over: of the answer, and perhaps of the prompt."""
    beside = settings.parts.prompt_window
    return settings.resolved_lookahead + beside if beside else settings.resolved_window


def ring_window(settings: CompressionConfig) -> int:
    """The most last queries that an engine keeps of each answer; 0 where none is read."""
    ahead = [each for each in settings.variants if each.resolved_lookahead]
    windows = [0, *(lookahead_window(variant) for variant in ahead)]
    if settings.decode_budget is not None:
        windows += [variant.resolved_decode_window for variant in settings.variants]
        if any(adds_up(variant) for variant in settings.variants):
            windows.append(settings.decode_interval)
    return max(windows)
