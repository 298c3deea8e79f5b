"""Shape of a model's KV cache, read from its config.json."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.planning.layer_groups import LayerGroups, layer_types
from vllm_kvcompress.planning.model_traits import (
    SENTENCE_EMBEDDER,
    groups,
    looks_like_hub_id,
    text_config,
    traits_of,
)
from vllm_kvcompress.refusals.model import MODEL
from vllm_kvcompress.refusals.rule import refuse

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)
_WIDTH = ("hidden_size", "n_embd", "d_model")
_KEY_BIASES = ("attention_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias", "use_bias")
_LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
# Optional small files that complete config.json.
_EXTRA_FILES = ("hf_quant_config.json", "modules.json", "model.safetensors.index.json")
_POOLING_MODULES = (
    "sentence_transformers.models.Pooling",
    "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes that determine a model's KV cache, over all ranks.

    The field names are keys of the JSON output.

    Args:
        layers: attention layers.
        heads: query heads.
        kv_heads: KV heads.
        head_dim: elements per head.
        dtype: dtype of the model, a key of `ITEMSIZE`.
        longest: maximum sequence length of the model in tokens. None if its config has none.
        cache: dtype of the KV cache by vLLM's name. None if it is `dtype`.
        groups: the layers with full attention, which are compressed, and all others.
        key_biases: whether its attention adds biases to keys.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    longest: int | None
    cache: str | None = None
    groups: LayerGroups
    key_biases: bool = False

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def stored(self) -> int:
        """Return the bytes per element of a cached key."""
        return self.itemsize if self.cache is None else 1


def read_config(model: str) -> dict[str, Any]:
    """Return the config.json of a folder or of a Hugging Face model, downloaded if not cached.

    Raises:
        ConfigError: There is no config.json, or it is not a JSON object.
    """
    path = config_path(model)
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be read as JSON ({e})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(config).__name__}")
    if config.get("quantization_config") is None and (
        quantization := _extra_json(path, "hf_quant_config")
    ):
        # ModelOpt wrote its settings to this file until version 0.29.
        config["quantization_config"] = quantization
    modules = _extra_json(path, "modules") or ()
    if any(module.get("type") in _POOLING_MODULES for module in modules):
        config["architectures"] = [SENTENCE_EMBEDDER]
    return config


def config_path(model: str) -> Path:
    """Return the local path of the config.json of a folder or of a Hugging Face model.

    Raises:
        ConfigError: There is none.
    """
    folder = Path(model).expanduser()
    path = folder if folder.suffix == ".json" else folder / "config.json"
    if folder.exists() and not path.is_file():
        raise ConfigError(f"{model} has no config.json; give the folder of a Hugging Face model")
    if folder.exists():
        return path
    if not looks_like_hub_id(model):
        raise ConfigError(
            f"there is no folder {model}; give a model folder or a Hugging Face model name"
        )
    return _hub_config_path(model)


def _extra_json(path: Path, name: str) -> Any:
    """Return the content of another JSON file in the same folder, or None if there is none."""
    try:
        return json.loads((path.parent / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None


def _hub_config_path(model: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        raise ConfigError(
            f"there is no folder {model}, and huggingface_hub is not installed to download it; give"
            " a folder that contains the model's config.json"
        ) from None
    try:
        path = Path(hf_hub_download(model, "config.json"))
        for name in _EXTRA_FILES:
            with suppress(HfHubHTTPError, OSError):
                hf_hub_download(model, name)
        return path
    except (HfHubHTTPError, HFValidationError, OSError) as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise ConfigError(
            f"{model} is neither a folder nor a model whose config.json is on the Hugging Face hub"
            f" or in its cache ({reason}); give a model folder or a Hugging Face model name"
        ) from None


def shape_of(
    config: Mapping[str, Any],
    dtype: str = "auto",
    *,
    cache_dtype: str = "auto",
    disable_sliding_window: bool = False,
    prefix_caching: bool = True,
) -> ModelShape:
    """Return the shape that a config.json describes.

    Args:
        config: the parsed config.json.
        dtype: dtype of the model. "auto" uses the config's, with bfloat16 for float32, as vLLM
            does.
        cache_dtype: dtype of the KV cache, as in ``--kv-cache-dtype``.
        disable_sliding_window: limit sequences to the model's window, as vLLM does.
        prefix_caching: whether a second copy of each state is kept for the prefix cache.

    Raises:
        ConfigError: The model cannot be compressed, or its config lacks a required key.
    """
    text = text_config(config)
    model_dtype = _dtype(config, dtype)
    traits = replace(traits_of(config), dtype=model_dtype, cache=cache_dtype)
    longest = _longest(text)
    if disable_sliding_window and traits.window is not None:
        longest = min(longest or traits.window, traits.window)
        traits = replace(traits, window=None)
    if not prefix_caching:
        traits = replace(traits, cached_states=1)
    refuse(MODEL, traits)
    layers, (heads, kv_heads, head_dim) = _num_layers(text), heads_of(text)
    return ModelShape(
        layers=layers,
        groups=groups(traits, layers),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=model_dtype,
        longest=longest,
        cache=traits.stored if traits.has_fp8_cache else None,
        key_biases=_has_key_biases(text),
    )


def heads_of(text: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the numbers of query heads and KV heads of a layer, and their dimension.

    Raises:
        ConfigError: The config lacks a required key.
    """
    heads = _required(text, _HEADS)
    dim = text.get("head_dim") or text.get("hidden_size_per_head")
    return heads, _kv_heads(text, heads), int(dim or _required(text, _WIDTH) // heads)


def _has_key_biases(text: Mapping[str, Any]) -> bool:
    """Return whether attention adds biases to keys. Configs of Qwen to Qwen2.5 do not say it."""
    kind = str(text.get("model_type") or "")
    return kind == "qwen" or kind.startswith("qwen2") or any(text.get(key) for key in _KEY_BIASES)


def _num_layers(text: Mapping[str, Any]) -> int:
    """Return the number of layers. Some configs only list the types of the layers."""
    listed = len(layer_types(text)) if not isinstance(text.get(_LAYERS[0]), int) else 0
    return listed or _required(text, _LAYERS)


def figure(text: Mapping[str, Any], *names: str) -> int:
    """Return the value of the first key of a config that is present, or 0."""
    return next((int(text[name]) for name in names if isinstance(text.get(name), int)), 0)


def _required(text: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Return the value of the first key that is present.

    Raises:
        ConfigError: No key is present, or it is 0.
    """
    if value := figure(text, *names):
        return value
    raise ConfigError(
        f"the model's config.json must have {names[0]} to compute the size of its KV cache"
    )


def _kv_heads(text: Mapping[str, Any], heads: int) -> int:
    """Return the number of KV heads: the number of query heads if the config has none or null."""
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    attention = text.get("attn_config")
    inside = attention.get("kv_n_heads") if isinstance(attention, Mapping) else None
    for block in text.get("block_configs") or ():
        inside = inside or heads // int(block["attention"]["n_heads_in_group"])
    for name, value in (("attn_config", inside), *((name, text.get(name)) for name in _KV_HEADS)):
        if isinstance(value, int):
            return value
        if value is not None:
            raise ConfigError(
                f"every layer must have the same number of KV heads, got {name} {value!r} in the"
                " model's config.json; serve this model without --kv-compress"
            )
    return heads


def _dtype(config: Mapping[str, Any], dtype: str) -> str:
    if dtype != "auto":
        named = {"half": "float16", "float": "float32"}.get(dtype, dtype)
        if named not in ITEMSIZE:
            raise ConfigError(f"--dtype must be auto or one of {sorted(ITEMSIZE)}, got {dtype!r}")
        return named
    text = text_config(config)
    declared = next(
        (str(part[key]) for part in (text, config) for key in ("dtype", "torch_dtype")
         if part.get(key)),
        "float32",
    )  # fmt: skip
    declared = declared.removeprefix("torch.")
    if declared not in ITEMSIZE:
        raise ConfigError(
            f"the model's dtype must be one of {sorted(ITEMSIZE)}, got {declared!r} in its"
            " config.json; pass --dtype"
        )
    return "bfloat16" if declared == "float32" else declared


def _longest(text: Mapping[str, Any]) -> int | None:
    """Return the maximum sequence length, RoPE scaling included, or None if the config has none."""
    positions = figure(text, *_LONGEST)
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    factor = scaling.get("factor") if isinstance(scaling, Mapping) else None
    original = scaling.get("original_max_position_embeddings") if factor else None
    if not positions:
        return None
    return max(positions, int(original * factor)) if original and factor else positions
