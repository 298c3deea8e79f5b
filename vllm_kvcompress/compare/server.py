"""A server of our own for a model's folder, that lets each request choose."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vllm_kvcompress.compare.client import Cell
from vllm_kvcompress.errors import ConfigError

_DEADLINE_S = 1800.0
_CACHE_GIB = "4"


@contextmanager
def start(model: Path, arguments: Sequence[str], cells: Sequence[Cell], log: Path) -> Iterator[str]:
    """Start ``vllm serve`` on a free loopback port and end it with the block; yields its URL.

    The server compresses requests that ask for it, and lets them ask for `cells` and nothing else:
    whatever requests may ask for takes memory next to the cache.

    Args:
        model: the model's folder.
        arguments: further flags of ``vllm serve``; they win over ours.
        cells: the methods, budgets and look-aheads that requests may ask for, at least one with a
            budget.
        log: the file that takes what the server prints.

    Raises:
        ConfigError: vLLM is not installed, or the server did not start.
    """
    try:
        from vllm_kvcompress.serving.process import CACHE_SPACE, serve
    except ImportError as e:
        raise ConfigError(
            f"--model starts a server, which needs vLLM beside this command ({e}); install it, or"
            " give the --url of a running server"
        ) from None
    budgets = [cell.budget for cell in cells if cell.budget is not None]
    methods = dict.fromkeys(cell.method for cell in cells)
    ahead = max((cell.lookahead for cell in cells if cell.lookahead is not None), default=None)
    flags = [
        "--kv-compress",
        "off",
        "--kv-allow-override",
        ",".join(["off", *methods]),
        "--kv-budget-bounds",
        f"{min(budgets)}:{max(budgets)}",
        "--kv-usage",
        *([] if ahead is None else ["--kv-lookahead", str(ahead)]),
        *arguments,
    ]
    # On a CPU, vLLM would take half of the machine's memory.
    environment = {CACHE_SPACE: os.environ.get(CACHE_SPACE, _CACHE_GIB)}
    with ExitStack() as stack:
        try:
            running = stack.enter_context(
                serve(str(model), flags, log, deadline_s=_DEADLINE_S, environment=environment)
            )
        except (RuntimeError, OSError) as e:
            # The log follows in its message.
            sentence = str(e).splitlines()[0].partition(";")[0]
            raise ConfigError(f"{sentence} before it was healthy; see {log}") from None
        stack.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        try:
            yield running.url
        finally:
            # A second Ctrl-C must not leave the server behind.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
