"""Ranks in processes of their own, of an engine in this process: two imports of vLLM are spared.

That an engine which is a process too ends with its rank, tests of servers and of Ray's actors show.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from broken_sites import broken

# Who waits for another process asks again and again for a second, and then sleeps until it is told.
# The processes of a test are more than its cores: they sleep at once.
AT_ONCE = (0,)
SLEEPY = broken(SpinCondition.__module__, f"module.SpinCondition.__init__.__defaults__ = {AT_ONCE}")


@contextmanager
def workers_with(folder: Path, site: str = "", **environment: str) -> Iterator[Path]:
    """Processes that are started meanwhile run `site` first, and have this environment too.

    What they say, and vLLM's log of this process, is written to the file that is given.
    """
    (folder / "sitecustomize.py").write_text(SLEEPY + site)
    log = folder / "log"
    more = {"PYTHONPATH": _path(folder), "VLLM_LOGGING_LEVEL": "INFO", **environment}
    with pytest.MonkeyPatch.context() as patch, _written_to(log):
        for name, value in more.items():
            patch.setenv(name, value)
        patch.setattr(SpinCondition.__init__, "__defaults__", AT_ONCE)
        yield log


def _path(folder: Path) -> str:
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


@contextmanager
def _written_to(log: Path) -> Iterator[None]:
    """File descriptors 1 and 2, which processes inherit, and vLLM's log, which has its own."""
    handler = logging.FileHandler(log)
    logging.getLogger("vllm").addHandler(handler)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {number: os.dup(number) for number in (1, 2)}
    with log.open("ab") as out:
        for number in kept:
            os.dup2(out.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in kept.items():
            os.dup2(copy, number)
            os.close(copy)
        logging.getLogger("vllm").removeHandler(handler)
        handler.close()
