"""Search for a threshold in a Triton kernel, one 8-bit digit at a time from the top."""

import triton
import triton.language as tl

BITS = tl.constexpr(8)
"""Bits of a digit."""
BINS = tl.constexpr(256)
"""Number of digits."""


@triton.jit
def sortable_bits32(score):  # type: ignore[no-untyped-def]
    """Return float32 scores as uint32 of the same order, with NaN as -inf and -0.0 as 0.0."""
    bits = score.to(tl.uint32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0xFF800000, bits)
    bits = tl.where(bits == 0x80000000, 0, bits)
    return bits ^ tl.where((bits >> 31) == 0, 0x80000000, 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def matches_prefix(key, prefix, shift):  # type: ignore[no-untyped-def]
    """Return whether `key` matches `prefix` in all digits above the one at `shift`."""
    return ((key ^ prefix) >> shift) >> BITS == 0


@triton.jit
def digit_at(key, shift):  # type: ignore[no-untyped-def]
    """Return the digit of `key` at `shift`."""
    return ((key >> shift) & (BINS - 1)).to(tl.int32)
