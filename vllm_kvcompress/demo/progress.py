"""Signs of life while the demo waits: a live line on a terminal, and lines in a log elsewhere."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.text import Text

EVERY_S = 10.0
"""Seconds between two lines where no terminal shows a live one."""


@dataclass(slots=True, kw_only=True)
class Step:
    """Something that takes a while.

    Args:
        name: what is done, such as "vLLM alone, request 1 of 3".
        state: how far it is; whoever does the work sets it as the work goes on.
        started_s: when it began, by `clock`.
        clock: the time in seconds.
    """

    name: str
    state: str
    started_s: float
    clock: Callable[[], float]

    @property
    def line(self) -> str:
        """The step, its state and the seconds since it began."""
        return f"{self.name}: {self.state}, {self.clock() - self.started_s:.0f} s"

    def __rich__(self) -> Text:
        return Text(self.line)


class Progress:
    """Shows the step that is under way, and leaves one line for each that is done.

    Args:
        console: where it is shown. On a terminal the step's line is refreshed in place; elsewhere
            it is printed again every `EVERY_S` seconds.
        clock: the time in seconds.
        ended: makes the event that ends the lines of a step.
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
        """Show a step until the block ends, and print its line if the block did not fail."""
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
