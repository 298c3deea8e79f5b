"""Why a method cannot pack anything more than once, in sentences."""

from vllm_kvcompress.growth import wrong_interval
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.presets import PRESETS
from vllm_kvcompress.methods.scorers.accumulated import H2O
from vllm_kvcompress.methods.scorers.caote import Caote
from vllm_kvcompress.methods.scorers.chance import Random
from vllm_kvcompress.pipeline import Method, method_of
from vllm_kvcompress.planning.cache_dtypes import FLOAT8_CACHES
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.pieces import wrong_piece


def why_not_bounded(settings: CompressionConfig, block_size: int | None) -> str | None:
    """Why an engine cannot bound its answers, in a sentence; None if it can, or need not.

    Args:
        block_size: tokens in a KV block; None where that is not known yet.
    """
    if settings.decode_budget is None:
        return None
    for variant in settings.variants:
        if reason := obstacle(method_of(variant)):
            can = _possible()
            return (
                f"--kv-decode-budget cannot bound answers by {variant.compress!r}: {reason}; choose"
                f" from {can}, or remove --kv-decode-budget"
            )
    if block_size and settings.decode_interval % block_size:
        return wrong_interval(settings.decode_interval, block_size)
    return None


def why_not_in_pieces(settings: CompressionConfig, block_size: int | None) -> str | None:
    """Why an engine cannot pack prompts piece by piece, in a sentence; None if it can.

    Args:
        block_size: tokens in a KV block; None where that is not known yet.
    """
    if settings.max_whole is None:
        return None
    for variant in settings.variants:
        if reason := obstacle(method_of(variant)):
            can = _possible()
            return (
                f"--kv-max-whole cannot pack prompts by {variant.compress!r}: {reason}; choose from"
                f" {can}, or remove --kv-max-whole"
            )
    if block_size and settings.piece % block_size:
        return wrong_piece(settings.piece, block_size)
    return None


def why_not_merged(settings: CompressionConfig, stored: str | None, cure: str) -> str | None:
    """Why what merges tokens cannot be asked for, in a sentence; None if nothing forbids it.

    Args:
        stored: what the KV cache holds, by vLLM's name; None for the model's own dtype.
        cure: the flags that set that.
    """
    if stored not in FLOAT8_CACHES:
        return None
    for variant in settings.variants:
        if method_of(variant).merge:
            return (
                f"{variant.compress!r} merges tokens, which a KV cache in {stored} would have to"
                f" quantise anew; choose a method that does not merge, or set {cure}"
            )
    return None


def _possible() -> list[str]:
    presets = {name: CompressionConfig.parse({"compress": name}) for name in PRESETS}
    return sorted(name for name, own in presets.items() if not obstacle(method_of(own)))


def obstacle(method: Method) -> str:
    """Why a method cannot judge what a request holds; empty if it can."""
    reads = method.reads
    if Reads.COLUMN_SUMS in method.scorer.reads and isinstance(method.scorer, Caote):
        return "it weighs the sums of every query head, of which the mean over a KV head's is kept"
    if Reads.COLUMN_MEANS in reads or (isinstance(method.scorer, H2O) and method.scorer.per_query):
        return "it divides by the queries that saw a token, which are not counted for an answer"
    if Reads.KEYS in reads:
        return "it compares the cached keys, which is not done once tokens are dropped"
    if Reads.SCORES in reads:
        return "it shares the budget by the scores of the whole prompt"
    if Reads.POOLED in reads:
        return "it compares scores with their mean over the whole prompt"
    if Reads.VALUES in reads and not isinstance(method.scorer, Caote):
        return "it compares the values' norms with their sum over the whole prompt"
    if isinstance(method.scorer, Random):
        return "what it draws would depend on the answers packed beside it"
    if any(method.selector.source(layer) != layer for layer in range(8)):
        return "its layers reuse a ranking"
    return ""
