"""Start a local Ray for a test, and end all of its processes afterwards."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from server_metrics import wait_for
from site_patches import patch_on_import, write_site
from tools import missing
from vllm_kvcompress.serving.process import free_port

# vLLM's CPU platform has no Ray device name, so the tests declare a "GPU" that does not exist.
# vLLM's CPU workers never use it.
DEVICE = "GPU"
DEVICE_NAMED = patch_on_import(
    "vllm.platforms.cpu", f"module.CpuPlatform.ray_device_key = {DEVICE!r}"
)
# an environment variable that marks the processes of one Ray
_MARK = "LOCAL_RAY"


def need_ray() -> None:
    """Skip the test, or fail it in CI, if Ray is not installed."""
    if find_spec("ray") is None:
        missing("this test needs the Python package ray; run `make setup`")


def processes(folder: Path) -> dict[int, str]:
    """Return the pid and command line of all processes of this Ray's nodes and clients."""
    mark, commands = f"{_MARK}={folder}".encode(), {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if mark in (process / "environ").read_bytes().split(b"\0"):
                commands[int(process.name)] = (process / "cmdline").read_bytes().decode()
    return commands


def end(folder: Path, started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminate these processes and wait until everything that they started has ended.

    Uses process ids, because `ray stop` ends every Ray on the machine.
    """
    for process in reversed(started):
        process.terminate()
    for process in started:
        process.wait(60)
    try:
        wait_for(lambda: not processes(folder), 60)
    except AssertionError:
        remaining = processes(folder)
        kill(folder)
        raise AssertionError(remaining) from None


def kill(folder: Path) -> None:
    """Kill all processes of this Ray's nodes and clients."""
    for number in processes(folder):
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    wait_for(lambda: not processes(folder), 60)


@contextmanager
def ray_folder() -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield a folder for one Ray, and the environment of its processes and clients.

    A separate folder keeps other Rays on this machine out of reach.
    """
    # pytest's temporary folders have paths that are too long for Ray's sockets
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    environment = {
        _MARK: str(folder),
        "RAY_TMPDIR": str(folder),
        "RAY_DEDUP_LOGS": "0",  # keep equal lines of different ranks
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences a warning about a future change
        "RAY_memory_monitor_refresh_ms": "0",  # never kill actors to free memory
        "TORCHDYNAMO_DISABLE": "1",  # vLLM would compile its embedding in each rank
    }
    try:
        yield folder, environment
    finally:
        shutil.rmtree(folder)


@contextmanager
def local_ray(sites: Sequence[str] = ("", "")) -> Iterator[dict[str, str]]:
    """Start Ray nodes with one device each; yield the environment variables that a client needs.

    vLLM treats the nodes as machines and connects to the workers of other nodes over TCP.

    Args:
        sites: Python code that runs first in the processes of each node, including its actors.
    """
    need_ray()
    with ray_folder() as (folder, environment):
        nodes: list[subprocess.Popen[bytes]] = []
        address_file = folder / "ray" / "ray_current_cluster"
        try:
            for number, site in enumerate(sites):
                address = ["--address", address_file.read_text().strip()] if number else _head()
                nodes.append(_node(folder / f"node-{number}", site, address, environment))
                _wait(nodes[-1], folder / f"node-{number}" / "log")
                # the first node writes its address after it reports that it has started
                wait_for(lambda: address_file.exists() and address_file.read_text())
            # the first node's path, for clients in separate processes
            path = _path(folder / "node-0")
            yield {
                **environment,
                "RAY_ADDRESS": address_file.read_text().strip(),
                "PYTHONPATH": path,
            }
        finally:
            end(folder, nodes)


def _head() -> list[str]:
    client = ["--ray-client-server-port", str(free_port())]  # cannot be switched off
    return ["--head", "--port", "0", "--include-dashboard", "false", *client]


def _node(
    folder: Path, site: str, address: Sequence[str], environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    folder.mkdir()
    write_site(folder, DEVICE_NAMED + site)
    options = shlex.split("--num-cpus 1 --num-gpus 1 --min-worker-port 0 --max-worker-port 0")
    options += ["--block", "--disable-usage-stats", f"--object-store-memory={80 * 2**20}"]
    options.append(f"--dashboard-agent-listen-port={free_port()}")
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *address, *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, "PYTHONPATH": _path(folder)},
        )


def _path(site: Path) -> str:
    return os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))


def _wait(node: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the command reports that its node has started."""
    wait_for(lambda: "Ray runtime started" in log.read_text() or node.poll() is not None)
    assert node.poll() is None, log.read_text()
