"""Read a float8 cache in a Triton kernel."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def widened(x, dtype: tl.constexpr, live=None):  # type: ignore[no-untyped-def]
    """Convert float8 to `dtype` exactly, and return any other dtype unchanged.

    The conversion goes through float32. Hopper converts float8 to float16; from there, two
    full-rate instructions lead to bfloat16, or one at a quarter of the rate.

    With `live`, elements outside it become 0. If the result is an operand of a dot product, this
    select also stops the compiler from converting in the operand's layout, which would load
    single bytes.
    """
    if x.dtype.primitive_bitwidth == 8:
        x = x.to(tl.float32).to(dtype)
        if live is not None:
            x = tl.where(live, x, 0.0)
    return x
