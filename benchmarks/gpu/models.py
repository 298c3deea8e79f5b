"""Models for `serving`: shapes of known ones with random weights: nothing is downloaded."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Model:
    """A Llama of this shape."""

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
        """Bytes of its weights in bfloat16, the embedding and the output layer included."""
        attention = 2 * self.hidden * self.dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return 2 * (self.layers * layer + 2 * self.vocabulary * self.hidden)

    @property
    def token_bytes(self) -> int:
        """Of a token's keys and values in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.dim

    def write(self, folder: Path) -> str:
        """Its configuration, for vLLM to load with random weights."""
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


MODELS = (  # the largest first
    Model("Llama-3.1-8B", 32, 4096, 14336, heads=32, kv_heads=8, dim=128),
    Model("Llama-3.2-3B", 28, 3072, 8192, heads=24, kv_heads=8, dim=128),
    Model("Llama-3.2-1B", 16, 2048, 8192, heads=32, kv_heads=8, dim=64),
)
TINY = {"heads": 4, "kv_heads": 2, "dim": 32, "vocabulary": 512}
DRY = Model("dry", 2, 128, 128, dtype="float32", **TINY)
POOL = 36_864  # tokens that a model's pool must hold: 18 prompts of 2048


def largest(memory: int) -> Model:
    """The largest model that fits into so many bytes with such a pool.

    Raises:
        RuntimeError: none does.
    """
    for model in MODELS:
        if model.weights + POOL * model.token_bytes <= memory:
            return model
    least = MODELS[-1].weights + POOL * MODELS[-1].token_bytes
    raise RuntimeError(
        f"an engine needs {least / 2**30:.0f} GiB for its weights and its pool,"
        f" {memory / 2**30:.0f} GiB are free for each of two; free memory on the GPU"
    )
