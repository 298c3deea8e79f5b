"""Compile every kernel without a GPU and report its resources.

    python -m kvcompress_kernels.report_triton --check kernels/compiled.md

Compiles each `Build` with Triton's own ptxas for each architecture and disassembles it with
cuobjdump. Exits with 1 if a kernel does not compile, spills registers, needs more shared memory
than the GPU has, or lacks the 16-byte loads, tensor-core instructions or prefetches that it was
written for. The main loop of a kernel is its largest loop that copies asynchronously from global
memory, or else its largest loop. In a kernel that unpacks numbers, it is the first that copies.

Triton caches compiled kernels, so a second run takes seconds.
"""

import argparse
import hashlib
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvcompress_kernels.builds import ARCHITECTURES, Build
from kvcompress_kernels.compiled_table import HEAD, Compiled, differences, section, sections

SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Maximum bytes of shared memory per program, by architecture."""
SHARED_PER_SM = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
"""Shared memory per SM in bytes. CUDA reserves 1 KiB of it per program."""
REGISTERS_PER_SM, WARPS_PER_SM, PROGRAMS_PER_SM = 65536, 64, 32
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\S+\s+)?([A-Z][A-Z0-9_.]*)(.*?);", re.MULTILINE
)
"""An instruction's address, name and operands."""
JOBS = 2


def modules() -> Iterator[Any]:
    """Yield the Triton modules that define `builds`."""
    for path in sorted(Path(__file__).parent.glob("*/triton.py")):
        module = importlib.import_module(f"kvcompress_kernels.{path.parent.name}.triton")
        if hasattr(module, "builds"):
            yield module


def builds_by_name(sm: int) -> dict[str, Build]:
    """Return all builds for one architecture by name."""
    return {build.name: build for module in modules() for build in module.builds(sm)}


def compiled(build: Build, sm: int) -> Compiled:
    """Compile one build.

    Raises:
        Exception: The kernel does not compile. Triton and ptxas raise errors of many types.
    """
    names = build.kernel.arg_names
    constant = {(names.index(key),): value for key, value in build.constexprs.items()}
    signature = {name: build.signature.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in build.aligned}
    source = ASTSource(fn=build.kernel, signature=signature, constexprs=constant, attrs=aligned)
    options: dict[str, int | None] = {"num_warps": build.warps, "num_stages": build.stages}
    options["maxnreg"] = build.max_registers
    kernel = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    usage, listing = (_dumped(flag, kernel.asm["cubin"]) for flag in ("-res-usage", "-sass"))
    usage_match = re.search(r"REG:(\d+) STACK:\d+ SHARED:\d+ LOCAL:(\d+)", usage)
    if usage_match is None:
        raise RuntimeError(f"{build.name}: cuobjdump printed no register count:\n{usage}")
    operations = Counter(op for _, op, _ in INSTRUCTION.findall(listing))

    def count(*starts: str, part: str = "") -> int:
        return sum(n for op, n in operations.items() if op.startswith(starts) and part in op)

    registers, shared = int(usage_match[1]), int(kernel.metadata.shared)
    loop = main_loop(listing, first=build.unpacked > 0)
    waits = [re.search(r"SB0, 0x([0-9a-f]+)", rest) for op, rest in loop if op == "DEPBAR.LE"]
    issued = len(loop) * build.warps * 32
    return Compiled(
        registers=registers,
        shared=shared,
        spills=count("LDL", "STL") + int(usage_match[2]),
        loads_16=count("LDG", "LDGSTS", part="128"),
        tensor=count("HGMMA", "HMMA", "UTCHMMA", "UTCQMMA", "TCGEN"),
        instructions=sum(operations.values()),
        programs=programs_per_sm(sm, registers, shared, build.warps),
        barriers=sum(op.startswith("BAR.") for op, _ in loop),
        per_logit=round(issued / build.logits, 1) if build.logits else None,
        per_number=round(issued / build.unpacked, 1) if build.unpacked else None,
        copies_in_flight=min((int(wait[1], 16) for wait in waits if wait), default=None),
    )


def programs_per_sm(sm: int, registers: int, shared: int, warps: int) -> int:
    """Return how many programs fit on one SM at the same time.

    Args:
        sm: compute capability.
        registers: per thread. A warp's registers are allocated in units of 256.
        shared: bytes of shared memory per program.
        warps: warps per program.
    """
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = REGISTERS_PER_SM // per_warp // warps
    by_shared = SHARED_PER_SM[sm] // (shared + 1024)
    return min(by_registers, by_shared, WARPS_PER_SM // warps, PROGRAMS_PER_SM)


def main_loop(listing: str, *, first: bool = False) -> list[tuple[str, str]]:
    """Return the name and operands of each instruction of the main loop; empty without a loop.

    Args:
        listing: disassembled kernel.
        first: choose the first loop that copies asynchronously instead of the largest.
    """
    lines = [(int(at, 16), op, rest.strip()) for at, op, rest in INSTRUCTION.findall(listing)]
    loops = []
    for index, (at, op, rest) in enumerate(lines):
        target = re.search(r"0x([0-9a-f]+)", rest)
        if op.startswith("BRA") and target and int(target[1], 16) < at:
            start = next(i for i, line in enumerate(lines) if line[0] == int(target[1], 16))
            loops.append([line[1:] for line in lines[start : index + 1]])
    # Skip the padding after EXIT, which branches to itself.
    loops = [loop for loop in loops if all(op != "EXIT" for op, _ in loop)]
    copying = [loop for loop in loops if any(op.startswith("LDGSTS") for op, _ in loop)]
    if first:
        copying = copying[:1]
    return max(copying or loops, key=len, default=[])


def _dumped(flag: str, binary: bytes) -> str:
    """Return cuobjdump's output. It takes as long as compiling, so cache it in Triton's cache."""
    cache = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    cached = cache / f"cuobjdump{flag}-{hashlib.sha256(binary).hexdigest()}"
    if not cached.exists():
        with tempfile.NamedTemporaryFile(suffix=".cubin", dir=cache) as file:
            file.write(binary)
            file.flush()
            command = [str(TOOLS / "cuobjdump"), flag, file.name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        part = cached.with_suffix(f".{os.getpid()}")
        part.write_text(done.stdout)
        part.replace(cached)
    return cached.read_text()


def faults(build: Build, sm: int, kernel: Compiled) -> list[str]:
    """List the problems of a compiled kernel. Empty if there are none."""
    problems = []
    if kernel.spills:
        problems.append(f"{kernel.spills} spills")
    if kernel.shared > SHARED[sm]:
        problems.append(f"{kernel.shared} bytes of shared memory, the limit is {SHARED[sm]}")
    if build.wide_loads and not kernel.loads_16:
        problems.append("no 16-byte loads")
    if build.tensor_cores and not kernel.tensor:
        problems.append("no tensor cores")
    if build.prefetches and not kernel.copies_in_flight:
        problems.append("no prefetches: the main loop waits for all of its copies")
    return problems


def _compile_job(name: str, sm: int) -> tuple[Compiled | None, list[str]]:
    """Compile a build in a worker process, and return its resources and its problems."""
    build = builds_by_name(sm)[name]
    try:
        kernel = compiled(build, sm)
    # Triton and ptxas raise errors of many types.
    except Exception as error:
        return None, [str(error).strip().splitlines()[-1]]
    return kernel, faults(build, sm, kernel)


def report(
    architectures: Sequence[int], *, once: bool, only: str = ""
) -> tuple[dict[str, dict[int, Compiled]], list[str]]:
    """Compile builds and return their resources by name and architecture, and their problems.

    Args:
        architectures: compute capabilities, such as 90.
        once: compile only the last build of each kernel.
        only: compile only builds whose names match this regular expression.
    """
    jobs = []
    for sm in architectures:
        builds = builds_by_name(sm)
        last_per_kernel = {build.kernel: name for name, build in builds.items()}.values()
        names = last_per_kernel if once else builds
        jobs += [(name, sm) for name in names if re.search(only, name)]
    rows: dict[str, dict[int, Compiled]] = {name: {} for name, _ in jobs}
    all_faults = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(JOBS, os.cpu_count() or 1), mp_context=context) as pool:
        results = pool.map(_compile_job, *zip(*jobs, strict=True))
        for (name, sm), (kernel, wrong) in zip(jobs, results, strict=True):
            all_faults += [f"{name}, sm_{sm}: {fault}" for fault in wrong]
            if kernel:
                rows[name][sm] = kernel
    return rows, all_faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    known = list(ARCHITECTURES)
    parser.add_argument("--sm", type=int, nargs="+", default=known, choices=known)
    parser.add_argument("--once", action="store_true", help="compile only one build of each kernel")
    parser.add_argument(
        "--only", default="", help="compile only builds whose names match this regular expression"
    )
    parser.add_argument(
        "--check", type=Path, help="compare with the table of this Triton version in a file"
    )
    parser.add_argument(
        "--write", type=Path, help="write the table of this Triton version to a file"
    )
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        parser.error("TRITON_INTERPRET must be unset: interpreted kernels are not compiled")
    rows, wrong = report(args.sm, once=args.once, only=args.only)
    text = section(triton.__version__, args.sm, rows)
    sys.stdout.write(text)
    if args.write:
        tables = sections(args.write.read_text()) if args.write.exists() else {}
        tables[triton.__version__] = text
        newest_first = (tables[x] for x in sorted(tables, reverse=True))
        args.write.write_text("\n".join([HEAD, *newest_first]))
    if args.check:
        committed = sections(args.check.read_text()).get(triton.__version__, "")
        wrong += differences(text, committed, report_missing=not args.once and not args.only)
    sys.stdout.writelines(f"FAULT {fault}\n" for fault in wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
