"""``kvcompress plan``: compute and show the forecast for a model and a workload."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from vllm_kvcompress.commands.plan.concurrency import forecast, next_hits, sizes_on_rank
from vllm_kvcompress.commands.plan.forecast import (
    Forecast,
    NextHits,
    WarmConversations,
    Workload,
)
from vllm_kvcompress.commands.plan.gpu_memory import GIB, Estimate, defaults_for, estimate
from vllm_kvcompress.commands.plan.model_shape import (
    ITEMSIZE,
    ModelShape,
    config_path,
    read_config,
    shape_of,
)
from vllm_kvcompress.commands.plan.options import PlanOptions
from vllm_kvcompress.commands.plan.report import (
    DEVICES_WITH_K4V3,
    default_line,
    estimate_line,
    next_turn_line,
    recommended_notes,
    show_forecast,
)
from vllm_kvcompress.commands.plan.warm import warm_conversations
from vllm_kvcompress.commands.plan.weights import weights_of
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.registry import RECOMMENDED, RECOMMENDED_BUDGETS
from vllm_kvcompress.planning.model_traits import text_config, traits_of
from vllm_kvcompress.planning.packed_pages import CPU_BLOCK_WITH_GROUPS
from vllm_kvcompress.planning.states import hybrid_block_size
from vllm_kvcompress.refusals.rule import refusal
from vllm_kvcompress.refusals.server import SERVER, Server
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.packed_dtype import K4V3
from vllm_kvcompress.settings.parsing import with_default_method
from vllm_kvcompress.settings.protection import WORDS
from vllm_kvcompress.settings.whole_blocks import in_whole_blocks

# vLLM's default block sizes.
_BLOCK_SIZE = {"cuda": 16, "cpu": 128}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """Forecast of ``kvcompress plan`` with the inputs that it is for.

    Args:
        model: folder or name as given.
        device: "cuda" or "cpu".
        shape: shape of the model.
        settings: compression settings.
        ranks: tensor-parallel size.
        stages: pipeline-parallel size.
        forecast: the forecast.
        next_hits: what a next turn finds in the prefix cache. None without that cache, and for
            models with sliding windows or states.
        warm: conversations that stay warm with ``--kv-reuse``. None without it, or where
            `next_hits` is None.
        default_note: note about the default of --max-num-seqs. None if it was given.
        estimated: estimate of the KV pool. None if its size was given or is unknown.
    """

    model: str
    device: str
    shape: ModelShape
    settings: CompressionConfig
    ranks: int
    stages: int
    forecast: Forecast
    next_hits: NextHits | None
    warm: WarmConversations | None
    default_note: str | None
    estimated: Estimate | None

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "device": self.device,
            "shape": asdict(self.shape),
            "settings": self.settings.to_additional_config(),
            "budget": self.settings.budget,
            "window": self.settings.resolved_window,
            "tensor_parallel_size": self.ranks,
            "pipeline_parallel_size": self.stages,
            "kv_cache_estimate": None if self.estimated is None else asdict(self.estimated),
            "next_hits": None if self.next_hits is None else asdict(self.next_hits),
            "warm": None if self.warm is None else asdict(self.warm),
            **self.forecast.to_json(),
        }

    def show(self) -> None:
        """Print the forecast as text."""
        load, shape = self.forecast.load, self.shape
        gpus = f", {self.ranks * self.stages} GPUs" if self.ranks * self.stages > 1 else ""
        title = (
            f"{self.model.rstrip('/').rsplit('/', 1)[-1]} ({_layers(shape)},"
            f" {shape.kv_heads} KV heads of {shape.head_dim}, {shape.dtype}{gpus}):"
            f" {load.prompt:,} tokens, --kv-compress {self.settings.compress}"
            f" --kv-budget {self.settings.budget}"
        )
        console = Console()
        if load.protected:
            title += f", {load.protected:,} protected tokens"
        if self.settings.packed.dtype is not None:
            title += f" --kv-packed-dtype {self.settings.packed.dtype}"
        if self.settings.lookahead.tokens is not None:
            title += f" --kv-lookahead {self.settings.lookahead.tokens}"
        if self.settings.decode.budget is not None:
            title += f" --kv-decode-budget {self.settings.decode.budget}"
        if self.settings.reuses_pages:
            title += f" --kv-reuse {self.settings.packed.reuse}"
        elif self.settings.packs_outputs:
            title += f" --kv-decode-interval {self.settings.decode.interval}"
        if self.settings.pieces.max_whole is not None:
            pieces = self.settings.pieces
            title += f" --kv-max-whole {pieces.max_whole} --kv-piece {pieces.length}"
            first, last = self.settings.scoring_query_counts
            title += f" --kv-probe {last}"
            if first:
                title += f" --kv-probe-first {first}"
        show_forecast(
            self.forecast,
            title,
            console,
            device=self.device,
            estimated=self.estimated is not None,
            packs_outputs=self.settings.decode.budget is not None or self.settings.packs_outputs,
            stages=self.stages,
            warm=self.warm,
        )
        if self.next_hits is not None and self.next_hits.on != self.next_hits.off:
            console.print(next_turn_line(load, self.next_hits), highlight=False)
        for line in (
            *recommended_notes(self.device, shape),
            self.default_note,
            self.estimated and estimate_line(self.estimated),
        ):
            if line:
                console.print(line, highlight=False)
        if shape.longest is not None and load.cached > shape.longest:
            console.print(
                f"This model supports {shape.longest:,} tokens; vLLM refuses longer requests.",
                highlight=False,
            )


def _layers(shape: ModelShape) -> str:
    groups = shape.groups
    if not groups.num_uncompressed:
        return f"{shape.layers} layers"
    if groups.stateful:
        return (
            f"{shape.layers} layers, {len(groups.full)} of them compressed and {groups.stateful}"
            " with a recurrent state"
        )
    return (
        f"{shape.layers} layers, {len(groups.full)} of them compressed and {groups.windowed} with a"
        f" sliding window of {groups.window:,} tokens"
    )


def make_plan(options: PlanOptions) -> PlanResult:
    """Return the forecast for a model and requests of one length.

    Without a method, a budget and a format, it is for the recommended ones: on a CPU in k4v3 if
    that can be used, else at the default budget in the cache's dtype.

    Raises:
        ConfigError: An option is invalid, or the model cannot be served with compression.
    """
    choices = {"compress", "allocator", "scorer", "budget", "packed_dtype"}
    if options.device in DEVICES_WITH_K4V3 and not options.settings.keys() & choices:
        budget = str(RECOMMENDED_BUDGETS["balanced"])
        try:
            return _plan(replace(options, budget=budget, packed_dtype=K4V3))
        except ConfigError:
            # The reason may be k4v3. If it is not, the same error follows.
            pass
    return _plan(options)


def _plan(options: PlanOptions) -> PlanResult:
    settings = _checked_settings(options)
    _check_options(options)
    config = read_config(options.model)
    shape = shape_of(
        config,
        options.dtype,
        cache_dtype=options.cache_dtype,
        disable_sliding_window=options.disable_sliding_window,
        prefix_caching=options.prefix_caching is not False,
    )
    block_size = _block_size(options, config, shape, settings)
    _refuse_unsupported(options, config, shape, settings, block_size)
    settings = in_whole_blocks(settings, block_size)
    defaults = defaults_for(options.device, options.gpu_gib, options.ranks * options.stages)
    on_gpu = options.device == "cuda"
    sizes = sizes_on_rank(
        shape,
        ranks=options.ranks,
        stages=options.stages,
        longest=options.longest or options.length + options.output,
        block_size=block_size,
        max_requests=options.requests or defaults.max_num_seqs,
        graphs=on_gpu,
        in_flight=defaults.batched_tokens,
    )
    estimated = _estimated_pool(options, config, shape, sizes.max_requests, defaults.batched_tokens)
    pool_bytes = None if options.memory_gib is None else int(options.memory_gib * GIB)
    if estimated is not None:
        pool_bytes = estimated.kv_cache_bytes
    load = Workload(prompt=options.length, output=options.output, protected=options.protected)
    # vLLM caches windows and states only at boundaries of the prompt.
    caches_output = options.prefix_caching is not False and not shape.groups.num_uncompressed
    planned = forecast(sizes, settings, load, pool_bytes=pool_bytes, tables_from_pool=on_gpu)
    warm = None
    if caches_output and settings.reuses_pages:
        warm = warm_conversations(settings, sizes, planned)
    default_note = None
    if options.requests is None:
        default_note = default_line(options.device, options.gpu_gib, defaults)
    return PlanResult(
        model=options.model,
        device=options.device,
        shape=shape,
        settings=settings,
        ranks=options.ranks,
        stages=options.stages,
        forecast=planned,
        next_hits=next_hits(settings, sizes, load) if caches_output else None,
        warm=warm,
        default_note=default_note,
        estimated=estimated,
    )


def _checked_settings(options: PlanOptions) -> CompressionConfig:
    given = with_default_method(options.settings)
    if options.protected:
        # --protected implies --kv-protect with all parts, unless the settings have their own.
        given = {"protect": WORDS, **given}
    settings = CompressionConfig.parse(given)
    if not settings.active:
        raise ConfigError(
            f"kvcompress plan needs a compression method; give one, such as --kv-compress"
            f" {RECOMMENDED}"
        )
    return settings


def _block_size(
    options: PlanOptions, config: dict[str, Any], shape: ModelShape, settings: CompressionConfig
) -> int:
    """Return the tokens per KV block: as requested, or more if a layer's state is larger."""
    default = _BLOCK_SIZE[options.device]
    if options.device == "cpu" and settings.packs_k4v3:
        default = CPU_BLOCK_WITH_GROUPS
    block_size = options.block_size or default
    if not shape.groups.stateful:
        return block_size
    token_bytes = 2 * max(shape.kv_heads // options.ranks, 1) * shape.head_dim * shape.stored
    return hybrid_block_size(
        text_config(config),
        options.ranks,
        shape.itemsize,
        token_bytes,
        block_size,
        state_dtype=options.state_dtype,
        on_cpu=options.device == "cpu",
    )


def _check_options(options: PlanOptions) -> None:
    """Raise ConfigError for options that are invalid for every model."""
    if options.device not in _BLOCK_SIZE:
        raise ConfigError(f"--device must be one of {sorted(_BLOCK_SIZE)}, got {options.device!r}")
    if options.device != "cuda" and options.gpu_gib is not None:
        raise ConfigError(
            "--gpu-memory needs --device cuda, got --device cpu; give --kv-memory (vLLM's default"
            " on a CPU is half of the machine's memory, or VLLM_CPU_KVCACHE_SPACE)"
        )
    if options.state_dtype not in ("auto", *ITEMSIZE):
        raise ConfigError(
            f"--mamba-ssm-cache-dtype must be auto or one of {sorted(ITEMSIZE)}, got"
            f" {options.state_dtype!r}"
        )
    if options.protected > options.length:
        raise ConfigError(
            f"--protected must be at most --len {options.length}, got {options.protected}"
        )
    if not 0 < options.utilization <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization must be in (0, 1], got {options.utilization:g}"
        )
    tokens = options.length + options.output
    if options.longest is not None and options.longest < tokens:
        raise ConfigError(
            f"--max-model-len must be at least --len plus --max-tokens, {tokens} tokens; got"
            f" {options.longest}"
        )


def _refuse_unsupported(
    options: PlanOptions,
    config: dict[str, Any],
    shape: ModelShape,
    settings: CompressionConfig,
    block_size: int,
) -> None:
    """Raise ConfigError if the settings cannot compress this model's cache."""
    traits = replace(traits_of(config), dtype=shape.dtype, cache=options.cache_dtype)
    if options.disable_sliding_window:
        traits = replace(traits, window=None)
    server = Server(
        settings=settings,
        model=traits,
        head_dim=shape.head_dim,
        itemsize=shape.stored,
        block_size=block_size,
        max_model_len=options.longest,
        options={"--mamba-cache-mode": "align"} if options.prefix_caching else {},
    )
    if (reason := refusal(SERVER, server)) is not None:
        raise ConfigError(reason)


def _estimated_pool(
    options: PlanOptions,
    config: dict[str, Any],
    shape: ModelShape,
    max_num_seqs: int,
    batched_tokens: int,
) -> Estimate | None:
    """Return an estimate of the KV pool, or None if its size or no GPU memory was given."""
    if options.memory_gib is not None or options.gpu_gib is None:
        return None
    return estimate(
        config,
        shape,
        weights_of(config_path(options.model).parent, config, shape),
        gpu_gib=options.gpu_gib,
        utilization=options.utilization,
        ranks=options.ranks,
        stages=options.stages,
        max_num_seqs=max_num_seqs,
        batched_tokens=batched_tokens,
    )
