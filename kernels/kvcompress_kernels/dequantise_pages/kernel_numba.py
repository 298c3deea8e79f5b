"""Numba code of `dequantise_pages`, which `cpu.py` calls.

A task is one KV head of one packed page. It dequantises a group into a panel ``[64, D]`` that stays
in the processor's cache, then copies the panel into the ordinary pages. In CPU_ATTN's vector layout
the tokens of a key channel are adjacent, so keys are copied channel by channel.

All code is in this file, because numba's cache on disk only notices changes of the file that
defines the outermost function.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

try:
    from llvmlite import ir
    from numba import carray, cfunc, njit, types
    from numba.core import cgutils
    from numba.extending import intrinsic, overload
except ImportError as error:
    raise ImportError(
        "dequantise_pages on a CPU needs numba, which vLLM installs: pip install numba"
    ) from error

_MATH = {"contract", "nsz"}
_HALF_BIAS = np.float32(2.0**112)
_LARGEST_HALF = np.float32(65504.0)


def _cached(decorate: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    """Return a numba decorator that caches on disk where some cache folder is writable."""

    def apply(function: Callable[..., Any]) -> Any:
        try:
            return decorate(*args, cache=True, **options)(function)
        except RuntimeError:  # numba finds no folder that it can write to
            return decorate(*args, **options)(function)

    return apply


_compiled = _cached(njit, fastmath=_MATH, nogil=True, error_model="numpy")


@intrinsic
def _pointer(typing_context, address):
    """Return an integer address as a pointer."""

    def code(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), code


@intrinsic
def _fetch_add(typing_context, counters, index, value):
    """Add to a counter atomically and return its previous value."""

    def code(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        at = cgutils.get_item_pointer(context, builder, signature.args[0], array, [args[1]])
        return builder.atomic_rmw("add", at, args[2], "acq_rel")

    return types.int64(types.Array(types.int64, 1, "C"), types.intp, types.int64), code


@intrinsic
def _read_halves(typing_context, content, at, row, count):
    """Write float16 numbers, from byte `at` on, to `row` as float32.

    Args:
        count: a zero for each 8 numbers.
    """

    def code(context, builder, signature, args):
        content, row = (
            context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 2)
        )
        halves, floats = ir.VectorType(ir.HalfType(), 8), ir.VectorType(ir.FloatType(), 8)
        for first in range(0, 8 * len(count), 8):
            place = builder.gep(
                content, [builder.add(args[1], ir.Constant(args[1].type, 2 * first))]
            )
            numbers = builder.load(builder.bitcast(place, halves.as_pointer()), align=1)
            place = builder.gep(row, [ir.Constant(ir.IntType(64), first)])
            place = builder.bitcast(place, floats.as_pointer())
            builder.store(builder.fpext(numbers, floats), place, align=4)
        return context.get_dummy_value()

    return types.void(content, types.intp, row, count), code


def _as_element(x, like):
    """Return a finite float32 in the type of `like`, rounded to nearest, ties to even."""


@overload(_as_element, jit_options={"fastmath": _MATH})
def _as_element_of(x, like):
    if like == types.uint16:
        return lambda x, like: _to_bfloat16(x)
    if like == types.int16:
        return lambda x, like: np.int16(_to_half(x))
    return lambda x, like: x


@_compiled
def _to_bfloat16(x):
    bits = np.float32(x).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@_compiled
def _to_half(x):
    x = min(max(np.float32(x), -_LARGEST_HALF), _LARGEST_HALF)
    bits = np.float32(x).view(np.uint32)
    sign = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    # Subnormal: adding 0.5 shifts and rounds the mantissa.
    rounded = np.float32(magnitude.view(np.float32) + np.float32(0.5)).view(np.uint32)
    small = np.uint32(rounded - np.uint32(0x3F000000))
    odd = (magnitude >> np.uint32(13)) & np.uint32(1)
    normal = np.uint32(np.uint32(magnitude + np.uint32(0xC8000FFF) + odd) >> np.uint32(13))
    half = small if magnitude < np.uint32(0x38800000) else normal
    return np.uint16(sign | half)


@_compiled
def _read_keys(content, at, scales, minima, panel, eighths):
    """Write the keys of the group at byte `at` to the panel ``[64, D]``."""
    half = 4 * len(eighths)
    _read_halves(content, at + 112 * half, scales, eighths)
    _read_halves(content, at + 116 * half, minima, eighths)
    like = panel[0, 0]
    for t in range(64):
        row, codes = panel[t], at + t * half
        for j in range(half):
            code = content[np.uintp(codes + j)] & np.uint8(15)
            row[j] = _as_element(np.float32(minima[j] + scales[j] * np.float32(code)), like)
        for j in range(half):
            code = content[np.uintp(codes + j)] >> np.uint8(4)
            d = half + j
            row[d] = _as_element(np.float32(minima[d] + scales[d] * np.float32(code)), like)


@_compiled
def _read_values(content, at, scales, minima, panel, eighths):
    """Write the values of the group at byte `at` to the panel ``[64, D]``."""
    eighth = len(eighths)
    dim, tokens = 8 * eighth, (0, 0, 0, 0, 0, 0, 0, 0)
    _read_halves(content, at + 60 * dim, scales, tokens)
    _read_halves(content, at + 60 * dim + 128, minima, tokens)
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
                row[part * eighth + j] = _as_element(np.float32(minimum + scale * code), like)


@_compiled
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


@_compiled
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
    task = _fetch_add(counter, 0, 1)
    while task < count * kv_heads:
        page, head = task // kv_heads, task % kv_heads
        from_page = np.int64(packed[page]) * page_step + head * head_step
        for group in range(groups):
            at = (from_page + group * group_rows * row_step) * itemsize
            source = content
            if row_step != 2 * dim:
                for r in range(group_rows):
                    line = at + r * row_step * itemsize
                    for x in range(width):
                        copied[r * width + x] = content[np.uintp(line + x)]
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
        task = _fetch_add(counter, 0, 1)


ARGUMENTS = 16
"""Integers of a call: 7 numbers, then 9 addresses."""


@functools.cache
def worker(cache: Any, eighths: tuple[int, ...]) -> Any:
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
            carray(_pointer(n[7]), (1,), np.uint8),
            carray(_pointer(n[8]), (1,), cache),
            carray(_pointer(n[9]), (1,), np.int32),
            carray(_pointer(n[10]), (1,), np.int32),
            carray(_pointer(n[11]), (n[2],), np.int32),
            carray(_pointer(n[12]), (dim,), np.int32),
            carray(_pointer(n[13]), (n[2],), np.int32),
            carray(_pointer(n[14]), (dim,), np.int32),
            carray(_pointer(n[15]), (1,), np.int64),
            eighths,
        )  # fmt: skip

    c_function: Any = _cached(cfunc, types.void(types.voidptr))(work)
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(c_function.address)
