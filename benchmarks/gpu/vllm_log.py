"""Observe vLLM from outside: its CUDA graph log and its host syncs."""

import logging
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SYNC = "called a synchronizing CUDA operation"  # text of PyTorch's warning
OUR_PACKAGES = ("vllm_kvcompress", "kvcompress_kernels")


class LogLines(logging.Handler):
    """A logging handler that collects log lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()


def graph_table(lines: Sequence[str]) -> list[list[str]]:
    """Return the rows of the tables that vLLM logs with ``--cudagraph-metrics``.

    Columns: tokens, padded tokens, paddings, runtime mode, steps.
    """
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    return [row for row in cells if len(row) == 5 and row[-1].isdigit()]


def graph_modes(lines: Sequence[str]) -> dict[str, int]:
    """Return the number of steps by runtime mode: FULL, PIECEWISE or NONE."""
    modes: Counter[str] = Counter()
    for *_, mode, steps in graph_table(lines):
        modes[mode.rsplit(".")[-1]] += int(steps)
    return dict(modes)


@contextmanager
def counted_syncs(worker: Any) -> Iterator[Counter[str]]:
    """Count host syncs inside a worker's steps by the code location that causes them.

    PyTorch warns about each sync. Only `execute_model` and `sample_tokens` are watched: elsewhere
    vLLM waits for tokens on purpose.
    """
    counts: Counter[str] = Counter()
    original = warnings.showwarning

    def count_sync(message: Any, *rest: Any, **named: Any) -> None:
        if SYNC in str(message):
            counts[sync_location()] += 1

    watched = [name for name in ("execute_model", "sample_tokens") if watch(worker, name)]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count_sync
        try:
            yield counts
        finally:
            warnings.showwarning = original
            for name in watched:
                delattr(worker, name)


def watch(worker: Any, name: str) -> bool:
    """Make PyTorch warn about syncs in a worker method; False without that method or a GPU."""
    import torch

    inner = getattr(worker, name, None)
    if inner is None or not torch.cuda.is_available():
        return False

    def watched(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            return inner(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    setattr(worker, name, watched)
    return True


def sync_location() -> str:
    """Return package, file and line of the innermost frame outside PyTorch and this file."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if "torch" in path.parts or path.name in ("warnings.py", Path(__file__).name):
            continue
        root = next((part for part in (*OUR_PACKAGES, "vllm") if part in path.parts), "elsewhere")
        return f"{root} {path.name}:{frame.lineno} {frame.name}"
    return "elsewhere"
