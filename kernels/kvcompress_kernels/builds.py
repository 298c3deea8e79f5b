"""What of a Triton kernel is compiled ahead of time, to see what the compiler makes of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    aligned: tuple[str, ...] = ()
    wide_loads: bool = True
