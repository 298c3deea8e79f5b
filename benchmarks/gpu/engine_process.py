"""A vLLM engine in its own process, controlled with one line of JSON per call.

Two engines to compare stay up on one GPU and take turns. Other load on the machine then affects
both, and both start, compile and capture graphs at the same time.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import Engine

NEVER = 1_000_000  # tokens; a threshold that no prompt reaches
SHUTDOWN_SECONDS = 20  # then an engine process is killed
CACHES = Path(__file__).parents[2] / ".cache" / "gpu-engines"
"""vLLM's compile caches, which the engines of the next stage use again."""


class EngineProcess:
    """The client side: starts an `Engine` in a subprocess and calls its methods.

    Args:
        settings: settings of the plugin; None runs vLLM without it.
        options: arguments of vLLM's `LLM`.
    """

    def __init__(self, model: str, settings: dict[str, Any] | None, **options: Any) -> None:
        spec = {"model": model, "settings": settings, "options": options}
        self.name = f"{'plugin' if settings else 'vLLM'} {options}"
        # Engines that compile at the same time must not share vLLM's compile cache.
        cache = CACHES / ("plugin" if settings else "vllm")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.engine_process", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"TORCHINDUCTOR_COMPILE_THREADS": "4", **os.environ}
            | {"VLLM_CACHE_ROOT": str(cache)},
        )

    def ready(self) -> dict[str, Any]:
        """Wait until the engine is up, and return `Engine.about`."""
        about: dict[str, Any] = self._read_result()
        return about

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of `Engine` and return its result.

        Raises:
            RuntimeError: the method raised, or the process died.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, arguments]) + "\n")
        self.process.stdin.flush()
        return self._read_result()

    def _read_result(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}: ended with status {self.process.wait()}; see the log")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"{self.name}: {reply['error']}")
        return reply["result"]

    def close(self) -> None:
        """Shut the engine down; kill it if that takes too long. Safe to call twice."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(SHUTDOWN_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextmanager
def engine_pair(
    model: str, settings: dict[str, Any], **options: Any
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """Start vLLM without and with the plugin; both shut down when the context ends."""
    engines = EngineProcess(model, None, **options), EngineProcess(model, settings, **options)
    try:
        for engine in engines:
            engine.ready()
        yield engines
    finally:
        for engine in engines:
            engine.close()


def main(spec: str) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to the log, not into the replies

    def reply(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        engine = Engine(**json.loads(spec))
        reply(result=engine.about())
    except Exception as e:  # the client reports it and continues without this engine
        traceback.print_exc()
        reply(error=f"{type(e).__name__}: {e}")
        return
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            reply(result=getattr(engine, method)(**arguments))
        except Exception as e:
            traceback.print_exc()
            reply(error=f"{method}: {type(e).__name__}: {e}")
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
    os.environ.update(VLLM_NO_USAGE_STATS="1", TOKENIZERS_PARALLELISM="false")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    # A single process works on a machine without a network.
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(sys.argv[1])
