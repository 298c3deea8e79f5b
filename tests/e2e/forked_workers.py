"""Run an engine in this process whose ranks are forks of one process that has imported vLLM.

Tests of servers and of Ray actors cover engines that run in a separate process.
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

from site_patches import patch_on_import, write_site
from spin_condition import sleep_instead_of_spinning

# A test has more processes than cores, so a process that waits for another one must sleep.
SLEEP_SITE = patch_on_import(
    SpinCondition.__module__,
    "import spin_condition; spin_condition.sleep_instead_of_spinning(module.SpinCondition)",
)
IMPORTED = ["vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker"]


@contextmanager
def workers_with(folder: Path, site: str = "", **environment: str) -> Iterator[Path]:
    """Make ranks that start in the body run `site` first, with these environment variables.

    A fork server runs `site` and imports vLLM once, and each rank is a fork of it; vLLM by default
    spawns each rank. Yields the file with the ranks' output and this process's vLLM log.
    """
    write_site(folder, SLEEP_SITE + site)
    log = folder / "log"
    variables = {"PYTHONPATH": _path(folder), "VLLM_LOGGING_LEVEL": "INFO", **environment}
    # With several ranks, vLLM compiles its embedding, which takes 5 seconds in each rank.
    variables["TORCHDYNAMO_DISABLE"] = "1"
    with pytest.MonkeyPatch.context() as patch, _written_to(log):
        for name, value in variables.items():
            patch.setenv(name, value)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        patch.setattr(multiproc_executor, "get_mp_context", lambda: context)
        try:
            with sleeping():
                yield log
        finally:
            forkserver._forkserver._stop()


@contextmanager
def sleeping() -> Iterator[None]:
    """Let this process sleep while it waits for ranks in other processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpinCondition, "wait", SpinCondition.wait)  # so that the patch is undone
        sleep_instead_of_spinning(SpinCondition)
        yield


def _path(folder: Path) -> str:
    tests_folder = str(Path(__file__).parent)
    return os.pathsep.join(filter(None, [str(folder), tests_folder, os.environ.get("PYTHONPATH")]))


@contextmanager
def _written_to(log: Path) -> Iterator[None]:
    """Redirect file descriptors 1 and 2, which processes inherit, and vLLM's log to `log`."""
    handler = logging.FileHandler(log)
    logging.getLogger("vllm").addHandler(handler)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {number: os.dup(number) for number in (1, 2)}
    with log.open("ab") as out:
        for number in saved:
            os.dup2(out.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)
        logging.getLogger("vllm").removeHandler(handler)
        handler.close()
