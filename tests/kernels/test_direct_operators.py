"""The interpreter's direct operators return what Triton's operators return, or leave it to them."""

import itertools

import numpy as np
import pytest

from cases import INTERPRETED

if not INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

import triton.language as tl
from triton.runtime.interpreter import TensorHandle, interpreter_semantic

import direct_operators

KINDS = [
    (tl.int1, np.bool_),
    (tl.int32, np.int32),
    (tl.int64, np.int64),
    (tl.uint32, np.uint32),
    (tl.float16, np.float16),
    (tl.float32, np.float32),
    (tl.float64, np.float64),
    (tl.pointer_type(tl.float32), np.uint64),
]
SHAPES = [(), (4,), (4, 1), (1, 4), (2, 4)]
NUMBERS = [0, -3, 7, 2**31, 0.5, True, tl.constexpr(5)]


def operand(kind, dtype, shape):
    """Return a block, or a scalar if `shape` is empty, with distinct small numbers."""
    size = shape or (1,)
    data = (np.arange(1, 1 + np.prod(size)).reshape(size) * 3 % 7).astype(dtype)
    return tl.tensor(TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind)


TENSORS = [operand(*kind, shape) for kind in KINDS for shape in SHAPES]


def outcome(method, *operands):
    """Return type, dtype and bytes of a result, or the name of its error."""
    with np.errstate(all="ignore"):
        try:
            result = method(*operands)
        except Exception as e:  # Triton's own errors have no common base class
            return type(e).__name__
    return result and (str(result.type), str(result.dtype), result.handle.data.tobytes())


def operands_of(name):
    """Return the operands with which a method is tested."""
    if name == "where":
        masks = [x for x in TENSORS if x.dtype == tl.int1]
        parts = [*TENSORS[::3], *NUMBERS[:-1]]  # `tl.where` unwraps constants before
        return [(interpreter_semantic, *each) for each in itertools.product(masks, parts, parts)]
    if name == "cast":
        return [(interpreter_semantic, x, kind) for x in TENSORS for kind, _ in KINDS]
    if name == "__getitem__":
        return [(x, i) for x in TENSORS for i in (None, (slice(None), None), (None, slice(None)))]
    return list(itertools.product(TENSORS, [*TENSORS, *NUMBERS]))


@pytest.mark.parametrize(
    ("name", "direct", "by_triton"),
    direct_operators.REPLACED,
    ids=[f"{name} {index}" for index, (name, *_) in enumerate(direct_operators.REPLACED)],
)
def test_results_are_those_of_triton(name, direct, by_triton):
    num_direct = 0
    for operands in operands_of(name):
        found = outcome(direct, *operands)
        if found is not None:
            num_direct += 1
            assert found == outcome(by_triton, *operands), [getattr(x, "type", x) for x in operands]
    assert num_direct > 10
