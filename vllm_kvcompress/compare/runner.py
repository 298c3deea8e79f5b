"""Concurrent execution of prompts: each prompt with the full cache and in every pending cell."""

import queue
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from vllm_kvcompress.compare.client import FULL, Cell, Client, Interrupted
from vllm_kvcompress.compare.outcome import Outcome
from vllm_kvcompress.compare.tasks import Item
from vllm_kvcompress.serving.exposition import Refused, Unreachable


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPrompt:
    """A prompt and the cells that it has not been run in."""

    item: Item
    key: str
    cells: Sequence[Cell]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """Result of one prompt in one cell.

    Args:
        outcome: None if the server refused the request.
        full_text, text: outputs of the full and the compressed cache. Empty if refused.
        refusal: the server's refusal, if any.
    """

    prompt: PendingPrompt
    cell: Cell
    outcome: Outcome | None
    full_text: str = ""
    text: str = ""
    refusal: Refused | None = None


def run_prompts(
    client: Client,
    prompts: Sequence[PendingPrompt],
    *,
    concurrency: int,
    kl: bool,
    others: Mapping[str, Client] = MappingProxyType({}),
) -> Generator[CellResult, None, None]:
    """Run all prompts and yield results as they complete.

    Closing the generator stops the threads without waiting for their current requests.

    Args:
        others: clients of the other servers, by `Cell.server`.
        concurrency: prompts to run at once.
        kl: also compare token probabilities.

    Raises:
        Unreachable: The server is gone. Earlier results have been yielded.
    """
    stop = threading.Event()
    pending: queue.SimpleQueue[PendingPrompt] = queue.SimpleQueue()
    results: queue.SimpleQueue[CellResult | Exception | None] = queue.SimpleQueue()
    for prompt in prompts:
        pending.put(prompt)
    clients = {
        server: replace(each, should_stop=stop.is_set)
        for server, each in {**others, "": client}.items()
    }
    threads = [
        threading.Thread(target=_work, args=(clients, kl, pending, results.put, stop), daemon=True)
        for _ in range(min(concurrency, len(prompts)))
    ]
    for thread in threads:
        thread.start()
    num_running = len(threads)
    try:
        while num_running:
            result = results.get()
            if result is None:
                num_running -= 1
            elif isinstance(result, Exception):
                raise result
            else:
                yield result
    finally:
        stop.set()


def _work(
    clients: Mapping[str, Client],
    kl: bool,
    pending: queue.SimpleQueue[PendingPrompt],
    put: Callable[[Any], None],
    stop: threading.Event,
) -> None:
    """Run prompts until none is left, then put None."""
    try:
        while not stop.is_set():
            _run_prompt(clients, kl, pending.get_nowait(), put)
    except (queue.Empty, Interrupted):
        pass
    except Exception as e:
        # The consumer of the queue raises it.
        put(e)
    put(None)


def _run_prompt(
    clients: Mapping[str, Client],
    kl: bool,
    prompt: PendingPrompt,
    put: Callable[[CellResult], None],
) -> None:
    """Run a prompt with the full cache and in its cells.

    Args:
        clients: by `Cell.server`.
    """
    try:
        full = clients[FULL.server].complete(prompt.item, FULL)
    except Refused as e:
        for cell in prompt.cells:
            put(CellResult(prompt=prompt, cell=cell, outcome=None, refusal=_refusal(e)))
        return
    # Every cell continues the full cache's earlier turns, so that all of them get the same prompt.
    prompt = replace(prompt, item=prompt.item.with_replies(full.replies))
    for cell in prompt.cells:
        client = clients[cell.server]
        try:
            compressed = client.complete(prompt.item, cell)
        except Refused as e:
            put(CellResult(prompt=prompt, cell=cell, outcome=None, refusal=_refusal(e)))
            continue
        outcome = Outcome.of(
            prompt.item, prompt.key, cell, full, compressed, kl=kl, dtype_bytes=client.dtype_bytes
        )
        put(
            CellResult(
                prompt=prompt,
                cell=cell,
                outcome=outcome,
                full_text=full.text,
                text=compressed.text,
            )
        )


def _refusal(e: Refused) -> Refused:
    """Return `e` if it concerns this prompt only; raise Unreachable if every request would fail."""
    if e.status in (400, 413, 422):
        return e
    raise Unreachable(str(e)) from None
