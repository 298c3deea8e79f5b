"""Servers of tests whose processes are forks of the first: vLLM is imported once for all of them.

That a server is well whose processes are started anew, as vLLM does it, test_server shows.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from broken_sites import write_site
from vllm_kvcompress.serving.process import Server, serve

# Python that runs before vLLM is imported. A fork must not hand its own signals to the event
# loop of the one that it is a copy of.
FORKS = """
import multiprocessing, os, signal
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
_get_context = multiprocessing.get_context
multiprocessing.get_context = lambda how=None: _get_context("fork" if how == "spawn" else how)
"""


def forking(folder: Path, site: str = "") -> dict[str, str]:
    """What a server must have in its environment, so that its processes are forks.

    Args:
        folder: takes the Python that runs first in its first process.
        site: more of that.
    """
    write_site(folder, FORKS + site)
    paths = [str(folder), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@contextmanager
def serve_forking(
    model: str, flags: Sequence[str], folder: Path, site: str = "", **environment: str
) -> Iterator[Server]:
    """Start such a server, whose log is in the folder; it is killed when it is no longer needed."""
    environment = {**environment, **forking(folder, site)}
    with serve(model, flags, folder / "log", deadline_s=600, environment=environment) as running:
        try:
            yield running
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL)
