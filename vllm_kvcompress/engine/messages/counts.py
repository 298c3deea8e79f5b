"""What a scheduler counted since it last reported, beside a KV connector's statistics.

They lie in the connector's place under a key of their own. vLLM serialises what lies there as plain
values, so that `Counts` are.
"""

from typing import TypedDict

from vllm.v1.metrics.stats import SchedulerStats

_KEY = "kvcompress"


class Counts(TypedDict):
    """Differences since the last report, which add up to the same whichever server is told."""

    planned: dict[str, int]
    """Requests whose prompts the scheduler gave to the workers to compress, by method."""
    packed: dict[str, int]
    """Planned requests that the workers have compressed, by method."""
    skipped: dict[str, int]
    """Requests whose prompts stayed uncompressed, by reason."""
    in_place: int
    """Prompts packed into their own blocks."""
    freed_blocks: int
    """The prompts' own blocks that went back to the pool."""
    packed_blocks: int
    """Blocks taken for what is kept."""
    prompt_tokens: int
    """Tokens of the compressed prompts, before."""
    kept_tokens: float
    """Tokens of the compressed prompts, after: the mean of their layers."""
    layer_tokens: dict[str, int]
    """Tokens that each layer keeps of them, by its index in the model."""
    ratios: list[float]
    """Per compressed prompt, what is kept of it as a share."""
    seconds: list[float]
    """Time on the worker's device to score and pack a prompt, once for each time it was packed."""
    repacked: int
    """Times that an answer was packed again."""
    answer_blocks: int
    """Blocks that went back to the pool by that."""
    pieces: int
    """Times that a prompt was packed piecewise, its end included."""
    slotless: int
    """Prompts that found no slot for a look-ahead."""
    protected_tokens: int
    """Tokens of compressed prompts that are kept whatever their score, as parts or as spans."""
    raised_budgets: int
    """Prompts whose budget was raised to what is protected."""
    cut_lookaheads: dict[str, int]
    """Times that a prompt was packed before its look-ahead was over, by what to."""


def attach_counts(stats: SchedulerStats, counts: Counts) -> None:
    """Send the counts with a step's statistics."""
    stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), _KEY: counts}


def take_counts(stats: SchedulerStats) -> Counts | None:
    """Take the counts off a step's statistics: vLLM's loggers expect a connector's there alone."""
    if not stats.kv_connector_stats:
        return None
    counts: Counts | None = stats.kv_connector_stats.pop(_KEY, None)
    stats.kv_connector_stats = stats.kv_connector_stats or None
    return counts
