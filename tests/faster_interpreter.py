"""Caches that make Triton's interpreter faster without changing its results.

The interpreter spends most of its time on types. For every result it builds the type of the block,
checks the shape and converts its sizes to constants, for each of its three representations of a
type. Types are immutable, so these patches share one object between equal types and cache derived
values on it.
"""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter

import direct_operators
from kvcompress_kernels.packed_attention import triton as packed_attention

BUILTIN_WRAPPER = core.load.__code__
"""Code object of the wrapper that `core.builtin` puts around every function of the language."""
EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


@functools.cache
def install_caches() -> None:
    """Install the caches. The interpreter's patches of `triton.language` stay installed, too."""
    _patch_language_once()
    _cache_signatures()
    _pass_cpu_tensors()
    _cache_block_types()
    _cache_type_conversions()
    _compare_by_identity_first()
    _skip_needless_conversions()
    _check_overflow_with_numpy()
    _count_with_bincount()
    _start_fewer_idle_programs()
    direct_operators.install()


def _start_fewer_idle_programs() -> None:
    """Split rows of `packed_attention` at most 16 times, which is enough for 4096 tokens.

    A launch has as many programs as fit on a GPU, and most of 64 find no tokens in a test's rows.
    """
    packed_attention.SPLITS = 16


def _patch_language_once() -> None:
    """Patch `triton.language` once.

    The interpreter searches all of it for functions to replace, and restores them, for every launch
    and every call of another jitted function.
    """

    def patch(package: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        # Skip the wrapper, which only checks for the argument that `builtin` adds below.
        if member.__code__ is BUILTIN_WRAPPER:
            member = member.__wrapped__

        def builtin(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        scope.set_attr(package, name, builtin)

    interpreter._patch_attr = patch
    interpreter._patch_lang(SimpleNamespace(__globals__={"language": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()


def _cache_signatures() -> None:
    """Cache the signatures of kernels, which the interpreter inspects three times per launch."""
    signature = functools.cache(inspect.signature)

    def callargs(kernel: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = signature(kernel).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    replacements = {
        "getfullargspec": functools.cache(inspect.getfullargspec),
        "getcallargs": callargs,
    }
    interpreter.inspect = SimpleNamespace(**{**vars(inspect), **replacements})


def _pass_cpu_tensors() -> None:
    """Pass tensors to kernels without copies, as all of them are on the CPU, and cache types."""
    executor, convert = interpreter.GridExecutor, interpreter._implicit_cvt
    copy, restore = executor._init_args_hst, executor._restore_args_dev
    pointers: dict[torch.dtype, Any] = {}

    plain = {int, float, bool, type(None), torch.dtype, core.dtype, core.constexpr}

    def needs_no_copy(x: Any) -> bool:
        return x.is_cpu if isinstance(x, torch.Tensor) else type(x) in plain

    def pass_arguments(self: Any, args: Any, kwargs: Any) -> Any:
        if all(map(needs_no_copy, (*args, *kwargs.values()))):
            return args, kwargs
        return copy(self, args, kwargs)

    def keep_arguments(self: Any, args: Any, passed: Any, kwargs: Any, passed_kwargs: Any) -> None:
        if args is not passed:
            restore(self, args, passed, kwargs, passed_kwargs)

    def convert_argument(x: Any) -> Any:
        if type(x) is not torch.Tensor:
            return convert(x)
        if x.dtype not in pointers:
            pointers[x.dtype] = convert(x).type
        handle = interpreter.TensorHandle(
            np.array([x.data_ptr()], dtype=np.uint64), pointers[x.dtype]
        )
        return core.tensor(handle, pointers[x.dtype])

    executor._init_args_hst, executor._restore_args_dev = pass_arguments, keep_arguments
    interpreter._implicit_cvt = convert_argument


def _cache_block_types() -> None:
    """Share one type object between all blocks of the same element type and shape."""
    known: dict[Any, core.block_type] = {}
    begin = core.block_type.__init__

    def create(cls: type, element_ty: core.dtype, shape: Any) -> Any:
        sizes = tuple(each.value if isinstance(each, core.constexpr) else each for each in shape)
        if {*map(type, sizes)} != {int}:
            return object.__new__(cls)  # `begin` raises the error.
        key = element_ty.name, getattr(element_ty, "address_space", None), sizes
        if key not in known:
            block = object.__new__(cls)
            begin(block, element_ty, shape)
            known[key] = block
        return known[key]

    def begin_once(self: Any, element_ty: core.dtype, shape: Any) -> None:
        if "numel" not in vars(self):
            begin(self, element_ty, shape)

    core.block_type.__new__ = create
    core.block_type.__init__ = begin_once
    with_element_ty = core.block_type.with_element_ty

    def with_element_once(self: Any, element_ty: core.dtype) -> Any:
        # Keep the element type: the id of a deleted one could belong to another type.
        known = vars(self).setdefault("_with_elements", {})
        if id(element_ty) not in known:
            known[id(element_ty)] = element_ty, with_element_ty(self, element_ty)
        return known[id(element_ty)][1]

    core.block_type.with_element_ty = with_element_once


def _cache_type_conversions() -> None:
    """Cache each type's numpy dtype, its builder type, and its tensors' shape, size and dtype."""
    numpy_of = interpreter._get_np_dtype
    known: dict[str, np.dtype[Any]] = {}

    def get_np_dtype(kind: core.dtype) -> np.dtype[Any]:
        if kind.name not in known:
            known[kind.name] = numpy_of(kind)
        return known[kind.name]

    interpreter._get_np_dtype = get_np_dtype

    named = functools.cache(tl.str_to_ty)
    tl.str_to_ty = named
    for cls in (core.dtype, core.pointer_type, core.block_type):
        cls.to_ir = _once(cls.to_ir)

    begin = core.tensor.__init__

    def begin_tensor(self: Any, handle: Any, kind: core.dtype) -> None:
        if "_tensors" not in vars(kind):
            begin(self, handle, kind)
            kind._tensors = self.shape, self.numel, self.dtype
        self.handle, self.type = handle, kind
        self.shape, self.numel, self.dtype = kind._tensors

    core.tensor.__init__ = begin_tensor
    integers = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)
    core.dtype.is_int = lambda self: self.name in integers


def _once(to_ir: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def remembered(self: Any, builder: Any) -> Any:
        if "_ir" not in vars(self):
            self._ir = to_ir(self, builder)
        return self._ir

    return remembered


def _compare_by_identity_first() -> None:
    """Compare types by identity before by value, and compare lists of integers directly."""

    def identity_first(equal: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda self, other: self is other or equal(self, other)

    for cls in (core.dtype, core.pointer_type, core.block_type):
        hash_method = cls.__hash__
        cls.__eq__ = identity_first(cls.__eq__)
        cls.__hash__ = hash_method

    equal = core.tuple.__eq__

    def equal_tuples(self: Any, other: Any) -> Any:
        values = other.values if isinstance(other, core.tuple) else other
        if isinstance(values, list) and {*map(type, values)} == {int}:
            return core.constexpr(self.values == values)
        return equal(self, other)

    core.tuple.__eq__ = equal_tuples


def _skip_needless_conversions() -> None:
    """Skip casts to the same type and broadcasts to the same shape."""
    operations = semantic.TritonSemantic
    cast, broadcast = operations.cast, operations.broadcast_impl_value
    promote = operations.computation_type_impl
    promoted: dict[Any, core.dtype] = {}

    def cast_if_other(self: Any, input: Any, dst_ty: core.dtype, *how: Any, **named: Any) -> Any:
        same = input.dtype is dst_ty.scalar
        return input if same else cast(self, input, dst_ty, *how, **named)

    def broadcast_if_other(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left is right or (
            left.is_block() and right.is_block() and left.shape.values == right.shape.values
        ):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def promote_once(self: Any, a: core.dtype, a_scalar: bool, b: core.dtype, *more: bool) -> Any:
        key = a.name, a_scalar, b.name, *more
        if key not in promoted:
            promoted[key] = promote(self, a, a_scalar, b, *more)
        return promoted[key]

    operations.cast = cast_if_other
    operations.broadcast_impl_value = broadcast_if_other
    operations.computation_type_impl = promote_once


def _check_overflow_with_numpy() -> None:
    """Check integer arithmetic for overflow with numpy, and raise `OverflowError`.

    Triton's own check creates tensors for its steps and ignores the result.
    """

    def check(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        kind = lhs.type.scalar
        if kind.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
            return
        exact = EXACT[operation.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
        low, high = kind.get_int_min_value(), kind.get_int_max_value()
        if exact.min() < low or exact.max() > high:
            raise OverflowError(f"{operation.__name__} of {kind}")

    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = check


def _count_with_bincount() -> None:
    """Compute `tl.histogram` with `np.bincount`, which needs no floating-point edges of bins."""

    def create_histogram(self: Any, data: Any, bins: int, mask: Any) -> Any:
        valid = (data.data >= 0) & (data.data < bins)
        if mask is not None:
            valid &= mask.data
        counts = np.bincount(data.data[valid].astype(np.int64), minlength=bins)
        return interpreter.TensorHandle(counts.astype(np.int32), tl.int32)

    interpreter.InterpreterBuilder.create_histogram = create_histogram
