"""Stub of `benchmarks/engine_bench.py` for scripts that import it as a top-level module."""

from benchmarks.engine_bench import *  # noqa: F403
