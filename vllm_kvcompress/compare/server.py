"""Start vLLM servers for a model: one whose requests choose their compression, and low-bit ones."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from vllm_kvcompress.compare.client import Cell
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.settings.packed_dtype import K4V3

_START_TIMEOUT_S = 1800.0
_CPU_CACHE_GIB = "4"


def start(
    model: Path, arguments: Sequence[str], cells: Sequence[Cell], log: Path
) -> AbstractContextManager[str]:
    """Start ``vllm serve`` on a free loopback port, yield its URL, and stop it on exit.

    Requests may choose the given cells only: every method and budget that requests may choose
    reserves memory besides the KV cache.

    Args:
        model: folder of the model.
        arguments: further flags of ``vllm serve``. They override the flags set here.
        cells: the methods, budgets, formats and look-aheads that requests may choose. At least one
            has a budget. If one has a format, all have.
        log: file for the server's output.

    Raises:
        ConfigError: vLLM is not installed, or the server did not start.
    """
    budgets = [cell.budget for cell in cells if cell.budget is not None]
    methods = dict.fromkeys(["off", *(cell.method for cell in cells)])
    lookaheads = [cell.lookahead for cell in cells if cell.lookahead is not None]
    flags = ["--kv-compress", "off", "--kv-allow-override", ",".join(methods)]
    flags += ["--kv-budget-bounds", f"{min(budgets)}:{max(budgets)}", "--kv-usage"]
    if lookaheads:
        flags += ["--kv-lookahead", str(max(lookaheads))]
    if any(cell.packed_dtype == K4V3 for cell in cells):
        flags += ["--kv-packed-dtype", K4V3]
    return _serving(model, [*flags, *arguments], log)


def start_low_bit(
    model: Path, cache_dtype: str, arguments: Sequence[str], log: Path
) -> AbstractContextManager[str]:
    """Start a server with a low-bit KV cache and without compression, as `start` does.

    Args:
        cache_dtype: value of ``--kv-cache-dtype``.
    """
    return _serving(
        model, ["--kv-compress", "off", *arguments, "--kv-cache-dtype", cache_dtype], log
    )


@contextmanager
def _serving(model: Path, flags: Sequence[str], log: Path) -> Iterator[str]:
    try:
        from vllm_kvcompress.serving.process import CACHE_SPACE, serve
    except ImportError as e:
        raise ConfigError(
            f"--model starts a server, which needs vLLM in this environment ({e}); install it, or"
            " give the --url of a running server"
        ) from None
    # On a CPU, vLLM's default KV cache is half of the machine's memory.
    environment = {CACHE_SPACE: os.environ.get(CACHE_SPACE, _CPU_CACHE_GIB)}
    with ExitStack() as stack:
        try:
            running = stack.enter_context(
                serve(str(model), flags, log, deadline_s=_START_TIMEOUT_S, environment=environment)
            )
        except (RuntimeError, OSError) as e:
            # The rest of the message is the log.
            sentence = str(e).splitlines()[0].partition(";")[0]
            raise ConfigError(f"{sentence} before it was healthy; see {log}") from None
        stack.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        try:
            yield running.url
        finally:
            # A second Ctrl-C must not interrupt stopping the server.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
