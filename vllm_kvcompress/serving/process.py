"""Start a real ``vllm serve`` on loopback, and stop it, as an operator would."""

import ast
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_kvcompress.serving.exposition import Host, Unreachable

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # vLLM logs one line per compressed prompt at this level.
    "VLLM_LOGGING_LEVEL": "INFO",
    # `compressed_requests` reads vLLM's own format.
    "VLLM_LOGGING_COLOR": "0",
    "VLLM_LOGGING_PREFIX": "",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""Variables that every server gets on top of this process's environment."""
CACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""The variable that sets the size of the KV cache on a CPU, in GiB."""
_TEXT = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_LINE = re.compile(
    # Log lines may contain text of clients, but no client writes what stands before a message.
    r"^[^\[\n]*\[[^\]\s]*reports\.py:\d+\] "
    rf"kv-compress: request=(?P<request>{_TEXT})(?:\.\.\.)?"
    r" prompt_tokens=(?P<prompt>\d+)"
    r" kept_tokens=(?P<kept>[\d.]+) lookahead=(?P<lookahead>\d+)"
    r" blocks_before=(?P<before>\d+) blocks_after=(?P<after>\d+)"
    r" layer_tokens=\[(?P<layers>[\d,]+)\]$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Compressed:
    """The engine's log line about one compressed prompt.

    Args:
        request: the request's id in the engine; the beginning of a long one.
        prompt_tokens: length of the prompt.
        kept_tokens: kept tokens per layer, mean over layers.
        lookahead: output tokens whose attention chose the kept tokens.
        blocks_before, blocks_after: KV blocks of the request before and after compression.
        layer_tokens: kept tokens of each layer.
    """

    request: str
    prompt_tokens: int
    kept_tokens: float
    lookahead: int
    blocks_before: int
    blocks_after: int
    layer_tokens: tuple[int, ...]


def compressed_requests(log: str) -> list[Compressed]:
    """Every compressed prompt in `log`, in the order of its lines."""
    return [
        Compressed(
            request=ast.literal_eval(m["request"]),
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
    """A server that was started.

    Args:
        url: address without a path.
        log: the file with the server's stdout and stderr.
        process: the leader of the server's own process group.
    """

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def metric(self, name: str, label: str | None = None) -> float:
        """The sum of a metric's samples, or of the numbers in one of its labels.

        Raises:
            KeyError: the server does not export `name`.
        """
        samples = Host(self.url).metrics(30).of(name)
        if not samples:
            raise KeyError(name)
        return sum(float(sample.labels[label]) if label else sample.value for sample in samples)

    def compressed(self) -> list[Compressed]:
        """The prompts that this server has compressed so far, by its log."""
        # In text mode, Python would read a client's carriage return as the start of a line.
        return compressed_requests(self.log.read_bytes().decode(errors="replace"))

    def wait_healthy(self, deadline_s: float = 300) -> None:
        """Return once ``/health`` answers 200.

        Raises:
            RuntimeError: the server ended, or was not healthy within `deadline_s` seconds. The
                message has the end of its log.
        """
        end = time.monotonic() + deadline_s
        while time.monotonic() < end and self.process.poll() is None:
            with suppress(Unreachable):
                if Host(self.url).get("/health", 2)[0] == 200:
                    return
            time.sleep(0.3)
        ended = self.process.poll() is not None
        state = "ended" if ended else f"was not healthy within {deadline_s:.0f} s"
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
        raise RuntimeError(f"the server {state}; the end of its log:\n{tail}")


def free_port() -> int:
    """A loopback TCP port on which nothing listens now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def command(model: str, port: int, arguments: Sequence[str]) -> list[str]:
    """The command line of a loopback server, with the ``vllm`` of this Python's environment."""
    vllm = str(Path(sys.executable).with_name("vllm"))
    return [vllm, "serve", model, "--host", "127.0.0.1", "--port", str(port), *arguments]


@contextmanager
def launch(
    model: str,
    arguments: Sequence[str],
    log: Path,
    *,
    environment: dict[str, str] | None = None,
) -> Iterator[Server]:
    """Start a server without waiting until it is healthy; end all its processes on exit.

    Args:
        model: a folder, or the name of a model in the hub's local cache.
        arguments: further flags of ``vllm serve``.
        log: the file that takes the server's stdout and stderr.
        environment: variables that win over `ENVIRONMENT` and this process's environment.

    Raises:
        OSError: this Python's environment has no ``vllm`` command.
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
    try:
        yield Server(url=f"http://127.0.0.1:{port}", log=log, process=process)
    finally:
        _end(process)


@contextmanager
def serve(
    model: str,
    arguments: Sequence[str],
    log: Path,
    *,
    deadline_s: float = 300,
    environment: dict[str, str] | None = None,
) -> Iterator[Server]:
    """Start a server and wait until it is healthy; end all its processes on exit.

    Args and errors are those of `launch`, and:

    Args:
        deadline_s: seconds within which the server must be healthy.

    Raises:
        RuntimeError: the server ended, or was not healthy within `deadline_s` seconds.
    """
    with launch(model, arguments, log, environment=environment) as server:
        server.wait_healthy(deadline_s)
        yield server


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the process group, then kill it if it does not end."""
    for sign, patience_s in ((signal.SIGINT, 20), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, sign)
            process.wait(patience_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
    process.wait()
