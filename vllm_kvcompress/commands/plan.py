"""``kvcompress plan``: from what was typed to a forecast."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from vllm_kvcompress.commands.concurrency import Forecast, Load, forecast, sizes_on_rank
from vllm_kvcompress.commands.gpu_memory import Estimate, defaults_for, estimate
from vllm_kvcompress.commands.model_shape import ModelShape, config_path, read_config, shape_of
from vllm_kvcompress.commands.plan_text import default_line, estimate_line, show_forecast
from vllm_kvcompress.commands.weights import weights_of
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.presets import RECOMMENDED
from vllm_kvcompress.planning.model_traits import plain_cache, traits_of
from vllm_kvcompress.planning.obstacles import why_not_again, why_not_merged
from vllm_kvcompress.settings.config import CompressionConfig

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
        if self.settings.decode_budget is not None:
            title += f" --kv-decode-budget {self.settings.decode_budget}"
        if self.settings.max_whole is not None:
            title += f" --kv-max-whole {self.settings.max_whole} --kv-piece {self.settings.piece}"
        show_forecast(
            self.forecast,
            title,
            console,
            estimated=self.estimated is not None,
            bounded=self.settings.decode_budget is not None,
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
    if not own.windowed:
        return f"{shape.layers} layers"
    return (
        f"{shape.layers} layers, of which {len(own.full)} are compressed and {own.windowed} see"
        f" {own.window:,} tokens"
    )


def with_method(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with the recommended method where they name none."""
    named = settings.keys() & {"compress", "allocator", "scorer"}
    return settings if named else {"compress": RECOMMENDED, **settings}


def ask(
    *,
    model: str,
    settings: dict[str, Any],
    length: int,
    output: int,
    memory_gib: float | None,
    block_size: int | None,
    dtype: str,
    ranks: int,
    stages: int = 1,
    longest: int | None,
    requests: int | None,
    device: str,
    gpu_gib: float | None = None,
    utilization: float = 0.92,
    cache_dtype: str = "auto",
    disable_sliding_window: bool = False,
) -> Answer:
    """The forecast for a model and requests of one length.

    Args:
        memory_gib: the KV cache of one GPU; `gpu_gib`, its whole memory, gives an estimate of it.
        ranks: tensor-parallel size. `stages`: pipeline-parallel size.
        requests: requests at once; None takes vLLM's default for the device.

    Raises:
        ConfigError: something is unknown, or cannot be served compressed.
    """
    checked = CompressionConfig.parse(with_method(settings))
    if not checked.active:
        raise ConfigError(
            f"plan compares with compression; give a method, --kv-compress {RECOMMENDED}"
        )
    if (reason := why_not_again(checked, block_size or _BLOCK.get(device))) is not None:
        raise ConfigError(reason)
    if device not in _BLOCK:
        raise ConfigError(f"--device must be one of {sorted(_BLOCK)}, got {device!r}")
    if device != "cuda" and gpu_gib is not None:
        raise ConfigError(
            "--gpu-memory is of a GPU; give --kv-memory with --device cpu, where vLLM takes half of"
            " the machine's memory unless VLLM_CPU_KVCACHE_SPACE says otherwise"
        )
    if not 0 < utilization <= 1:
        raise ConfigError(f"--gpu-memory-utilization must be in (0, 1], got {utilization:g}")
    config = read_config(model)
    shape = shape_of(
        config, dtype, cache_dtype=cache_dtype, disable_sliding_window=disable_sliding_window
    )
    cure = plain_cache(replace(traits_of(config), dtype=shape.dtype, cache=cache_dtype))
    if (reason := why_not_merged(checked, shape.cache, cure)) is not None:
        raise ConfigError(reason)
    load = Load(prompt=length, output=output)
    if longest is not None and longest < length + output:
        raise ConfigError(
            f"--max-model-len must hold --len and --max-tokens, {length + output} tokens; got"
            f" {longest}"
        )
    defaults = defaults_for(device, gpu_gib, ranks * stages)
    sizes = sizes_on_rank(
        shape,
        ranks=ranks,
        stages=stages,
        longest=longest or length + output,
        block_size=block_size or _BLOCK[device],
        max_requests=requests or defaults.max_num_seqs,
        graphs=device == "cuda",
        in_flight=defaults.batched_tokens,
    )
    estimated = None
    if memory_gib is None and gpu_gib is not None:
        estimated = estimate(
            config,
            shape,
            weights_of(config_path(model).parent, config, shape),
            gpu_gib=gpu_gib,
            utilization=utilization,
            ranks=ranks,
            stages=stages,
            max_num_seqs=sizes.max_requests,
            batched_tokens=defaults.batched_tokens,
        )
    pool = None if memory_gib is None else int(memory_gib * 2**30)
    if estimated is not None:
        pool = estimated.kv_cache_bytes
    result = forecast(sizes, checked, load, pool_bytes=pool, tables_from_pool=device == "cuda")
    return Answer(
        model=model,
        shape=shape,
        settings=checked,
        ranks=ranks,
        stages=stages,
        forecast=result,
        defaulted=default_line(device, gpu_gib, defaults) if requests is None else None,
        estimated=estimated,
    )
