"""Ray on this machine, for tests: started by a test, and gone with all its processes after it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from broken_sites import broken, write_site
from idling import wait_for
from tools import missing
from vllm_kvcompress.serving.process import free_port

# vLLM asks its platform what Ray calls the device, and a CPU has no name there. So Ray counts a
# device that is not there; vLLM's CPU workers do not ask for it.
DEVICE = "GPU"
DEVICE_NAMED = broken("vllm.platforms.cpu", f"module.CpuPlatform.ray_device_key = {DEVICE!r}")
# a variable that all processes of a Ray and no others have
_MARK = "LOCAL_RAY"


def need_ray() -> None:
    """The test says that it needs Ray if it is not installed."""
    if find_spec("ray") is None:
        missing("this test needs the Python package ray; run `make setup`")


def processes(folder: Path) -> dict[int, str]:
    """Number and command of all that this folder's nodes have started, and their clients."""
    mark, found = f"{_MARK}={folder}".encode(), {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "cmdline").read_bytes().decode()
    return found


def end(folder: Path, started: Sequence[subprocess.Popen[bytes]]) -> None:
    """End these processes, and see that all that they started ends.

    By their numbers, and not by `ray stop`, which ends every Ray of the machine.
    """
    for process in reversed(started):
        process.terminate()
    for process in started:
        process.wait(60)
    try:
        wait_for(lambda: not processes(folder), 60)
    except AssertionError:
        left = processes(folder)
        kill(folder)
        raise AssertionError(left) from None


def kill(folder: Path) -> None:
    """End all that this folder's nodes have started, and their clients, at once."""
    for number in processes(folder):
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    wait_for(lambda: not processes(folder), 60)


@contextmanager
def ray_folder() -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder for one Ray, and what its processes and its clients must have in their environment.

    Its own folder, so that another Ray of this machine is neither found nor touched.
    """
    # not pytest's, whose path is too long for Ray's sockets
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    environment = {
        _MARK: str(folder),
        "RAY_TMPDIR": str(folder),
        "RAY_DEDUP_LOGS": "0",  # each rank's own lines
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without it Ray warns of a change to come
        "RAY_memory_monitor_refresh_ms": "0",  # it would end actors when others fill the memory
    }
    try:
        yield folder, environment
    finally:
        shutil.rmtree(folder)


@contextmanager
def local_ray(sites: Sequence[str] = ("", "")) -> Iterator[dict[str, str]]:
    """Several nodes of one device each: what the environment of a client must have.

    For vLLM they are machines: between an engine and another node's worker it uses TCP.

    Args:
        sites: of each node, Python that runs first in its processes, so in its actors.
    """
    need_ray()
    with ray_folder() as (folder, environment):
        nodes: list[subprocess.Popen[bytes]] = []
        found = folder / "ray" / "ray_current_cluster"
        try:
            for number, site in enumerate(sites):
                where = ["--address", found.read_text().strip()] if number else _head()
                nodes.append(_node(folder / f"node-{number}", site, where, environment))
                _wait(nodes[-1], folder / f"node-{number}" / "log")
            # the first node's path, for clients in processes of their own
            path = _path(folder / "node-0")
            yield {**environment, "RAY_ADDRESS": found.read_text().strip(), "PYTHONPATH": path}
        finally:
            end(folder, nodes)


def _head() -> list[str]:
    client = ["--ray-client-server-port", str(free_port())]  # which cannot be switched off
    return ["--head", "--port", "0", "--include-dashboard", "false", *client]


def _node(
    folder: Path, site: str, where: Sequence[str], environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    folder.mkdir()
    write_site(folder, DEVICE_NAMED + site)
    options = (
        "--block",
        "--num-cpus",
        "1",
        "--num-gpus",
        "1",
        "--disable-usage-stats",
        "--object-store-memory",
        str(80 * 2**20),
        "--min-worker-port",
        "0",
        "--max-worker-port",
        "0",
        "--dashboard-agent-listen-port",
        str(free_port()),
    )
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *where, *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, "PYTHONPATH": _path(folder)},
        )


def _path(site: Path) -> str:
    return os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))


def _wait(node: subprocess.Popen[bytes], log: Path) -> None:
    """Until the command says that its node has started."""
    wait_for(lambda: "Ray runtime started" in log.read_text() or node.poll() is not None)
    assert node.poll() is None, log.read_text()
