"""Where a figure comes from: the machine and the commit that its file names."""

import os
import platform
import subprocess
from pathlib import Path


def machine() -> str:
    """The GPU's name; without one the processor's, if the system tells it, and its cores."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    tiles = any(line.startswith("flags") and " amx_tile" in line for line in lines)
    cores = f"{os.cpu_count()} cores" + (", with AMX" if tiles else "")
    return f"{names[0] if names else platform.machine()}, {cores}"


def commit() -> str:
    """The commit of the plugin that is imported, marked when files that matter differ from it.

    A copy without git's own files is told by the variable BENCHMARK_COMMIT where it came from.
    """
    import vllm_kvcompress

    if given := os.environ.get("BENCHMARK_COMMIT"):
        return given

    root = Path(vllm_kvcompress.__file__).parents[1]

    def git(*words: str) -> str:
        here = ["git", "-C", str(root), *words]
        return subprocess.run(here, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", "vllm_kvcompress", "kernels", "benchmarks/*.py")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")
