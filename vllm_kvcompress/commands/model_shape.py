"""What a model's KV cache is made of, from its config.json alone."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.planning.cache_dtypes import FLOAT8_CACHES
from vllm_kvcompress.planning.layer_groups import LayerGroups, layer_types
from vllm_kvcompress.planning.model_traits import (
    SENTENCE_EMBEDDER,
    groups,
    stored_in,
    text_config,
    traits_of,
    unsupported,
)

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
_LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
# small files that say more than config.json, where a model has them
_BESIDE = ("hf_quant_config.json", "modules.json", "model.safetensors.index.json")
_POOLING_MODULES = (
    "sentence_transformers.models.Pooling",
    "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The figures that decide how large a model's KV cache is, over all ranks.

    Args:
        layers: attention layers.
        groups: those with full attention, which are compressed, and the others.
        heads: query heads.
        kv_heads: KV heads.
        head_dim: size of a head.
        dtype: what the model computes in: a key of `ITEMSIZE`.
        cache: what keys and values are stored in, by vLLM's name; None for `dtype`.
        longest: tokens that the model was made for; None where its config does not say.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    longest: int | None
    cache: str | None = None
    groups: LayerGroups

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def stored(self) -> int:
        """Bytes of an element of a cached key."""
        return self.itemsize if self.cache is None else 1


def read_config(model: str) -> dict[str, Any]:
    """The config.json of a folder, or of a model on the hub: from its cache, else downloaded.

    Raises:
        ConfigError: there is none, or it is not an object.
    """
    path = config_path(model)
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} is not readable as JSON ({e})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(config).__name__}")
    if config.get("quantization_config") is None and (extra := _beside(path, "hf_quant_config")):
        # Where ModelOpt wrote its settings until its 0.29.
        config["quantization_config"] = extra
    modules = _beside(path, "modules") or ()
    if any(module.get("type") in _POOLING_MODULES for module in modules):
        config["architectures"] = [SENTENCE_EMBEDDER]
    return config


def config_path(model: str) -> Path:
    """Where the config.json of a folder, or of a model on the hub, lies on this machine.

    Raises:
        ConfigError: there is none.
    """
    folder = Path(model).expanduser()
    path = folder if folder.suffix == ".json" else folder / "config.json"
    if folder.exists() and not path.is_file():
        raise ConfigError(f"{model} has no config.json; give the folder of a Hugging Face model")
    if folder.exists():
        return path
    if not looks_like_hub_id(model):
        raise ConfigError(f"there is no folder {model}; give a model's folder, or its hub name")
    return _from_hub(model)


def _beside(path: Path, name: str) -> Any:
    """What another JSON file of the same folder holds; None without one."""
    try:
        return json.loads((path.parent / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None


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
        path = Path(hf_hub_download(model, "config.json"))
        for name in _BESIDE:
            with suppress(HfHubHTTPError, OSError):
                hf_hub_download(model, name)
        return path
    except (HfHubHTTPError, HFValidationError, OSError) as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise ConfigError(
            f"there is no folder {model}, and no config.json of that name on the hub or in its"
            f" cache ({reason}); give a folder, or the hub's name of a model"
        ) from None


def shape_of(
    config: Mapping[str, Any],
    dtype: str = "auto",
    *,
    cache_dtype: str = "auto",
    disable_sliding_window: bool = False,
    prefix_caching: bool = True,
) -> ModelShape:
    """The shape that a config.json describes.

    Args:
        dtype: "auto" stands for the config's own, and float32 for bfloat16, as in vLLM.
        cache_dtype: what keys and values are stored in, as ``--kv-cache-dtype`` takes it.
        disable_sliding_window: prompts end where the model's window does, as in vLLM.
        prefix_caching: where it is off, no state is kept beside the one that is computed.

    Raises:
        ConfigError: the model is one that cannot be compressed, or its config lacks a figure.
    """
    text = text_config(config)
    stored = _dtype(config, dtype)
    traits = replace(traits_of(config), dtype=stored, cache=cache_dtype)
    longest = _longest(text)
    if disable_sliding_window and traits.window is not None:
        longest = min(longest or traits.window, traits.window)
        traits = replace(traits, window=None)
    if not prefix_caching:
        traits = replace(traits, cached_states=1)
    if (reason := unsupported(traits)) is not None:
        raise ConfigError(reason)
    heads, layers = _figure(text, _HEADS), _number_of_layers(text)
    dim = text.get("head_dim") or text.get("hidden_size_per_head")
    return ModelShape(
        layers=layers,
        groups=groups(traits, layers),
        heads=heads,
        kv_heads=_kv_heads(text, heads),
        head_dim=int(dim or _figure(text, _WIDTH) // heads),
        dtype=stored,
        longest=longest,
        cache=stored_in(traits) if stored_in(traits) in FLOAT8_CACHES else None,
    )


def _number_of_layers(text: Mapping[str, Any]) -> int:
    """How many there are; some configs have their names alone."""
    named = len(layer_types(text)) if not isinstance(text.get(_LAYERS[0]), int) else 0
    return named or _figure(text, _LAYERS)


def _figure(text: Mapping[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        if isinstance(text.get(name), int):
            return int(text[name])
    raise ConfigError(f"the model's config.json has no {names[0]}, so its KV cache is not known")


def _kv_heads(text: Mapping[str, Any], heads: int) -> int:
    """KV heads; where the config has none, or null, there are as many as query heads."""
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
            f"the model's dtype {declared!r} is none of {sorted(ITEMSIZE)}; pass --dtype"
        )
    return "bfloat16" if declared == "float32" else declared


def _longest(text: Mapping[str, Any]) -> int | None:
    positions = next((text[name] for name in _LONGEST if isinstance(text.get(name), int)), None)
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    factor = scaling.get("factor") if isinstance(scaling, Mapping) else None
    original = scaling.get("original_max_position_embeddings") if factor else None
    if positions is None:
        return None
    return max(int(positions), int(original * factor)) if original and factor else int(positions)
