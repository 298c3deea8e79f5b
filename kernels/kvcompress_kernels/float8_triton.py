"""How kernels read a quantised cache."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def widened(x, dtype: tl.constexpr, live=None):  # type: ignore[no-untyped-def]
    """Float8 as `dtype`, exactly; anything else as it is.

    By way of float32: from float16, which is what Hopper turns float8 into, two instructions of
    full rate lead to bfloat16, or one of a quarter of it.

    With `live`, 0 elsewhere. Where the result goes into the registers of a product's operand, this
    choice keeps the compiler from converting in their layout, to which it would load single bytes.
    """
    if x.dtype.primitive_bitwidth == 8:
        x = x.to(tl.float32).to(dtype)
        if live is not None:
            x = tl.where(live, x, 0.0)
    return x
