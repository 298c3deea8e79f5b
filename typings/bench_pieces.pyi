"""`benchmarks/bench_pieces.py`, as scripts beside it import it."""

from benchmarks.bench_pieces import *  # noqa: F403
