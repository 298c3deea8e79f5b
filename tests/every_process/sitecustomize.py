"""Python runs this at the start of every process of the suite.

Importing vLLM makes a million objects that stay, and an engine that starts and ends asks eight
times for a look through all of them. With Python's own thresholds and vLLM's calls, a fifth of the
suite's time would be spent on looking for garbage. What a test calls for is collected.
"""

import gc
import sys
from collections.abc import Callable

gc.set_threshold(1_000_000, 50, 100)


def but_for_vllm(collect: Callable[..., int]) -> Callable[..., int]:
    """`gc.collect` that does nothing where vLLM calls it."""

    def collecting(generation: int = 2) -> int:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return 0 if caller.startswith("vllm.") else collect(generation)

    return collecting


gc.collect = but_for_vllm(gc.collect)
