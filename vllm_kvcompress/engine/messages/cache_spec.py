"""VllmHook `cache_spec`: the KV cache spec of compressed layers, from workers to the scheduler.

`scheduling.kv_cache` registers it with its block manager. Where that module is not loaded, vLLM
treats the spec as the class that it extends.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    SlidingWindowSpec,
)

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.planning.memory import uncompressed_prompt_blocks
from vllm_kvcompress.planning.model_traits import Traits
from vllm_kvcompress.refusals.rule import refuse
from vllm_kvcompress.refusals.server import DRAFT_SHAPE, LAYERS, Server
from vllm_kvcompress.settings.config import CompressionConfig

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_SCALED = KVQuantMode.FP8_PER_TENSOR
# Specs of layers that stay uncompressed and that vLLM manages.
_UNCOMPRESSED = (SlidingWindowSpec, MambaSpec)


@dataclass(frozen=True, kw_only=True)
class CompressedSpec(FullAttentionSpec):
    """The KV cache spec of a compressed full-attention layer.

    It is defined at module level because vLLM pickles specs.

    Args:
        num_compressed_layers: layers that share the page pool, L.
        settings: the engine's compression settings.
        ring_slots: maximum number of requests whose latest queries the workers store.
        num_draft_layers: layers of a draft model that share the page pool, D. They keep every
            token.
    """

    num_compressed_layers: int
    settings: CompressionConfig
    ring_slots: int
    num_draft_layers: int = 0

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the most memory that one request uses in this layer, in bytes.

        vLLM checks that it fits the pool.
        """
        max_tokens = vllm_config.model_config.max_model_len
        blocks = uncompressed_prompt_blocks(
            self.settings,
            self.num_compressed_layers,
            self.block_size,
            max_tokens,
            self.dtype.itemsize,
        )
        return int(min(super().max_memory_usage_bytes(vllm_config), blocks * self.page_size_bytes))

    @classmethod
    def merge(cls, specs: list["CompressedSpec"]) -> "CompressedSpec":
        """Return one spec for a group of layers.

        vLLM's merge keeps only the fields of its own class, so we add ours again.

        Raises:
            AssertionError: a layer is not compressed. vLLM groups layers by trying to merge them,
                and catches this error.
        """
        if not all(isinstance(spec, CompressedSpec) for spec in specs):
            raise AssertionError("compressed layers must form a group of their own")
        plain = FullAttentionSpec.merge([_plain(spec) for spec in specs])
        first = specs[0]
        return _compressed(
            plain,
            first.num_compressed_layers,
            first.settings,
            first.ring_slots,
            first.num_draft_layers,
        )


def _plain(spec: FullAttentionSpec) -> FullAttentionSpec:
    return FullAttentionSpec(**{f.name: getattr(spec, f.name) for f in fields(FullAttentionSpec)})


def _compressed(
    spec: FullAttentionSpec,
    num_layers: int,
    settings: CompressionConfig,
    ring_slots: int,
    draft_layers: int,
) -> CompressedSpec:
    vllm_fields = {f.name: getattr(spec, f.name) for f in fields(FullAttentionSpec)}
    return CompressedSpec(
        **vllm_fields,
        num_compressed_layers=num_layers,
        settings=settings,
        ring_slots=ring_slots,
        num_draft_layers=draft_layers,
    )


def compressed_specs(
    specs: Mapping[str, KVCacheSpec],
    settings: CompressionConfig,
    ring_slots: int = 0,
    draft_names: Collection[str] = (),
) -> dict[str, KVCacheSpec]:
    """Return the layers' specs, with a `CompressedSpec` for every full-attention layer.

    Layers with a sliding window and layers that keep a state are left as they are.

    Args:
        specs: vLLM's specs by layer name.
        settings: the engine's settings. A decode interval and a piece size that are not set are
            derived from the block size.
        ring_slots: maximum number of requests whose latest queries the workers store.
        draft_names: names of a draft model's layers.

    Raises:
        ConfigError: the model has an unsupported layer or no full-attention layer, its layers
            differ in shape, so that they cannot exchange pages, or its pages cannot hold tokens in
            the format of kept tokens.
    """
    if not specs:
        raise ConfigError(
            "--kv-compress needs a model with a KV cache, but this model has none;"
            " serve it without --kv-compress"
        )
    others = {name: spec for name, spec in specs.items() if type(spec) in _UNCOMPRESSED}
    full = {name: spec for name, spec in specs.items() if name not in others}
    for name in draft_names:
        target = next((spec for other, spec in full.items() if other not in draft_names), None)
        if target is not None and specs[name] != target:
            refuse((DRAFT_SHAPE,), name, "--kv-compress ")
    if not full:
        raise ConfigError(
            "--kv-compress needs a full-attention layer, but all layers of this model have a"
            " sliding window or keep a state; serve it without --kv-compress"
        )
    first_name, first = next(iter(full.items()))
    # All groups take their pages from the same blocks, so pages must have one size in bytes. Layers
    # with a sliding window need the same block size in tokens, too. Those with a state do not:
    # without the prefix cache, vLLM sets their block size to the maximum sequence length.
    for name, spec in others.items():
        same_block = isinstance(spec, MambaSpec) or spec.block_size == first.block_size
        if spec.page_size_bytes != first.page_size_bytes or not same_block:
            raise ConfigError(
                "--kv-compress needs the same KV heads, head size, dtype and page size in every"
                f" layer, but {name} differs from {first_name}; serve this model without"
                " --kv-compress"
            )
    for name, spec in full.items():
        plain = type(spec) is FullAttentionSpec and not spec.non_causal
        if not plain or spec.sliding_window or spec.attention_chunk_size:
            raise ConfigError(
                "--kv-compress supports layers with full attention, a sliding window or a state,"
                f" but {name} is {_describe(spec)}; serve this model without --kv-compress"
            )
        supported_dtype = spec.dtype in _FLOATS or spec.kv_quant_mode == _SCALED
        if not supported_dtype or spec.head_size_v != spec.head_size:
            raise ConfigError(
                "--kv-compress needs keys and values of the same head size, as floats or as fp8"
                f" with one scale per layer, but {name} has head sizes {spec.head_size} and"
                f" {spec.head_size_v} in {spec.dtype}; serve this model without --kv-compress"
            )
        if spec != first:
            raise ConfigError(
                "--kv-compress needs the same KV heads, head size and dtype in every layer, but"
                f" {name} differs from {first_name}; serve this model without --kv-compress"
            )
    settings = settings.in_whole_blocks(first.block_size)
    server = Server(
        settings=settings,
        model=Traits(),
        head_dim=first.head_size,
        itemsize=first.dtype.itemsize,
        block_size=first.block_size,
    )
    refuse(LAYERS, server)
    compressed = {
        name: _compressed(
            spec, len(full) - len(draft_names), settings, ring_slots, len(draft_names)
        )
        for name, spec in full.items()
    }
    return {name: compressed.get(name, spec) for name, spec in specs.items()}


def _describe(spec: KVCacheSpec) -> str:
    if isinstance(spec, AttentionSpec) and getattr(spec, "sliding_window", None):
        return f"sliding-window attention ({spec.sliding_window} tokens)"
    return type(spec).__name__
