"""How the kernels' numba code is compiled, cached on disk and called.

Numba's cache notices changes of the file that defines a function, but not of code in other files
that the function calls. So the names of cached functions end with a hash of this package's code.
"""

import ctypes
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    from llvmlite import ir as ir
    from llvmlite.binding import ffi
    from numba import carray as carray
    from numba import cfunc as cfunc
    from numba import njit as njit
    from numba import types as types
    from numba.core import cgutils as cgutils
    from numba.extending import intrinsic as intrinsic
    from numba.extending import overload as overload
except ImportError as error:
    raise ImportError(
        "window scores and packed pages on a CPU need numba, which vLLM installs: pip install numba"
    ) from error


def _hide_dict(library: Any, get: Callable[[Any, str], Any]) -> None:
    """Make attribute `__dict__` of llvmlite's library missing. Otherwise it is a C function.

    When an engine starts, vLLM searches the attributes of all modules for Triton kernels. It fails
    on an object whose `__dict__` is no dictionary.
    """

    def get_attribute(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return get(self, name)

    library.__getattr__ = get_attribute


_hide_dict(type(ffi.lib), type(ffi.lib).__getattr__)

# No "nnan" and "ninf": pages may hold NaN after a row's last token, and a sink may be infinite.
FAST_MATH = {"contract", "reassoc", "arcp", "nsz", "afn"}


def _hash_of_sources(folder: Path) -> str:
    """Return a hash of all Python code in `folder` and the folders in it."""
    files = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


_SOURCES = _hash_of_sources(Path(__file__).parent)


def cached(decorate: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    """Return a numba decorator that caches on disk where some cache folder is writable."""

    def apply(function: Callable[..., Any]) -> Any:
        function.__qualname__ += f"_{_SOURCES}"
        try:
            return decorate(*args, cache=True, **options)(function)
        except RuntimeError:  # numba finds no folder that it can write to
            return decorate(*args, **options)(function)

    return apply


compiled = cached(
    njit, fastmath=FAST_MATH, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
)


@intrinsic
def as_pointer(typing_context, address):
    """Return an integer address as a pointer."""

    def code(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), code


@intrinsic
def fetch_add(typing_context, counters, index, value):
    """Add to a counter atomically and return its previous value."""

    def code(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        at = cgutils.get_item_pointer(context, builder, signature.args[0], array, [args[1]])
        return builder.atomic_rmw("add", at, args[2], "acq_rel")

    return types.int64(types.Array(types.int64, 1, "C"), types.intp, types.int64), code


def c_function(work: Callable[..., None]) -> Any:
    """Return `work` compiled to a C function, whose argument is the address of the arguments."""
    function: Any = cached(cfunc, types.void(types.voidptr))(work)
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.address)
