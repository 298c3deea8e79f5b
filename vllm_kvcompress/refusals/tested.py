"""What is accepted: what was tested, and a few untested pairs. Anything else is refused."""

import itertools
from collections.abc import Iterator, Mapping

from packaging.specifiers import SpecifierSet

DEVICES = ("cpu", "cuda")
CUDA_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")
"""Attention backends on CUDA, in order of preference."""
CONNECTORS = ("NixlConnector", "NixlPullConnector")
"""KV connectors that pull prompts: two names in vLLM for the same class."""
OFFLOADING_CONNECTOR = "OffloadingConnector"
SIMPLE_CONNECTOR = "SimpleCPUOffloadConnector"
OFFLOADING_KEYS: Mapping[str, tuple[str, ...]] = {
    OFFLOADING_CONNECTOR: (
        "block_size", "blocks_per_chunk", "cpu_bytes_to_use", "eviction_policy",
        "offload_prompt_only", "spec_name", "store_threshold",
    ),
    SIMPLE_CONNECTOR: ("cpu_bytes_to_use", "lazy_offload"),
}  # fmt: skip
"""Offloading connector -> tested keys of ``kv_connector_extra_config``.

Of ``spec_name`` only the default, and of ``lazy_offload`` only true."""
DRAFTS = "ngram"
DRAFT_MODELS = ("eagle", "eagle3", "mtp")
"""Methods of drafting by layers with a KV cache of their own, which keep every token."""
EXECUTORS = ("MultiprocExecutor", "UniProcExecutor", "RayExecutorV2")
"""Executors of vLLM that call each rank's worker for every step."""
STATE_MODELS = frozenset(
    {
        "GraniteMoeHybridForCausalLM",
        "NemotronHForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
    }
)
"""State-space architectures. Only their full-attention layers are compressed."""
CACHED_STATE_MODELS = frozenset({"Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"})
"""Architectures with states in the prefix cache, which vLLM enables by default."""
STATE_VLLM = SpecifierSet(">=0.32,<0.33")
"""Versions of vLLM on which stateful layers and offloading were tested."""
MODALITIES: Mapping[str, frozenset[str]] = {
    "Qwen2_5_VLForConditionalGeneration": frozenset({"image"}),
    "Qwen3VLForConditionalGeneration": frozenset({"image"}),
    "Qwen3VLMoeForConditionalGeneration": frozenset({"image"}),
}
"""Architecture -> modalities besides text, by vLLM's names."""

NGRAM, CONNECTOR = "--speculative-config", "--kv-transfer-config"
PIPELINE, TENSOR = "--pipeline-parallel-size", "--tensor-parallel-size"
DATA, RAY, REUSE = "--data-parallel-size", "--distributed-executor-backend ray", "--kv-reuse"
PARK = "--kv-park"
WINDOWS, STATES, IMAGES = "layers with a sliding window", "layers with a state", "images"
OFFLOADING = "--kv-offloading-size"
DRAFT_LAYERS, MTP_MODULES, DRAFT_OPTION = "draft layers", "MTP modules", "a draft option"
DRAFT_OPTIONS: Mapping[str, object] = {
    "attention_backend": None,
    "disable_padded_drafter_batch": False,
    "draft_sample_method": "greedy",
    "enable_adaptive_verification": False,
    "kv_cache_dtype": None,
    "num_speculative_tokens_per_batch_size": None,
    "parallel_drafting": False,
    "rejection_sample_method": "standard",
    "use_heterogeneous_vocab": False,
}
"""Fields of ``--speculative-config`` whose defaults alone were tested with draft layers."""
TOGETHER: Mapping[str, tuple[str, ...]] = {
    NGRAM: (TENSOR, DATA, RAY, WINDOWS, IMAGES, DRAFT_LAYERS, PARK),
    DRAFT_LAYERS: (),
    PIPELINE: (TENSOR, DATA, RAY, IMAGES, REUSE),
    TENSOR: (DATA, RAY, OFFLOADING, WINDOWS, STATES, IMAGES, REUSE),
    DATA: (WINDOWS, STATES, IMAGES, REUSE),
    RAY: (CONNECTOR, WINDOWS, STATES, IMAGES, REUSE),
    # CONNECTOR and OFFLOADING never occur together, because vLLM runs one connector.
    CONNECTOR: (OFFLOADING, PARK),
    OFFLOADING: (),
    WINDOWS: (STATES, IMAGES),
    STATES: (IMAGES,),
    IMAGES: (REUSE,),
    REUSE: (),
    PARK: (),
}
"""Features that may be combined, each pair once. Every other pair is refused.

Some accepted pairs are untested: docs/compatibility.md lists them as "Accepted, but untested"."""
PLAIN_OPTIONS: Mapping[str, tuple[str, ...]] = {
    CONNECTOR: (f"{CONNECTOR}.enable_permute_local_kv", f"{CONNECTOR}.kv_buffer_device"),
    STATES: (
        "--prefix-match-unit",
        "--enable-mamba-shared-prefix-checkpoint",
        "--use-replayssm",
    ),
    IMAGES: ("--ec-transfer-config", "--enable-mm-embeds", "--video-pruning-rate"),
}
"""Feature -> options of vLLM with which only the default was tested."""


def untested_pairs() -> Iterator[tuple[str, str]]:
    """Yield every two features that may not be combined."""
    for first, second in itertools.combinations(TOGETHER, 2):
        if second not in TOGETHER[first]:
            yield first, second
    for feature, options in PLAIN_OPTIONS.items():
        yield from itertools.product([feature], options)
