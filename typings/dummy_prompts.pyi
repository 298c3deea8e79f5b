"""Stub of `benchmarks/dummy_prompts.py` for scripts that import it as a top-level module."""

from benchmarks.dummy_prompts import *  # noqa: F403
