"""Tiny random draft models for the checkpoints of `checkpoints`, which some targets agree with.

A head passes the target's hidden state on, and adds attention over its own KV cache to it. So its
drafts depend on that cache, and the target accepts some of them. Weights are seeded.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from checkpoints import VOCAB, llama_sizes, make

_HEAD: dict[str, object] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_HEAD |= {"hidden_act": "silu", "rms_norm_eps": 1e-6, "torch_dtype": "float32"}


def make_eagle(target: str, *, heads: int = 4, kv_heads: int = 2, head_dim: int = 32) -> str:
    """Write an EAGLE head of one layer beside a Llama checkpoint; return its path.

    Args:
        target: path of the target's checkpoint.
        heads, kv_heads, head_dim: of the head; its hidden size is the target's.
    """
    hidden = json.loads(Path(target, "config.json").read_text())["hidden_size"]
    path = Path(f"{target}-eagle-{heads}-{kv_heads}-{head_dim}")
    config = {**llama_sizes(1, heads, kv_heads, head_dim), "hidden_size": hidden}
    weights = _layer("layers.0", hidden, hidden, heads, kv_heads, head_dim)
    weights["fc.weight"] = torch.cat(
        [_random(1, hidden, hidden) * 0.1, torch.eye(hidden) + _random(2, hidden, hidden) * 0.1], 1
    )
    return _write(path, config, weights)


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


def make_eagle3(target: str) -> str:
    """Write an EAGLE3 head of one layer beside a Llama checkpoint; return its path."""
    shape = json.loads(Path(target, "config.json").read_text())
    hidden, heads, kv_heads = (
        shape[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    path, name, head_dim = Path(f"{target}-eagle3"), "midlayer", shape["head_dim"]
    config = {**llama_sizes(1, heads, kv_heads, head_dim), "hidden_size": hidden}
    config |= {"draft_vocab_size": VOCAB, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    weights = _layer(name, hidden, 2 * hidden, heads, kv_heads, head_dim)
    for norm in (f"{name}.input_layernorm", f"{name}.hidden_norm", "norm"):
        weights[f"{norm}.weight"] = torch.ones(hidden)
    # Three of the target's layers pass their hidden states on.
    weights["fc.weight"] = torch.cat([torch.eye(hidden)] * 3, 1)
    weights["lm_head.weight"] = _weights_of(target)["lm_head.weight"]
    return _write(path, config, weights)


def make_with_mtp(folder: Path, modules: int = 1) -> str:
    """Write the glm4-moe checkpoint with MTP modules like its last layer; return its path."""
    target = Path(make("glm4-moe", folder))
    path = folder / f"glm4-moe-mtp-{modules}"
    path.mkdir(exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    config["num_nextn_predict_layers"] = modules
    (path / "config.json").write_text(json.dumps(config))
    weights, layers, hidden = (
        _weights_of(str(target)), config["num_hidden_layers"], config["hidden_size"],
    )  # fmt: skip
    last = f"model.layers.{layers - 1}."
    for module in range(layers, layers + modules):
        name = f"model.layers.{module}"
        weights |= {
            f"{name}.{key.removeprefix(last)}": each.clone()
            for key, each in weights.items()
            if key.startswith(last)
        }
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            weights[f"{name}.{norm}.weight"] = torch.ones(hidden)
        weights[f"{name}.eh_proj.weight"] = torch.cat(
            [_random(1, hidden, hidden) * 0.1, torch.eye(hidden)], 1
        )
        weights[f"{name}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
        weights[f"{name}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(
        {name: each.contiguous() for name, each in weights.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    return str(path)


def _weights_of(path: str) -> dict[str, torch.Tensor]:
    return load_file(Path(path, "model.safetensors"))
