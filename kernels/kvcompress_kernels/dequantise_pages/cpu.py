"""CPU code of `dequantise_pages`: numba code (`kernel_numba`) on the threads of PyTorch."""

import numpy as np
import torch

from kvcompress_kernels.dequantise_pages.kernel_numba import ARGUMENTS, dequantise_worker
from kvcompress_kernels.packed_attention.cpu import row_offsets, run_on_threads
from kvcompress_kernels.packed_attention.offsets import Offsets

_ELEMENT = {torch.bfloat16: np.uint16, torch.float16: np.int16, torch.float32: np.float32}


def compile_for(head_dim: int, cache: torch.dtype) -> None:
    """Compile the code for a layer, or load it from numba's cache on disk.

    Compiling takes several seconds, which a request must not wait for.

    Args:
        head_dim: the layer's head dim.
        cache: dtype of the cache.
    """
    dequantise_worker(_ELEMENT[cache], (0,) * (head_dim // 8))


def run(
    pages: torch.Tensor,
    offsets: Offsets | None,
    packed: torch.Tensor,
    destinations: torch.Tensor,
) -> None:
    _, kv_heads, block, width = pages.shape
    where = row_offsets(block, pages.stride(2), width // 2) if offsets is None else offsets
    counter = torch.zeros(1, dtype=torch.int64)
    numbers = len(packed), kv_heads, block, pages.itemsize, *pages.stride()[:3]
    arrays = pages, pages, packed, destinations, *where, counter
    call = np.array([*numbers, *(x.data_ptr() for x in arrays)], np.int64)
    assert len(call) == ARGUMENTS
    run_on_threads(dequantise_worker(_ELEMENT[pages.dtype], (0,) * (width // 16)), call)
