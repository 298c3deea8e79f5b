"""Shared functions of the benchmarks that run engines in one process."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def use_one_process(*, cache_gib: int) -> None:
    """Configure vLLM for one quiet process with a CPU KV cache; call before importing vLLM."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE=str(cache_gib),
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
    )


def replace_kernels_once() -> None:
    """Let vLLM replace its Triton kernels on a CPU only once in this process.

    It searches all modules whenever an engine starts, and fails on those of numba, which attention
    over packed pages uses. Call this before the first engine starts.
    """
    import functools

    from vllm.platforms.cpu import CpuPlatform

    once = functools.cache(CpuPlatform.register_triton_kernel_overrides)
    CpuPlatform.register_triton_kernel_overrides = staticmethod(once)


def write_eagle_head(model: str | Path, folder: Path, drafted: Sequence[int] = ()) -> str:
    """Write a draft head of one layer like the model's, with random weights; return its folder.

    Args:
        model: the target's folder.
        folder: an empty folder.
        drafted: token ids that the head drafts, which makes it an EAGLE3 head; empty for an EAGLE
            head, which drafts any.
    """
    import torch
    from safetensors.torch import save_file

    config = json.loads((Path(model) / "config.json").read_text())
    hidden, inner, layers = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    queries, keys = (
        config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    config |= {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    config["tie_word_embeddings"] = False
    name, inputs = ("midlayer", 2 * hidden) if drafted else ("layers.0", hidden)
    norms = [f"{name}.post_attention_layernorm"]
    sizes = {
        "fc": (hidden, 3 * hidden if drafted else 2 * hidden),
        f"{name}.self_attn.q_proj": (queries, inputs),
        f"{name}.self_attn.k_proj": (keys, inputs),
        f"{name}.self_attn.v_proj": (keys, inputs),
        f"{name}.self_attn.o_proj": (hidden, queries),
        f"{name}.mlp.gate_proj": (inner, hidden),
        f"{name}.mlp.up_proj": (inner, hidden),
        f"{name}.mlp.down_proj": (hidden, inner),
    }
    if drafted:
        config["draft_vocab_size"] = len(drafted)
        config["eagle_aux_hidden_state_layer_ids"] = [0, layers // 2, layers]
        sizes["lm_head"] = (len(drafted), hidden)
        norms += [f"{name}.input_layernorm", f"{name}.hidden_norm", "norm"]
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": torch.randn(size, generator=generator) * size[1] ** -0.5
        for name, size in sizes.items()
    }
    weights |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    if drafted:
        weights["d2t"] = torch.tensor(drafted) - torch.arange(len(drafted))
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def blocks_in_use(llm: Any) -> int:
    """Return the number of KV blocks in use, without the null block."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def print_result(result: dict[str, Any], output: Path | None) -> None:
    """Print a result as JSON, and write it to `output` if given."""
    text = json.dumps(result, indent=2)
    print(text)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n")
