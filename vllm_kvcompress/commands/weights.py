"""How much memory a model's weights take, as far as its folder or its config.json tells."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from vllm_kvcompress.commands.model_shape import ModelShape
from vllm_kvcompress.planning.model_traits import text_config

_INDEX = "model.safetensors.index.json"
# vLLM loads these as the model's own dtype.
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
# Bytes of an element; dtypes that are not listed take one.
_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "F4": 0.5}
_LARGEST_HEADER = 100 * 2**20
# 16 weights of 4 bits share a scale of 8.
_NVFP4 = 4.5
# Bits of a weight, by what a checkpoint calls its quantisation.
_BITS = {"fp8": 8, "modelopt": 8, "fbgemm_fp8": 8, "mxfp4": 4.25, "modelopt_fp4": _NVFP4}


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of all ranks together, and where the figure is from."""

    total_bytes: int
    source: str


def weights_of(folder: Path, config: Mapping[str, Any], shape: ModelShape) -> Weights:
    """The weights' size: from safetensors files, else their index, else the config's figures.

    Args:
        folder: where the config.json lies; the others are looked for beside it.
    """
    index = _index(folder)
    sizes = [_tensor_bytes(file, shape.itemsize) for file in _files(folder, index)]
    if sizes and None not in sizes:
        return Weights(sum(size for size in sizes if size is not None), "safetensors headers")
    total = ((index or {}).get("metadata") or {}).get("total_size")
    if isinstance(total, int):
        return Weights(total, _INDEX)
    return Weights(_from_config(config, shape), "config.json")


def _index(folder: Path) -> dict[str, Any] | None:
    try:
        index = json.loads((folder / _INDEX).read_text())
    except (OSError, ValueError):
        return None
    return index if isinstance(index, dict) else None


def _files(folder: Path, index: Mapping[str, Any] | None) -> list[Path]:
    """The files that vLLM loads: the index's, else all but a second copy in Mistral's own form."""
    if names := set((index or {}).get("weight_map", {}).values()):
        return [folder / name for name in sorted(names)]
    files = sorted(folder.glob("*.safetensors"))
    return [file for file in files if not file.name.startswith("consolidated")] or files


def _tensor_bytes(file: Path, itemsize: int) -> int | None:
    """Bytes of a file's tensors once loaded; None when it has no header that can be read."""
    try:
        with file.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            header = json.loads(handle.read(length)) if length <= _LARGEST_HEADER else None
    except (OSError, ValueError, struct.error):
        return None
    if not isinstance(header, dict):
        return None
    tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
    return int(sum(prod(tensor["shape"]) * _width(tensor["dtype"], itemsize) for tensor in tensors))


def _width(dtype: str, itemsize: int) -> float:
    return itemsize if dtype in _FLOATS else _BYTES.get(dtype, 1)


def _from_config(config: Mapping[str, Any], shape: ModelShape) -> int:
    """Matrices of a decoder: attention, gated feed-forward parts of all experts, both ends."""
    text = text_config(config)

    def figure(*names: str) -> int:
        return next((int(text[name]) for name in names if isinstance(text.get(name), int)), 0)

    width = figure("hidden_size", "n_embd", "d_model")
    inner = figure("intermediate_size", "n_inner", "ffn_dim") or 4 * width
    experts = figure("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    attention = 2 * width * shape.head_dim * (shape.heads + shape.kv_heads)
    feed = 3 * width * inner
    if experts:
        own = figure("moe_intermediate_size", "expert_intermediate_size") or inner
        shared = figure("n_shared_experts", "num_shared_experts") * own
        feed = 3 * width * (experts * own + (shared or figure("shared_expert_intermediate_size")))
    ends = figure("vocab_size", "n_vocab") * width * (1 if text.get("tie_word_embeddings") else 2)
    in_layers = shape.layers * (attention + feed) * _bits(config, 8 * shape.itemsize) / 8
    return int(in_layers + ends * shape.itemsize)


def _bits(config: Mapping[str, Any], plain: int) -> float:
    """Bits of a weight in a layer's matrices."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return plain
    if "FP4" in _modelopt_algorithm(quantization):
        return _NVFP4
    for key in ("bits", "w_bit", "weight_bits"):
        if isinstance(quantization.get(key), int):
            return float(quantization[key])
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        bits = ((group or {}).get("weights") or {}).get("num_bits")
        if isinstance(bits, int):
            return bits
    if quantization.get("load_in_4bit") or quantization.get("load_in_8bit"):
        return 4 if quantization.get("load_in_4bit") else 8
    return _BITS.get(str(quantization.get("quant_method")), plain)


def _modelopt_algorithm(quantization: Mapping[str, Any]) -> str:
    """What ModelOpt calls its format, such as NVFP4; empty for another's checkpoint."""
    if not str(quantization.get("quant_method") or "").lower().startswith("modelopt"):
        return ""
    nested = quantization.get("quantization")
    algorithm = (nested if isinstance(nested, Mapping) else quantization).get("quant_algo")
    return str(algorithm or "").upper()
