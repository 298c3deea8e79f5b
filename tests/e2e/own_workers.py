"""Ranks in processes of their own, of an engine in this process: vLLM is imported once for all.

That an engine which is a process too ends with its rank, tests of servers and of Ray's actors show.
"""

import logging
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path

import pytest
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.v1.executor import multiproc_executor

from broken_sites import broken, write_site
from naps import take_naps

# The processes of a test are more than its cores: who waits for another one sleeps.
SLEEPY = broken(SpinCondition.__module__, "import naps; naps.take_naps(module.SpinCondition)")
IMPORTED = ["vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker"]


@contextmanager
def workers_with(folder: Path, site: str = "", **environment: str) -> Iterator[Path]:
    """Ranks that are started meanwhile ran `site` first, and have this environment too.

    One process did so and imported vLLM, and each rank is a fork of it, where vLLM would start each
    anew. What they say, and vLLM's log of this process, is written to the file that is given.
    """
    write_site(folder, SLEEPY + site)
    log = folder / "log"
    more = {"PYTHONPATH": _path(folder), "VLLM_LOGGING_LEVEL": "INFO", **environment}
    with pytest.MonkeyPatch.context() as patch, _written_to(log):
        for name, value in more.items():
            patch.setenv(name, value)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        patch.setattr(multiproc_executor, "get_mp_context", lambda: context)
        patch.setattr(SpinCondition, "wait", SpinCondition.wait)  # so that it is given back
        take_naps(SpinCondition)
        try:
            yield log
        finally:
            forkserver._forkserver._stop()


def _path(folder: Path) -> str:
    here = str(Path(__file__).parent)
    return os.pathsep.join(filter(None, [str(folder), here, os.environ.get("PYTHONPATH")]))


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
