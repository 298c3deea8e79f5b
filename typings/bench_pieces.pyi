"""Stub of `benchmarks/bench_pieces.py` for scripts that import it as a top-level module."""

from benchmarks.bench_pieces import *  # noqa: F403
