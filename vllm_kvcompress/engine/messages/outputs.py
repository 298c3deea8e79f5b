"""What the scheduler reports to the front end, and which aborts are due to a stop string.

The scheduler sends counts for the metrics with `SchedulerStats`, and each request's compression
result with its `EngineCoreOutput`. Both travel under a key of their own in fields for a KV
connector, `kv_connector_stats` and `kv_transfer_params`. vLLM serialises these fields as plain
values, so the messages hold only plain values.

vLLM's front end detects stop strings. It then aborts the request in the engine, as it also does
when the client hangs up, and an abort carries only request ids. The front end lists an id twice to
mean "ended by a stop string". vLLM routes and aborts such a list like any other.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from vllm.outputs import RequestOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.metrics.stats import SchedulerStats

_KEY = "kvcompress"

# -- counts for the metrics ------------------------------------------------------------------------


Counts = dict[str, Any]
"""Changes since the last report, by field of `scheduling.compression_stats.CompressionStats`.

Counts are differences, so their sums are right even if several API servers receive reports.
"""


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


# -- compression results for the usage -------------------------------------------------------------

USAGE_KEY = "kv_compress"
"""The attribute that vLLM's RequestOutput gets, and the key in a response's usage."""

CompressionUsage = dict[str, Any]
"""What a request's usage says about its compression.

A new compression has ``method``, ``budget``, ``packed_dtype``, ``prompt_tokens``, ``kept_tokens``,
``kept_bytes`` and ``uncompressed_bytes``, and where they apply ``lookahead`` and
``protected_tokens``. ``kept_bytes`` are the bytes of the KV blocks that the request then holds, on
all GPUs, and ``uncompressed_bytes`` those that it would hold uncompressed. The workers add
``layer_tokens`` later, with their mean as ``kept_tokens``.
"""


def same_compression(kept: CompressionUsage, update: CompressionUsage) -> bool:
    """Return whether both are of one compression of a prompt.

    A preempted prompt is compressed again with its output, and one whose look-ahead ended early may
    be compressed again after more output tokens.
    """
    return all(kept.get(key) == update.get(key) for key in ("prompt_tokens", "lookahead"))


def default_usage_to_none() -> None:
    """Give every `RequestOutput` of this process a ``kv_compress`` of None. Idempotent.

    Offline code can then read the attribute of any output. The outputs of a compressed prompt
    override it.
    """
    setattr(RequestOutput, USAGE_KEY, None)


def attach_usage(output: EngineCoreOutput, usage: CompressionUsage) -> None:
    """Attach a compression result to one of the request's outputs."""
    output.kv_transfer_params = {**(output.kv_transfer_params or {}), _KEY: usage}


def take_usage(output: EngineCoreOutput) -> CompressionUsage | None:
    """Remove and return the compression result of an output, None if there is none.

    vLLM passes everything left in that field to the client as the connector's parameters.
    """
    params = output.kv_transfer_params
    if not params or _KEY not in params:
        return None
    usage: CompressionUsage = params[_KEY]
    output.kv_transfer_params = {key: value for key, value in params.items() if key != _KEY} or None
    return usage


# -- aborts ----------------------------------------------------------------------------------------


def mark_stopped(request_ids: Iterable[str]) -> list[str]:
    """Return the request ids of an abort, each listed twice."""
    return [request_id for request_id in request_ids for _ in range(2)]


def stopped_ids(request_ids: Iterable[str]) -> frozenset[str]:
    """Return the request ids of an abort that `mark_stopped` has marked."""
    listed = Counter(request_ids)
    return frozenset(request_id for request_id, times in listed.items() if times > 1)
