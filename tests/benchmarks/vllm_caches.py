"""Store keys and values in vLLM's low-bit KV caches and read them with vLLM's attention kernels.

The kernels run in Triton's interpreter, which must be set up before vLLM is imported, so this runs
as a process: ``python vllm_caches.py CASE.pt OUTPUTS.pt``. The case has query, keys and values in
float32; the outputs have the attention output of the last token by format.
"""

import os
import sys
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
import triton.backends

_driver = type("InterpreterDriver", (), {"is_active": staticmethod(lambda: True)})
triton.backends.backends.setdefault("cpu", SimpleNamespace(driver=_driver, compiler=None))

import torch
from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
from vllm.model_executor.layers.quantization.turboquant.config import TQ_PRESETS, TurboQuantConfig
from vllm.v1.attention.backends.turboquant_attn import _build_hadamard
from vllm.v1.attention.ops import triton_reshape_and_cache_flash as stores
from vllm.v1.attention.ops.triton_turboquant_decode import triton_turboquant_decode_attention
from vllm.v1.attention.ops.triton_turboquant_store import triton_turboquant_store
from vllm.v1.attention.ops.triton_unified_attention import unified_attention
from vllm.v1.kv_cache_interface import KVQuantMode

import interpreter

BLOCK = 16
PER_TOKEN_HEAD = {
    "fp8_per_token_head": (KVQuantMode.FP8_PER_TOKEN_HEAD, torch.float8_e4m3fn),
    "int8_per_token_head": (KVQuantMode.INT8_PER_TOKEN_HEAD, torch.int8),
    "int4_per_token_head": (KVQuantMode.INT4_PER_TOKEN_HEAD, torch.uint8),
}


def attend(query, caches, tokens, mode, **scales):
    """Return the output ``[1, Hq, D]`` of vLLM's TRITON_ATTN kernel."""
    out = torch.empty_like(query)
    unified_attention(
        q=query,
        k=caches[0],
        v=caches[1],
        out=out,
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        max_seqlen_q=1,
        seqused_k=torch.tensor([tokens], dtype=torch.int32),
        max_seqlen_k=tokens,
        softmax_scale=query.shape[-1] ** -0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=torch.arange(len(caches[0]), dtype=torch.int32)[None],
        softcap=0.0,
        q_descale=None,
        k_descale=torch.ones(1),
        v_descale=torch.ones(1),
        kv_quant_mode=mode,
        **scales,
    )
    return out


def fp8(query, keys, values, slots):
    shape = (-(-len(keys) // BLOCK), BLOCK, *keys.shape[1:])
    caches = [torch.zeros(shape).to(torch.float8_e4m3fn) for _ in range(2)]
    heads, dim = keys.shape[1:]
    one = torch.ones(1)
    # `triton_reshape_and_cache_flash` asks for the GPU's compute capability before this launch.
    stores.reshape_and_cache_kernel_flash[(len(keys), 1)](
        keys, values, *caches, slots, one, one,
        keys.stride(0), values.stride(0), caches[0].stride(0), caches[0].stride(2), 0, 0,
        caches[0].stride(1), heads, dim, BLOCK, 1, False, True, heads * dim,
    )  # fmt: skip
    return attend(query, caches, len(keys), KVQuantMode.FP8_PER_TENSOR)


def per_token_head(name, query, keys, values, slots):
    mode, dtype = PER_TOKEN_HEAD[name]
    heads, dim = keys.shape[1:]
    stored_dim = dim // 2 if mode == KVQuantMode.INT4_PER_TOKEN_HEAD else dim
    blocks = -(-len(keys) // BLOCK)
    caches = [torch.zeros(blocks, BLOCK, heads, stored_dim).to(dtype) for _ in range(2)]
    scales = dict(
        k_scale_cache=torch.zeros(blocks, BLOCK, heads),
        v_scale_cache=torch.zeros(blocks, BLOCK, heads),
    )
    stores.triton_reshape_and_cache_flash_per_token_head_quant(
        keys, values, *caches, slot_mapping=slots, kv_quant_mode=mode, **scales
    )
    return attend(query, caches, len(keys), mode, **scales)


def turboquant(name, query, keys, values, slots):
    config = TurboQuantConfig.from_cache_dtype(name, keys.shape[-1])
    blocks, heads = -(-len(keys) // BLOCK), keys.shape[1]
    cache = torch.zeros(blocks, BLOCK, heads, config.slot_size_aligned, dtype=torch.uint8)
    rotation = _build_hadamard(config.head_dim, "cpu")
    centroids = get_centroids(config.head_dim, config.centroid_bits).sort().values
    layout = dict(
        key_packed_size=config.key_packed_size,
        value_quant_bits=config.value_quant_bits,
        key_fp8=config.key_fp8,
    )
    midpoints = (centroids[:-1] + centroids[1:]) / 2
    triton_turboquant_store(
        keys, values, cache, slots, rotation, midpoints, mse_bits=config.key_mse_bits, **layout
    )
    return triton_turboquant_decode_attention(
        query,
        cache,
        torch.arange(blocks, dtype=torch.int32)[None],
        torch.tensor([len(keys)], dtype=torch.int32),
        rotation,
        centroids,
        config.head_dim**-0.5,
        config.key_mse_bits,
        norm_correction=config.norm_correction,
        max_num_kv_splits=2,
        **layout,
    )


def main(case_file, outputs_file):
    interpreter.install_fixes()
    case = torch.load(case_file)
    query, keys, values = case["query"], case["keys"], case["values"]
    slots = torch.arange(len(keys), dtype=torch.int32)
    outputs = {"fp8": fp8(query, keys, values, slots)}
    for name in PER_TOKEN_HEAD:
        outputs[name] = per_token_head(name, query, keys, values, slots)
    for name in TQ_PRESETS:
        outputs[name] = turboquant(name, query, keys, values, slots)
    torch.save(outputs, outputs_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
