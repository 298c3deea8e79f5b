"""A vLLM engine in its own process, controlled with one line of JSON per call.

Two engines to compare stay up on one GPU and take turns. Other load on the machine then affects
both, and both start, compile and capture graphs at the same time.
"""

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import Engine
from benchmarks.json_process import JsonProcess, Replies

NEVER = 1_000_000  # tokens; a threshold that no prompt reaches
CACHES = Path(__file__).parents[2] / ".cache" / "gpu-engines"
"""vLLM's compile caches, which the engines of the next stage use again."""


class EngineProcess(JsonProcess):
    """The client side: starts an `Engine` in a subprocess and calls its methods.

    Args:
        settings: settings of the plugin; None runs vLLM without it.
        options: arguments of vLLM's `LLM`.
    """

    def __init__(self, model: str, settings: dict[str, Any] | None, **options: Any) -> None:
        spec = {"model": model, "settings": settings, "options": options}
        # Engines that compile at the same time must not share vLLM's compile cache.
        cache = CACHES / ("plugin" if settings else "vllm")
        threads = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "4")
        super().__init__(
            ["-m", "benchmarks.gpu.engine_process", json.dumps(spec)],
            VLLM_CACHE_ROOT=str(cache),
            TORCHINDUCTOR_COMPILE_THREADS=threads,
        )
        self.name = f"{'plugin' if settings else 'vLLM'} {options}"

    def read(self) -> Any:
        """Return the next result: first `Engine.about`, once the engine is up.

        Raises:
            RuntimeError: the engine raised an error, or the process died.
        """
        reply = super().read()
        if "error" in reply:
            raise RuntimeError(f"{self.name}: {reply['error']}")
        return reply["result"]

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of `Engine` and return its result.

        Raises:
            RuntimeError: the method raised, or the process died.
        """
        return self.ask([method, arguments])


@contextmanager
def engine_pair(
    model: str, settings: dict[str, Any], **options: Any
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """Start vLLM without and with the plugin; both shut down when the context ends."""
    engines = EngineProcess(model, None, **options), EngineProcess(model, settings, **options)
    try:
        for engine in engines:
            engine.read()
        yield engines
    finally:
        for engine in engines:
            engine.close()


def main(spec: str) -> None:
    replies = Replies()  # vLLM prints to the log
    try:
        engine = Engine(**json.loads(spec))
        replies.send({"result": engine.about()})
    except Exception as e:  # the client reports it and continues without this engine
        traceback.print_exc()
        replies.send({"error": f"{type(e).__name__}: {e}"})
        return
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            replies.send({"result": getattr(engine, method)(**arguments)})
        except Exception as e:
            traceback.print_exc()
            replies.send({"error": f"{method}: {type(e).__name__}: {e}"})
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
    os.environ.update(VLLM_NO_USAGE_STATS="1", TOKENIZERS_PARALLELISM="false")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    # A single process works on a machine without a network.
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(sys.argv[1])
