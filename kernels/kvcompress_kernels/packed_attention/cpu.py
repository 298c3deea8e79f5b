"""CPU code of `packed_attention`: numba code (`kernel_numba`) on the threads of PyTorch.

Numba's own threads would compete with those of PyTorch, and its OpenMP layer refuses to run in a
process that was forked after it started. So the threads are one parallel region of the OpenMP
runtime that PyTorch uses. Each runs tasks until none is left.
"""

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvcompress_kernels.contract import require
from kvcompress_kernels.packed_attention.kernel_numba import FACTORS, attention_worker
from kvcompress_kernels.packed_attention.offsets import Offsets
from kvcompress_kernels.packed_attention.scratch import (
    SPLITS,
    query_tile,
    split_lines,
    workspace,
)

_NAME = "packed_attention"
_ELEMENT = {
    torch.bfloat16: np.uint16,
    torch.float16: np.int16,
    torch.float32: np.float32,
    torch.float8_e4m3fn: np.uint8,
    torch.float8_e5m2: np.uint8,
}


@functools.cache
def parallel_region() -> Callable[..., Any] | None:
    """Return `GOMP_parallel` of the OpenMP runtime that PyTorch uses; None if there is none."""
    # A preloaded runtime, such as Intel's, comes before the one that PyTorch is linked with.
    for library in (None, torch._C.__file__):
        region = getattr(ctypes.CDLL(library), "GOMP_parallel", None)
        if region is not None:
            region.restype = None
            region.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            return region  # type: ignore[no-any-return]
    return None


def run_on_threads(work: Any, call: Any) -> None:
    """Run a C function with the address of the array `call` on every thread of PyTorch."""
    threads, region = torch.get_num_threads(), parallel_region()
    if threads == 1 or region is None:
        work(call.ctypes.data)
    else:
        region(ctypes.cast(work, ctypes.c_void_p), call.ctypes.data, threads, 0)


@functools.cache
def _float8_table(dtype: torch.dtype) -> torch.Tensor:
    """Return the 256 numbers of a float8 dtype as float32; unused zeros for other dtypes."""
    if dtype.itemsize > 1:
        return torch.zeros(256)
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


@functools.cache
def row_offsets(block: int, step: int, dim: int) -> Offsets:
    """Return the offsets of pages in which a token's row is its K, then its V."""
    token, d = torch.arange(block, dtype=torch.int32) * step, torch.arange(dim, dtype=torch.int32)
    return Offsets(token, d, token, d + dim)


def compile_for(
    head_dim: int, query: torch.dtype, cache: torch.dtype, output: torch.dtype | None = None
) -> None:
    """Compile the code for a layer, or load it from numba's cache on disk.

    Compiling takes several seconds, which a request must not wait for.

    Args:
        head_dim: the layer's head dim.
        query, cache: dtypes of the queries and of the cache.
        output: dtype of the output; that of the queries if None.
    """
    kinds = (_ELEMENT[dtype] for dtype in (query, output or query, cache))
    attention_worker(*kinds, (0,) * (head_dim // 8))


def run(
    query: torch.Tensor,
    output: torch.Tensor,
    pages: torch.Tensor,
    offsets: Offsets | None,
    packed: torch.Tensor,
    packed_tokens: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    query_start: torch.Tensor,
    slots: torch.Tensor,
    live: torch.Tensor,
    *,
    scale: float,
    max_query_tokens: int,
    key_scale: float,
    value_scale: float,
    sinks: torch.Tensor | None,
    scratch: torch.Tensor | None,
) -> None:
    rows = int(live)
    (_, heads, dim), (_, kv_heads, block, _) = query.shape, pages.shape
    group = heads // kv_heads
    if scratch is None:
        scratch = workspace(heads, kv_heads, dim, rows=rows, device="cpu")
    capacity = len(scratch) // (kv_heads * (2 + SPLITS * split_lines(group) * (dim + 2)))
    require(capacity >= rows, _NAME, f"workspace must hold the batch's {rows} rows", capacity)
    where = row_offsets(block, pages.stride(2), dim) if offsets is None else offsets
    if sinks is not None:
        sinks = sinks * math.log2(math.e)
    counter = torch.zeros(1, dtype=torch.int64)
    numbers = (
        rows,
        kv_heads,
        group,
        block,
        pages.itemsize,
        query_tile(group, max_query_tokens),
        *pages.stride()[:3],
        *query.stride()[:2],
        *output.stride()[:2],
        packed.stride(0),
        packed_tokens.stride(0),
        tables.stride(0),
        sinks is not None,
        split_lines(group),
    )
    table = _float8_table(pages.dtype)
    arrays = (
        query, output, pages, pages, table, packed, packed_tokens, tables, lengths, query_start,
        slots, table if sinks is None else sinks, *where, counter, scratch,
    )  # fmt: skip
    addresses = [x.data_ptr() for x in arrays]
    addresses.append(addresses[-1] + 8 * capacity * kv_heads)  # the counters come first
    call = np.empty(FACTORS + 2, np.int64)
    call[:FACTORS] = (*numbers, *addresses)
    call[FACTORS:].view(np.float32)[:3] = scale * math.log2(math.e), key_scale, value_scale
    kinds = (_ELEMENT[x.dtype] for x in (query, output, pages))
    run_on_threads(attention_worker(*kinds, (0,) * (dim // 8)), call)
