"""Architectures, dtypes and configurations that the Triton kernels are compiled for."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kvcompress_kernels.contract import require

ARCHITECTURES = (80, 90, 100)
"""A100, H100 and H200, B200: ten times the major compute capability, plus the minor one."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FLOAT8 = {torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5"}
"""Dtypes of a quantised cache, with Triton's name for a pointer to each."""


def float8(sm: int) -> dict[torch.dtype, str]:
    """Return the `FLOAT8` dtypes that an architecture can read. e4m3 needs Ada or later."""
    return {x: name for x, name in FLOAT8.items() if sm >= 89 or x != torch.float8_e4m3fn}


def float8_suffix(pointer: str) -> str:
    """Return the suffix of a build's name that says which float8 the cache holds, if any."""
    return "" if pointer == "*bf16" else f" {pointer.removeprefix('*')}"


def check_cache(op: str, pages: torch.Tensor) -> None:
    """Raise ``ValueError`` unless the kernels read pages of this dtype on their GPU."""
    sm = architecture(pages.device)
    dtypes = [*FLOATS, *float8(sm)]
    require(pages.dtype in dtypes, op, f"a cache on sm_{sm} must be one of {dtypes}", pages.dtype)


@cache
def architecture(device: torch.device) -> int:
    """Return the GPU's compute capability, or an H100's for a CPU device (Triton's interpreter)."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


DIMS = (64, 80, 96, 128, 256)
"""Head dimensions that are compiled ahead of time."""


def dims_and_kinds(sm: int) -> list[tuple[int, str]]:
    """Return head dims with the pointer type of the cache: float8 for one dim, bf16 for all."""
    return [*((128, kind) for kind in float8(sm).values()), *((dim, "*bf16") for dim in DIMS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One configuration of one kernel, as its op launches it.

    Args:
        name: unique name: the op, then what distinguishes the configuration.
        kernel: the jitted function.
        config: constant arguments, with the launch options ``num_warps`` and ``num_stages``.
        types: Triton's type of each other argument that is not ``"i32"``, such as ``"*bf16"``. May
            list arguments that the kernel lacks.
        unaligned: integer arguments that need not be multiples of 16, although the kernel
            specialises for multiples.
        wide_loads: whether the compiled kernel must use 16-byte loads from global memory.
        tensor_cores: whether the compiled kernel must use tensor-core instructions.
        logits: attention logits in one iteration of the main loop; 0 if it computes none.
        unpacked: quantised numbers in one iteration of the main loop; 0 if it unpacks none.
        prefetches: whether the main loop must load the next keys while it uses the current ones.
    """

    name: str
    kernel: Any
    config: Mapping[str, Any]
    types: Mapping[str, str]
    unaligned: tuple[str, ...] = ()
    wide_loads: bool = True
    tensor_cores: bool = False
    logits: int = 0
    unpacked: int = 0
    prefetches: bool = False

    @property
    def constexprs(self) -> dict[str, Any]:
        """Return the constant arguments."""
        return {name: x for name, x in self.config.items() if name in self.kernel.arg_names}

    @property
    def signature(self) -> dict[str, str]:
        """Return the type of each argument that is not constant."""
        names = (name for name in self.kernel.arg_names if name not in self.config)
        return {name: self.types.get(name, "i32") for name in names}

    @property
    def aligned(self) -> list[str]:
        """Return the pointers and integers that are multiples of 16: all that Triton tests."""
        tested = {
            x.name
            for x in self.kernel.params
            if not (x.do_not_specialize or x.do_not_specialize_on_alignment)
        }
        return [
            name
            for name, kind in self.signature.items()
            if name in tested and name not in self.unaligned and not kind.startswith("fp")
        ]

    @property
    def warps(self) -> int:
        """Return the warps of a program. Triton's default is 4."""
        return int(self.config.get("num_warps", 4))

    @property
    def stages(self) -> int:
        """Return the stages of the pipelined loops. Triton's default is 3."""
        return int(self.config.get("num_stages", 3))

    @property
    def max_registers(self) -> int | None:
        """Return the registers that a thread may have; None leaves it to the compiler."""
        limit: int | None = self.config.get("maxnreg")
        return limit
