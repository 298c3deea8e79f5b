"""`benchmarks/engine_bench.py`, as scripts beside it import it."""

from benchmarks.engine_bench import *  # noqa: F403
