"""What a model's KV cache is made of, from its config.json alone."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvcompress.errors import ConfigError

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
_ALIBI = frozenset({"bloom", "mpt", "jais"})
_STATE_SPACE = ("state_size", "ssm_state_size", "mamba_d_state", "linear_num_key_heads", "time_mix")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The figures that decide how large a model's KV cache is, over all ranks.

    Args:
        layers: attention layers, L.
        heads: query heads.
        kv_heads: KV heads.
        head_dim: size of a head.
        dtype: what keys and values are stored in: a key of `ITEMSIZE`.
        longest: tokens that the model was made for; None where its config does not say.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    longest: int | None

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]


def read_config(model: str) -> dict[str, Any]:
    """The config.json of a folder, or of a model on the hub: from its cache, else downloaded.

    Raises:
        ConfigError: there is none, or it is not an object.
    """
    folder = Path(model).expanduser()
    path = folder if folder.suffix == ".json" else folder / "config.json"
    if folder.exists() and not path.is_file():
        raise ConfigError(f"{model} has no config.json; give the folder of a Hugging Face model")
    if not folder.exists():
        if not looks_like_hub_id(model):
            raise ConfigError(f"there is no folder {model}; give a model's folder, or its hub name")
        path = _from_hub(model)
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} is not readable as JSON ({e})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found


def looks_like_hub_id(model: str) -> bool:
    """Whether `model` could be ``owner/name``; a path with more parts, or that starts with a dot,
    cannot."""
    parts = model.split("/")
    return len(parts) <= 2 and all(parts) and not model.startswith((".", "~"))


def _from_hub(model: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        raise ConfigError(
            f"there is no folder {model}, and huggingface_hub is not installed to look for it on"
            " the hub; give a folder that holds the model's config.json"
        ) from None
    try:
        return Path(hf_hub_download(model, "config.json"))
    except (HfHubHTTPError, HFValidationError, OSError) as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise ConfigError(
            f"there is no folder {model}, and no config.json of that name on the hub or in its"
            f" cache ({reason}); give a folder, or the hub's name of a model"
        ) from None


def shape_of(config: Mapping[str, Any], dtype: str = "auto") -> ModelShape:
    """The shape that a config.json describes.

    Args:
        dtype: "auto" stands for the config's own, and float32 for bfloat16, as in vLLM.

    Raises:
        ConfigError: the model is one that cannot be compressed, or its config lacks a figure.
    """
    text = text_config(config)
    if (reason := unsupported(config)) is not None:
        raise ConfigError(f"{reason}; serve this model without --kv-compress")
    heads = _figure(text, _HEADS)
    dim = text.get("head_dim") or _figure(text, _WIDTH) // heads
    return ModelShape(
        layers=_figure(text, _LAYERS),
        heads=heads,
        kv_heads=_kv_heads(text, heads),
        head_dim=int(dim),
        dtype=_dtype(config, dtype),
        longest=_longest(text),
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part about the language model, where the config has parts."""
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), Mapping):
            part: Mapping[str, Any] = config[key]
            return part
    return config


def unsupported(config: Mapping[str, Any]) -> str | None:
    """Why a model cannot be compressed, as far as its config tells; None when it can.

    What vLLM itself decides, and flags, are judged when it starts (`engine.refusals`).
    """
    text = text_config(config)
    kind = str(text.get("model_type", ""))
    if text.get("kv_lora_rank"):
        return "MLA models keep one latent per token instead of keys and values"
    if config.get("is_encoder_decoder"):
        return "encoder-decoder models are not supported"
    if "mamba" in kind or "rwkv" in kind or any(text.get(key) for key in _STATE_SPACE):
        return "every layer must be full attention, this model has state-space layers"
    attention = text.get("attn_config")
    in_attention = isinstance(attention, Mapping) and attention.get("alibi")
    named = kind in _ALIBI and not (isinstance(attention, Mapping) and in_attention is False)
    position = text.get("position_embedding_type") == "alibi"
    if text.get("alibi") or in_attention or named or position:
        return "ALiBi needs every token at its true position, which a packed page has not"
    types = set(text.get("layer_types") or ())
    if types - {"full_attention"}:
        return f"every layer must be full attention, this model has {sorted(types)}"
    if window := _sliding_window(text, kind):
        return f"every layer must be full attention, this model has a sliding window of {window}"
    if chunk := text.get("attention_chunk_size"):
        return f"every layer must be full attention, this model attends in chunks of {chunk}"
    if cap := text.get("attn_logit_softcapping"):
        return f"scores are taken before the soft cap of {cap} on this model's logits"
    if shared := text.get("num_kv_shared_layers"):
        return f"layers must not share KV caches, and {shared} of this model do"
    return None


def _sliding_window(text: Mapping[str, Any], kind: str) -> int | None:
    window = text.get("sliding_window")
    # Qwen's configs have a window and a switch for it, which is off unless they say otherwise
    if not text.get("use_sliding_window", not kind.startswith("qwen")):
        return None
    return window if isinstance(window, int) else None


def _figure(text: Mapping[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        if isinstance(text.get(name), int):
            return int(text[name])
    raise ConfigError(f"the model's config.json has no {names[0]}, so its KV cache is not known")


def _kv_heads(text: Mapping[str, Any], heads: int) -> int:
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    for name in _KV_HEADS:
        if isinstance(text.get(name), int):
            return int(text[name])
    return heads


def _dtype(config: Mapping[str, Any], dtype: str) -> str:
    if dtype != "auto":
        return {"half": "float16", "float": "float32"}.get(dtype, dtype)
    text = text_config(config)
    found = next(
        (str(part[key]) for part in (text, config) for key in ("dtype", "torch_dtype")
         if part.get(key)),
        "float32",
    )  # fmt: skip
    found = found.removeprefix("torch.")
    if found not in ITEMSIZE:
        raise ConfigError(
            f"the model's dtype {found!r} is none of {sorted(ITEMSIZE)}; pass --dtype"
        )
    return "bfloat16" if found == "float32" else found


def _longest(text: Mapping[str, Any]) -> int | None:
    found = next((text[name] for name in _LONGEST if isinstance(text.get(name), int)), None)
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    factor = scaling.get("factor") if isinstance(scaling, Mapping) else None
    original = scaling.get("original_max_position_embeddings") if factor else None
    if found is None:
        return None
    return max(int(found), int(original * factor)) if original and factor else int(found)
