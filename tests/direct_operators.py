"""Operators of Triton's interpreter that apply numpy's operators at once.

For each operator, the interpreter derives the type of the result, casts both operands to it, and
broadcasts them. If both operands already have one type, these operators skip that. The results are
the same. All other operands take Triton's way.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core, semantic
from triton.language.core import constexpr, tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

Direct = Callable[..., tensor | None]
"""Returns an operator's result, or None if only Triton's operator can compute it."""

ARITHMETIC = {"__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply}
COMPARISONS = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
ON_MASKS = {"__and__": np.bitwise_and, "__or__": np.bitwise_or}
REPLACED: list[tuple[str, Direct, Callable[..., tensor]]] = []
"""The name of each replaced method, its replacement, and Triton's method."""
BOOL = np.dtype(np.bool_)
LOWEST, HIGHEST = np.iinfo(np.int32).min, np.iinfo(np.int32).max
FLOATS = (np.float32, np.float64)


def install() -> None:
    """Replace operators of tensors, after the interpreter has patched `triton.language`."""
    core.dtype._number = core.dtype._mask_type = None
    tl.int32._number, tl.int64._number = np.int32, np.int64
    tl.float32._number, tl.float64._number = np.float32, np.float64
    for name, operation in ARITHMETIC.items():
        _replace(tensor, name, _arithmetic(operation))
    for name, operation in COMPARISONS.items():
        _replace(tensor, name, _comparison(operation))
    for name, operation in ON_MASKS.items():
        _replace(tensor, name, _on_masks(operation))
    _replace(tensor, "__add__", _pointer_offset)
    _replace(tensor, "__getitem__", _with_new_axes)
    _replace(semantic.TritonSemantic, "where", _where)
    _replace(semantic.TritonSemantic, "cast", _cast)


def _replace(owner: type, name: str, direct: Direct) -> None:
    """Let the method `name` of `owner` call `direct`, and Triton's method if that returns None."""
    by_triton = getattr(owner, name)

    def operator(self: Any, *operands: Any) -> Any:
        result = direct(self, *operands)
        return by_triton(self, *operands) if result is None else result

    setattr(owner, name, operator)
    REPLACED.append((name, direct, by_triton))


def _promoted(left: tensor, right: Any) -> tuple[tensor, Any]:
    """Return both operands in int64 if one is int32 and the other int64, otherwise unchanged."""
    if type(right) is tensor and right.dtype is not left.dtype:
        if left.dtype is tl.int32 and right.dtype is tl.int64:
            return _cast(None, left, tl.int64), right
        if left.dtype is tl.int64 and right.dtype is tl.int32:
            return left, _cast(None, right, tl.int64)
    return left, right


def _operand(left: tensor, right: Any) -> Any:
    """Return the numpy data of `right` in the dtype of `left`, or None if the dtypes differ."""
    if type(right) is tensor:
        return right.handle.data if right.dtype is left.dtype else None
    if type(right) is constexpr:
        right = right.value
    number = left.dtype._number
    if (type(right) is int and LOWEST <= right <= HIGHEST) or (
        type(right) is float and number in FLOATS
    ):
        return number(right)
    return None


def _result(data: np.ndarray[Any, Any], dtype: Any, kind: Any, *operands: Any) -> tensor:
    """Return a tensor of `dtype` and the type `kind`, or its type with the shape of `data`."""
    if (not kind.is_block() or kind.shape.values != list(data.shape)) and any(
        type(x) is tensor and x.type.is_block() for x in operands
    ):
        kind = core.block_type(kind.scalar, list(data.shape))
    return tensor(TensorHandle(data, dtype), kind)


def _arithmetic(operation: np.ufunc) -> Direct:
    def operate(left: tensor, right: Any) -> tensor | None:
        left, right = _promoted(left, right)
        kind = left.dtype
        if kind._number is None or (operand := _operand(left, right)) is None:
            return None
        if kind is tl.int32 and interpreter.interpreter_builder.options.sanitize_overflow:
            exact = operation(left.handle.data, operand, dtype=np.int64)
            data = exact.astype(np.int32)
            if (data != exact).any():
                raise OverflowError(f"{operation.__name__} of {kind}")
        else:
            data = operation(left.handle.data, operand)
        if type(right) is not tensor or right.type is left.type:
            return tensor(TensorHandle(data, kind), left.type)
        return _result(data, kind, left.type, left, right)

    return operate


def _comparison(operation: np.ufunc) -> Direct:
    def operate(left: tensor, right: Any) -> tensor | None:
        left, right = _promoted(left, right)
        kind = left.dtype
        if kind._number is None or (operand := _operand(left, right)) is None:
            return None
        data = operation(left.handle.data, operand)
        if type(right) is not tensor or right.type is left.type:
            if left.type._mask_type is None:
                left.type._mask_type = left.type.with_element_ty(tl.int1)
            return tensor(TensorHandle(data, kind), left.type._mask_type)
        return _result(data, kind, tl.int1, left, right)

    return operate


def _on_masks(operation: np.ufunc) -> Direct:
    def operate(left: tensor, right: Any) -> tensor | None:
        if left.dtype is not tl.int1 or type(right) is not tensor or right.dtype is not tl.int1:
            return None
        a, b = left.handle.data, right.handle.data
        if a.dtype is not BOOL or b.dtype is not BOOL:
            return None
        data, kind = operation(a, b), left.handle.dtype.scalar
        if right.type is left.type:
            return tensor(TensorHandle(data, kind), left.type)
        return _result(data, kind, left.type, left, right)

    return operate


def _pointer_offset(left: tensor, right: Any) -> tensor | None:
    """Return a pointer plus an int32 or int64 tensor."""
    if not left.dtype.is_ptr() or type(right) is not tensor:
        return None
    if right.dtype is not tl.int32 and right.dtype is not tl.int64:
        return None
    width = max(1, left.handle.get_element_ty().primitive_bitwidth // 8)
    data = left.handle.data + width * right.handle.data.astype(np.uint64)
    return _result(data, left.handle.dtype, left.type, left, right)


def _with_new_axes(block: tensor, index: Any) -> tensor | None:
    """Return a block such as ``block[:, None]``."""
    if type(index) is not tuple or not block.type.is_block():
        return None
    if any(part is not None and part != slice(None) for part in index):
        return None
    data = block.handle.data[index]
    kind = core.block_type(block.dtype, list(data.shape))
    return tensor(TensorHandle(data, block.handle.dtype.scalar), kind)


def _where(_: Any, condition: tensor, x: Any, y: Any) -> tensor | None:
    pattern = x if type(x) is tensor else y
    if condition.dtype is not tl.int1 or type(pattern) is not tensor:
        return None
    if pattern.dtype._number is None:
        return None
    chosen, other = _operand(pattern, x), _operand(pattern, y)
    if chosen is None or other is None:
        return None
    data = np.where(condition.handle.data, chosen, other)
    return _result(data, pattern.dtype, pattern.type, condition, x, y)


def _cast(_: Any, value: tensor, kind: Any, *rounding: Any) -> tensor | None:
    """Convert masks and numbers to other numbers, as `InterpreterBuilder.cast_impl` does."""
    dtype, source = kind.scalar, value.dtype
    if rounding not in ((), (None,)) or kind.is_block() > value.type.is_block():
        return None
    if dtype._number is None or (source._number is None and source is not tl.int1):
        return None
    if source is dtype:
        return value
    data = value.handle.data.astype(dtype._number)
    if value.type.is_block():
        dtype = value.type.with_element_ty(dtype)
    return tensor(TensorHandle(data, dtype.scalar), dtype)
