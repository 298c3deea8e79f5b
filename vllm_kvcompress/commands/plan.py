"""``kvcompress plan``: from what was typed to a forecast."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from vllm_kvcompress.commands.concurrency import forecast, sizes_on_rank
from vllm_kvcompress.commands.forecast import Forecast, Load
from vllm_kvcompress.commands.gpu_memory import GIB, Estimate, defaults_for, estimate
from vllm_kvcompress.commands.model_shape import (
    ITEMSIZE,
    ModelShape,
    config_path,
    read_config,
    shape_of,
)
from vllm_kvcompress.commands.plan_options import PlanOptions
from vllm_kvcompress.commands.plan_text import default_line, estimate_line, show_forecast
from vllm_kvcompress.commands.weights import weights_of
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.presets import RECOMMENDED
from vllm_kvcompress.planning.model_traits import plain_cache, text_config, traits_of
from vllm_kvcompress.planning.obstacles import (
    why_never_reached,
    why_not_again,
    why_not_merged,
    why_not_probed,
    why_states_not_cached,
)
from vllm_kvcompress.planning.states import block_of
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.method_of import judging_ends
from vllm_kvcompress.settings.protection import WORDS
from vllm_kvcompress.settings.whole_blocks import in_whole_blocks

# vLLM's own block sizes, where none is asked for.
_BLOCK = {"cuda": 16, "cpu": 128}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What `plan` says, and what about."""

    model: str
    shape: ModelShape
    settings: CompressionConfig
    ranks: int
    stages: int
    forecast: Forecast
    defaulted: str | None
    estimated: Estimate | None

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "shape": asdict(self.shape),
            "settings": self.settings.to_additional_config(),
            "budget": self.settings.budget,
            "window": self.settings.resolved_window,
            "tensor_parallel_size": self.ranks,
            "pipeline_parallel_size": self.stages,
            "kv_cache_estimate": None if self.estimated is None else asdict(self.estimated),
            **self.forecast.to_json(),
        }

    def show(self) -> None:
        load, shape = self.forecast.load, self.shape
        on = f", {self.ranks * self.stages} GPUs" if self.ranks * self.stages > 1 else ""
        title = (
            f"{self.model.rstrip('/').rsplit('/', 1)[-1]} ({_layers(shape)},"
            f" {shape.kv_heads} KV heads of {shape.head_dim}, {shape.dtype}{on}):"
            f" {load.prompt:,} tokens, --kv-compress {self.settings.compress}"
            f" --kv-budget {self.settings.budget}"
        )
        console = Console()
        if load.protected:
            title += f", {load.protected:,} of its tokens protected"
        if self.settings.lookahead is not None:
            title += f" --kv-lookahead {self.settings.lookahead}"
        if self.settings.decode_budget is not None:
            title += f" --kv-decode-budget {self.settings.decode_budget}"
        if self.settings.max_whole is not None:
            title += f" --kv-max-whole {self.settings.max_whole} --kv-piece {self.settings.piece}"
            first, last = judging_ends(self.settings)
            title += f" --kv-probe {last}"
            if first:
                title += f" --kv-probe-first {first}"
        show_forecast(
            self.forecast,
            title,
            console,
            estimated=self.estimated is not None,
            bounded=self.settings.decode_budget is not None,
            lookahead=self.settings.resolved_lookahead if self.settings.enabled else 0,
            stages=self.stages,
        )
        for line in (self.defaulted, self.estimated and estimate_line(self.estimated)):
            if line:
                console.print(line, highlight=False)
        if shape.longest is not None and load.cached > shape.longest:
            console.print(
                f"This model serves {shape.longest:,} tokens; vLLM refuses longer requests.",
                highlight=False,
            )


def _layers(shape: ModelShape) -> str:
    own = shape.groups
    if not own.others:
        return f"{shape.layers} layers"
    if own.stateful:
        return (
            f"{shape.layers} layers, of which {len(own.full)} are compressed and {own.stateful}"
            " keep a state"
        )
    return (
        f"{shape.layers} layers, of which {len(own.full)} are compressed and {own.windowed} see"
        f" {own.window:,} tokens"
    )


def with_method(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with the recommended method where they name none."""
    named = settings.keys() & {"compress", "allocator", "scorer"}
    return settings if named else {"compress": RECOMMENDED, **settings}


def ask(options: PlanOptions) -> Answer:
    """The forecast for a model and requests of one length.

    Raises:
        ConfigError: something is unknown, or cannot be served compressed.
    """
    settings = _checked_settings(options)
    _refuse_contradictions(options)
    config = read_config(options.model)
    shape = _shape(options, config, settings)
    block = _block(options, config, shape)
    settings = in_whole_blocks(settings, block)
    reason = why_not_again(settings, block)
    if reason is None and options.longest is not None:
        reason = why_never_reached(settings, options.longest)
    if reason is not None:
        raise ConfigError(reason)
    defaults = defaults_for(options.device, options.gpu_gib, options.ranks * options.stages)
    on_gpu = options.device == "cuda"
    sizes = sizes_on_rank(
        shape,
        ranks=options.ranks,
        stages=options.stages,
        longest=options.longest or options.length + options.output,
        block_size=block,
        max_requests=options.requests or defaults.max_num_seqs,
        graphs=on_gpu,
        in_flight=defaults.batched_tokens,
    )
    estimated = _estimated(options, config, shape, sizes.max_requests, defaults.batched_tokens)
    pool = None if options.memory_gib is None else int(options.memory_gib * GIB)
    if estimated is not None:
        pool = estimated.kv_cache_bytes
    load = Load(prompt=options.length, output=options.output, protected=options.protected)
    defaulted = None
    if options.requests is None:
        defaulted = default_line(options.device, options.gpu_gib, defaults)
    return Answer(
        model=options.model,
        shape=shape,
        settings=settings,
        ranks=options.ranks,
        stages=options.stages,
        forecast=forecast(sizes, settings, load, pool_bytes=pool, tables_from_pool=on_gpu),
        defaulted=defaulted,
        estimated=estimated,
    )


def _checked_settings(options: PlanOptions) -> CompressionConfig:
    given = with_method(options.settings)
    if options.protected:
        # by the operator, unless the settings say otherwise
        given = {"protect": WORDS, **given}
    settings = CompressionConfig.parse(given)
    if not settings.active:
        raise ConfigError(
            f"plan compares with compression; give a method, --kv-compress {RECOMMENDED}"
        )
    return settings


def _block(options: PlanOptions, config: dict[str, Any], shape: ModelShape) -> int:
    """Tokens in a KV block: what was asked for, or more where a layer's state is larger."""
    asked = options.block_size or _BLOCK[options.device]
    if not shape.groups.stateful:
        return asked
    token = 2 * max(shape.kv_heads // options.ranks, 1) * shape.head_dim * shape.stored
    return block_of(
        *(text_config(config), options.ranks, shape.itemsize, token, asked),
        state_dtype=options.state_dtype,
        on_cpu=options.device == "cpu",
    )


def _refuse_contradictions(options: PlanOptions) -> None:
    """Refuse what no model could be served with."""
    if options.device not in _BLOCK:
        raise ConfigError(f"--device must be one of {sorted(_BLOCK)}, got {options.device!r}")
    if options.device != "cuda" and options.gpu_gib is not None:
        raise ConfigError(
            "--gpu-memory needs --device cuda, got --device cpu; give --kv-memory, where vLLM takes"
            " half of the machine's memory unless VLLM_CPU_KVCACHE_SPACE says otherwise"
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
            f"--max-model-len must hold --len and --max-tokens, {tokens} tokens; got"
            f" {options.longest}"
        )


def _shape(options: PlanOptions, config: dict[str, Any], settings: CompressionConfig) -> ModelShape:
    """The model's shape; refuses settings that its cache cannot be compressed by."""
    shape = shape_of(
        config,
        options.dtype,
        cache_dtype=options.cache_dtype,
        disable_sliding_window=options.disable_sliding_window,
        prefix_caching=options.prefix_caching is not False,
    )
    traits = replace(traits_of(config), dtype=shape.dtype, cache=options.cache_dtype)
    if (reason := why_not_merged(settings, shape.cache, plain_cache(traits))) is not None:
        raise ConfigError(reason)
    if shape.groups.stateful and (reason := why_not_probed(settings)) is not None:
        raise ConfigError(reason)
    asked = options.prefix_caching is True and shape.groups.stateful
    if asked and (reason := why_states_not_cached(config.get("architectures"))) is not None:
        raise ConfigError(reason)
    return shape


def _estimated(
    options: PlanOptions,
    config: dict[str, Any],
    shape: ModelShape,
    max_num_seqs: int,
    batched_tokens: int,
) -> Estimate | None:
    """The size of the KV cache by the GPU's memory; None where it was given, or no GPU was."""
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
