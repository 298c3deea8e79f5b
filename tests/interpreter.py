"""Triton's interpreter, mended: it multiplies the bit patterns of bfloat16 operands of `tl.dot`."""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def mend() -> None:
    """Let `tl.dot` widen bfloat16 operands to float32 before it multiplies them."""
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data
        bits = interpreter._convert_float(handle.data, tl.bfloat16, tl.float32, None)
        return bits.view(np.float32)

    def create_dot(self, a, b, d, *how):
        if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
            return dot(self, a, b, d, *how)
        product = np.matmul(widened(a), widened(b), dtype=np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    builder.create_dot = create_dot
