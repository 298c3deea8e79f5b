"""Start test servers as forks of a process that has imported vLLM, and let them fork in turn.

`test_server` tests a server whose processes are spawned, as vLLM does by default.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from site_patches import write_site
from vllm_kvcompress.serving import process as serving
from vllm_kvcompress.serving.process import Server, serve

# Runs before vLLM is imported. A fork must not deliver its signals to its parent's event loop.
FORKS = """
import multiprocessing, os, signal
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
_get_context = multiprocessing.get_context
multiprocessing.get_context = lambda how=None: _get_context("fork" if how == "spawn" else how)
"""
PRELOADED = [
    __name__,
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
]
_server_forks = forkserver.ForkServer()
_server_forks.set_forkserver_preload(PRELOADED)


class ForkedCommand:
    """A ``vllm`` command in a fork of one process per session, with the interface of `Popen`.

    Args:
        command: the command line, whose first part is not used.
        stdout: the file for stdout and stderr.
        env: all environment variables of the command.
        site: Python code that runs before the command. It must not patch `PRELOADED` modules.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: IO[str],
        env: Mapping[str, str],
        site: str = "",
        **_: Any,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_run, args=(command[1:], stdout.name, env, site))
        path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
        variables = {**serving.ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)  # of the process that is forked, if it starts now
            patch.setattr(
                forkserver, "connect_to_new_process", _server_forks.connect_to_new_process
            )
            self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("vllm", timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _run(arguments: Sequence[str], log: str, env: Mapping[str, str], site: str) -> None:
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["vllm", *arguments]
    exec(FORKS + site, {})
    from vllm.entrypoints.cli.main import main

    main()


@contextmanager
def forked_commands(site: str = "") -> Iterator[None]:
    """Let servers that the body starts be `ForkedCommand`s."""
    popen = partial(ForkedCommand, site=site)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": popen}))
        yield


@contextmanager
def serve_forking(
    model: str, flags: Sequence[str], folder: Path, site: str = "", **environment: str
) -> Iterator[Server]:
    """Run a server whose processes are forks; its log is ``folder / "log"``.

    The server is killed at the end.
    """
    with forked_commands(site), _killed_at_end(model, flags, folder, environment) as running:
        yield running


@contextmanager
def serve_importing(
    model: str, flags: Sequence[str], folder: Path, site: str, **environment: str
) -> Iterator[Server]:
    """As `serve_forking`, but the first process imports vLLM, so that `site` can patch all of it.

    Args:
        folder: also receives `site` as the ``sitecustomize.py`` of the first process.
    """
    write_site(folder, FORKS + site)
    paths = [str(folder), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with _killed_at_end(model, flags, folder, environment) as running:
        yield running


@contextmanager
def _killed_at_end(
    model: str, flags: Sequence[str], folder: Path, environment: dict[str, str]
) -> Iterator[Server]:
    with serve(model, flags, folder / "log", deadline_s=600, environment=environment) as running:
        try:
            yield running
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL)
