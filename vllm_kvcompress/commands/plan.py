"""``kvcompress plan``: from what was typed to a forecast."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from vllm_kvcompress.commands.concurrency import Forecast, Load, forecast, sizes_on_rank
from vllm_kvcompress.commands.model_shape import ITEMSIZE, ModelShape, read_config, shape_of
from vllm_kvcompress.commands.plan_text import show_forecast
from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.errors import ConfigError

_BLOCK = {"cuda": 16, "cpu": 128}  # vLLM's own, where none is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What `plan` says, and what about."""

    model: str
    shape: ModelShape
    settings: CompressionConfig
    ranks: int
    found: Forecast

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "shape": asdict(self.shape),
            "settings": self.settings.to_additional_config(),
            "budget": self.settings.budget,
            "window": self.settings.resolved_window,
            "tensor_parallel_size": self.ranks,
            **self.found.to_json(),
        }

    def show(self) -> None:
        load, shape = self.found.load, self.shape
        on = f", {self.ranks} GPUs" if self.ranks > 1 else ""
        title = (
            f"{self.model.rstrip('/').rsplit('/', 1)[-1]} ({shape.layers} layers,"
            f" {shape.kv_heads} KV heads of {shape.head_dim}, {shape.dtype}{on}):"
            f" {load.prompt:,} tokens, --kv-compress {self.settings.compress}"
            f" --kv-budget {self.settings.budget}"
        )
        console = Console()
        show_forecast(self.found, title, console)
        if shape.longest is not None and load.cached > shape.longest:
            console.print(
                f"This model was made for {shape.longest:,} tokens; vLLM refuses longer requests.",
                highlight=False,
            )


def with_method(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with the README's first method where they name none."""
    named = settings.keys() & {"compress", "allocator", "scorer"}
    return settings if named else {"compress": "cake", **settings}


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
    longest: int | None,
    requests: int,
    device: str,
) -> Answer:
    """The forecast for a model and requests of one length.

    Raises:
        ConfigError: something is unknown, or cannot be served compressed.
    """
    checked = CompressionConfig.parse(with_method(settings))
    if not checked.enabled:
        raise ConfigError("plan compares with compression; give a method, --kv-compress cake")
    if device not in _BLOCK:
        raise ConfigError(f"--device must be one of {sorted(_BLOCK)}, got {device!r}")
    shape = shape_of(read_config(model), dtype)
    if shape.dtype not in ITEMSIZE:
        raise ConfigError(f"--dtype must be auto or one of {sorted(ITEMSIZE)}, got {dtype!r}")
    load = Load(prompt=length, output=output)
    if longest is not None and longest < length + output:
        raise ConfigError(
            f"--max-model-len must hold --len and --max-tokens, {length + output} tokens; got"
            f" {longest}"
        )
    sizes = sizes_on_rank(
        shape,
        ranks=ranks,
        longest=longest or length + output,
        block_size=block_size or _BLOCK[device],
        max_requests=requests,
        graphs=device == "cuda",
    )
    pool = None if memory_gib is None else int(memory_gib * 2**30)
    found = forecast(sizes, checked, load, pool_bytes=pool, tables_from_pool=device == "cuda")
    return Answer(model=model, shape=shape, settings=checked, ranks=ranks, found=found)
