"""Models for stage `serving`: the shapes of known models with random weights, no downloads."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Model:
    """Shape of a Llama model."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int = 128256
    positions: int = 131072
    dtype: str = "bfloat16"

    @property
    def weights(self) -> int:
        """Return the bytes of the weights in bfloat16, with embedding and output layer."""
        attention = 2 * self.hidden * self.dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return 2 * (self.layers * layer + 2 * self.vocabulary * self.hidden)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of the keys and values of one token in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.dim

    def write(self, folder: Path) -> str:
        """Write a config.json that vLLM loads with random weights, and return the folder."""
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)


MODELS = (  # largest first
    Model("Llama-3.1-8B", 32, 4096, 14336, heads=32, kv_heads=8, dim=128),
    Model("Llama-3.2-3B", 28, 3072, 8192, heads=24, kv_heads=8, dim=128),
    Model("Llama-3.2-1B", 16, 2048, 8192, heads=32, kv_heads=8, dim=64),
)
TINY = {"heads": 4, "kv_heads": 2, "dim": 32, "vocabulary": 512}
DRY = Model("dry", 2, 128, 128, dtype="float32", **TINY)
MIN_POOL_TOKENS = 36_864  # smallest KV pool: 18 prompts of 2048 tokens


def largest(memory: int) -> Model:
    """Return the largest model that fits into `memory` bytes with a pool of MIN_POOL_TOKENS.

    Raises:
        RuntimeError: no model fits.
    """
    for model in MODELS:
        if model.weights + MIN_POOL_TOKENS * model.token_bytes <= memory:
            return model
    required = MODELS[-1].weights + MIN_POOL_TOKENS * MODELS[-1].token_bytes
    raise RuntimeError(
        f"each of the two engines needs {required / 2**30:.0f} GiB for weights and KV pool,"
        f" but only {memory / 2**30:.0f} GiB per engine are free: free GPU memory"
    )
