"""Size of a model's weights in memory, from its safetensors files or its config.json."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from vllm_kvcompress.commands.plan.model_shape import ModelShape, figure
from vllm_kvcompress.planning.model_traits import text_config

_INDEX = "model.safetensors.index.json"
# vLLM converts these dtypes to the model's dtype when it loads them.
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
# Bytes per element of other dtypes. Dtypes that are not listed take one byte.
_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "F4": 0.5}
_MAX_HEADER_BYTES = 100 * 2**20
# NVFP4: 4-bit weights, with one 8-bit scale for every 16 weights.
_NVFP4 = 4.5
# Bits per weight by the checkpoint's quant_method.
_BITS = {"fp8": 8, "modelopt": 8, "fbgemm_fp8": 8, "mxfp4": 4.25, "modelopt_fp4": _NVFP4}


@dataclass(frozen=True, slots=True)
class Weights:
    """Size of a model's weights.

    Args:
        total_bytes: bytes over all ranks.
        source: where the size is from.
    """

    total_bytes: int
    source: str


def weights_of(folder: Path, config: Mapping[str, Any], shape: ModelShape) -> Weights:
    """Return the size of a model's weights once loaded.

    Reads it from the headers of the safetensors files if they are present, else from their index,
    else estimates it from the config.

    Args:
        folder: folder that contains the config.json.
        config: the parsed config.json.
        shape: shape of the model.
    """
    index = _index(folder)
    sizes = [_tensor_bytes(file, shape.itemsize) for file in _files(folder, index)]
    if sizes and None not in sizes:
        return Weights(sum(size for size in sizes if size is not None), "safetensors headers")
    total = ((index or {}).get("metadata") or {}).get("total_size")
    if isinstance(total, int):
        return Weights(total, _INDEX)
    return Weights(_bytes_from_config(config, shape), "config.json")


def _index(folder: Path) -> dict[str, Any] | None:
    try:
        index = json.loads((folder / _INDEX).read_text())
    except (OSError, ValueError):
        return None
    return index if isinstance(index, dict) else None


def _files(folder: Path, index: Mapping[str, Any] | None) -> list[Path]:
    """Return the files that vLLM loads: those of the index, or all but Mistral's consolidated copy.

    Mistral's repositories contain the weights twice; files named ``consolidated*`` are the copy.
    """
    if names := set((index or {}).get("weight_map", {}).values()):
        return [folder / name for name in sorted(names)]
    files = sorted(folder.glob("*.safetensors"))
    return [file for file in files if not file.name.startswith("consolidated")] or files


def _tensor_bytes(file: Path, itemsize: int) -> int | None:
    """Return the bytes of a file's tensors once loaded, or None if its header is not readable."""
    try:
        with file.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            header = json.loads(handle.read(length)) if length <= _MAX_HEADER_BYTES else None
    except (OSError, ValueError, struct.error):
        return None
    if not isinstance(header, dict):
        return None
    tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
    return int(
        sum(prod(tensor["shape"]) * _element_bytes(tensor["dtype"], itemsize) for tensor in tensors)
    )


def _element_bytes(dtype: str, itemsize: int) -> float:
    return itemsize if dtype in _FLOATS else _BYTES.get(dtype, 1)


def _bytes_from_config(config: Mapping[str, Any], shape: ModelShape) -> int:
    """Return the size of a decoder's matrices: attention, gated MLPs of all experts, embeddings."""
    text = text_config(config)
    first = partial(figure, text)
    hidden = first("hidden_size", "n_embd", "d_model")
    intermediate = first("intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    experts = first("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    attention = 2 * hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    mlp = 3 * hidden * intermediate
    if experts:
        per_expert = first("moe_intermediate_size", "expert_intermediate_size") or intermediate
        shared = first("n_shared_experts", "num_shared_experts") * per_expert
        shared = shared or first("shared_expert_intermediate_size")
        mlp = 3 * hidden * (experts * per_expert + shared)
    num_embeddings = 1 if text.get("tie_word_embeddings") else 2
    embeddings = first("vocab_size", "n_vocab") * hidden * num_embeddings
    in_layers = shape.layers * (attention + mlp) * _bits(config, 8 * shape.itemsize) / 8
    return int(in_layers + embeddings * shape.itemsize)


def _bits(config: Mapping[str, Any], unquantised: int) -> float:
    """Return the bits per weight in a layer's matrices, `unquantised` without quantisation."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return unquantised
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
    return _BITS.get(str(quantization.get("quant_method")), unquantised)


def _modelopt_algorithm(quantization: Mapping[str, Any]) -> str:
    """Return ModelOpt's name of its format, such as NVFP4, or "" for other quantisers."""
    if not str(quantization.get("quant_method") or "").lower().startswith("modelopt"):
        return ""
    nested = quantization.get("quantization")
    algorithm = (nested if isinstance(nested, Mapping) else quantization).get("quant_algo")
    return str(algorithm or "").upper()
