"""Return the machine and the commit that a result file records."""

import os
import platform
import subprocess
from pathlib import Path


def machine() -> str:
    """Return the name of the GPU, or without a GPU the processor and its number of cores."""
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
    """Return the commit of the imported plugin, with a mark if relevant files have changes.

    For a copy without .git, set BENCHMARK_COMMIT to its commit.
    """
    import vllm_kvcompress

    if commit_id := os.environ.get("BENCHMARK_COMMIT"):
        return commit_id

    root = Path(vllm_kvcompress.__file__).parents[1]

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", "vllm_kvcompress", "kernels", "benchmarks/*.py")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")
