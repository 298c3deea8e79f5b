"""Prompts asked of a server, some at once, each with the full cache and in every open cell."""

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_kvcompress.compare.client import FULL, Cell, Client, Interrupted
from vllm_kvcompress.compare.outcome import Outcome
from vllm_kvcompress.compare.tasks import Item
from vllm_kvcompress.serving.exposition import Refused, Unreachable


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A prompt, and the cells in which it is not yet asked."""

    item: Item
    key: str
    cells: Sequence[Cell]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One cell of one prompt is done.

    Args:
        outcome: None where the server refused the request.
        full, text: what was answered; empty where it was refused.
        refusal: of a refused request.
    """

    work: Work
    cell: Cell
    outcome: Outcome | None
    full: str = ""
    text: str = ""
    refusal: Refused | None = None


def ask_all(
    client: Client, works: Sequence[Work], *, concurrency: int, kl: bool
) -> Generator[Asked, None, None]:
    """Ask for all of it, in the order in which answers come.

    Threads end with the iterator: what they still ask is not waited for.

    Args:
        concurrency: prompts at once.
        kl: compare what is likely as well.

    Raises:
        Unreachable: the server is gone. What was asked before has been handed out.
    """
    stop = threading.Event()
    pack_request: queue.SimpleQueue[Work] = queue.SimpleQueue()
    done: queue.SimpleQueue[Asked | Exception | None] = queue.SimpleQueue()
    for work in works:
        pack_request.put(work)
    client = replace(client, stopping=stop.is_set)
    threads = [
        threading.Thread(target=_work, args=(client, kl, pack_request, done.put, stop), daemon=True)
        for _ in range(min(concurrency, len(works)))
    ]
    for thread in threads:
        thread.start()
    running = len(threads)
    try:
        while running:
            came = done.get()
            if came is None:
                running -= 1
            elif isinstance(came, Exception):
                raise came
            else:
                yield came
    finally:
        stop.set()


def _work(
    client: Client,
    kl: bool,
    pack_request: queue.SimpleQueue[Work],
    tell: Callable[[Any], None],
    stop: threading.Event,
) -> None:
    try:
        while not stop.is_set():
            _one(client, kl, pack_request.get_nowait(), tell)
    except (queue.Empty, Interrupted):
        pass
    except Exception as e:
        # The thread that reads the queue raises it.
        tell(e)
    tell(None)


def _one(client: Client, kl: bool, work: Work, tell: Callable[[Asked], None]) -> None:
    try:
        full = client.ask(work.item, FULL)
    except Refused as e:
        for cell in work.cells:
            tell(Asked(work=work, cell=cell, outcome=None, refusal=_only_this(e)))
        return
    for cell in work.cells:
        try:
            other = client.ask(work.item, cell)
        except Refused as e:
            tell(Asked(work=work, cell=cell, outcome=None, refusal=_only_this(e)))
            continue
        outcome = Outcome.of(work.item, work.key, cell, full, other, kl=kl)
        tell(Asked(work=work, cell=cell, outcome=outcome, full=full.text, text=other.text))


def _only_this(e: Refused) -> Refused:
    """A request that the server does not take; what no request would survive ends the run."""
    if e.status in (400, 413, 422):
        return e
    raise Unreachable(str(e)) from None
