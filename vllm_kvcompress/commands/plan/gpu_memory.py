"""Estimate of the GPU memory that vLLM leaves for the KV cache.

At startup, vLLM measures it by running the model once. Here nothing runs: the memory besides the
weights is estimated from the activations of the largest batch and its logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_kvcompress.commands.plan.drafts import Drafts
from vllm_kvcompress.commands.plan.model_shape import ModelShape, config_path, figure
from vllm_kvcompress.commands.plan.options import PlanOptions
from vllm_kvcompress.commands.plan.weights import weights_of
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.planning.memory import Sizes
from vllm_kvcompress.planning.model_traits import text_config

GIB = 2**30
# Both boundaries are vLLM's, from `EngineArgs.get_batch_defaults`.
LARGE_GPU_GIB = 70
LARGEST_GPU_GIB = 160
# Approximate memory of the CUDA context, libraries, communication buffers and captured graphs.
_RUNTIME_BYTES = GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Defaults of vLLM's server.

    Args:
        max_num_seqs: concurrent requests.
        batched_tokens: tokens per step.
    """

    max_num_seqs: int
    batched_tokens: int


def defaults_for(device: str, gpu_gib: float | None, ranks: int) -> Defaults:
    """Return the defaults of vLLM's server, those of a large GPU if `gpu_gib` is None.

    vLLM recognises some GPUs by name and gives them the smaller defaults: an A100 with 80 GiB, and
    in vLLM 0.33 a GB10. This function knows the memory only.
    """
    if device == "cpu":
        return Defaults(max_num_seqs=128 * ranks, batched_tokens=2048 * ranks)
    if gpu_gib is None or LARGE_GPU_GIB <= gpu_gib < LARGEST_GPU_GIB:
        return Defaults(max_num_seqs=1024, batched_tokens=8192)
    if gpu_gib >= LARGEST_GPU_GIB:
        return Defaults(max_num_seqs=1024, batched_tokens=16384)
    return Defaults(max_num_seqs=256, batched_tokens=2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Memory of one GPU in bytes. The field names are keys of the JSON output.

    Args:
        gpu_bytes: all memory of the GPU.
        utilization: share of it that vLLM may use.
        weights_bytes: this GPU's part of the weights.
        weights_source: where the size of the weights is from.
        working_bytes: activations, logits and the CUDA runtime.
        kv_cache_bytes: the rest, for the KV cache without compression.
        estimated: always True. Marks the figures as an estimate in JSON.
    """

    gpu_bytes: int
    utilization: float
    weights_bytes: int
    weights_source: str
    working_bytes: int
    kv_cache_bytes: int
    estimated: bool = True


def estimate(
    options: PlanOptions,
    config: Mapping[str, Any],
    shape: ModelShape,
    sizes: Sizes,
    drafts: Drafts,
) -> Estimate | None:
    """Return an estimate of one GPU's KV cache; None if its size or no GPU memory was given.

    Args:
        options: the command's options.
        config: the model's config.json.
        shape: shape of the model.
        sizes: sizes of one rank.
        drafts: how the server drafts. A draft model has weights of its own.

    Raises:
        ConfigError: Nothing is left for the KV cache.
    """
    if options.memory_gib is not None or options.gpu_gib is None:
        return None
    ranks, stages = options.ranks, options.stages
    weights = weights_of(config_path(options.model).parent, config, shape)
    if drafts.model is not None:
        layers = replace(shape, layers=drafts.layers)
        head = weights_of(config_path(drafts.model).parent, drafts.config, layers)
        weights = replace(weights, total_bytes=weights.total_bytes + head.total_bytes)
    text = text_config(config)
    hidden, intermediate = figure(text, "hidden_size"), figure(text, "intermediate_size")
    # Activations: residual stream with a copy, and the widest matrices of a layer, which are split
    # among ranks.
    activations = sizes.in_flight * (4 * hidden + 3 * intermediate // ranks) * shape.itemsize
    # Logits: float32, with a copy that the sampler sorts.
    logits = sizes.max_requests * figure(text, "vocab_size") * 2 * 4
    working = activations + logits + _RUNTIME_BYTES
    weights_bytes = weights.total_bytes // ranks
    if stages > 1:
        # The first stage holds the embedding, the last one the LM head.
        embedding = figure(text, "vocab_size") * hidden * shape.itemsize
        embeddings = embedding if text.get("tie_word_embeddings") else 2 * embedding
        in_layers = max(weights.total_bytes - embeddings, 0)
        weights_bytes = (in_layers // stages + embedding) // ranks
    total = int(options.gpu_gib * GIB)
    kv_cache_bytes = int(total * options.utilization) - weights_bytes - working
    if kv_cache_bytes <= 0:
        raise ConfigError(
            f"--gpu-memory {options.gpu_gib:g} at --gpu-memory-utilization {options.utilization:g}"
            " leaves nothing for the KV cache: the weights take"
            f" {weights_bytes / GIB:.2f} GiB (from {weights.source}), activations and the CUDA"
            f" runtime about {working / GIB:.2f} GiB; raise --tp or --pp, or use a larger GPU or a"
            " smaller model"
        )
    return Estimate(
        gpu_bytes=total,
        utilization=options.utilization,
        weights_bytes=weights_bytes,
        weights_source=weights.source,
        working_bytes=working,
        kv_cache_bytes=kv_cache_bytes,
    )
