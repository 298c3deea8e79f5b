"""Start test servers whose processes are forks of the first one, so vLLM is imported only once.

`test_server` tests a server whose processes are spawned, as vLLM does by default.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from site_patches import write_site
from vllm_kvcompress.serving.process import Server, serve

# Runs before vLLM is imported. A fork must not deliver its signals to its parent's event loop.
FORKS = """
import multiprocessing, os, signal
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
_get_context = multiprocessing.get_context
multiprocessing.get_context = lambda how=None: _get_context("fork" if how == "spawn" else how)
"""


def forking_environment(folder: Path, site: str = "") -> dict[str, str]:
    """Return environment variables that make a server fork its processes.

    Args:
        folder: receives the ``sitecustomize.py`` of the server's first process.
        site: Python code that is appended to it.
    """
    write_site(folder, FORKS + site)
    paths = [str(folder), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@contextmanager
def serve_forking(
    model: str, flags: Sequence[str], folder: Path, site: str = "", **environment: str
) -> Iterator[Server]:
    """Run a server whose processes are forks; its log is ``folder / "log"``.

    The server is killed at the end.
    """
    environment = {**environment, **forking_environment(folder, site)}
    with serve(model, flags, folder / "log", deadline_s=600, environment=environment) as running:
        try:
            yield running
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL)
