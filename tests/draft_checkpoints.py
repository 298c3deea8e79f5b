"""Tiny random draft models for the checkpoints of `checkpoints`, which some targets agree with.

A head passes the target's hidden state on, and adds attention over its own KV cache to it. So its
drafts depend on that cache, and the target accepts some of them. Weights are seeded.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from checkpoints import VOCAB

_HEAD = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "intermediate_size": 128,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def make_eagle(target: str, *, heads: int = 4, kv_heads: int = 2, head_dim: int = 32) -> str:
    """Write an EAGLE head of one layer beside a Llama checkpoint; return its path.

    Args:
        target: path of the target's checkpoint.
        heads, kv_heads, head_dim: of the head; its hidden size is the target's.
    """
    hidden = json.loads(Path(target, "config.json").read_text())["hidden_size"]
    path = Path(f"{target}-eagle-{heads}-{kv_heads}-{head_dim}")
    config = {"architectures": ["LlamaForCausalLM"], **_shape(hidden, heads, kv_heads, head_dim)}
    weights = _layer("layers.0", hidden, hidden, heads, kv_heads, head_dim)
    weights["fc.weight"] = torch.cat(
        [_random(1, hidden, hidden) * 0.1, torch.eye(hidden) + _random(2, hidden, hidden) * 0.1], 1
    )
    return _write(path, config, weights)


def _shape(hidden: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _layer(
    name: str, hidden: int, inputs: int, heads: int, kv_heads: int, head_dim: int
) -> dict[str, torch.Tensor]:
    """Return the weights of a Llama layer whose attention reads `inputs` numbers per token."""
    sizes = {
        "self_attn.q_proj": (heads * head_dim, inputs),
        "self_attn.k_proj": (kv_heads * head_dim, inputs),
        "self_attn.v_proj": (kv_heads * head_dim, inputs),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (128, hidden),
        "mlp.up_proj": (128, hidden),
        "mlp.down_proj": (hidden, 128),
    }
    weights = {
        f"{name}.{part}.weight": _random(seed, *size) * 0.05
        for seed, (part, size) in enumerate(sizes.items(), 3)
    }
    weights[f"{name}.post_attention_layernorm.weight"] = torch.ones(hidden)
    return weights


def _random(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def _write(path: Path, config: dict[str, object], weights: dict[str, torch.Tensor]) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**_HEAD, **config}))
    save_file(
        {name: each.contiguous() for name, each in weights.items()}, path / "model.safetensors"
    )
    return str(path)
