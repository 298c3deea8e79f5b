"""Numba code of `dequantise_pages` on a CPU.

A task is one KV head of one packed page. It dequantises a group into a panel ``[64, D]`` that stays
in the processor's cache, then copies the panel into the ordinary pages. In CPU_ATTN's vector layout
the tokens of a key channel are adjacent, so keys are copied channel by channel.
"""

import functools
from typing import Any

import numpy as np

from kvcompress_kernels.compiling_numba import (
    as_pointer,
    c_function,
    carray,
    compiled,
    fetch_add,
)
from kvcompress_kernels.elements_numba import (
    as_finite_element,
    copy_rows,
    read_halves,
)


@compiled
def _read_keys(content, at, scales, minima, panel, eighths):
    """Write the keys of the group at byte `at` to the panel ``[64, D]``."""
    half = 4 * len(eighths)
    read_halves(content, at + 112 * half, scales, eighths)
    read_halves(content, at + 116 * half, minima, eighths)
    like = panel[0, 0]
    for t in range(64):
        row, codes = panel[t], at + t * half
        for j in range(half):
            code = content[np.uintp(codes + j)] & np.uint8(15)
            x = np.float32(minima[j] + scales[j] * np.float32(code))
            row[j] = as_finite_element(x, like)
        for j in range(half):
            code = content[np.uintp(codes + j)] >> np.uint8(4)
            d = half + j
            x = np.float32(minima[d] + scales[d] * np.float32(code))
            row[d] = as_finite_element(x, like)


@compiled
def _read_values(content, at, scales, minima, panel, eighths):
    """Write the values of the group at byte `at` to the panel ``[64, D]``."""
    eighth = len(eighths)
    dim, tokens = 8 * eighth, (0, 0, 0, 0, 0, 0, 0, 0)
    read_halves(content, at + 60 * dim, scales, tokens)
    read_halves(content, at + 60 * dim + 128, minima, tokens)
    like = panel[0, 0]
    for t in range(64):
        row, scale, minimum = panel[t], scales[t], minima[t]
        lows, highs = at + 32 * dim + t * 2 * eighth, at + 48 * dim + t * eighth
        for part in range(8):
            bits, first = np.uint8(2 * (part // 2)), part % 2 * eighth
            for j in range(eighth):
                low = (content[np.uintp(lows + first + j)] >> bits) & np.uint8(3)
                high = (content[np.uintp(highs + j)] >> np.uint8(part)) & np.uint8(1)
                code = np.float32(low) + np.float32(4) * np.float32(high)
                x = np.float32(minimum + scale * code)
                row[part * eighth + j] = as_finite_element(x, like)


@compiled
def _write(elements, panel, starts, tokens, dims, run, eighths):
    """Copy the panel ``[64, D]`` into the pages of its tokens.

    Args:
        starts: for each token, its page's part of the head.
        tokens: for each token, its offset in that part.
        dims: the offset of each channel.
        run: tokens that lie in one page.
    """
    dim = 8 * len(eighths)
    if tokens[run - 1] - tokens[0] == run - 1:
        for first in range(0, 64, run):
            at = starts[first] + tokens[first]
            for d in range(dim):
                place = at + dims[d]
                for t in range(run):
                    elements[np.uintp(place + t)] = panel[first + t, d]
        return
    if dims[dim - 1] - dims[0] == dim - 1:
        for t in range(64):
            place = starts[t] + tokens[t] + dims[0]
            for d in range(dim):
                elements[np.uintp(place + d)] = panel[t, d]
        return
    for t in range(64):
        place = starts[t] + tokens[t]
        for d in range(dim):
            elements[np.uintp(place + dims[d])] = panel[t, d]


@compiled
def _dequantise(
    count, kv_heads, block, itemsize, page_step, head_step, row_step, content, elements, packed,
    destinations, key_tokens, key_dims, value_tokens, value_dims, counter, eighths,
):  # fmt: skip
    """Run tasks until none is left."""
    dim = 8 * len(eighths)
    group_rows, width = 32 // itemsize, 2 * dim * itemsize
    groups = block // group_rows
    run = min(block, 64)
    panel = np.empty((64, dim), elements.dtype)
    copied = np.empty(64 * dim, np.uint8)
    scales, minima = np.empty(max(dim, 64), np.float32), np.empty(max(dim, 64), np.float32)
    starts = np.empty(64, np.int64)
    k_tokens, v_tokens = np.empty(64, np.int64), np.empty(64, np.int64)
    task = fetch_add(counter, 0, 1)
    while task < count * kv_heads:
        page, head = task // kv_heads, task % kv_heads
        from_page = np.int64(packed[page]) * page_step + head * head_step
        for group in range(groups):
            at = (from_page + group * group_rows * row_step) * itemsize
            source = content
            if row_step != 2 * dim:
                copy_rows(content, at, row_step * itemsize, width, group_rows, copied)
                source, at = copied, 0
            for t in range(64):
                token = (page * groups + group) * 64 + t
                to_page = np.int64(destinations[token // block])
                starts[t] = to_page * page_step + head * head_step
                k_tokens[t], v_tokens[t] = key_tokens[token % block], value_tokens[token % block]
            _read_keys(source, at, scales, minima, panel, eighths)
            _write(elements, panel, starts, k_tokens, key_dims, run, eighths)
            _read_values(source, at, scales, minima, panel, eighths)
            _write(elements, panel, starts, v_tokens, value_dims, run, eighths)
        task = fetch_add(counter, 0, 1)


ARGUMENTS = 16
"""Integers of a call: 7 numbers, then 9 addresses."""


@functools.cache
def dequantise_worker(cache: Any, eighths: tuple[int, ...]) -> Any:
    """Return the C function that each thread runs, for an element type and a head dim.

    Args:
        cache: numpy type of the cache's elements.
        eighths: D / 8 zeros. The length of a tuple is part of its type, so the compiler knows D.
    """

    def work(call):
        n = carray(call, (ARGUMENTS,), np.int64)
        dim = 8 * len(eighths)
        _dequantise(
            n[0], n[1], n[2], n[3], n[4], n[5], n[6],
            carray(as_pointer(n[7]), (1,), np.uint8),
            carray(as_pointer(n[8]), (1,), cache),
            carray(as_pointer(n[9]), (1,), np.int32),
            carray(as_pointer(n[10]), (1,), np.int32),
            carray(as_pointer(n[11]), (n[2],), np.int32),
            carray(as_pointer(n[12]), (dim,), np.int32),
            carray(as_pointer(n[13]), (n[2],), np.int32),
            carray(as_pointer(n[14]), (dim,), np.int32),
            carray(as_pointer(n[15]), (1,), np.int64),
            eighths,
        )  # fmt: skip

    return c_function(work)
