"""Stub of `benchmarks/json_process.py` for scripts that import it as a top-level module."""

from benchmarks.json_process import *  # noqa: F403
