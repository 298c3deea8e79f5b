"""VllmHook `cache_spec`: what vLLM knows of a compressed group of layers, and of its manager."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from vllm.config import VllmConfig
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_kvcompress.engine.scheduling.kv_cache import CompressedManager
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.planning.obstacles import why_not_in_blocks
from vllm_kvcompress.planning.uncompressed_prompt import uncompressed_prompt_blocks
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.whole_blocks import in_whole_blocks

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_SCALED = KVQuantMode.FP8_PER_TENSOR
# Specs of layers that stay vLLM's.
_OTHERS = (SlidingWindowSpec, MambaSpec)


@dataclass(frozen=True, kw_only=True)
class CompressedSpec(FullAttentionSpec):
    """A full-attention layer whose prompts are compressed. Module level: vLLM pickles specs.

    Args:
        num_compressed_layers: layers that share the page pool, L.
        settings: the engine's compression settings.
        ring_slots: requests whose last queries the workers keep at once.
    """

    num_compressed_layers: int
    settings: CompressionConfig
    ring_slots: int

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """What one request takes of this layer at most: vLLM asks whether that fits the pool."""
        longest = vllm_config.model_config.max_model_len
        blocks = uncompressed_prompt_blocks(
            self.settings, self.num_compressed_layers, self.block_size, longest
        )
        return int(min(super().max_memory_usage_bytes(vllm_config), blocks * self.page_size_bytes))

    @classmethod
    def merge(cls, specs: list["CompressedSpec"]) -> "CompressedSpec":
        """vLLM's merge rebuilds the listed fields of its own class; ours are added back.

        Raises:
            AssertionError: a layer is of another kind. vLLM takes that for an answer: it groups
                layers by trying.
        """
        if not all(isinstance(spec, CompressedSpec) for spec in specs):
            raise AssertionError("layers that are compressed are a group of their own")
        plain = FullAttentionSpec.merge([_plain(spec) for spec in specs])
        first = specs[0]
        return _compressed(plain, first.num_compressed_layers, first.settings, first.ring_slots)


def _plain(spec: FullAttentionSpec) -> FullAttentionSpec:
    return FullAttentionSpec(**{f.name: getattr(spec, f.name) for f in fields(FullAttentionSpec)})


def _compressed(
    spec: FullAttentionSpec, num_layers: int, settings: CompressionConfig, ring_slots: int
) -> CompressedSpec:
    own = {f.name: getattr(spec, f.name) for f in fields(FullAttentionSpec)}
    return CompressedSpec(
        **own, num_compressed_layers=num_layers, settings=settings, ring_slots=ring_slots
    )


def compressed_specs(
    specs: Mapping[str, KVCacheSpec], settings: CompressionConfig, ring_slots: int = 0
) -> dict[str, KVCacheSpec]:
    """Replace the spec of every layer with full attention by a `CompressedSpec`.

    Those with a sliding window, and those that keep a state, stay as they are.

    Args:
        settings: the engine's; an interval and a piece that nobody gave follow the block.
        ring_slots: requests whose last queries the workers keep at once.

    Raises:
        ConfigError: the model has a layer that is neither, no full one, or layers differ in
            shape: their pages could not be exchanged.
    """
    if not specs:
        raise ConfigError(
            "--kv-compress needs a model with a KV cache, and this model has none;"
            " serve it without --kv-compress"
        )
    others = {name: spec for name, spec in specs.items() if type(spec) in _OTHERS}
    full = {name: spec for name, spec in specs.items() if name not in others}
    if not full:
        raise ConfigError(
            "--kv-compress needs a layer with full attention, and all of this model's have a"
            " sliding window or keep a state; serve it without --kv-compress"
        )
    first_name, first = next(iter(full.items()))
    _check_others(others, first_name, first)
    for name, spec in full.items():
        plain = type(spec) is FullAttentionSpec and not spec.non_causal
        if not plain or spec.sliding_window or spec.attention_chunk_size:
            raise ConfigError(
                "--kv-compress needs full attention in every layer, or a sliding window or a state,"
                f" but {name} is {_describe(spec)}; serve this model without --kv-compress"
            )
        known = spec.dtype in _FLOATS or spec.kv_quant_mode == _SCALED
        if not known or spec.head_size_v != spec.head_size:
            raise ConfigError(
                "--kv-compress needs keys and values of one size, in floats or in fp8 with one"
                " scale per layer, but"
                f" {name} keeps {spec.head_size} and {spec.head_size_v} of {spec.dtype}; serve"
                " this model without --kv-compress"
            )
        if spec != first:
            raise ConfigError(
                "--kv-compress needs the same KV heads, head size and dtype in every layer, but"
                f" {name} differs from {first_name}; serve this model without --kv-compress"
            )
    settings = in_whole_blocks(settings, first.block_size)
    if (reason := why_not_in_blocks(settings, first.block_size)) is not None:
        raise ConfigError(reason)
    ours = {name: _compressed(spec, len(full), settings, ring_slots) for name, spec in full.items()}
    return {name: ours.get(name, spec) for name, spec in specs.items()}


def _check_others(others: Mapping[str, KVCacheSpec], first_name: str, first: KVCacheSpec) -> None:
    """Raise ConfigError unless the layers that stay vLLM's share a pool with the full ones.

    A block of the pool is one group's pages, whatever they hold. A window's tokens are counted in
    the same blocks; a state is none of a number of tokens, and without the prefix cache vLLM calls
    the longest sequence its block.
    """
    for name, spec in others.items():
        same_page = spec.page_size_bytes == first.page_size_bytes
        stateful = isinstance(spec, MambaSpec)
        if not same_page or not (stateful or spec.block_size == first.block_size):
            raise ConfigError(
                "--kv-compress needs the same KV heads, head size and dtype in every layer, and"
                f" pages of one size, but {name} differs from {first_name}; serve this model"
                " without --kv-compress"
            )


def _describe(spec: KVCacheSpec) -> str:
    if isinstance(spec, AttentionSpec) and getattr(spec, "sliding_window", None):
        return f"sliding-window attention ({spec.sliding_window} tokens)"
    return type(spec).__name__


# On import, because every process must know the pair: the scheduler's class and a pickled spec
# both import this module wherever they are used. Inert until a worker returns such a spec.
# vLLM fills only an EMPTY registry by itself: ours first would hide every built-in spec.
register_all_kvcache_specs(None)
KVCacheSpecRegistry.register(CompressedSpec, CompressedManager, FullAttentionSpec)
