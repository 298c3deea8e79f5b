"""Show what the demo is waiting for: a live line on a terminal, repeated lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from time import monotonic

from rich.console import Console
from rich.live import Live
from rich.text import Text

EVERY_S = 10.0
"""Seconds between two lines of a step, if the output is not a terminal."""


@dataclass(slots=True, kw_only=True)
class Step:
    """A piece of work that takes seconds or longer.

    Args:
        name: name of the work, such as "vLLM alone, question 1 of 3".
        state: how far the work is; the code that does the work updates it.
        started_s: start time in seconds.
    """

    name: str
    state: str
    started_s: float = field(default_factory=lambda: monotonic())

    def __rich__(self) -> Text:
        """Return the step's name, its state and the seconds since its start."""
        return Text(f"{self.name}: {self.state}, {monotonic() - self.started_s:.0f} s")

    def print(self, console: Console) -> None:
        """Print the line."""
        console.print(self, soft_wrap=True)


@contextmanager
def show_step(console: Console, name: str, state: str) -> Iterator[Step]:
    """Show a step until the block ends; print its line unless the block raised an error.

    A terminal refreshes the line in place. Any other output gets a new line every `EVERY_S`
    seconds.
    """
    step = Step(name=name, state=state)
    if console.is_terminal:
        with Live(step, console=console, transient=True):
            yield step
    else:
        with _repeated(step, console):
            yield step
    step.print(console)


@contextmanager
def _repeated(step: Step, console: Console) -> Iterator[None]:
    """Print the step's line again and again in a thread until the block ends."""
    ended = Event()

    def repeat() -> None:
        while not ended.wait(EVERY_S):
            step.print(console)

    thread = Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
