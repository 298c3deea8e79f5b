"""`benchmarks/origin.py`, as scripts beside it import it."""

from benchmarks.origin import *  # noqa: F403
