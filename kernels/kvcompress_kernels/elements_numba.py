"""What the kernels' numba code does with elements of a cache: convert, exponentiate, copy and add.

A run has 16 elements that are 1 or 2 apart.
"""

import math

import numpy as np

from kvcompress_kernels.compiling_numba import (
    FAST_MATH,
    compiled,
    intrinsic,
    ir,
    overload,
    types,
)

LANES = 16
"""Float32 in a vector. LLVM splits it where vectors are shorter."""
ONE, LOWEST, LEAST_EXPONENT = np.float32(1), np.float32(-1e30), np.float32(-126)
_POWERS = tuple(np.float32(math.log(2) ** k / math.factorial(k)) for k in range(7))
_HALF_BIAS, _LARGEST_HALF = np.float32(2.0**112), np.float32(65504.0)

# Numba knows neither bfloat16 nor float16 nor float8. An array of bfloat16 is passed as uint16, of
# float16 as int16 and of float8 as uint8 with a table.


def as_float(x, table):
    """Return an element of an array as float32."""


@overload(as_float, jit_options={"fastmath": FAST_MATH})
def _as_float_of(x, table):
    if x == types.uint16:
        return lambda x, table: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    if x == types.int16:
        return lambda x, table: _from_half(np.uint32(np.uint16(x)))
    if x == types.uint8:
        return lambda x, table: table[np.uintp(x)]
    return lambda x, table: x


@compiled
def _from_half(bits):
    """Return the float32 of float16 bits, subnormal and infinite ones included."""
    magnitude = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13))
    scaled = np.float32(magnitude.view(np.float32) * _HALF_BIAS).view(np.uint32)
    special = np.uint32(magnitude | np.uint32(0x70000000))
    scaled = special if magnitude >= np.uint32(0x0F800000) else scaled
    sign = np.uint32((bits & np.uint32(0x8000)) << np.uint32(16))
    return np.uint32(scaled | sign).view(np.float32)


def as_element(x, like):
    """Return a float32 in the type of `like`, rounded to nearest, ties to even."""


@overload(as_element, jit_options={"fastmath": FAST_MATH})
def _as_element_of(x, like):
    if like == types.uint16:
        return lambda x, like: _bfloat16(x) if x == x else np.uint16(0x7FC0)
    if like == types.int16:
        return lambda x, like: np.int16(_any_half(x))
    return lambda x, like: x


def as_finite_element(x, like):
    """Return a finite float32 as `as_element` does, but at most the largest float16."""


@overload(as_finite_element, jit_options={"fastmath": FAST_MATH})
def _as_finite_element_of(x, like):
    if like == types.uint16:
        return lambda x, like: _bfloat16(x)
    if like == types.int16:
        return lambda x, like: np.int16(_half(min(max(x, -_LARGEST_HALF), _LARGEST_HALF)))
    return lambda x, like: x


@compiled
def _bfloat16(x):
    """Return the bfloat16 bits of a number other than NaN."""
    bits = np.float32(x).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@compiled
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


@compiled
def _any_half(x):
    """Return the float16 bits of any number. 65536 and more become infinite."""
    bits = np.float32(x).view(np.uint32)
    sign = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    special = np.uint32(0x7E00) if magnitude > np.uint32(0x7F800000) else np.uint32(0x7C00)
    return _half(x) if magnitude < np.uint32(0x47800000) else np.uint16(sign | special)


@compiled
def exp2(x):
    """Return 2 ** x for x <= 0 to 1e-7, and 2 ** -126 for smaller exponents."""
    x = max(x, LEAST_EXPONENT)
    whole = np.rint(x)
    return np.float32(power_of_fraction(np.float32(x - whole)) * power_of_two(whole))


@compiled
def power_of_fraction(part):
    """Return 2 ** part for parts between -0.5 and 0.5. 2 ** 0 is exact."""
    power = _POWERS[6]
    power = np.float32(power * part + _POWERS[5])
    power = np.float32(power * part + _POWERS[4])
    power = np.float32(power * part + _POWERS[3])
    power = np.float32(power * part + _POWERS[2])
    power = np.float32(power * part + _POWERS[1])
    return np.float32(power * part + ONE)


@compiled
def power_of_two(whole):
    """Return 2 ** whole for whole numbers between -126 and 127."""
    return np.int32(np.int32(np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@compiled
def run_step(offsets):
    """Return the distance of neighbours in runs of 16 elements; 0 if it is not constant."""
    if len(offsets) % 16:
        return 0
    step = offsets[1] - offsets[0]
    for i in range(len(offsets)):
        if i % 16 and offsets[i] - offsets[i - 1] != step:
            return 0
    return step


@compiled
def read_run(elements, at, step, table, row, first):
    """Write 16 elements that are `step` (1 or 2) apart to `row`, from column `first` on."""
    if step == 1:
        for i in range(16):
            row[first + i] = as_float(elements[np.uintp(at + i)], table)
    else:
        for i in range(16):
            row[first + i] = as_float(elements[np.uintp(at + 2 * i)], table)


# -- vectors --------------------------------------------------------------------------------------
# LLVM does not find these loops by itself, because their results stay in registers.


def address_of(context, builder, signature, args, index):
    """Return a pointer to the first element of an array argument."""
    return context.make_array(signature.args[index])(context, builder, args[index]).data


def vector_at(builder, pointer, at, element, lanes):
    """Return a pointer to a vector of `lanes` elements from element `at` of `pointer`."""
    vector = ir.VectorType(element, lanes)
    return builder.bitcast(builder.gep(pointer, [at]), vector.as_pointer())


def repeated(number, lanes):
    """Return a vector of equal 32-bit integers."""
    return ir.Constant(ir.VectorType(ir.IntType(32), lanes), [number] * lanes)


def multiply_add(builder, total, number, vector):
    """Add the product of a float32 number and a vector to the vector variable `total`."""
    one = builder.insert_element(
        ir.Constant(vector.type, ir.Undefined), number, ir.Constant(ir.IntType(32), 0)
    )
    splat = builder.shuffle_vector(one, one, repeated(0, vector.type.count))
    product = builder.fmul(splat, vector, flags=("contract",))
    builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)


@intrinsic
def read_halves(typing_context, content, at, row, eighths):
    """Write 8 float16 for each element of `eighths`, from byte `at` on, to `row` as float32."""

    def code(context, builder, signature, args):
        content, row = (address_of(context, builder, signature, args, i) for i in (0, 2))
        halves = ir.VectorType(ir.HalfType(), 8)
        for first in range(0, 8 * len(eighths), 8):
            place = builder.gep(
                content, [builder.add(args[1], ir.Constant(args[1].type, 2 * first))]
            )
            numbers = builder.load(builder.bitcast(place, halves.as_pointer()), align=1)
            numbers = builder.fpext(numbers, ir.VectorType(ir.FloatType(), 8))
            at = ir.Constant(ir.IntType(64), first)
            builder.store(numbers, vector_at(builder, row, at, ir.FloatType(), 8), align=4)
        return context.get_dummy_value()

    return types.void(content, types.intp, row, eighths), code


@compiled
def copy_rows(content, at, step, width, rows, copied):
    """Copy rows of `width` bytes, which start `step` bytes apart from byte `at` on."""
    for row in range(rows):
        line = at + row * step
        for x in range(width):
            copied[row * width + x] = content[np.uintp(line + x)]
