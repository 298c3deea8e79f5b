"""Numba code of `packed_attention`, `dequantise_pages` and `window_scores` on a CPU.

Attention: a task is one KV head of one row, a tile of its query tokens and a share of its tokens.
Tokens are read in chunks of 64: first the packed groups, then the ordinary tokens. All query heads
of the KV head and all query tokens of the tile are the lines of a small matrix product:

* the scores add 8 channels at a time, in a panel ``[8, 64]`` of float32 that stays in the L1 cache,
* the output adds 8 tokens at a time, in a panel ``[8, D]``.

A packed group fills its panels with codes. The key scales are folded into the query, and the value
scales into the probabilities, so no key or value is ever dequantised.

A long row is split into up to `SPLITS` tasks. The task that finishes last joins their partial
results. Splits depend only on the row's lengths, so neither the batch nor the number of threads
changes a result.

Dequantising: a task is one KV head of one packed page. It dequantises a group into a panel
``[64, D]`` that stays in the processor's cache, then copies the panel into the ordinary pages. In
CPU_ATTN's vector layout the tokens of a key channel are adjacent, so keys are copied channel by
channel.

Window scores: a task is one KV head of one row and a few chunks of 64 columns. The first pass
multiplies queries and keys, and replaces each line's logits in a chunk by weights relative to a
power of 2 near their maximum. The last task of a KV head computes the lines' factors. The second
pass reduces the weights over the window.

All code is in this file, because numba's cache on disk only notices changes of the file that
defines the outermost function. `kvcompress_kernels.packed_attention.cpu` says which threads run it.
"""

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from kvcompress_kernels.packed_attention.scratch import SPLITS

try:
    from llvmlite import ir
    from llvmlite.binding import ffi
    from numba import carray, cfunc, njit, types
    from numba.core import cgutils
    from numba.extending import intrinsic, overload
except ImportError as error:
    raise ImportError(
        "window scores and packed pages on a CPU need numba, which vLLM installs: pip install numba"
    ) from error


def _hide_dict(library: Any, get: Callable[[Any, str], Any]) -> None:
    """Make attribute `__dict__` of llvmlite's library missing. Otherwise it is a C function.

    When an engine starts, vLLM searches the attributes of all modules for Triton kernels. It fails
    on an object whose `__dict__` is no dictionary.
    """

    def get_attribute(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return get(self, name)

    library.__getattr__ = get_attribute


_hide_dict(type(ffi.lib), type(ffi.lib).__getattr__)

_FEW_LINES = 8
"""Most lines for which codes are unpacked again for every 4 lines instead of stored in a panel."""
_LANES = 16
"""Float32 in a vector. LLVM splits it where vectors are shorter."""
_MIN_CHUNKS = 8
"""Least chunks of a split."""
# No "nnan" and "ninf": pages may hold NaN after a row's last token, and a sink may be infinite.
_MATH = {"contract", "reassoc", "arcp", "nsz", "afn"}
_ONE, _LOWEST, _LEAST_EXPONENT = np.float32(1), np.float32(-1e30), np.float32(-126)
_POWERS = tuple(np.float32(math.log(2) ** k / math.factorial(k)) for k in range(7))
_HALF_BIAS, _LARGEST_HALF = np.float32(2.0**112), np.float32(65504.0)


def _cached(decorate: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    """Return a numba decorator that caches on disk where some cache folder is writable."""

    def apply(function: Callable[..., Any]) -> Any:
        try:
            return decorate(*args, cache=True, **options)(function)
        except RuntimeError:  # numba finds no folder that it can write to
            return decorate(*args, **options)(function)

    return apply


_compiled = _cached(
    njit, fastmath=_MATH, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
)


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


# -- conversions ----------------------------------------------------------------------------------
# Numba knows neither bfloat16 nor float16 nor float8. An array of bfloat16 is passed as uint16, of
# float16 as int16 and of float8 as uint8 with a table.


def _as_float(x, table):
    """Return an element of an array as float32."""


@overload(_as_float, jit_options={"fastmath": _MATH})
def _as_float_of(x, table):
    if x == types.uint16:
        return lambda x, table: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    if x == types.int16:
        return lambda x, table: _from_half(np.uint32(np.uint16(x)))
    if x == types.uint8:
        return lambda x, table: table[np.uintp(x)]
    return lambda x, table: x


@_compiled
def _from_half(bits):
    """Return the float32 of float16 bits, subnormal and infinite ones included."""
    magnitude = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13))
    scaled = np.float32(magnitude.view(np.float32) * _HALF_BIAS).view(np.uint32)
    special = np.uint32(magnitude | np.uint32(0x70000000))
    scaled = special if magnitude >= np.uint32(0x0F800000) else scaled
    sign = np.uint32((bits & np.uint32(0x8000)) << np.uint32(16))
    return np.uint32(scaled | sign).view(np.float32)


def _as_element(x, like):
    """Return a float32 in the type of `like`, rounded to nearest, ties to even."""


@overload(_as_element, jit_options={"fastmath": _MATH})
def _as_element_of(x, like):
    if like == types.uint16:
        return lambda x, like: _bfloat16(x) if x == x else np.uint16(0x7FC0)
    if like == types.int16:
        return lambda x, like: np.int16(_any_half(x))
    return lambda x, like: x


def _as_finite_element(x, like):
    """Return a finite float32 as `_as_element` does, but at most the largest float16."""


@overload(_as_finite_element, jit_options={"fastmath": _MATH})
def _as_finite_element_of(x, like):
    if like == types.uint16:
        return lambda x, like: _bfloat16(x)
    if like == types.int16:
        return lambda x, like: np.int16(_half(min(max(x, -_LARGEST_HALF), _LARGEST_HALF)))
    return lambda x, like: x


@_compiled
def _bfloat16(x):
    """Return the bfloat16 bits of a number other than NaN."""
    bits = np.float32(x).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@_compiled
def _half(x):
    """Return the float16 bits of a number below 65536."""
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
def _any_half(x):
    """Return the float16 bits of any number. 65536 and more become infinite."""
    bits = np.float32(x).view(np.uint32)
    sign = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    special = np.uint32(0x7E00) if magnitude > np.uint32(0x7F800000) else np.uint32(0x7C00)
    return _half(x) if magnitude < np.uint32(0x47800000) else np.uint16(sign | special)


@_compiled
def _exp2(x):
    """Return 2 ** x for x <= 0 to 1e-7, and 2 ** -126 for smaller exponents."""
    x = max(x, _LEAST_EXPONENT)
    whole = np.rint(x)
    return np.float32(_power(np.float32(x - whole)) * _power_of_two(whole))


@_compiled
def _power(part):
    """Return 2 ** part for parts between -0.5 and 0.5. 2 ** 0 is exact."""
    power = _POWERS[6]
    power = np.float32(power * part + _POWERS[5])
    power = np.float32(power * part + _POWERS[4])
    power = np.float32(power * part + _POWERS[3])
    power = np.float32(power * part + _POWERS[2])
    power = np.float32(power * part + _POWERS[1])
    return np.float32(power * part + _ONE)


@_compiled
def _power_of_two(whole):
    """Return 2 ** whole for whole numbers between -126 and 127."""
    return np.int32(np.int32(np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


# -- products -------------------------------------------------------------------------------------


@_compiled
def _add_scores(scores, query, panel, channels, lines):
    """Add the products with 8 channels of 64 tokens to the scores ``[lines, 64]``."""
    c0, c1, c2, c3, c4, c5, c6, c7 = channels
    for m in range(lines):
        q = query[m]
        q0, q1, q2, q3 = q[c0], q[c1], q[c2], q[c3]
        q4, q5, q6, q7 = q[c4], q[c5], q[c6], q[c7]
        row = scores[m]
        for t in range(64):
            row[t] += (
                (q0 * panel[0, t] + q1 * panel[1, t]) + (q2 * panel[2, t] + q3 * panel[3, t])
            ) + ((q4 * panel[4, t] + q5 * panel[5, t]) + (q6 * panel[6, t] + q7 * panel[7, t]))


@_compiled
def _add_values(sums, weights, panel, first, lines, eighths):
    """Add 8 tokens of the panel ``[8, D]``, from token `first`, to the sums ``[lines, D]``."""
    for m in range(lines):
        w = weights[m]
        w0, w1, w2, w3 = w[first], w[first + 1], w[first + 2], w[first + 3]
        w4, w5, w6, w7 = w[first + 4], w[first + 5], w[first + 6], w[first + 7]
        row = sums[m]
        for d in range(8 * len(eighths)):
            row[d] += (
                (w0 * panel[0, d] + w1 * panel[1, d]) + (w2 * panel[2, d] + w3 * panel[3, d])
            ) + ((w4 * panel[4, d] + w5 * panel[5, d]) + (w6 * panel[6, d] + w7 * panel[7, d]))


@_compiled
def _softmax(scores, tops, totals, sums, line, limit, eighths):
    """Turn a line's 64 scores into weights, 0 from token `limit` on, and rescale its sums."""
    row = scores[line]
    top = tops[line]
    for t in range(64):
        top = max(top, row[t] if t < limit else _LOWEST)
    total = np.float32(0)
    for t in range(64):
        weight = _exp2(np.float32(row[t] - top))
        weight = weight if t < limit else np.float32(0)
        row[t] = weight
        total += weight
    if top > tops[line]:
        rise = _exp2(np.float32(tops[line] - top))
        total += totals[line] * rise
        old = sums[line]
        for d in range(8 * len(eighths)):
            old[d] *= rise
        tops[line] = top
        totals[line] = total
    else:
        totals[line] += total


# -- vectors --------------------------------------------------------------------------------------
# LLVM does not find these loops by itself, because their results stay in registers.


def _elements(context, builder, signature, args, index):
    """Return a pointer to the first element of an array argument."""
    return context.make_array(signature.args[index])(context, builder, args[index]).data


def _vector_at(builder, pointer, at, element, lanes):
    """Return a pointer to a vector of `lanes` elements from element `at` of `pointer`."""
    vector = ir.VectorType(element, lanes)
    return builder.bitcast(builder.gep(pointer, [at]), vector.as_pointer())


def _each(number, lanes):
    """Return a vector of equal 32-bit integers."""
    return ir.Constant(ir.VectorType(ir.IntType(32), lanes), [number] * lanes)


def _multiply_add(builder, total, number, vector):
    """Add the product of a float32 number and a vector to the vector variable `total`."""
    one = builder.insert_element(
        ir.Constant(vector.type, ir.Undefined), number, ir.Constant(ir.IntType(32), 0)
    )
    splat = builder.shuffle_vector(one, one, _each(0, vector.type.count))
    product = builder.fmul(splat, vector, flags=("contract",))
    builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)


@intrinsic
def _read_halves(typing_context, content, at, row, eighths):
    """Write 8 float16 for each element of `eighths`, from byte `at` on, to `row` as float32."""

    def code(context, builder, signature, args):
        content, row = (_elements(context, builder, signature, args, i) for i in (0, 2))
        halves = ir.VectorType(ir.HalfType(), 8)
        for first in range(0, 8 * len(eighths), 8):
            place = builder.gep(
                content, [builder.add(args[1], ir.Constant(args[1].type, 2 * first))]
            )
            numbers = builder.load(builder.bitcast(place, halves.as_pointer()), align=1)
            numbers = builder.fpext(numbers, ir.VectorType(ir.FloatType(), 8))
            at = ir.Constant(ir.IntType(64), first)
            builder.store(numbers, _vector_at(builder, row, at, ir.FloatType(), 8), align=4)
        return context.get_dummy_value()

    return types.void(content, types.intp, row, eighths), code


@intrinsic
def _add_packed_scores(typing_context, words, query, scores, first_line, eighths, block):
    """Add the products of a block of lines with 64 packed keys to their scores.

    Args:
        words: ``[D / 8, 64]`` uint32: key codes, transposed.
        query: ``[lines, D]``.
        scores: ``[lines, 64]``.
        first_line: first line of the block.
        eighths: D / 8 zeros.
        block: a zero for each line of the block.
    """
    dim, count, parts = 8 * len(eighths), len(block), 2

    def code(context, builder, signature, args):
        int32, float32, index = ir.IntType(32), ir.FloatType(), ir.IntType(64)
        words, query, scores = (_elements(context, builder, signature, args, i) for i in range(3))
        vector = ir.VectorType(float32, _LANES)

        def number(x):
            return ir.Constant(index, x)

        lines = [builder.add(args[3], number(i)) for i in range(count)]
        query_lines = [builder.mul(line, number(dim)) for line in lines]
        totals = [
            [cgutils.alloca_once(builder, vector) for _ in range(parts)] for _ in range(count)
        ]
        with cgutils.for_range(builder, number(64 // _LANES // parts)) as loop:
            first = builder.mul(loop.index, number(_LANES * parts))
            firsts = [builder.add(first, number(_LANES * part)) for part in range(parts)]
            places = [
                [
                    _vector_at(
                        builder,
                        scores,
                        builder.add(builder.mul(line, number(64)), at),
                        float32,
                        _LANES,
                    )
                    for at in firsts
                ]
                for line in lines
            ]
            for line in range(count):
                for part in range(parts):
                    value = builder.load(places[line][part], align=4)
                    builder.store(value, totals[line][part])
            with cgutils.for_range(builder, number(dim // 8)) as inner:
                row = builder.mul(inner.index, number(64))
                packed = [
                    builder.load(
                        _vector_at(builder, words, builder.add(row, at), int32, _LANES), align=4
                    )
                    for at in firsts
                ]
                low = builder.mul(inner.index, number(4))
                for i in range(8):
                    channel = builder.add(low, number(i // 2 + i % 2 * (dim // 2)))
                    for part in range(parts):
                        bits = builder.lshr(packed[part], _each(4 * i, _LANES))
                        bits = builder.and_(bits, _each(15, _LANES))
                        codes = builder.sitofp(bits, vector)
                        for line in range(count):
                            at = builder.add(query_lines[line], channel)
                            value = builder.load(builder.gep(query, [at]))
                            _multiply_add(builder, totals[line][part], value, codes)
            for line in range(count):
                for part in range(parts):
                    builder.store(builder.load(totals[line][part]), places[line][part], align=4)
        return context.get_dummy_value()

    return types.void(words, query, scores, types.intp, eighths, block), code


def _value_codes(builder, content, low, high, channels, eighth):
    """Yield the value codes of a token's `channels` in each quarter, as vectors of float32.

    Args:
        low: byte of the low bits of the first channel.
        high: first byte of the token's high bits.
        channels: neighbours in the first quarter.
        eighth: an eighth of the channels.
    """
    byte, lanes = ir.IntType(8), len(channels)
    words = ir.VectorType(ir.IntType(32), lanes)
    low_bits = builder.load(_vector_at(builder, content, low, byte, lanes), align=1)
    low_bits = builder.zext(low_bits, words)
    bits = builder.load(_vector_at(builder, content, high, byte, eighth), align=1)
    source = ir.Constant(words, [channel % eighth for channel in channels])
    high_bits = builder.zext(builder.shuffle_vector(bits, bits, source), words)
    # The second half of a quarter has the next bit of the same byte. Bit 2 is the code's.
    shift = ir.Constant(words, [2 if channel < eighth else 1 for channel in channels])
    high_bits = builder.shl(high_bits, shift)
    for i in range(4):
        bits = builder.and_(builder.lshr(low_bits, _each(2 * i, lanes)), _each(3, lanes))
        top = builder.and_(builder.lshr(high_bits, _each(2 * i, lanes)), _each(4, lanes))
        yield builder.sitofp(builder.or_(bits, top), ir.VectorType(ir.FloatType(), lanes))


@intrinsic
def _add_packed_values(
    typing_context, content, low, high, weights, sums, first_line, tokens, eighths, block
):
    """Add the weighted value codes of a packed group to the sums of a block of lines.

    Args:
        content: bytes.
        low, high: bytes at which the group's bit planes start.
        weights: ``[lines, 64]``.
        sums: ``[lines, D]``.
        first_line: first line of the block.
        tokens: tokens of the group.
        eighths: D / 8 zeros.
        block: a zero for each line of the block.
    """
    eighth, count = len(eighths), len(block)
    quarter, dim = 2 * eighth, 8 * eighth

    def code(context, builder, signature, args):
        float32, index = ir.FloatType(), ir.IntType(64)
        content = _elements(context, builder, signature, args, 0)
        weights, sums = (_elements(context, builder, signature, args, i) for i in (3, 4))

        def number(x):
            return ir.Constant(index, x)

        lines = [builder.add(args[5], number(i)) for i in range(count)]
        weight_lines = [builder.mul(line, number(64)) for line in lines]
        sum_lines = [builder.mul(line, number(dim)) for line in lines]
        # The lanes are neighbours in a quarter of the channels.
        for first in range(0, quarter, _LANES):
            lanes = min(_LANES, quarter - first)
            channels = range(first, first + lanes)
            vector = ir.VectorType(float32, lanes)
            totals = [
                [cgutils.alloca_once(builder, vector) for _ in range(4)] for _ in range(count)
            ]
            places = [
                [
                    _vector_at(builder, sums, builder.add(line, number(at)), float32, lanes)
                    for at in range(first, dim, quarter)
                ]
                for line in sum_lines
            ]
            for line in range(count):
                for i in range(4):
                    builder.store(builder.load(places[line][i], align=4), totals[line][i])
            with cgutils.for_range(builder, args[6]) as loop:
                token = loop.index
                low = builder.add(args[1], builder.mul(token, number(quarter)))
                low = builder.add(low, number(first))
                high = builder.add(args[2], builder.mul(token, number(eighth)))
                values = [
                    builder.load(builder.gep(weights, [builder.add(line, token)]))
                    for line in weight_lines
                ]
                all_codes = _value_codes(builder, content, low, high, channels, eighth)
                for i, codes in enumerate(all_codes):
                    for line in range(count):
                        _multiply_add(builder, totals[line][i], values[line], codes)
            for line in range(count):
                for i in range(4):
                    builder.store(builder.load(totals[line][i]), places[line][i], align=4)
        return context.get_dummy_value()

    arrays = content, types.intp, types.intp, weights, sums
    return types.void(*arrays, types.intp, types.intp, eighths, block), code


# -- packed groups --------------------------------------------------------------------------------


@_compiled
def _group_scores(content, at, query, scaled, scales, minima, scores, words, panel, lines, eighths):
    """Write the scores of the packed group at byte `at`."""
    dim = 8 * len(eighths)
    _read_halves(content, at + 56 * dim, scales, eighths)
    _read_halves(content, at + 58 * dim, minima, eighths)
    for m in range(lines):
        base = np.float32(0)
        for d in range(dim):
            scaled[m, d] = query[m, d] * scales[d]
            base += query[m, d] * minima[d]
        scores[m, :] = base
    # Transpose in words of 4 bytes, so that 64 tokens lie side by side.
    for t in range(64):
        for w in range(len(eighths)):
            byte = at + t * (dim // 2) + 4 * w
            words[w, t] = (
                np.uint32(content[np.uintp(byte)])
                | (np.uint32(content[np.uintp(byte + 1)]) << np.uint32(8))
                | (np.uint32(content[np.uintp(byte + 2)]) << np.uint32(16))
                | (np.uint32(content[np.uintp(byte + 3)]) << np.uint32(24))
            )
    if lines <= _FEW_LINES:
        # The scores of up to 4 lines stay in registers.
        m = 0
        while m + 4 <= lines:
            _add_packed_scores(words, scaled, scores, m, eighths, (0, 0, 0, 0))
            m += 4
        if m + 3 == lines:
            _add_packed_scores(words, scaled, scores, m, eighths, (0, 0, 0))
        elif m + 2 == lines:
            _add_packed_scores(words, scaled, scores, m, eighths, (0, 0))
        elif m + 1 == lines:
            _add_packed_scores(words, scaled, scores, m, eighths, (0,))
        return
    for w in range(len(eighths)):
        for i in range(8):
            for t in range(64):
                code = (words[w, t] >> np.uint32(4 * i)) & np.uint32(15)
                panel[i, t] = np.float32(np.int32(code))
        c, h = 4 * w, 4 * w + dim // 2
        channels = c, h, c + 1, h + 1, c + 2, h + 2, c + 3, h + 3
        _add_scores(scores, scaled, panel, channels, lines)


@intrinsic
def _decode_values(typing_context, content, low, high, row, eighths):
    """Write the D value codes of a token to `row` as float32.

    Its low bits are at byte `low` and its high bits at byte `high`. The quarters of the channels
    are the lanes of one vector, which LLVM does not find by itself.
    """
    eighth = len(eighths)
    quarter = 2 * eighth

    def code(context, builder, signature, args):
        content, row = (_elements(context, builder, signature, args, i) for i in (0, 3))
        all_codes = _value_codes(builder, content, args[1], args[2], range(quarter), eighth)
        for i, codes in enumerate(all_codes):
            at = ir.Constant(ir.IntType(64), i * quarter)
            place = _vector_at(builder, row, at, ir.FloatType(), quarter)
            builder.store(codes, place, align=4)
        return context.get_dummy_value()

    return types.void(content, types.intp, types.intp, row, eighths), code


@_compiled
def _group_values(content, at, weights, sums, scales, minima, panel, tokens, lines, eighths):
    """Add the values of the packed group at byte `at`."""
    dim = 8 * len(eighths)
    _read_halves(content, at + 60 * dim, scales, (0, 0, 0, 0, 0, 0, 0, 0))
    _read_halves(content, at + 60 * dim + 128, minima, (0, 0, 0, 0, 0, 0, 0, 0))
    for t in range(tokens, 64):  # bytes after the last token may hold NaN
        scales[t] = np.float32(0)
        minima[t] = np.float32(0)
    for m in range(lines):
        base = np.float32(0)
        for t in range(64):
            base += weights[m, t] * minima[t]
            weights[m, t] *= scales[t]
        for d in range(dim):
            sums[m, d] += base
    low, high = at + 32 * dim, at + 48 * dim
    if lines <= _FEW_LINES:
        m = 0
        while m + 4 <= lines:
            _add_packed_values(content, low, high, weights, sums, m, tokens, eighths, (0, 0, 0, 0))
            m += 4
        if m + 3 == lines:
            _add_packed_values(content, low, high, weights, sums, m, tokens, eighths, (0, 0, 0))
        elif m + 2 == lines:
            _add_packed_values(content, low, high, weights, sums, m, tokens, eighths, (0, 0))
        elif m + 1 == lines:
            _add_packed_values(content, low, high, weights, sums, m, tokens, eighths, (0,))
        return
    for first in range(0, tokens, 8):
        for t in range(8):
            low = at + 32 * dim + (first + t) * (dim // 4)
            high = at + 48 * dim + (first + t) * (dim // 8)
            _decode_values(content, low, high, panel[t], eighths)
        _add_values(sums, weights, panel, first, lines, eighths)


# -- ordinary pages -------------------------------------------------------------------------------


@_compiled
def _step(offsets):
    """Return the distance of neighbours in runs of 16 elements; 0 if it is not constant."""
    if len(offsets) % 16:
        return 0
    step = offsets[1] - offsets[0]
    for i in range(len(offsets)):
        if i % 16 and offsets[i] - offsets[i - 1] != step:
            return 0
    return step


@_compiled
def _read_run(elements, at, step, table, row, first):
    """Write 16 elements that are `step` (1 or 2) apart to `row`, from column `first` on."""
    if step == 1:
        for i in range(16):
            row[first + i] = _as_float(elements[np.uintp(at + i)], table)
    else:
        for i in range(16):
            row[first + i] = _as_float(elements[np.uintp(at + 2 * i)], table)


@_compiled
def _ordinary_scores(
    elements, table, starts, dims, step, tokens, query, scores, panel, lines, eighths
):
    """Write the scores of up to 64 ordinary tokens, whose elements 0 are at `starts`."""
    for m in range(lines):
        scores[m, :] = np.float32(0)
    for c in range(0, 8 * len(eighths), 8):
        for j in range(8):
            dim, row = dims[c + j], panel[j]
            if step == 1 or step == 2:
                for first in range(0, tokens, 16):
                    _read_run(elements, starts[first] + dim, step, table, row, first)
            else:
                for t in range(tokens):
                    row[t] = _as_float(elements[np.uintp(starts[t] + dim)], table)
        channels = c, c + 1, c + 2, c + 3, c + 4, c + 5, c + 6, c + 7
        _add_scores(scores, query, panel, channels, lines)


@_compiled
def _ordinary_values(
    elements, table, starts, dims, step, tokens, weights, sums, panel, lines, eighths
):
    """Add the values of up to 64 ordinary tokens."""
    for first in range(0, tokens, 8):
        for t in range(8):
            row = panel[t]
            if first + t >= tokens:
                row[:] = np.float32(0)
                continue
            start = starts[first + t]
            if step == 1 or step == 2:
                for c in range(0, 8 * len(eighths), 16):
                    _read_run(elements, start + dims[c], step, table, row, c)
            else:
                for d in range(8 * len(eighths)):
                    row[d] = _as_float(elements[np.uintp(start + dims[d])], table)
        _add_values(sums, weights, panel, first, lines, eighths)


# -- attention ------------------------------------------------------------------------------------

NUMBERS = (
    "row_count", "kv_heads", "group", "block", "itemsize", "tile", "page_step", "head_step",
    "row_step", "query_token_step", "query_head_step", "output_token_step", "output_head_step",
    "packed_step", "packed_tokens_step", "tables_step", "has_sinks", "max_split_lines",
)  # fmt: skip


@_compiled
def _aligned(rows, columns):
    """Return float32 that starts a cache line, because vectors that cross one take longer."""
    memory = np.empty(rows * columns + 16, np.float32)
    first = -(memory.ctypes.data // 4) % 16
    return memory[first : first + rows * columns].reshape((rows, columns))


@_compiled
def _copy_rows(content, at, step, width, rows, copied):
    """Copy rows of `width` bytes, which start `step` bytes apart from byte `at` on."""
    for row in range(rows):
        line = at + row * step
        for x in range(width):
            copied[row * width + x] = content[np.uintp(line + x)]


@_compiled
def _attend(
    rows, kv_heads, group, block, itemsize, tile, page_step, head_step, row_step,
    query_token_step, query_head_step, output_token_step, output_head_step,
    packed_step, packed_tokens_step, tables_step, has_sinks, max_split_lines,
    factors, query, output, elements, content, table, packed, packed_tokens, tables, lengths,
    query_start, slots, sinks, key_tokens, key_dims, value_tokens, value_dims,
    counter, arrivals, partials, eighths,
):  # fmt: skip
    """Run tasks until none is left. Every thread calls this."""
    dim = 8 * len(eighths)
    scale, key_scale, value_scale = factors[0], factors[1], factors[2]
    key_step, value_step = _step(key_tokens), _step(value_dims)
    group_rows = 32 // itemsize
    page_groups = block // group_rows
    max_lines = tile * group
    q = _aligned(max_lines, dim)
    scaled = _aligned(max_lines, dim)
    sums = _aligned(max_lines, dim)
    scores = _aligned(max_lines, 64)
    tops = np.empty(max_lines, np.float32)
    totals = np.empty(max_lines, np.float32)
    panel = _aligned(8, max(dim, 64))
    words = _aligned(len(eighths), 64).view(np.uint32)
    scales = _aligned(1, max(dim, 64))[0]
    minima = _aligned(1, max(dim, 64))[0]
    starts = np.empty((2, 64), np.int64)
    copied = np.empty(64 * dim, np.uint8)
    wanted = _fetch_add(counter, 0, 1)
    task = 0
    for row in range(rows):
        slot = slots[row]
        count = np.int64(packed_tokens[slot * packed_tokens_step])
        first_query, queries = np.int64(query_start[row]), query_start[row + 1] - query_start[row]
        if count == 0 or queries <= 0:
            continue
        length = np.int64(lengths[row])
        groups = (count + 63) // 64
        chunks = groups + (length + 63) // 64
        tiles = (queries + tile - 1) // tile
        splits = 1
        if queries * group <= max_split_lines:
            splits = max(1, min(SPLITS, chunks // _MIN_CHUNKS))
        if wanted >= task + kv_heads * tiles * splits:
            task += kv_heads * tiles * splits
            continue
        for index in range(kv_heads * tiles * splits):
            if task + index != wanted:
                continue
            wanted = _fetch_add(counter, 0, 1)
            head, part = index // (tiles * splits), index % (tiles * splits)
            split = part if tiles == 1 else 0
            start = 0 if tiles == 1 else part * tile  # first query token of the tile
            stop = min(start + tile, queries)
            # Ordinary tokens that the tile's last query attends to.
            seen = length - queries + stop
            used = groups + (seen + 63) // 64
            lines = (stop - start) * group
            for m in range(lines):
                token, h = first_query + start + m // group, head * group + m % group
                at = token * query_token_step + h * query_head_step
                for d in range(dim):
                    q[m, d] = _as_float(query[np.uintp(at + d)], table) * scale
                    sums[m, d] = np.float32(0)
                tops[m], totals[m] = _LOWEST, np.float32(0)
            for chunk in range(used * split // splits, used * (split + 1) // splits):
                if chunk < groups:
                    page = np.int64(packed[slot * packed_step + chunk // page_groups])
                    at = page * page_step + head * head_step
                    at += chunk % page_groups * group_rows * row_step
                    at *= itemsize
                    tokens = min(64, count - 64 * chunk)
                    source = content
                    if row_step != 2 * dim:
                        width, step = 2 * dim * itemsize, row_step * itemsize
                        _copy_rows(content, at, step, width, group_rows, copied)
                        source, at = copied, 0
                    _group_scores(
                        source, at, q, scaled, scales, minima, scores, words, panel, lines, eighths
                    )
                    for m in range(lines):
                        _softmax(scores, tops, totals, sums, m, tokens, eighths)
                    _group_values(
                        source, at, scores, sums, scales, minima, panel, tokens, lines, eighths
                    )
                    continue
                first = 64 * (chunk - groups)
                tokens = min(64, seen - first)
                for t in range(tokens):
                    page = np.int64(tables[row * tables_step + (first + t) // block])
                    at = page * page_step + head * head_step
                    starts[0, t] = at + key_tokens[(first + t) % block]
                    starts[1, t] = at + value_tokens[(first + t) % block]
                _ordinary_scores(
                    elements, table, starts[0], key_dims, key_step, tokens, q, scores, panel, lines,
                    eighths,
                )  # fmt: skip
                for m in range(lines):
                    if key_scale != _ONE:
                        for t in range(64):
                            scores[m, t] *= key_scale
                    limit = length - queries + start + m // group + 1 - first
                    _softmax(scores, tops, totals, sums, m, limit, eighths)
                    if value_scale != _ONE:
                        for t in range(64):
                            scores[m, t] *= value_scale
                _ordinary_values(
                    elements, table, starts[1], value_dims, value_step, tokens, scores, sums, panel,
                    lines, eighths,
                )  # fmt: skip
            if splits > 1:
                space = max_split_lines * (dim + 2)
                part_0 = (row * kv_heads + head) * SPLITS * space
                at = part_0 + split * space
                for m in range(lines):
                    partials[np.uintp(at + m * (dim + 2))] = tops[m]
                    partials[np.uintp(at + m * (dim + 2) + 1)] = totals[m]
                    for d in range(dim):
                        partials[np.uintp(at + m * (dim + 2) + 2 + d)] = sums[m, d]
                if _fetch_add(arrivals, row * kv_heads + head, 1) != splits - 1:
                    continue
                arrivals[row * kv_heads + head] = 0
                _join(partials, part_0, space, splits, lines, tops, totals, sums, eighths)
            for m in range(lines):
                token, h = first_query + start + m // group, head * group + m % group
                total = totals[m]
                factor = _ONE
                if has_sinks:
                    sink = sinks[h]
                    top = max(tops[m], sink)
                    factor = _exp2(np.float32(tops[m] - top))
                    total = total * factor + _exp2(np.float32(sink - top))
                factor = np.float32(factor / total)
                at = token * output_token_step + h * output_head_step
                for d in range(dim):
                    place = np.uintp(at + d)
                    output[place] = _as_element(np.float32(sums[m, d] * factor), output[place])
        task += kv_heads * tiles * splits


@_compiled
def _join(partials, at, space, splits, lines, tops, totals, sums, eighths):
    """Join the partial results of a row's splits, in order."""
    dim = 8 * len(eighths)
    for m in range(lines):
        line = at + m * (dim + 2)
        top = _LOWEST
        for split in range(splits):
            top = max(top, partials[np.uintp(line + split * space)])
        total, row = np.float32(0), sums[m]
        row[:] = np.float32(0)
        for split in range(splits):
            part = line + split * space
            factor = _exp2(np.float32(partials[np.uintp(part)] - top))
            total += partials[np.uintp(part + 1)] * factor
            for d in range(dim):
                row[d] += partials[np.uintp(part + 2 + d)] * factor
        tops[m], totals[m] = top, total


def _c_function(work: Callable[..., None]) -> Any:
    """Return `work` compiled to a C function, whose argument is the address of the arguments."""
    compiled: Any = _cached(cfunc, types.void(types.voidptr))(work)
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)


ARRAYS = (
    "query", "output", "elements", "content", "table", "packed", "packed_tokens", "tables",
    "lengths", "query_start", "slots", "sinks", "key_tokens", "key_dims", "value_tokens",
    "value_dims", "counter", "arrivals", "partials",
)  # fmt: skip
FACTORS = len(NUMBERS) + len(ARRAYS)


@functools.cache
def attention_worker(query: Any, output: Any, cache: Any, eighths: tuple[int, ...]) -> Any:
    """Return the C function that each thread runs, for element types and a head dim.

    Args:
        query, output, cache: numpy types of their elements.
        eighths: D / 8 zeros. The length of a tuple is part of its type, so the compiler knows D.
    """
    numbers, arrays, count = len(NUMBERS), FACTORS, FACTORS + 2

    def work(call):
        n = carray(call, (count,), np.int64)
        p = n[numbers:arrays]
        dim = 8 * len(eighths)
        _attend(
            n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8],
            n[9], n[10], n[11], n[12], n[13], n[14], n[15], n[16], n[17],
            n[arrays:].view(np.float32),
            carray(_pointer(p[0]), (1,), query),
            carray(_pointer(p[1]), (1,), output),
            carray(_pointer(p[2]), (1,), cache),
            carray(_pointer(p[3]), (1,), np.uint8),
            carray(_pointer(p[4]), (256,), np.float32),
            carray(_pointer(p[5]), (1,), np.int32),
            carray(_pointer(p[6]), (1,), np.int32),
            carray(_pointer(p[7]), (1,), np.int32),
            carray(_pointer(p[8]), (1,), np.int32),
            carray(_pointer(p[9]), (1,), np.int32),
            carray(_pointer(p[10]), (1,), np.int32),
            carray(_pointer(p[11]), (1,), np.float32),
            carray(_pointer(p[12]), (n[3],), np.int32),
            carray(_pointer(p[13]), (dim,), np.int32),
            carray(_pointer(p[14]), (n[3],), np.int32),
            carray(_pointer(p[15]), (dim,), np.int32),
            carray(_pointer(p[16]), (1,), np.int64),
            carray(_pointer(p[17]), (1,), np.int64),
            carray(_pointer(p[18]), (1,), np.float32),
            eighths,
        )  # fmt: skip

    return _c_function(work)


# -- dequantising ---------------------------------------------------------------------------------


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
            x = np.float32(minima[j] + scales[j] * np.float32(code))
            row[j] = _as_finite_element(x, like)
        for j in range(half):
            code = content[np.uintp(codes + j)] >> np.uint8(4)
            d = half + j
            x = np.float32(minima[d] + scales[d] * np.float32(code))
            row[d] = _as_finite_element(x, like)


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
                x = np.float32(minimum + scale * code)
                row[part * eighth + j] = _as_finite_element(x, like)


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
                _copy_rows(content, at, row_step * itemsize, width, group_rows, copied)
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


DEQUANTISE_ARGUMENTS = 16
"""Integers of a call: 7 numbers, then 9 addresses."""


@functools.cache
def dequantise_worker(cache: Any, eighths: tuple[int, ...]) -> Any:
    """Return the C function that each thread runs, for an element type and a head dim.

    Args:
        cache: numpy type of the cache's elements.
        eighths: D / 8 zeros. The length of a tuple is part of its type, so the compiler knows D.
    """

    def work(call):
        n = carray(call, (DEQUANTISE_ARGUMENTS,), np.int64)
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

    return _c_function(work)


# -- window scores --------------------------------------------------------------------------------
# Equal columns must have equal results in every chunk, so that their ties go to the lower position.
# So all loops over columns have 64 iterations, and chunks differ only by powers of 2, whose
# products are exact. Attention below 2 ** -124 counts as 0, because smaller products may round.

PRODUCT_LINES = 6
"""Lines that are multiplied at once: their products with 16 keys stay in registers."""
_TILE = 4
"""Chunks of a task."""
_LEAST_ATTENTION = np.float32(2.0**-124)
_LOWEST_TOP = np.float32(-1e29)

SCORE_NUMBERS = (
    "step", "reader", "call", "kv_heads", "group", "window", "dim", "tokens", "block", "page_step",
    "head_step", "pooled", "grouped", "has_variance", "has_last", "has_maximum", "total_step",
    "all_step",
)  # fmt: skip
SCORE_ARRAYS = (
    "query", "elements", "table", "pages", "key_tokens", "key_dims", "sinks", "counter", "arrivals",
    "weights", "factors", "sums", "pooling", "entropy", "shifts", "total", "variance", "recent",
    "last", "maximum", "totals",
)  # fmt: skip


@intrinsic
def _multiply_lines(typing_context, query, at, panel, keys, dim, scores, place):
    """Write the products of `PRODUCT_LINES` lines with 16 keys to the scores.

    Args:
        query: ``[D, PRODUCT_LINES]`` from element `at` on.
        panel: ``[D, 16]`` from element `keys` on.
        dim: D.
        scores: ``[lines, 64]``: the first score is element `place`.
    """

    def code(context, builder, signature, args):
        query, panel, scores = (_elements(context, builder, signature, args, i) for i in (0, 2, 5))
        index, float32 = ir.IntType(64), ir.FloatType()
        vector = ir.VectorType(float32, _LANES)
        totals = [cgutils.alloca_once(builder, vector) for _ in range(PRODUCT_LINES)]
        for total in totals:
            builder.store(ir.Constant(vector, None), total)
        with cgutils.for_range(builder, args[4]) as loop:
            row = builder.mul(loop.index, ir.Constant(index, _LANES))
            key = _vector_at(builder, panel, builder.add(args[3], row), float32, _LANES)
            key = builder.load(key, align=4)
            first = builder.mul(loop.index, ir.Constant(index, PRODUCT_LINES))
            first = builder.add(args[1], first)
            for i, total in enumerate(totals):
                value = builder.add(first, ir.Constant(index, i))
                _multiply_add(builder, total, builder.load(builder.gep(query, [value])), key)
        for i, total in enumerate(totals):
            line = builder.add(args[6], ir.Constant(index, 64 * i))
            to = _vector_at(builder, scores, line, float32, _LANES)
            builder.store(builder.load(total), to, align=4)
        return context.get_dummy_value()

    offsets = types.intp, panel, types.intp, types.intp, scores, types.intp
    return types.void(query, *offsets), code


@functools.cache
def key_reader(cache: Any) -> Any:
    """Return the C function that reads 64 keys of a KV head, for an element type.

    Its arguments are the address of those of `score_worker`, the KV head, the chunk, and the
    address of a panel ``[4, D, 16]`` of float32, which it writes.
    """
    numbers, count = len(SCORE_NUMBERS), len(SCORE_NUMBERS) + len(SCORE_ARRAYS)

    def work(call, head, chunk, to):
        n = carray(call, (count,), np.int64)
        p, dim, tokens, block = n[numbers:], n[6], n[7], n[8]
        elements = carray(_pointer(p[1]), (1,), cache)
        table = carray(_pointer(p[2]), (256,), np.float32)
        pages = carray(_pointer(p[3]), (1,), np.int64)
        key_tokens = carray(_pointer(p[4]), (block,), np.int64)
        key_dims = carray(_pointer(p[5]), (dim,), np.int64)
        panel, step = carray(to, (4 * dim, 16), np.float32), _step(key_tokens)
        for first in range(0, min(64, tokens - 64 * chunk), 16):
            row = first // 16 * dim
            for t in range(min(16, tokens - 64 * chunk - first)):
                token = 64 * chunk + first + t
                at = pages[token // block] * n[9] + head * n[10] + key_tokens[token % block]
                if step == 1 or step == 2:
                    for d in range(dim):
                        _read_run(elements, at + key_dims[d], step, table, panel[row + d], 0)
                    break
                for d in range(dim):
                    panel[row + d, t] = _as_float(elements[np.uintp(at + key_dims[d])], table)

    signature = types.void(types.voidptr, types.int64, types.int64, types.voidptr)
    return _cached(cfunc, signature)(work)


@intrinsic
def _read_keys_with(typing_context, reader, call, head, chunk, panel):
    """Call the function at the address `reader`, which is a `key_reader`."""

    def code(context, builder, signature, args):
        index, pointer = ir.IntType(64), cgutils.voidptr_t
        function = ir.FunctionType(ir.VoidType(), [pointer, index, index, pointer]).as_pointer()
        to = builder.bitcast(_elements(context, builder, signature, args, 4), pointer)
        given = builder.inttoptr(args[1], pointer), args[2], args[3], to
        builder.call(builder.inttoptr(args[0], function), given)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64, panel), code


@intrinsic
def _highest(typing_context, scores, at):
    """Return the maximum of 64 scores from element `at` on. NaN is ignored."""

    def code(context, builder, signature, args):
        scores = _elements(context, builder, signature, args, 0)

        def larger(a, b):
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        highest = None
        for first in range(0, 64, _LANES):
            at = builder.add(args[1], ir.Constant(ir.IntType(64), first))
            part = _vector_at(builder, scores, at, ir.FloatType(), _LANES)
            part = builder.load(part, align=4)
            highest = part if highest is None else larger(part, highest)
        lanes = _LANES
        while lanes > 1:
            lanes //= 2
            halves = (
                ir.Constant(ir.VectorType(ir.IntType(32), lanes), [*range(start, start + lanes)])
                for start in (0, lanes)
            )
            low, high = (builder.shuffle_vector(highest, highest, half) for half in halves)
            highest = larger(low, high)
        return builder.extract_element(highest, ir.Constant(ir.IntType(32), 0))

    return types.float32(scores, types.intp), code


@_compiled
def _weigh_lines(scores, lines, is_past, tops, sums):
    """Replace the logits of all lines in a chunk, which are exponents of 2, by weights.

    A weight is 2 to the logit less the line's top, which is a whole number near the maximum.

    Args:
        scores: ``[lines, 64]``.
        is_past: ``[64]``: 1 for columns before the window, and 0 for its own columns.
        tops: ``[lines]``, written.
        sums: ``[3, lines]``, written: the sum of all weights, that of the past, and the sum of the
            past's weights times their logits less the top.
    """
    for m in range(lines):
        row = scores[m]
        top = max(np.rint(_highest(scores, 64 * m)), _LOWEST_TOP)
        total, before, product = np.float32(0), np.float32(0), np.float32(0)
        for t in range(64):
            logit = row[t]
            whole = np.rint(logit)
            # 2 ** -127 is computed as 0.
            scale = _power_of_two(max(np.float32(whole - top), _LEAST_EXPONENT - _ONE))
            weight = np.float32(_power(np.float32(logit - whole)) * scale)
            row[t] = weight
            total += weight
            older = np.float32(weight * is_past[t])
            before += older
            product += np.float32(older * np.float32(logit - top))
        tops[m] = top
        sums[0, m], sums[1, m], sums[2, m] = total, before, product


@_compiled
def _set_factors(
    first, chunks, lines, past, head, group, window, pooled, sinks, weights, factors, sums,
    totals, pooling, entropy,
):  # fmt: skip
    """Replace the tops of a KV head's lines by factors: weights times these, over the line's total.

    Also write the totals, the head's entropy, and with `pooled` the factors of its pooled lines.
    """
    top, total, mass = np.empty((3, lines), np.float32)
    for m in range(lines):
        top[m] = max(_LOWEST, np.rint(sinks[head * group + m // window]))
    for c in range(first, first + chunks):
        for m in range(lines):
            top[m] = max(top[m], factors[c, m])
    for m in range(lines):
        total[m] = _exp2(np.float32(sinks[head * group + m // window] - top[m]))
        mass[m] = np.float32(0)
    for c in range(first, first + chunks):
        for m in range(lines):
            total[m] += sums[c, 0, m] * _exp2(np.float32(factors[c, m] - top[m]))
    result = np.float64(0)
    for c in range(first, first + chunks):
        bits = np.float32(0)
        for m in range(lines):
            distance = np.float32(factors[c, m] - top[m])
            factor = _exp2(distance)
            before = np.float32(sums[c, 1, m] * factor / total[m])
            mass[m] += before
            bits += sums[c, 2, m] * factor / total[m] + before * max(distance, _LEAST_EXPONENT)
            factors[c, m] = factor
        result -= np.float64(bits)
    for m in range(lines):
        totals[head, m] = total[m]
        result += np.float64(mass[m]) * math.log2(np.float64(total[m]))
    entropy[head] = result * math.log(2.0)
    if pooled and past > 0:
        # Each column counts five times in the sum of a pooled line, columns next to an end less.
        for m in range(lines):
            lost = np.float32(0)
            for j in range(min(past, 2)):
                left, right = first + j // 64, first + (past - 1 - j) // 64
                a = _attention(weights[left, m, j % 64], factors[left, m], total[m])
                b = _attention(weights[right, m, (past - 1 - j) % 64], factors[right, m], total[m])
                lost += np.float32(2 - j) * (a + b)
            pooling[head, m] = mass[m] / max(np.float32(5) * mass[m] - lost, _LEAST_ATTENTION)


@_cached(
    njit,
    fastmath=_MATH - {"arcp", "afn"},
    error_model="numpy",
    no_cpython_wrapper=True,
    no_cfunc_wrapper=True,
)
def _attention(weight, factor, total):
    # With a product by the inverse, a query that attends to one token might not give it 1.
    quotient = np.float32(np.float32(weight * factor) / total)
    return np.float32(0) if quotient < _LEAST_ATTENTION else quotient


@_compiled
def _read_attention(weights, factors, totals, first, window, rows, columns):
    """Write the attention of a query head's lines in a chunk to `rows`; add it to `columns`."""
    for i in range(window):
        factor, line, row = factors[first + i], weights[first + i], rows[i]
        total = totals[first + i]
        for t in range(64):
            a = _attention(line[t], factor, total)
            row[t] = a
            columns[t] += a


@_compiled
def _pool(
    weights, factors, totals, pooling, rows, at, start, past, first, window, padded, maximum
):  # fmt: skip
    """Raise `maximum` to the pooled attention of a query head's lines in chunk `at`.

    Args:
        rows: attention of the lines in the chunk.
        start: first column of the chunk.
        first: first line of the query head.
        padded: memory for 68 columns.
    """
    for i in range(window):
        m = first + i
        for t in range(2):
            padded[t], padded[66 + t] = np.float32(0), np.float32(0)
            if start > 0:
                padded[t] = _attention(weights[at - 1, m, 62 + t], factors[at - 1, m], totals[m])
            if start + 64 + t < past:
                padded[66 + t] = _attention(weights[at + 1, m, t], factors[at + 1, m], totals[m])
        for t in range(64):
            padded[2 + t] = rows[i, t] if start + t < past else np.float32(0)
        factor = pooling[m]
        for t in range(64):
            outer = (padded[t] + padded[t + 1]) + (padded[t + 3] + padded[t + 4])
            maximum[t] = max(maximum[t], (outer + padded[t + 2]) * factor)


@_compiled
def _weigh(n, query, sinks, counter, arrivals, weights, factors, sums, totals, pooling, entropy):
    """Multiply queries and keys, and weigh the logits, until no task is left."""
    kv_heads, group, window, dim, tokens = n[3], n[4], n[5], n[6], n[7]
    chunks, lines, past = (tokens + 63) // 64, group * window, tokens - window
    blocks = (lines + PRODUCT_LINES - 1) // PRODUCT_LINES
    tiles = (chunks + _TILE - 1) // _TILE
    panel, is_past = np.empty((4 * dim, 16), np.float32), np.ones(64, np.float32)
    task = _fetch_add(counter, 0, 1)
    while task < kv_heads * tiles:
        head, tile = task // tiles, task % tiles
        for c in range(_TILE * tile, min(_TILE * tile + _TILE, chunks)):
            first, at = 64 * c, head * chunks + c
            _read_keys_with(n[1], n[2], head, c, panel)
            scores = weights[at]
            for part in range(4):
                for b in range(blocks):
                    _multiply_lines(
                        query, (head * blocks + b) * dim * PRODUCT_LINES, panel, part * dim * 16,
                        dim, scores, b * PRODUCT_LINES * 64 + 16 * part,
                    )  # fmt: skip
            for t in range(64):
                is_past[t] = np.float32(first + t < past)
            if first + 64 > past:
                for m in range(lines):
                    # The query attends to no later column.
                    for t in range(max(past + m % window + 1 - first, 0), 64):
                        scores[m, t] = _LOWEST
            _weigh_lines(scores, lines, is_past, factors[at], sums[at])
        if _fetch_add(arrivals, head, 1) == tiles - 1:
            arrivals[head] = 0
            _set_factors(
                head * chunks, chunks, lines, past, head, group, window, n[11], sinks, weights,
                factors, sums, totals, pooling, entropy,
            )  # fmt: skip
        task = _fetch_add(counter, 0, 1)


@_compiled
def _store(target, place, columns, first, stop):
    """Copy columns from `first` to `stop` to the elements from `place` on."""
    for t in range(first, stop):
        target[np.uintp(place + t)] = columns[t]


@_compiled
def _clear(columns):
    for t in range(64):
        columns[t] = np.float32(0)


@_compiled
def _reduce(
    n, counter, weights, factors, totals, pooling, shifts, total, variance, recent, last, maximum
):  # fmt: skip
    """Reduce the attention over the window's queries until no task is left."""
    kv_heads, group, window, tokens, pooled, grouped = n[3], n[4], n[5], n[7], n[11], n[12]
    has_variance, has_last, has_maximum, total_step, all_step = n[13], n[14], n[15], n[16], n[17]
    chunks, past = (tokens + 63) // 64, tokens - window
    tiles = (chunks + _TILE - 1) // _TILE
    share = np.float32(_ONE / np.float32(group)) if grouped else _ONE
    mean_share = np.float32(_ONE / np.float32(window))
    square_share = np.float32(_ONE / np.float32(max(window - 1, 1)))
    rows, padded = np.empty((window, 64), np.float32), np.empty(68, np.float32)
    columns, squares = np.empty((2, 64), np.float32)
    statistics = np.empty((5, 64), np.float32)
    line_sums, deviations, latest, highest, pools = statistics
    task = _fetch_add(counter, 0, 1)
    while task < kv_heads * tiles:
        head, tile = task // tiles, task % tiles
        for c in range(_TILE * tile, min(_TILE * tile + _TILE, chunks)):
            start, at = 64 * c, head * chunks + c
            older, count = min(max(past - start, 0), 64), min(64, tokens - start)
            shift = np.float64(0)
            for g in range(group):
                if g == 0 or not grouped:
                    for row in statistics:
                        _clear(row)
                _clear(columns)
                _clear(squares)
                _read_attention(
                    weights[at], factors[at], totals[head], g * window, window, rows, columns
                )
                if has_variance or has_maximum:
                    for i in range(window):
                        for t in range(64):
                            a = rows[i, t]
                            difference = np.float32(a - columns[t] * mean_share)
                            squares[t] += difference * difference
                            highest[t] = max(highest[t], a)
                for t in range(64):
                    variances = np.float32(squares[t] * square_share)
                    squares[t] = variances
                    deviations[t] += np.float32(variances * share)
                    line_sums[t] += np.float32(columns[t] * share)
                    latest[t] += np.float32(rows[window - 1, t] * share)
                if has_variance:
                    for t in range(older):
                        shift += np.float64(squares[t])
                if pooled and older:
                    _pool(
                        weights, factors, totals[head], pooling[head], rows, at, start, past,
                        g * window, window, padded, pools,
                    )  # fmt: skip
                if grouped and g < group - 1:
                    continue
                line = head if grouped else head * group + g
                place = line * total_step + start
                _store(total, place, line_sums, 0, older)
                _store(recent, line * window + start - past, line_sums, older, count)
                if has_variance:
                    _store(variance, place, deviations, 0, older)
                place = line * all_step + start
                if has_last:
                    _store(last, place, latest, 0, count)
                if has_maximum:
                    _store(maximum, place, highest, older if pooled else 0, count)
                    _store(maximum, place, pools, 0, older if pooled else 0)
            shifts[at] = shift
        task = _fetch_add(counter, 0, 1)


@functools.cache
def score_worker() -> Any:
    """Return the C function that each thread runs, once for each of the two steps of a row."""
    numbers, count = len(SCORE_NUMBERS), len(SCORE_NUMBERS) + len(SCORE_ARRAYS)

    def work(call):
        n = carray(call, (count,), np.int64)
        p = n[numbers:]
        kv_heads, lines, chunks = n[3], n[4] * n[5], (n[7] + 63) // 64
        padded = (lines + PRODUCT_LINES - 1) // PRODUCT_LINES * PRODUCT_LINES
        total = kv_heads * chunks
        weights = carray(_pointer(p[9]), (total, padded, 64), np.float32)
        factors = carray(_pointer(p[10]), (total, lines), np.float32)
        pooling = carray(_pointer(p[12]), (kv_heads, lines), np.float32)
        totals = carray(_pointer(p[20]), (kv_heads, lines), np.float32)
        counter = carray(_pointer(p[7]), (1,), np.int64)
        if n[0] == 0:
            _weigh(
                n,
                carray(_pointer(p[0]), (1,), np.float32),
                carray(_pointer(p[6]), (1,), np.float32),
                counter,
                carray(_pointer(p[8]), (kv_heads,), np.int64),
                weights,
                factors,
                carray(_pointer(p[11]), (total, 3, lines), np.float32),
                totals,
                pooling,
                carray(_pointer(p[13]), (kv_heads,), np.float64),
            )
        else:
            _reduce(
                n, counter, weights, factors, totals, pooling,
                carray(_pointer(p[14]), (total,), np.float64),
                carray(_pointer(p[15]), (1,), np.float32),
                carray(_pointer(p[16]), (1,), np.float32),
                carray(_pointer(p[17]), (1,), np.float32),
                carray(_pointer(p[18]), (1,), np.float32),
                carray(_pointer(p[19]), (1,), np.float32),
            )  # fmt: skip

    return _c_function(work)
