"""Stub of `benchmarks/origin.py` for scripts that import it as a top-level module."""

from benchmarks.origin import *  # noqa: F403
