"""Reduce garbage collection; Python runs this at the start of every process of the suite.

Importing vLLM creates a million long-lived objects, and starting and stopping an engine calls
``gc.collect`` eight times. With Python's default thresholds and vLLM's calls, garbage collection
would take 20 % of the suite's time. Calls by tests still collect.
"""

import gc
import sys
from collections.abc import Callable

gc.set_threshold(1_000_000, 50, 100)


def ignore_calls_by_vllm(collect: Callable[..., int]) -> Callable[..., int]:
    """Return a `gc.collect` that does nothing when vLLM calls it."""

    def collecting(generation: int = 2) -> int:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return 0 if caller.startswith("vllm.") else collect(generation)

    return collecting


gc.collect = ignore_calls_by_vllm(gc.collect)
