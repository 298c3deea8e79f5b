"""Stub of `benchmarks/late_offloading.py` for scripts that import it as a top-level module."""

from benchmarks.late_offloading import *  # noqa: F403
