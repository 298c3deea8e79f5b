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
from kvcompress_kernels.packed_attention.kernel_numba import (
    ARRAYS,
    FACTORS,
    NUMBERS,
    attention_worker,
)
from kvcompress_kernels.packed_attention.offsets import Offsets
from kvcompress_kernels.packed_attention.scratch import (
    SPLITS,
    query_tile,
    split_lines,
    workspace,
)

_NAME = "packed_attention"
ELEMENT = {
    torch.bfloat16: np.uint16,
    torch.float16: np.int16,
    torch.float32: np.float32,
    torch.float8_e4m3fn: np.uint8,
    torch.float8_e5m2: np.uint8,
}

# In the order in which `LayerCall` sets them for every call.
_VARYING = [
    (*NUMBERS, *ARRAYS).index(name)
    for name in (
        *("row_count", "tile", "tables_step"),
        *("query_token_step", "query_head_step", "output_token_step", "output_head_step"),
        *("query", "output", "tables", "lengths", "query_start"),
    )
]


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
def float8_table(dtype: torch.dtype) -> torch.Tensor:
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
    kinds = (ELEMENT[dtype] for dtype in (query, output or query, cache))
    attention_worker(*kinds, (0,) * (head_dim // 8))


class LayerCall:
    """Runs `packed_attention` of one layer; keeps the arguments of its C function between calls.

    Args:
        query_heads: query heads of the layer. The other arguments are as in `LayerAttention`.
    """

    def __init__(
        self,
        pages: torch.Tensor,
        offsets: Offsets | None,
        packed: torch.Tensor,
        packed_tokens: torch.Tensor,
        slots: torch.Tensor,
        live: torch.Tensor,
        query_heads: int,
        *,
        scale: float,
        key_scale: float,
        value_scale: float,
        sinks: torch.Tensor | None,
        scratch: torch.Tensor | None,
    ) -> None:
        _, kv_heads, block, width = pages.shape
        dim, self._group, self._live = width // 2, query_heads // kv_heads, live
        if scratch is None:
            scratch = workspace(query_heads, kv_heads, dim, rows=int(live), device="cpu")
        lines = split_lines(self._group)
        self._capacity = len(scratch) // (kv_heads * (2 + SPLITS * lines * (dim + 2)))
        where = row_offsets(block, pages.stride(2), dim) if offsets is None else offsets
        table, counter = float8_table(pages.dtype), torch.zeros(1, dtype=torch.int64)
        arrays = {
            "elements": pages,
            "content": pages,
            "table": table,
            "packed": packed,
            "packed_tokens": packed_tokens,
            "slots": slots,
            "sinks": table if sinks is None else sinks * math.log2(math.e),
            **where._asdict(),
            "counter": counter,
            "arrivals": scratch,
        }
        numbers = {
            "kv_heads": kv_heads,
            "group": self._group,
            "block": block,
            "itemsize": pages.itemsize,
            "page_step": pages.stride(0),
            "head_step": pages.stride(1),
            "row_step": pages.stride(2),
            "packed_step": packed.stride(0),
            "packed_tokens_step": packed_tokens.stride(0),
            "has_sinks": sinks is not None,
            "max_split_lines": lines,
            **{name: x.data_ptr() for name, x in arrays.items()},
            # The counters come first.
            "partials": scratch.data_ptr() + 8 * self._capacity * kv_heads,
        }
        self._arrays, self._counter = arrays, counter.numpy()
        names = *NUMBERS, *ARRAYS, "factors", "factors"
        self._call = np.array([numbers.get(name, 0) for name in names], np.int64)
        factors = self._call[FACTORS:].view(np.float32)
        factors[:3] = scale * math.log2(math.e), key_scale, value_scale
        self._cache, self._eighths = ELEMENT[pages.dtype], (0,) * (dim // 8)

    def __call__(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        query_start: torch.Tensor,
        max_query_tokens: int,
    ) -> None:
        call, rows = self._call, int(self._live)
        rule = "workspace must hold the batch's rows"
        require(self._capacity >= rows, _NAME, rule, (self._capacity, rows))
        query_steps, output_steps = query.stride(), output.stride()
        call[_VARYING] = (
            *(rows, query_tile(self._group, max_query_tokens), tables.stride(0)),
            *(query_steps[0], query_steps[1], output_steps[0], output_steps[1]),
            *(query.data_ptr(), output.data_ptr(), tables.data_ptr(), lengths.data_ptr()),
            query_start.data_ptr(),
        )
        self._counter[0] = 0
        kinds = ELEMENT[query.dtype], ELEMENT[output.dtype], self._cache
        run_on_threads(attention_worker(*kinds, self._eighths), call)
