"""CPU code of `window_scores`: numba code (`kernel_numba`) on the threads of PyTorch.

It reads K once. The weights of one row, ``Hq * w * S`` float32, are stored between two passes, and
the next row reuses their memory.
"""

import math
from functools import partial

import numpy as np
import torch
from torch.nn.functional import pad

from kvcompress_kernels.packed_attention.cpu import ELEMENT, float8_table, run_on_threads
from kvcompress_kernels.packed_attention.offsets import Offsets
from kvcompress_kernels.window_scores.kernel_numba import (
    ARRAYS,
    NUMBERS,
    PRODUCT_LINES,
    key_reader,
    score_worker,
)
from kvcompress_kernels.window_scores.result import Outputs, WindowScores

_COLUMNS = 64
"""Columns of a chunk."""


def compile_for(cache: torch.dtype) -> None:
    """Compile the code for a cache of this dtype, or load it from numba's cache on disk.

    Compiling takes several seconds, which a request must not wait for.
    """
    key_reader(ELEMENT[cache])
    score_worker()


def run_rows(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    scale: float | torch.Tensor,
    lengths: torch.Tensor | None,
    outputs: Outputs,
    sinks: torch.Tensor | None = None,
    offsets: Offsets | None = None,
) -> WindowScores:
    """Return the same as `window_scores_of_rows`, computed one row at a time."""
    (count, w, heads, dim), (_, kv_heads, _, block) = query.shape, key_pages.shape
    row_lengths = [tokens] * count if lengths is None else lengths.tolist()
    group, lines = heads // kv_heads, heads // kv_heads * w
    chunks = kv_heads * -(-max(row_lengths) // _COLUMNS)
    padded = -(-lines // PRODUCT_LINES) * PRODUCT_LINES
    # Columns past a shorter row's length stay 0.
    new = partial(torch.empty if lengths is None else torch.zeros, dtype=torch.float32)
    out_lines = kv_heads if outputs.grouped else heads
    total, recent = new(count, out_lines, tokens - w), new(count, out_lines, w)
    variance = new(count, out_lines, tokens - w) if outputs.variance else None
    last = new(count, out_lines, tokens) if outputs.last else None
    maximum = new(count, out_lines, tokens) if outputs.maximum else None
    entropy = torch.empty(count, kv_heads, dtype=torch.float64)
    shifts = torch.zeros(count, chunks, dtype=torch.float64)
    if offsets is None:
        tokens_at, dims_at = (
            torch.arange(key_pages.shape[axis]) * key_pages.stride(axis) for axis in (3, 2)
        )
    else:
        tokens_at, dims_at = offsets.key_tokens.long(), offsets.key_dims.long()
    if sinks is None:
        sinks = torch.full((count, heads), -torch.inf, dtype=torch.float32)
    counter, unused = torch.zeros(1, dtype=torch.int64), torch.empty(0)

    shared = {
        "elements": key_pages,
        "table": float8_table(key_pages.dtype),
        "key_tokens": tokens_at,
        "key_dims": dims_at,
        "counter": counter,
        "arrivals": torch.zeros(kv_heads, dtype=torch.int64),
        "weights": torch.empty(chunks, padded, _COLUMNS, dtype=torch.float32),
        "factors": torch.empty(chunks, lines, dtype=torch.float32),
        "sums": torch.empty(chunks, 3, lines, dtype=torch.float32),
        "pooling": torch.empty(kv_heads, lines, dtype=torch.float32),
        "totals": torch.empty(kv_heads, lines, dtype=torch.float32),
    }
    by_row = {
        "query": _in_blocks(query, kv_heads, scale, padded),
        "pages": pages.long().contiguous(),
        "sinks": sinks * math.log2(math.e),
        "entropy": entropy,
        "shifts": shifts,
        "total": total,
        "variance": unused if variance is None else variance,
        "recent": recent,
        "last": unused if last is None else last,
        "maximum": unused if maximum is None else maximum,
    }
    addresses = np.array([(shared | by_row)[name].data_ptr() for name in ARRAYS])
    steps = np.array(
        [by_row[name].stride(0) * by_row[name].itemsize if name in by_row else 0 for name in ARRAYS]
    )
    numbers = len(NUMBERS)
    call = np.empty(numbers + len(ARRAYS), np.int64)
    call[:numbers] = (
        *(0, key_reader(ELEMENT[key_pages.dtype]).address, call.ctypes.data),
        *(kv_heads, group, w, dim, tokens, block, *key_pages.stride()[:2]),
        *(outputs.pooled, outputs.grouped),
        *(outputs.variance, outputs.last, outputs.maximum, tokens - w, tokens),
    )
    worker = score_worker()
    for row, length in enumerate(row_lengths):
        call[NUMBERS.index("tokens")] = length
        call[numbers:] = addresses + row * steps
        for step in range(2):
            call[NUMBERS.index("step")] = step
            counter.zero_()
            run_on_threads(worker, call)
    return WindowScores(
        total, variance, entropy.sum(1).float(), shifts.sum(1).float(), recent, last, maximum
    )


def _in_blocks(
    query: torch.Tensor, kv_heads: int, scale: float | torch.Tensor, padded: int
) -> torch.Tensor:
    """Return the scaled queries in blocks of lines that are multiplied together.

    A line is one query of one query head. Products with keys are exponents of 2.

    Returns:
        ``[N, Hkv, padded / PRODUCT_LINES, D, PRODUCT_LINES]`` float32, with zeros after the last
        line.
    """
    count, w, _, dim = query.shape
    # A float scale is rounded as it would be in a tensor.
    factor = torch.as_tensor(scale, dtype=torch.float32).double() * math.log2(math.e)
    lines = query.view(count, w, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)
    lines = lines.float().reshape(count, kv_heads, -1, dim) * factor.float().view(-1, 1, 1, 1)
    lines = pad(lines, (0, 0, 0, padded - lines.shape[2]))
    blocks = lines.view(count, kv_heads, -1, PRODUCT_LINES, dim)
    return blocks.transpose(3, 4).contiguous()
