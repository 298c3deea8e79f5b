"""Checkpoints that bring the scales of a quantised KV cache, and what it makes of keys."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from checkpoints import SHAPES, make

FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SCHEME = dict(num_bits=8, type="float", strategy="tensor", symmetric=True, dynamic=False)


def scales(layer: int) -> tuple[float, float]:
    """Of keys and of values; no two layers share one, and none is a power of two.

    Small enough that the largest values are cut, as a checkpoint's may be.
    """
    return 0.013 + 0.004 * layer, 0.021 - 0.003 * layer


def scaled(name: str, folder: Path, to: Path, **scheme: object) -> str:
    """A checkpoint that brings its scales, as compressed-tensors writes them."""
    plain = Path(make(name, folder))
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = dict(
        quant_method="compressed-tensors", format="float-quantized", ignore=[], config_groups={},
        kv_cache_scheme={**SCHEME, **scheme},
    )  # fmt: skip
    (to / "config.json").write_text(json.dumps(config))
    weights = load_file(plain / "model.safetensors")
    for layer in range(SHAPES[name].layers):
        for part, scale in zip("kv", scales(layer), strict=True):
            weights[f"model.layers.{layer}.self_attn.{part}_scale"] = torch.tensor([scale])
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return str(to)


def as_cached(part: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """What vLLM's CPU kernels make of keys or values, in float64: they cut digits off."""
    top = torch.finfo(dtype).max
    exact = (part.float() / scale).clamp(-top, top)
    near = exact.to(dtype)
    too_far = near.float().abs() > exact.abs()
    cut = torch.where(too_far, near.view(torch.uint8) - 1, near.view(torch.uint8))
    return cut.view(dtype).double() * scale
