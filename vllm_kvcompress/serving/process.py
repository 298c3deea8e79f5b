"""A real ``vllm serve`` on loopback, started and stopped as an operator would."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # The log tells which prompts were compressed, at this level.
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""The environment of a server of ours, over the one of this process."""
CACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""The variable that sets the size of the KV cache on a CPU, in GiB."""
_LINE = re.compile(
    r"kv-compress: request=(?P<request>\S+) prompt_tokens=(?P<prompt>\d+)"
    r" kept_tokens=(?P<kept>[\d.]+) lookahead=(?P<lookahead>\d+)"
    r" blocks_before=(?P<before>\d+) blocks_after=(?P<after>\d+)"
    r" layer_tokens=\[(?P<layers>[\d,]+)\]"
)


@dataclass(frozen=True, slots=True)
class Compressed:
    """What the engine's log says of one compressed prompt.

    Args:
        request: the request's id in the engine.
        prompt_tokens: length of the prompt.
        kept_tokens: tokens that a layer keeps, mean over layers.
        lookahead: tokens of its answer that judged it.
        blocks_before, blocks_after: KV blocks that the request held before and after.
        layer_tokens: tokens that each layer keeps.
    """

    request: str
    prompt_tokens: int
    kept_tokens: float
    lookahead: int
    blocks_before: int
    blocks_after: int
    layer_tokens: tuple[int, ...]


def compressed_requests(log: str) -> list[Compressed]:
    """What `log` says of each compressed prompt, in its order."""
    return [
        Compressed(
            request=m["request"],
            prompt_tokens=int(m["prompt"]),
            kept_tokens=float(m["kept"]),
            lookahead=int(m["lookahead"]),
            blocks_before=int(m["before"]),
            blocks_after=int(m["after"]),
            layer_tokens=tuple(int(part) for part in m["layers"].split(",")),
        )
        for m in _LINE.finditer(log)
    ]


@dataclass(frozen=True, slots=True)
class Server:
    """A running server.

    Args:
        url: its address, without a path.
        log: the file that it writes its output to.
        process: the process that was started; it leads a process group of its own.
    """

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def metric(self, name: str, label: str | None = None) -> float:
        """The sum of a metric's samples, or the number in one of its labels.

        Raises:
            KeyError: the server does not export `name`.
        """
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        samples = [
            s for f in text_string_to_metric_families(text) for s in f.samples if s.name == name
        ]
        if not samples:
            raise KeyError(name)
        return sum(float(sample.labels[label]) if label else sample.value for sample in samples)

    def compressed(self) -> list[Compressed]:
        """What the log says of each prompt that was compressed up to now."""
        return compressed_requests(self.log.read_text(errors="replace"))


def free_port() -> int:
    """A TCP port of loopback on which nothing listens now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def command(model: str, port: int, arguments: Sequence[str]) -> list[str]:
    """The command line of a server on loopback, with the ``vllm`` of this Python's environment."""
    vllm = str(Path(sys.executable).with_name("vllm"))
    return [vllm, "serve", model, "--host", "127.0.0.1", "--port", str(port), *arguments]


@contextmanager
def serve(
    model: str,
    arguments: Sequence[str],
    log: Path,
    *,
    deadline_s: float = 300,
    environment: dict[str, str] | None = None,
) -> Iterator[Server]:
    """Start a server, wait until it is healthy, and end it with all its processes.

    Args:
        model: a folder, or a name on the hub that is in the hub's cache.
        arguments: further flags of ``vllm serve``.
        log: the file that takes what the server prints.
        deadline_s: seconds within which the server must be healthy.
        environment: variables for the server; they win over `ENVIRONMENT` and this process's.

    Raises:
        OSError: there is no ``vllm`` command in this Python's environment.
        RuntimeError: the server ended, or was not healthy within `deadline_s`; the message has
            the end of its log.
    """
    port = free_port()
    with log.open("w") as out:
        process = subprocess.Popen(
            command(model, port, arguments),
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            start_new_session=True,
        )
    server = Server(url=f"http://127.0.0.1:{port}", log=log, process=process)
    try:
        _wait_healthy(server, process, deadline_s)
        yield server
    finally:
        _end(process)


def _wait_healthy(server: Server, process: subprocess.Popen[bytes], deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"{server.url}/health", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.3)
    state = "ended" if process.poll() is not None else f"was not healthy within {deadline_s:.0f} s"
    tail = "\n".join(server.log.read_text(errors="replace").splitlines()[-25:])
    raise RuntimeError(f"the server {state}; the end of its log:\n{tail}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt, then kill the whole process group."""
    for sign, patience_s in ((signal.SIGINT, 20), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, sign)
            process.wait(patience_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
    process.wait()
