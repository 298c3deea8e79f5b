"""What the compiler makes of every kernel, on a machine without a GPU.

    python -m kvcompress_kernels.report_triton --check kernels/compiled.md

Compiles each `Build` with Triton's own ptxas for each architecture and reads the result back with
cuobjdump. It fails when a kernel does not compile, spills registers to memory, needs more shared
memory than the chip has, or has lost the 16-byte loads it was written for.
"""

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvcompress_kernels.builds import Build

SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes that one program may have
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\S+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One build for one architecture.

    Args:
        registers: per thread.
        shared: bytes of shared memory per program.
        local: instructions that load or store spilled registers.
        loads_16: 16-byte loads from global memory, through registers or straight to shared.
        tensor: tensor-core instructions.
        instructions: all of them.
    """

    name: str
    sm: int
    registers: int
    shared: int
    local: int
    loads_16: int
    tensor: int
    instructions: int

    def faults(self, build: Build) -> list[str]:
        """What is wrong with it; empty when it may be shipped."""
        found = []
        if self.local:
            found.append(f"{self.local} spills")
        if self.shared > SHARED[self.sm]:
            found.append(f"{self.shared} bytes of shared memory, {SHARED[self.sm]} are there")
        if build.wide_loads and not self.loads_16:
            found.append("no 16-byte loads")
        return found


def modules() -> Iterator[Any]:
    """The modules that hold kernels: those with `builds`."""
    for path in sorted(Path(__file__).parent.glob("*_triton.py")):
        module = importlib.import_module(f"kvcompress_kernels.{path.stem}")
        if hasattr(module, "builds"):
            yield module


def compiled(build: Build, sm: int) -> Compiled:
    """Compile one build.

    Raises:
        Exception: whatever Triton or ptxas say of a kernel that does not compile.
    """
    names = build.kernel.arg_names
    constant = {(names.index(key),): value for key, value in build.constexprs.items()}
    signature = {name: build.signature.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in build.aligned}
    source = ASTSource(fn=build.kernel, signature=signature, constexprs=constant, attrs=aligned)
    options = {"num_warps": build.warps, "num_stages": build.stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(kernel.asm["cubin"])
        binary.flush()
        usage, listing = (_dump(how, binary.name) for how in ("-res-usage", "-sass"))
    found = re.search(r"REG:(\d+) STACK:\d+ SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"{build.name}: cuobjdump did not tell its registers:\n{usage}")
    operations = Counter(INSTRUCTION.findall(listing))

    def count(*starts: str, part: str = "") -> int:
        return sum(n for op, n in operations.items() if op.startswith(starts) and part in op)

    return Compiled(
        name=build.name,
        sm=sm,
        registers=int(found[1]),
        shared=int(kernel.metadata.shared),
        local=count("LDL", "STL") + int(found[2]),
        loads_16=count("LDG", "LDGSTS", part="128"),
        tensor=count("HGMMA", "HMMA", "UTCHMMA", "TCGEN"),
        instructions=sum(operations.values()),
    )


def _dump(how: str, path: str) -> str:
    line = [str(TOOLS / "cuobjdump"), how, path]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout


def table(rows: Sequence[Compiled]) -> str:
    """A markdown table, one row per build and architecture."""
    header = ["kernel", "sm", "registers", "shared", "spills", "16-byte loads", "tensor", "SASS"]
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    lines += [[str(value) for value in asdict(row).values()] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def report(architectures: Sequence[int], *, once: bool) -> tuple[list[Compiled], list[str]]:
    """All builds for some architectures, and what is wrong with them.

    Args:
        once: the last build of each kernel alone.
    """
    rows, faults = [], []
    for module in modules():
        builds = module.builds()
        for build in {build.kernel: build for build in builds}.values() if once else builds:
            for sm in architectures:
                try:
                    row = compiled(build, sm)
                except Exception as error:  # the compiler's own, of any kind
                    faults.append(f"{build.name}, sm_{sm}: {str(error).strip().splitlines()[-1]}")
                    continue
                rows.append(row)
                faults += [f"{build.name}, sm_{sm}: {fault}" for fault in row.faults(build)]
    return rows, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--sm", type=int, nargs="+", default=[90], choices=list(SHARED))
    parser.add_argument("--once", action="store_true", help="one build of each kernel")
    parser.add_argument("--check", type=Path, help="compare with this file, if it has these lines")
    parser.add_argument("--write", type=Path, help="write the table")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        parser.error("TRITON_INTERPRET must be unset: interpreted kernels are not compiled")
    rows, faults = report(args.sm, once=args.once)
    text = f"Compiled by Triton {triton.__version__}.\n\n{table(rows)}"
    sys.stdout.write(text)
    if args.write:
        args.write.write_text(text)
    if args.check:
        faults += differences(text, args.check.read_text())
    sys.stdout.writelines(f"FAULT {fault}\n" for fault in faults)
    return 1 if faults else 0


def differences(now: str, then: str) -> list[str]:
    """Lines of `now` that a table by the same Triton does not have; none for another Triton."""
    if now.splitlines()[0] != then.splitlines()[0]:
        return []
    known = set(then.splitlines())
    return [f"not in the committed table: {line}" for line in now.splitlines() if line not in known]


if __name__ == "__main__":
    sys.exit(main())
