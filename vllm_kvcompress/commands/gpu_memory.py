"""What a GPU is likely to leave for the KV cache: an estimate, from its memory and the model.

vLLM measures it when it starts, by running the model once; nothing here runs. What it will need
beside the weights is told from the largest batch's activations and its logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_kvcompress.commands.model_shape import ModelShape
from vllm_kvcompress.commands.weights import Weights
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.planning.model_traits import text_config

GIB = 2**30
# The two boundaries are vLLM's own, of `EngineArgs.get_batch_defaults`.
LARGE_GPU_GIB = 70
LARGEST_GPU_GIB = 160
# The device's context, libraries and communication, and captured graphs take about this much.
_BESIDE = GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What vLLM's server takes where nothing is given.

    Args:
        max_num_seqs: requests at once. `batched_tokens`: tokens of a step.
    """

    max_num_seqs: int
    batched_tokens: int


def defaults_for(device: str, gpu_gib: float | None, ranks: int) -> Defaults:
    """vLLM's defaults for a server; of a GPU whose memory is not given, a large one's.

    An A100 of 80 GiB is no large GPU to vLLM, nor a GB10 to its 0.33: it knows them by their names.
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
    """What is left of one GPU for the KV cache without compression; all in bytes.

    Args:
        gpu_bytes: the GPU's memory. `utilization`: vLLM's share of it.
        weights_bytes: this GPU's part of the weights. `weights_source`: where that is from.
        working_bytes: activations, logits, and what the device itself takes.
        kv_cache_bytes: what is left.
    """

    gpu_bytes: int
    utilization: float
    weights_bytes: int
    weights_source: str
    working_bytes: int
    kv_cache_bytes: int
    estimated: bool = True


def estimate(
    config: Mapping[str, Any],
    shape: ModelShape,
    weights: Weights,
    *,
    gpu_gib: float,
    utilization: float,
    ranks: int,
    stages: int = 1,
    max_num_seqs: int,
    batched_tokens: int,
) -> Estimate:
    """Estimate one GPU's KV cache.

    Args:
        gpu_gib: memory of one GPU in GiB. `utilization`: in (0, 1].
        ranks: GPUs that share a stage's weights.
        stages: of the pipeline. The first and the last hold one end of the model each.

    Raises:
        ConfigError: nothing would be left.
    """
    text = text_config(config)

    def figure(name: str) -> int:
        return int(text[name]) if isinstance(text.get(name), int) else 0

    width, inner = figure("hidden_size"), figure("intermediate_size")
    # the residual stream and its copy, and a layer's widest matrices, split among the ranks
    activations = batched_tokens * (4 * width + 3 * inner // ranks) * shape.itemsize
    # float32 logits, and a copy that the sampler sorts
    logits = max_num_seqs * figure("vocab_size") * 2 * 4
    working = activations + logits + _BESIDE
    own = weights.total_bytes // ranks
    if stages > 1:
        end = figure("vocab_size") * width * shape.itemsize
        ends = end if text.get("tie_word_embeddings") else 2 * end
        own = (max(weights.total_bytes - ends, 0) // stages + end) // ranks
    total = int(gpu_gib * GIB)
    left = int(total * utilization) - own - working
    if left <= 0:
        raise ConfigError(
            f"--gpu-memory {gpu_gib:g} at --gpu-memory-utilization {utilization:g} must hold"
            f" {own / GIB:.2f} GiB of weights (estimated from {weights.source}) and about"
            f" {working / GIB:.2f} GiB to work in, and leaves nothing for the KV cache; raise --tp"
            " or --pp, or take a larger GPU or a smaller model"
        )
    return Estimate(
        gpu_bytes=total,
        utilization=utilization,
        weights_bytes=own,
        weights_source=weights.source,
        working_bytes=working,
        kv_cache_bytes=left,
    )
