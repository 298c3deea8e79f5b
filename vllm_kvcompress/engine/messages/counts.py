"""Counts that the scheduler sends with vLLM's `SchedulerStats`, for the Prometheus metrics.

They travel in `kv_connector_stats` under a key of their own, beside a KV connector's statistics.
vLLM serialises that field as plain values, so `Counts` holds only plain values.
"""

from typing import TypedDict

from vllm.v1.metrics.stats import SchedulerStats

_KEY = "kvcompress"


class Counts(TypedDict):
    """Changes since the last report. Sums over reports are right whichever API server gets them."""

    planned: dict[str, int]
    """Requests whose prompts the scheduler told the workers to compress, by method."""
    packed: dict[str, int]
    """Planned requests that the workers have compressed, by method."""
    skipped: dict[str, int]
    """Requests whose prompts stayed uncompressed, by reason."""
    in_place: int
    """Prompts packed into their own blocks."""
    freed_blocks: int
    """Blocks of uncompressed prompts that went back to the pool."""
    packed_blocks: int
    """Blocks taken from the pool for kept tokens."""
    prompt_tokens: int
    """Tokens of the compressed prompts before compression."""
    kept_tokens: float
    """Tokens of the compressed prompts after compression, mean over the layers."""
    layer_tokens: dict[str, int]
    """Tokens that each layer keeps of the compressed prompts, by the layer's index in the model."""
    ratios: list[float]
    """Share of each compressed prompt that is kept."""
    seconds: list[float]
    """Device time to score and pack a prompt, one entry per packing."""
    repacked_answers: int
    """Times that a request's cache was packed again during decoding."""
    freed_answer_blocks: int
    """Blocks that these repackings returned to the pool."""
    packed_pieces: int
    """Times that a prompt under ``max_whole`` was packed, its last packing included."""
    slotless_lookaheads: int
    """Prompts that found no free look-ahead slot."""
    protected_tokens: int
    """Tokens of compressed prompts that are kept regardless of their score."""
    raised_budgets: int
    """Prompts whose budget was raised to hold their protected tokens."""
    cut_lookaheads: dict[str, int]
    """Prompts packed before their look-ahead was over, by target (`half` or `budget`)."""
    packed_hit_tokens: int
    """Tokens of new requests that were read from packed pages in the prefix cache."""


def attach_counts(stats: SchedulerStats, counts: Counts) -> None:
    """Add the counts to a step's statistics."""
    stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), _KEY: counts}


def take_counts(stats: SchedulerStats) -> Counts | None:
    """Remove and return the counts of a step's statistics, None if there are none.

    vLLM's loggers expect only a connector's statistics in that field.
    """
    if not stats.kv_connector_stats:
        return None
    counts: Counts | None = stats.kv_connector_stats.pop(_KEY, None)
    stats.kv_connector_stats = stats.kv_connector_stats or None
    return counts
