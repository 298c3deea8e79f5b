"""VllmHook `metrics`: report compression counts and settings on vLLM's ``/metrics``.

Our stat logger implements vLLM's interface and runs before vLLM's own loggers. The scheduler's
counts travel with a KV connector's statistics, and must be removed before vLLM's loggers read them.

It is not an entry point in ``vllm.stat_logger_plugins``, because vLLM loads those with compression
off too, turns statistics on for operators who turned them off, and does not load them offline.
"""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats

from kvcompress_kernels import k4v3
from vllm_kvcompress.engine.layers import draft_layers_of, draft_slots_of, groups_of, stages_of
from vllm_kvcompress.engine.messages.outputs import Counts, take_counts
from vllm_kvcompress.engine.messages.settings import active_settings, has_settings
from vllm_kvcompress.engine.messages.step import BUDGET, HALF
from vllm_kvcompress.engine.scheduling.admission import REASONS
from vllm_kvcompress.schedules.outputs import OutputGroupSchedule
from vllm_kvcompress.settings.config import CompressionConfig

logger = init_logger("vllm.kvcompress")

_RATIOS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
REFUSALS = ("not_allowed", "out_of_bounds", "invalid", "too_long")


COUNTERS: Mapping[str, tuple[str, str]] = {
    "planned_requests": (
        "method",
        "Requests that the scheduler selected for compression. Each counts once.",
    ),
    "requests": ("method", "Planned requests that the workers have compressed."),
    "skipped_requests": (
        "reason",
        "Requests whose prompts stayed uncompressed, by reason. Each request is counted once: as"
        " planned, as skipped or as refused.",
    ),
    "prompt_tokens": ("", "Tokens of compressed prompts before compression."),
    "kept_tokens": (
        "",
        "Tokens of compressed prompts after compression, as the mean over the compressed layers."
        " The layers of a draft model are not among them, and keep all tokens.",
    ),
    "freed_blocks": ("", "KV blocks of compressed prompts that went back to the pool."),
    "packed_blocks": ("", "Free KV blocks allocated for the tokens that compressed prompts keep."),
    "in_place_requests": (
        "",
        "Prompts compressed in place, in their own blocks, because the pool had too few free ones.",
    ),
    "repacked_answers": (
        "",
        "Times that a request was compressed while it generated its output: to its decode budget,"
        " or to pack the output in k4v3.",
    ),
    "freed_answer_blocks": (
        "",
        "KV blocks that went back to the pool when requests were compressed during their output.",
    ),
    "packed_pieces": (
        "",
        "Times that a prompt was compressed piece by piece, its last piece included.",
    ),
    "slotless_lookaheads": (
        "",
        "Prompts compressed after prefill because no look-ahead slot was free.",
    ),
    "protected_tokens": (
        "",
        "Protected tokens of compressed prompts, which are kept whatever their score.",
    ),
    "raised_budgets": ("", "Prompts whose budget was raised to fit their protected tokens."),
    "cut_lookaheads": ("to", "Look-aheads that ended early because the KV pool was short."),
    "packed_hit_tokens": (
        "",
        "Tokens that requests found in packed pages of the prefix cache (--kv-reuse).",
    ),
    "resumed_requests": (
        "",
        "Times that a preempted request resumed from its pages in host memory (--kv-park).",
    ),
    "resumed_tokens": ("", "Tokens that resumed requests did not compute again."),
    "unparked_requests": (
        "",
        "Preempted requests computed again because host memory had no space for their pages.",
    ),
    "layer_tokens": ("layer", "Prompt tokens that compressed prompts keep, by layer."),
}
"""By name without prefix, the extra label of a counter and its help text, in the order of the table
in docs/operate.md. With a label, the scheduler sends a count for each of its values."""
GAUGES: Mapping[str, str] = {
    "parked_requests": "Preempted requests whose pages wait in host memory (--kv-park).",
    "parked_bytes": "Host memory in use by parked requests, in bytes.",
}
"""By name without prefix, the help text of a gauge whose changes the scheduler sends."""
_COUNT_KEYS = {
    "planned_requests": "planned",
    "requests": "packed",
    "skipped_requests": "skipped",
    "in_place_requests": "in_place",
}
"""Keys of `Counts` that differ from the name of their counter."""
_refusals: Counter | None = None
_model: list[str] = []


def count_refusal(reason: str) -> None:
    """Count a request that was refused, by a reason in REFUSALS."""
    if _refusals is not None:
        _refusals.labels(*_model, reason).inc()


def info_labels(settings: CompressionConfig, block_size: int, itemsize: int) -> dict[str, str]:
    """Return the settings as the labels of ``vllm:kv_compress_info``.

    They are the settings of requests that choose none. If only chosen settings compress, a label is
    the value that all of them share.

    Args:
        settings: settings of the engine.
        block_size: tokens in a block.
        itemsize: bytes of a number of the model.
    """
    names = {alias.name: alias.meaning for alias in settings.alias}
    first, last = settings.scoring_query_counts
    settings = settings.in_whole_blocks(block_size)
    page_tokens = k4v3.page_tokens(block_size, itemsize)
    served = [settings] if settings.enabled else list(settings.variants)
    may_choose = bool(set(settings.allow_override) - {"off"})
    return {
        "method": settings.compress,
        "budget": _common(
            (each.budget for each in served), settings.budget if may_choose else None
        ),
        "packed_dtype": _common(
            (each.resolved_packed_dtype for each in served), settings.packed.dtype
        ),
        "packed_page_tokens": str(page_tokens) if settings.packs_k4v3 else "",
        "window": _common(each.resolved_window for each in served),
        "lookahead": _common(map(_lookahead_of, served), settings.lookahead.tokens),
        "protect": ",".join(settings.protection.words),
        "min_prompt": str(settings.resolved_min_prompt),
        "min_output": str(settings.resolved_min_output),
        "pressure": str(settings.pressure),
        "decode_budget": str(settings.decode.budget or ""),
        "decode_interval": _common(_decode_intervals(served, page_tokens)),
        "max_whole": str(settings.pieces.max_whole or ""),
        "park": str(settings.park or ""),
        "piece": str(settings.pieces.length if settings.pieces.max_whole else ""),
        "probe": str(last if settings.pieces.max_whole else ""),
        "probe_first": str(first if settings.pieces.max_whole else ""),
        "allow_override": ",".join(settings.allow_override),
        "alias": json.dumps(names) if names else "",
    }


def _common(values: Iterable[object], otherwise: object = None) -> str:
    """Return the label for the settings that requests get: their common value.

    Args:
        values: value of each settings that requests get.
        otherwise: the flag's value, for settings with different values; None leaves the label
            empty.
    """
    # 1 token and a ratio of 1.0 are equal numbers.
    labels = {str(value) for value in values}
    if len(labels) == 1:
        return labels.pop()
    return "" if otherwise is None else str(otherwise)


def _lookahead_of(settings: CompressionConfig) -> int:
    return 0 if settings.keeps_all_tokens else settings.resolved_lookahead


def _decode_intervals(served: Iterable[CompressionConfig], page_tokens: int) -> Iterator[int]:
    """Yield the output tokens between two packings of an output, where outputs are packed."""
    for settings in served:
        if settings.decode.budget is not None:
            yield settings.decode.interval
        elif settings.packs_outputs:
            yield OutputGroupSchedule(
                settings=settings, max_tokens=0, page_tokens=page_tokens
            ).interval


class CompressionStatLogger(AggregateStatLoggerBase):
    """Exports the counts that the schedulers of all engines report.

    Args:
        vllm_config: configuration of the server.
        engine_indexes: engines whose statistics this process receives.
        settings: compression settings of the engine.
    """

    def __init__(
        self, vllm_config: VllmConfig, engine_indexes: list[int], settings: CompressionConfig
    ) -> None:
        model = str(vllm_config.model_config.served_model_name)
        layers = groups_of(vllm_config).full
        self._block_size = int(vllm_config.cache_config.block_size)
        self._itemsize = vllm_config.model_config.dtype.itemsize
        methods = [variant.compress for variant in settings.variants]
        known_values = {
            "method": methods,
            "reason": REASONS,
            "layer": [str(layer) for layer in layers],
            "to": [HALF, BUDGET],
        }
        self._engines = {index: (model, str(index)) for index in engine_indexes}
        self._counters: dict[str, Counter] = {}
        for name, (label, text) in COUNTERS.items():
            labels = ["model_name", "engine", *([label] if label else [])]
            counter = self._counters[name] = Counter(f"vllm:kv_compress_{name}", text, labels)
            for engine in self._engines.values():
                for value in known_values.get(label, []):
                    counter.labels(*engine, value)
                if not label:
                    counter.labels(*engine)
        labels = ["model_name", "engine"]
        self._gauges = {
            name: Gauge(f"vllm:kv_compress_{name}", text, labels, multiprocess_mode="sum")
            for name, text in GAUGES.items()
        }
        self._ratio = Histogram(
            "vllm:kv_compress_ratio",
            "Share of the prompt's tokens that compression keeps in the compressed layers.",
            labels,
            buckets=_RATIOS,
        )
        self._seconds = Histogram(
            "vllm:kv_compress_seconds",
            "Time on the worker's device to score and compress a prompt.",
            labels,
            buckets=_SECONDS,
        )
        for engine in self._engines.values():
            for gauge in self._gauges.values():
                gauge.labels(*engine)
            self._ratio.labels(*engine)
            self._seconds.labels(*engine)
        layer_labels = {
            "stages": str(len(stages_of(vllm_config))),
            "draft_layers": str(draft_layers_of(vllm_config)),
            "draft_slots": str(sum(draft_slots_of(vllm_config))),
        }
        self._set_gauges(settings, layer_labels)
        self._count_refusals(model)

    def _set_gauges(self, settings: CompressionConfig, layer_labels: dict[str, str]) -> None:
        """Create the gauges with the settings, the labels of the model's layers, and the budget."""
        values = info_labels(settings, self._block_size, self._itemsize) | layer_labels
        gauge = Gauge(
            "vllm:kv_compress_info",
            "Compression is on with these settings.",
            ["model_name", "engine", *values],
            multiprocess_mode="mostrecent",
        )
        budget = Gauge(
            "vllm:kv_compress_budget",
            "Budget of the engine: a ratio of the prompt, or tokens per layer.",
            ["model_name", "engine", "unit"],
            multiprocess_mode="mostrecent",
        )
        unit = "tokens" if isinstance(settings.budget, int) else "ratio"
        for engine in self._engines.values():
            gauge.labels(*engine, *values.values()).set(1)
            if settings.enabled:
                budget.labels(*engine, unit).set(settings.budget)

    @staticmethod
    def _count_refusals(model: str) -> None:
        global _refusals, _model
        _refusals, _model = (
            Counter(
                "vllm:kv_compress_refused_requests",
                "Requests refused with 400 for their compression settings or the pool size.",
                ["model_name", "reason"],
            ),
            [model],
        )
        for reason in REFUSALS:
            _refusals.labels(model, reason)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
        **more: Any,
    ) -> None:
        """Remove our counts from vLLM's statistics and add them to the counters."""
        if scheduler_stats is None:
            return
        counts = take_counts(scheduler_stats)
        if counts is not None:
            self._count(counts, self._engines[engine_idx])

    def _count(self, counts: Counts, engine: tuple[str, str]) -> None:
        count_of: Mapping[str, Any] = counts
        for name, counter in self._counters.items():
            increase = count_of[_COUNT_KEYS.get(name, name)]
            if isinstance(increase, Mapping):
                for label, count in increase.items():
                    counter.labels(*engine, label).inc(count)
            else:
                counter.labels(*engine).inc(increase)
        for name, gauge in self._gauges.items():
            gauge.labels(*engine).inc(count_of[name])
        for histogram, values in (
            (self._ratio, counts["ratios"]),
            (self._seconds, counts["seconds"]),
        ):
            child = histogram.labels(*engine)
            for value in values:
                child.observe(value)

    def log_engine_initialized(self) -> None:
        """Log nothing, because `configure` has logged the settings."""


def _report_off(vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
    """Create the gauge of a server whose settings turn compression off."""
    gauge = Gauge(
        "vllm:kv_compress_off",
        "Compression is off, and settings of requests are ignored.",
        ["model_name", "engine"],
        multiprocess_mode="mostrecent",
    )
    for index in engine_indexes:
        gauge.labels(str(vllm_config.model_config.served_model_name), str(index)).set(1)


@functools.cache
def install() -> None:
    """Wrap ``StatLoggerManager.__init__``; safe to call twice.

    Our logger is created after vLLM's, which unregisters all metrics first, and is called before
    them.
    """
    init = StatLoggerManager.__init__

    @functools.wraps(init)
    def with_ours(self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        init(self, vllm_config, *args, **kwargs)
        settings = active_settings(vllm_config.additional_config)
        if settings is not None:
            logger_ = CompressionStatLogger(vllm_config, self.engine_indexes, settings)
            self.stat_loggers.insert(0, logger_)
        elif has_settings(vllm_config.additional_config):
            _report_off(vllm_config, self.engine_indexes)

    StatLoggerManager.__init__ = with_ours
