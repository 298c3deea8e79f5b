"""Concurrent execution of prompts: each prompt with the full cache and in every pending cell."""

import queue
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
        prompt: the prompt, with the full cache's replies to its earlier turns.
        outcome: None if the server refused the request.
        full_text, text: outputs of the full and the compressed cache. Empty if refused.
        refusal: the server's refusal, if any.
    """

    prompt: PendingPrompt
    cell: Cell
    outcome: Outcome | None = None
    full_text: str = ""
    text: str = ""
    refusal: Refused | None = None


def run_prompts(
    clients: Mapping[str, Client], prompts: Sequence[PendingPrompt], *, concurrency: int, kl: bool
) -> Generator[CellResult, None, None]:
    """Run all prompts and yield results as they complete.

    Closing the generator stops the threads without waiting for their current requests.

    Args:
        clients: by `Cell.server`.
        concurrency: prompts to run at once.
        kl: also compare token probabilities.

    Raises:
        Unreachable: The server is gone. Earlier results have been yielded.
    """
    stop = threading.Event()
    clients = {
        server: replace(client, should_stop=stop.is_set) for server, client in clients.items()
    }
    pending: queue.SimpleQueue[PendingPrompt] = queue.SimpleQueue()
    results: queue.SimpleQueue[CellResult | Exception | None] = queue.SimpleQueue()
    for prompt in prompts:
        pending.put(prompt)

    def work() -> None:
        """Run prompts until none is left, then put None."""
        try:
            while not stop.is_set():
                for result in _results(clients, pending.get_nowait(), kl):
                    results.put(result)
        except (queue.Empty, Interrupted):
            pass
        except Exception as e:
            # The consumer of the queue raises it.
            results.put(e)
        results.put(None)

    num_running = min(concurrency, len(prompts))
    for _ in range(num_running):
        threading.Thread(target=work, daemon=True).start()
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


def _results(
    clients: Mapping[str, Client], prompt: PendingPrompt, kl: bool
) -> Iterator[CellResult]:
    """Run a prompt with the full cache and in its cells, and yield the results."""
    try:
        full = clients[FULL.server].complete(prompt.item, FULL)
    except Refused as e:
        for cell in prompt.cells:
            yield CellResult(prompt=prompt, cell=cell, refusal=_refusal(e))
        return
    # Every cell continues the full cache's earlier turns, so that all of them get the same prompt.
    item = prompt.item.with_replies(full.replies)
    prompt = replace(prompt, item=item)
    for cell in prompt.cells:
        client = clients[cell.server]
        try:
            compressed = client.complete(item, cell)
        except Refused as e:
            yield CellResult(prompt=prompt, cell=cell, refusal=_refusal(e))
            continue
        outcome = Outcome.of(
            item, prompt.key, cell, full, compressed, kl=kl, dtype_bytes=client.dtype_bytes
        )
        yield CellResult(
            prompt=prompt, cell=cell, outcome=outcome, full_text=full.text, text=compressed.text
        )


def _refusal(e: Refused) -> Refused:
    """Return `e` if it concerns this prompt only; raise Unreachable if every request would fail."""
    if e.status in (400, 413, 422):
        return e
    raise Unreachable(str(e)) from None
