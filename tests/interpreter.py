"""Fixes for Triton's interpreter where it differs from the compiled kernels.

Without them, the interpreter multiplies the bit patterns of bfloat16 operands in `tl.dot`, converts
NaN and infinity of float8 to finite numbers, flushes subnormal float8_e5m2 to zero when it converts
to float16, truncates float32 to bfloat16 instead of rounding it, loses the carry when it rounds
float32 up to a power of two in float8_e4m3, and turns the result of a scalar comparison into an
integer if it masks a block.
"""

import functools
from types import SimpleNamespace

import numpy as np
import torch
import triton.backends
import triton.language as tl
from triton.runtime import interpreter

FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
WIDER = {tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32}
BITS = {2: torch.uint16, 4: torch.uint32}


def install_driver() -> None:
    """Let vLLM use Triton without a GPU. Call this before vLLM is first imported."""
    driver = type("InterpreterDriver", (), {"is_active": staticmethod(lambda: True)})
    triton.backends.backends.setdefault("cpu", SimpleNamespace(driver=driver, compiler=None))


@functools.cache
def install_fixes() -> None:
    """Patch `tl.dot` for bfloat16, conversions of floats, and masks from scalars."""
    builder = interpreter.InterpreterBuilder
    dot, convert = builder.create_dot, interpreter._convert_float
    splat = builder.create_splat

    def convert_float(data, source, target, rounding):
        if (source, target) == (tl.float32, tl.bfloat16):
            numbers = torch.from_numpy(np.array(data, np.float32))
            return numbers.bfloat16().view(torch.uint16).numpy()
        if (source, target) == (tl.float32, tl.float8e4nv):
            # Compiled kernels saturate.
            numbers = torch.from_numpy(np.array(data, np.float32)).clamp(-448.0, 448.0)
            return numbers.to(FLOAT8[target]).view(torch.uint8).numpy()
        if source not in FLOAT8:
            return convert(data, source, target, rounding)
        table = torch.arange(256, dtype=torch.uint8).view(FLOAT8[source]).to(WIDER[target])
        return table.view(BITS[table.itemsize]).numpy()[data.view(np.uint8)]

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data
        bits = convert(handle.data, tl.bfloat16, tl.float32, None)
        return bits.view(np.float32)

    def create_dot(self, a, b, d, *how):
        if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
            return dot(self, a, b, d, *how)
        product = np.matmul(widened(a), widened(b), dtype=np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def create_splat(self, ret_ty, arg):
        if arg.data.dtype != np.bool_:
            return splat(self, ret_ty, arg)
        return interpreter.TensorHandle(np.full(ret_ty.shape, arg.data), tl.int1)

    interpreter._convert_float = convert_float
    builder.create_splat = create_splat
    builder.create_dot = create_dot
