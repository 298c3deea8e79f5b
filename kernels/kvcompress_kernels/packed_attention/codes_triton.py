"""Unpacks codes of `k4v3` in Triton, in the order in which `packed_attention` multiplies them."""

import triton
import triton.language as tl


@triton.jit
def _stacked(x, y):  # type: ignore[no-untyped-def]
    """Return ``[A, B, 2 * N]``: the last axis of `x`, then that of `y`."""
    both = tl.permute(tl.join(x, y), (0, 1, 3, 2))
    return tl.reshape(both, (x.shape[0], x.shape[1], 2 * x.shape[2]))


@triton.jit
def repeated(x):  # type: ignore[no-untyped-def]
    """Return ``[A, B, 2 * N]``: the last axis of `x`, two times."""
    both = tl.broadcast_to(x[:, :, None, :], (x.shape[0], x.shape[1], 2, x.shape[2]))
    return tl.reshape(both, (x.shape[0], x.shape[1], 2 * x.shape[2]))


@triton.jit
def _halves(word):  # type: ignore[no-untyped-def]
    """Return the low and the high half of each uint32 on a new last axis, as int16."""
    return tl.join(word.to(tl.int16), (word >> 16).to(tl.int16))


@triton.jit  # type: ignore[untyped-decorator]
def _fields(word, zero, START: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return two 16-bit floats in each uint32: an offset plus the code in each of its halves.

    A code that is written into a mantissa needs no conversion. The offset is 16 or 8, or
    ``2 ** MANTISSA`` for a code of 4 bits that starts at bit 0, which stays where it is.

    Args:
        zero: 0, which the compiler does not know. It would copy a constant before each use.
        START: first bit of the code in a half.
        MANTISSA: bits of the float's mantissa: 7 in bfloat16, 10 in float16.
    """
    END: tl.constexpr = 0 if START == 0 and BITS == 4 else MANTISSA - BITS
    if END > START:
        word = word << END - START
    elif END < START:
        word = word >> START - END
    MASK: tl.constexpr = (1 << (END + BITS)) - (1 << END)
    BIAS: tl.constexpr = 127 if MANTISSA == 7 else 15
    return word & (MASK * 0x10001 + zero) | ((BIAS + MANTISSA - END) << MANTISSA) * 0x10001


@triton.jit  # type: ignore[untyped-decorator]
def key_codes(word, zero, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return key codes plus an offset, ``[WARPS, tokens, 8 * N]`` in `dtype`.

    Args:
        word: four bytes each, ``[WARPS, tokens, N]`` uint32.
    """
    KIND: tl.constexpr = tl.float16 if dtype == tl.float16 else tl.bfloat16
    MANTISSA: tl.constexpr = 10 if dtype == tl.float16 else 7
    low = _stacked(_fields(word, zero, 0, 4, MANTISSA), _fields(word, zero, 8, 4, MANTISSA))
    high = _stacked(_fields(word, zero, 4, 4, MANTISSA), _fields(word, zero, 12, 4, MANTISSA))
    codes = _halves(_stacked(low, high))
    codes = tl.reshape(codes, (word.shape[0], word.shape[1], 8 * word.shape[2]))
    return codes.to(KIND, bitcast=True).to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _pairs(first, second, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return half PART of `first` below half PART of `second`."""
    if PART == 0:
        return first & 0xFFFF | second << 16
    return first >> 16 | second & 0xFFFF0000


@triton.jit  # type: ignore[untyped-decorator]
def _quarters(even, odd, zero, BYTE: tl.constexpr, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the codes of one byte's four channels, quarter by quarter on the last axis."""
    START: tl.constexpr = 8 * BYTE
    first = _stacked(
        _fields(even, zero, START, 3, MANTISSA), _fields(odd, zero, START, 3, MANTISSA)
    )
    second = _stacked(
        _fields(even, zero, START + 4, 3, MANTISSA), _fields(odd, zero, START + 4, 3, MANTISSA)
    )
    return _stacked(first, second)


@triton.jit  # type: ignore[untyped-decorator]
def _bytes(low, high, zero, UNIT: tl.constexpr, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the codes of the bytes in `low`'s halves.

    In `even` and `odd`, a nibble holds the code of an even and of an odd quarter.
    """
    mask = 0x33333333 + zero
    even = low & mask | (high << 2) & ~mask
    odd = (low >> 2) & mask | high & ~mask
    codes = _quarters(even, odd, zero, 0, MANTISSA)
    if UNIT > 1:
        codes = _stacked(codes, _quarters(even, odd, zero, 1, MANTISSA))
    return codes


@triton.jit  # type: ignore[untyped-decorator]
def value_codes(  # type: ignore[no-untyped-def]
    low, low_next, high, high_next, zero, UNIT: tl.constexpr, dtype: tl.constexpr
):
    """Return value codes plus 8, ``[WARPS, 4 * UNIT * N, tokens]`` in `dtype`.

    Args:
        low, low_next: low bits of every second token, and of the tokens between them,
            ``[WARPS, tokens / 2, N]`` uint32. Each holds UNIT bytes.
        high, high_next: their high bits. Bit 2i of a byte belongs to quarter i.
    """
    KIND: tl.constexpr = tl.float16 if dtype == tl.float16 else tl.bfloat16
    MANTISSA: tl.constexpr = 10 if dtype == tl.float16 else 7
    codes = _bytes(_pairs(low, low_next, 0), _pairs(high, high_next, 0), zero, UNIT, MANTISSA)
    if UNIT == 4:
        more = _bytes(_pairs(low, low_next, 1), _pairs(high, high_next, 1), zero, UNIT, MANTISSA)
        codes = _stacked(codes, more)
    codes = _halves(tl.permute(codes, (0, 2, 1)))
    codes = tl.reshape(codes, (codes.shape[0], codes.shape[1], 2 * codes.shape[2]))
    return codes.to(KIND, bitcast=True).to(dtype)


@triton.jit
def key_numbers(word):  # type: ignore[no-untyped-def]
    """Return the float16 of each channel as float32, in the order of `key_codes`.

    Args:
        word: two channels of each half of the channels, ``[2, N]`` uint32.
    """
    both = tl.permute(_halves(word), (0, 2, 1))
    both = tl.reshape(both, (4 * word.shape[1],))
    # A sum of one number keeps Triton from scaling the query in each warp.
    return tl.sum(both.to(tl.float16, bitcast=True).to(tl.float32)[None, :], 0)


@triton.jit
def as_codes(q):  # type: ignore[no-untyped-def]
    """Return ``[lines, channels]`` in the order of `key_codes`: even channels of a half first."""
    parts = tl.reshape(q, (q.shape[0], 2, q.shape[1] // 4, 2))
    return tl.reshape(tl.permute(parts, (0, 1, 3, 2)), (q.shape[0], q.shape[1]))


@triton.jit
def token_numbers(word):  # type: ignore[no-untyped-def]
    """Return the float16 of each token as float32 ``[WARPS, 16]``, from uint32 ``[WARPS, 8]``."""
    both = tl.permute(_halves(word), (0, 2, 1))
    both = tl.reshape(both, (word.shape[0], 2 * word.shape[1]))
    return both.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def as_words(x):  # type: ignore[no-untyped-def]
    """Return the bits of integers as uint32."""
    if x.dtype == tl.int32:
        return x.to(tl.uint32, bitcast=True)
    if x.dtype == tl.int16:
        x = x.to(tl.uint16, bitcast=True)
    return x.to(tl.uint32)


@triton.jit  # type: ignore[untyped-decorator]
def in_channel_order(sums, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return ``[channels, lines]`` in the order of `_channels`, from that of `value_codes`."""
    parts = tl.reshape(sums, (UNIT, 4, sums.shape[0] // (4 * UNIT), sums.shape[1]))
    return tl.reshape(tl.permute(parts, (1, 2, 0, 3)), (sums.shape[0], sums.shape[1]))
