"""Write checkpoints with scales for a quantised KV cache, and emulate its rounding."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from checkpoints import SHAPES, make

FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SCHEME = dict(num_bits=8, type="float", strategy="tensor", symmetric=True, dynamic=False)


def scales(layer: int) -> tuple[float, float]:
    """Return the scales of keys and values of a layer.

    All scales differ and none is a power of two. They are small enough that the largest values
    saturate, as with some published checkpoints.
    """
    return 0.013 + 0.004 * layer, 0.021 - 0.003 * layer


def scaled(name: str, folder: Path, to: Path, **scheme: object) -> str:
    """Write checkpoint `name` with scales in compressed-tensors format to `to`; return its path."""
    source = Path(make(name, folder))
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = dict(
        quant_method="compressed-tensors", format="float-quantized", ignore=[], config_groups={},
        kv_cache_scheme={**SCHEME, **scheme},
    )  # fmt: skip
    (to / "config.json").write_text(json.dumps(config))
    weights = load_file(source / "model.safetensors")
    for layer in range(SHAPES[name].layers):
        for part, scale in zip("kv", scales(layer), strict=True):
            weights[f"model.layers.{layer}.self_attn.{part}_scale"] = torch.tensor([scale])
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return str(to)


def as_cached(part: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Return keys or values as vLLM quantises them on a CPU (rounding towards zero), in float64."""
    max_value = torch.finfo(dtype).max
    exact = (part.float() / scale).clamp(-max_value, max_value)
    rounded = exact.to(dtype)
    rounded_up = rounded.float().abs() > exact.abs()
    truncated = torch.where(rounded_up, rounded.view(torch.uint8) - 1, rounded.view(torch.uint8))
    return truncated.view(dtype).double() * scale
