"""Show what the demo is waiting for: a live line on a terminal, repeated lines elsewhere."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
        started_s: start time by `clock`.
        clock: returns the time in seconds.
    """

    name: str
    state: str
    started_s: float
    clock: Callable[[], float]

    @property
    def line(self) -> str:
        """Return the step's name, its state and the seconds since its start."""
        return f"{self.name}: {self.state}, {self.clock() - self.started_s:.0f} s"

    def __rich__(self) -> Text:
        return Text(self.line)


class Progress:
    """Shows the current step, and prints one line for each finished step.

    Args:
        console: the output. A terminal refreshes the current step's line in place. Any other
            output gets a new line every `EVERY_S` seconds.
        clock: returns the time in seconds.
        ended: makes the event that stops the repeated lines of a step.
    """

    def __init__(
        self,
        console: Console,
        *,
        clock: Callable[[], float] = time.monotonic,
        ended: Callable[[], threading.Event] = threading.Event,
    ) -> None:
        self._console = console
        self._clock = clock
        self._ended = ended

    @contextmanager
    def step(self, name: str, state: str) -> Iterator[Step]:
        """Show a step until the block ends; print its line unless the block raised an error."""
        step = Step(name=name, state=state, started_s=self._clock(), clock=self._clock)
        if self._console.is_terminal:
            with Live(step, console=self._console, transient=True):
                yield step
        else:
            with self._lines_of(step):
                yield step
        self._print(step)

    @contextmanager
    def _lines_of(self, step: Step) -> Iterator[None]:
        ended = self._ended()

        def repeat() -> None:
            while not ended.wait(EVERY_S):
                self._print(step)

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _print(self, step: Step) -> None:
        self._console.print(step.line, highlight=False, markup=False, soft_wrap=True)
