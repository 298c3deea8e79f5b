"""The low-bit KV caches of vLLM, simulated on keys and values of a model in float32.

Each format rounds as vLLM's kernel does when it stores a token, and returns the numbers that the
attention kernel reads. Queries and all other arithmetic stay in float32.

* fp8: `triton_reshape_and_cache_flash` with scale 1, vLLM's default.
* int8, fp8 and int4 per token head: `triton_reshape_and_cache_flash_per_token_head_quant`.
* TurboQuant: `triton_turboquant_store`. vLLM keeps the first and last two layers at 16 bits.

fp8 and the per-token-head formats also change the prefill, whose attention reads the cache.
TurboQuant's prefill reads the exact keys and values of a prompt that is prefilled in one chunk.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
from vllm.model_executor.layers.quantization.turboquant.config import TQ_PRESETS, TurboQuantConfig
from vllm.utils.math_utils import largest_power_of_2_divisor
from vllm.v1.attention.backends.turboquant_attn import _build_hadamard
from vllm.v1.attention.ops.int4_per_token_head import single_rht

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = torch.finfo(FLOAT8).max
MIN_SCALE = 1e-6
"""Smallest scale of a per-token-head format."""
BOUNDARY_LAYERS = 2
"""Layers at each end of a model that TurboQuant leaves at 16 bits."""
Store = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Takes keys and values ``[..., D]`` float32 and returns them as an attention kernel reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """A number format of a KV cache.

    Args:
        name: value of vLLM's ``--kv-cache-dtype``.
        store: rounds keys and values.
        token_bytes: bytes of one token and KV head, both keys and values with their scales, by head
            dimension.
        changes_prefill: whether the attention of the prefill reads rounded keys and values.
        boundary_layers: layers at each end of the model that stay at 16 bits.
    """

    name: str
    store: Store
    token_bytes: Callable[[int], int]
    changes_prefill: bool = True
    boundary_layers: int = 0

    def is_exact(self, layer: int, num_layers: int) -> bool:
        """Return whether a layer stays at 16 bits."""
        skipped = min(self.boundary_layers, num_layers // 2)
        return not skipped <= layer < num_layers - skipped

    def stored(
        self, layer: int, num_layers: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values ``[..., D]`` of a layer as the attention kernel reads them."""
        return (keys, values) if self.is_exact(layer, num_layers) else self.store(keys, values)

    def share_of_bytes(self, layer: int, num_layers: int, dim: int) -> float:
        """Return the bytes of a layer's tokens, relative to the same tokens in 16 bits."""
        return 1.0 if self.is_exact(layer, num_layers) else self.token_bytes(dim) / (4 * dim)


def _both(store_one: Callable[[torch.Tensor], torch.Tensor]) -> Store:
    """Return a function that rounds keys and values in the same way."""
    return lambda keys, values: (store_one(keys), store_one(values))


def _float8(x: torch.Tensor) -> torch.Tensor:
    """Return `x` rounded to float8_e4m3fn. Larger numbers become the largest one."""
    return x.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8).to(x.dtype)


def _float8_per_token_head(x: torch.Tensor) -> torch.Tensor:
    scale = (x.abs().amax(-1, keepdim=True) / FLOAT8_MAX).clamp(min=MIN_SCALE)
    return _float8(x * (1.0 / scale)) * scale


def _int8_per_token_head(x: torch.Tensor) -> torch.Tensor:
    scale = (x.abs().amax(-1, keepdim=True) / 127.0).clamp(min=MIN_SCALE)
    codes = _round_half_away(x * (1.0 / scale)).clamp(-128.0, 127.0)
    return codes * scale


def _int4_per_token_head(x: torch.Tensor) -> torch.Tensor:
    """Return `x` after a randomised Hadamard transform, 4-bit codes and the inverse transform.

    The zero point is an integer, which vLLM stores in the last 4 bits of the scale.
    """
    rotated: torch.Tensor = single_rht(x)
    lowest, largest = rotated.amin(-1, keepdim=True), rotated.amax(-1, keepdim=True)
    scale = ((largest - lowest) / 15.0).clamp(min=MIN_SCALE)
    zero_point = _round_half_away(-lowest / scale).clamp(0.0, 15.0)
    codes = _round_half_away(rotated * (1.0 / scale) + zero_point).clamp(0.0, 15.0)
    stored_scale = (scale.contiguous().view(torch.int32) & -16).view(torch.float32)
    inverse: torch.Tensor = single_rht((codes - zero_point) * stored_scale, inverse=True)
    size: int = largest_power_of_2_divisor(x.shape[-1])
    return inverse / size


def _round_half_away(x: torch.Tensor) -> torch.Tensor:
    """Return `x` rounded to integers, halves away from zero."""
    return torch.where(x >= 0, x + 0.5, x - 0.5).trunc()


def _turboquant(
    name: str, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    config = TurboQuantConfig.from_cache_dtype(name, keys.shape[-1])
    stored_keys = _float8(keys) if config.key_fp8 else _turboquant_keys(config, keys)
    return stored_keys, _turboquant_values(config, values)


def _turboquant_keys(config: TurboQuantConfig, keys: torch.Tensor) -> torch.Tensor:
    """Return keys after a Hadamard rotation and rounding to the centroids of a normal variable."""
    rotation: torch.Tensor = _build_hadamard(config.head_dim, "cpu")
    centroids: torch.Tensor = get_centroids(config.head_dim, config.mse_bits).sort().values
    norm: torch.Tensor = keys.norm(dim=-1, keepdim=True)
    rotated = (keys / (norm + 1e-8)) @ rotation
    midpoints = (centroids[:-1] + centroids[1:]) / 2
    chosen = centroids[torch.bucketize(rotated, midpoints, right=True)]
    if config.norm_correction:
        chosen = chosen / (chosen.square().sum(-1, keepdim=True) + 1e-16).sqrt()
    return norm.half().float() * (chosen @ rotation)


def _turboquant_values(config: TurboQuantConfig, values: torch.Tensor) -> torch.Tensor:
    levels: float = 2.0**config.value_quant_bits - 1
    lowest = values.amin(-1, keepdim=True)
    scale = ((values.amax(-1, keepdim=True) - lowest) / levels).clamp(min=1e-8)
    codes = ((values - lowest) / scale + 0.5).trunc().clamp(0.0, levels)
    return codes * scale.half().float() + lowest.half().float()


def _turboquant_bytes(name: str, dim: int) -> int:
    size: int = TurboQuantConfig.from_cache_dtype(name, dim).slot_size_aligned
    return size


_SCALE_BYTES = 8
"""A per-token-head format stores two float32 scales per token and KV head."""

CACHE_FORMATS: Mapping[str, CacheFormat] = {
    cache_format.name: cache_format
    for cache_format in (
        CacheFormat(name="fp8", store=_both(_float8), token_bytes=lambda dim: 2 * dim),
        CacheFormat(
            name="fp8_per_token_head",
            store=_both(_float8_per_token_head),
            token_bytes=lambda dim: 2 * dim + _SCALE_BYTES,
        ),
        CacheFormat(
            name="int8_per_token_head",
            store=_both(_int8_per_token_head),
            token_bytes=lambda dim: 2 * dim + _SCALE_BYTES,
        ),
        CacheFormat(
            name="int4_per_token_head",
            store=_both(_int4_per_token_head),
            token_bytes=lambda dim: dim + _SCALE_BYTES,
        ),
        *(
            CacheFormat(
                name=name,
                store=partial(_turboquant, name),
                token_bytes=partial(_turboquant_bytes, name),
                changes_prefill=False,
                boundary_layers=BOUNDARY_LAYERS,
            )
            for name in TQ_PRESETS
        ),
    )
}
"""Formats by name."""
