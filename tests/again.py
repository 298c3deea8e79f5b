"""Test files once more, in processes of their own with another environment."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
Done = subprocess.CompletedProcess[str]


@contextmanager
def runs(files: Sequence[str], environment: Mapping[str, str]) -> Iterator[dict[str, Future[Done]]]:
    """Start pytest on each file, as many at once as there are cores, with one thread each.

    Both kinds that run again are interpreted kernels for the most part: one core's work.
    """

    def run(file: str) -> Done:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {file: pool.submit(run, file) for file in files}


def said(done: Done) -> str:
    """The end of what pytest said."""
    return done.stdout[-6000:] + done.stderr[-2000:]
