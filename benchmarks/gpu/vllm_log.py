"""What can be seen of vLLM from outside: its log of graphs, and what makes its host wait."""

import logging
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SYNC = "called a synchronizing CUDA operation"  # of PyTorch's warning
OURS = ("vllm_kvcompress", "kvcompress_kernels")


class Lines(logging.Handler):
    """Keeps what vLLM logs while it is in use."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()


def graph_table(lines: Sequence[str]) -> list[list[str]]:
    """Rows of the tables that vLLM logs under ``--cudagraph-metrics``: tokens, padded tokens,
    paddings, runtime mode, steps."""
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    return [row for row in cells if len(row) == 5 and row[-1].isdigit()]


def graph_modes(lines: Sequence[str]) -> dict[str, int]:
    """Steps by runtime mode: FULL, PIECEWISE or NONE."""
    modes: Counter[str] = Counter()
    for *_, mode, steps in graph_table(lines):
        modes[mode.rsplit(".")[-1]] += int(steps)
    return dict(modes)


@contextmanager
def counted_syncs(worker: Any) -> Iterator[Counter[str]]:
    """Host syncs inside a worker's steps, by the code that asks for them.

    PyTorch warns of each. Outside these two methods vLLM waits for tokens on purpose.
    """
    seen: Counter[str] = Counter()
    show = warnings.showwarning

    def note(message: Any, *rest: Any, **named: Any) -> None:
        if SYNC in str(message):
            seen[culprit()] += 1

    watched = [name for name in ("execute_model", "sample_tokens") if watch(worker, name)]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        try:
            yield seen
        finally:
            warnings.showwarning = show
            for name in watched:
                delattr(worker, name)


def watch(worker: Any, name: str) -> bool:
    """Let PyTorch warn of syncs inside a method; False where there is none, or no GPU."""
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


def culprit() -> str:
    """Package, file and line of the innermost frame that is neither PyTorch's nor this file's."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if "torch" in path.parts or path.name in ("warnings.py", Path(__file__).name):
            continue
        root = next((part for part in (*OURS, "vllm") if part in path.parts), "elsewhere")
        return f"{root} {path.name}:{frame.lineno} {frame.name}"
    return "elsewhere"
