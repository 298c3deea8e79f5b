"""What the Triton kernels compile for: architectures, dtypes, and builds made ahead of time."""

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
"""What a quantised cache may hold, and what Triton calls pointers to it."""


def float8(sm: int) -> dict[torch.dtype, str]:
    """Those of `FLOAT8` that an architecture reads: none before Ada has instructions for e4m3."""
    return {x: name for x, name in FLOAT8.items() if sm >= 89 or x != torch.float8_e4m3fn}


def named(pointer: str) -> str:
    """End of a build's name: which float8 the cache holds, if any."""
    return "" if pointer == "*bf16" else f" {pointer.removeprefix('*')}"


def check_cache(op: str, pages: torch.Tensor) -> None:
    """Raise ``ValueError`` unless the kernels read pages of this dtype on their GPU."""
    sm = architecture(pages.device)
    dtypes = [*FLOATS, *float8(sm)]
    require(pages.dtype in dtypes, op, f"a cache on sm_{sm} must be one of {dtypes}", pages.dtype)


@cache
def architecture(device: torch.device) -> int:
    """Of a GPU; that of an H100 where there is none, which is Triton's interpreter."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


DIMS = (64, 80, 96, 128, 256)
"""Head dims of the models that are served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One configuration of one kernel, as `run` launches it.

    Args:
        name: unique; the op, then what distinguishes the configuration.
        kernel: the jitted function.
        signature: argument -> ``"*bf16"``, ``"i32"``, ``"fp32"``, ...; constexprs are left out.
        constexprs: constant arguments.
        warps: warps of a program.
        stages: stages of its pipelined loops.
        aligned: arguments that are multiples of 16: pointers, and the strides that are.
        wide_loads: whether it must come out with 16-byte loads from global memory.
        tensor_cores: whether it must come out with instructions of theirs.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    aligned: tuple[str, ...] = ()
    wide_loads: bool = True
    tensor_cores: bool = False
