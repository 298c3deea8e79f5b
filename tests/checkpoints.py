"""Create tiny random checkpoints of each supported architecture, and seeded token prompts.

Weights are seeded. The tokenizer is the demo model's; ids above the vocabulary never occur.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

VOCAB = 512


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of one architecture: layers, heads and extra configuration keys."""

    config: type
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    block: int = 32
    """Tokens per KV block that vLLM chooses when 32 are requested."""


SHAPES = {
    "llama-gqa": Shape(LlamaConfig, 4, 4, 2, 32),
    "llama-mha": Shape(LlamaConfig, 3, 4, 4, 32),
    "llama-mqa": Shape(LlamaConfig, 3, 4, 1, 64),
    "llama-two-layers": Shape(LlamaConfig, 2, 4, 2, 32),
    "llama-one-layer": Shape(LlamaConfig, 1, 2, 1, 32),
    "llama-d80": Shape(LlamaConfig, 2, 2, 1, 80),  # no multiple of 32: vLLM's vec16 kernels
    "qwen2": Shape(Qwen2Config, 3, 6, 2, 32),
    "qwen3": Shape(Qwen3Config, 3, 4, 2, 64),
    "mistral": Shape(MistralConfig, 3, 4, 2, 32, {"sliding_window": None}),
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
MIXTURES = {  # mixtures of experts
    "qwen3-moe": Shape(Qwen3MoeConfig, 2, 4, 2, 32, {"num_experts": 8, **EXPERTS}),
    "mixtral": Shape(
        MixtralConfig, 2, 4, 2, 32,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "glm4-moe": Shape(
        Glm4MoeConfig, 2, 4, 2, 32,
        {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, **EXPERTS},
    ),
}  # fmt: skip
_W, _F = "sliding_attention", "full_attention"
HYBRIDS = {  # sliding-window layers and full-attention layers
    "gemma3": Shape(
        Gemma3TextConfig, 7, 4, 2, 32,
        {
            "sliding_window": 96,
            "layer_types": [_W, _W, _F, _W, _W, _F, _W],
            "query_pre_attn_scalar": 32,
        },
    ),
    "gpt-oss": Shape(
        GptOssConfig, 4, 4, 2, 32,
        {"sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mistral-windows": Shape(
        MistralConfig, 7, 4, 2, 32,
        {"sliding_window": 128, "layer_types": [_F, _W, _F, _W, _W, _F, _W]},
    ),
}  # fmt: skip

_S, _M = "linear_attention", "mlp"
_GRANITE = {
    "layer_types": [_S, _F, _S, _S, _F, _S],
    "num_local_experts": 0, "shared_intermediate_size": 128,
    "mamba_n_heads": 8, "mamba_chunk_size": 32,
    "position_embedding_type": "rope", "attention_multiplier": 32**-0.5,
}  # fmt: skip
# vLLM's CPU build supports these layers only in bfloat16 with a head size of 128
_DELTA = {
    "layer_types": [_S, _S, _F, _S, _S, _F, _S, _S],
    "linear_num_key_heads": 1, "linear_num_value_heads": 1,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
STATEFUL = {  # state-space and full-attention layers; the state's size sets the block size
    "granite": Shape(
        GraniteMoeHybridConfig, 6, 4, 2, 32,
        {
            **_GRANITE, "mamba_d_state": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
            "position_embedding_type": None,
        },
    ),
    "granite-96": Shape(
        GraniteMoeHybridConfig, 6, 4, 2, 32, {**_GRANITE, "mamba_d_state": 32}, block=96
    ),
    "nemotron": Shape(
        NemotronHConfig, 8, 4, 2, 32,
        {
            "layers_block_type": [_S, _M, _F, _S, _M, _F, _S, _S],
            "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 1,
            "chunk_size": 32,
        },
    ),
    "qwen3-next": Shape(
        Qwen3NextConfig, 8, 4, 4, 64,
        {
            **_DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
        dtype="bfloat16", block=96,
    ),
    "qwen3.5": Shape(Qwen3_5TextConfig, 8, 4, 4, 64, _DELTA, dtype="bfloat16", block=96),
}  # fmt: skip
# head dims that k4v3 can pack, where those above cannot
WIDE = {
    "llama-one-layer-d64": Shape(LlamaConfig, 1, 2, 1, 64),
    "llama-two-layers-d64": Shape(LlamaConfig, 2, 4, 2, 64),
    "gpt-oss-d64": Shape(
        GptOssConfig, 4, 4, 2, 64,
        {"sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mistral-windows-d64": replace(HYBRIDS["mistral-windows"], head_dim=64),
    "granite-d64": replace(STATEFUL["granite-96"], head_dim=64),
    "nemotron-d64": replace(STATEFUL["nemotron"], head_dim=64),
}  # fmt: skip


def llama_sizes(
    layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int = VOCAB
) -> dict[str, Any]:
    """Return the keys of a small model's configuration that all architectures have."""
    sizes: dict[str, Any] = {"vocab_size": vocab, "hidden_size": heads * head_dim}
    sizes |= {"intermediate_size": 128, "num_hidden_layers": layers, "head_dim": head_dim}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes |= {"max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2}
    return sizes | {"initializer_range": 0.3, "tie_word_embeddings": False}


def make(name: str, folder: Path, vocab: int = VOCAB) -> str:
    """Write the checkpoint `name` below `folder` once; return its path."""
    path = folder / name
    if (path / "config.json").exists():
        return str(path)
    shape = {**SHAPES, **MIXTURES, **HYBRIDS, **WIDE, **STATEFUL}[name]
    sizes = llama_sizes(shape.layers, shape.heads, shape.kv_heads, shape.head_dim, vocab)
    config = shape.config(**sizes, **shape.extra_config)
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    return str(path)


def text_checkpoint(folder: Path, tokenizer_source: str, shape: str = "llama-gqa") -> str:
    """Write a random checkpoint with the tokenizer of `tokenizer_source`; return its path.

    For servers whose outputs need not make sense: a prompt costs almost no compute.
    """
    vocab = json.loads(Path(tokenizer_source, "config.json").read_text())["vocab_size"]
    path = make(shape, folder / "talking", vocab)
    for file in Path(tokenizer_source).iterdir():
        if "token" in file.name or "template" in file.name:
            shutil.copy(file, path)
    return path


class NumberTokenizer:
    """A tokenizer for test models, which have none: it writes token ids as numbers."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def tokens(count: int, seed: int) -> list[int]:
    """Return `count` seeded ids in ``[3, VOCAB)``, which excludes special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()


def write_adapter(folder: Path, *, layers: int, hidden: int) -> str:
    """Write a random LoRA adapter of query and value projections; return its path.

    Args:
        layers, hidden: layers and hidden size of a model with half as many KV heads as heads.
    """
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for layer in range(layers):
        for name, out in (("q_proj", hidden), ("v_proj", hidden // 2)):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{key}.lora_A.weight"] = torch.randn(8, hidden, generator=generator) * 0.3
            weights[f"{key}.lora_B.weight"] = torch.randn(out, 8, generator=generator) * 0.3
    save_file(weights, folder / "adapter_model.safetensors")
    options = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}
    options |= {"target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(options))
    return str(folder)
