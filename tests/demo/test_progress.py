"""The demo shows that it is at work: a live line on a terminal, else lines. No server starts."""

import io
import queue
import threading

import pytest
from rich.console import Console

from vllm_kvcompress.demo import __main__ as demo
from vllm_kvcompress.demo.ask import Reply
from vllm_kvcompress.demo.progress import EVERY_S, Progress


class Clock:
    """A time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Ticks:
    """In an event's place: its waits end when the test says so, and no time passes."""

    def __init__(self) -> None:
        self._answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._waiting = threading.Semaphore(0)
        self.timeouts: set[float] = set()

    def wait(self, timeout: float) -> bool:
        self.timeouts.add(timeout)
        self._waiting.release()
        return self._answers.get()

    def set(self) -> None:
        self._answers.put(True)

    def tick(self) -> None:
        """Let one wait time out; returns when the next one has begun."""
        self._waiting.acquire()
        self._answers.put(False)
        self._waiting.acquire()
        self._waiting.release()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ticks():
    return Ticks()


@pytest.fixture
def log():
    return io.StringIO()


def console(file: io.StringIO, *, terminal: bool) -> Console:
    return Console(file=file, width=100, force_terminal=terminal, color_system=None)


@pytest.fixture
def progress(log, clock, ticks):
    """As it is in a pipe."""
    return Progress(console(log, terminal=False), clock=clock, ended=lambda: ticks)


def test_a_log_has_a_line_each_time_that_the_wait_ends(progress, log, clock, ticks):
    with progress.step("vLLM alone", "computing the prompt") as step:
        assert log.getvalue() == ""
        clock.now += 10
        ticks.tick()
        step.state = "7 of 48 tokens"
        clock.now += 10
        ticks.tick()
        clock.now += 3
        step.state = "48 of 48 tokens"
    assert log.getvalue().splitlines() == [
        "vLLM alone: computing the prompt, 10 s",
        "vLLM alone: 7 of 48 tokens, 20 s",
        "vLLM alone: 48 of 48 tokens, 23 s",
    ]
    assert ticks.timeouts == {EVERY_S}


def test_a_step_that_fails_leaves_no_line_and_no_thread(progress, log):
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="the server ended"), progress.step("a", "b"):
        raise RuntimeError("the server ended")
    assert log.getvalue() == ""
    assert threading.active_count() == before


def test_a_long_line_of_a_log_is_not_broken(progress, log):
    with progress.step("a " * 100, "done"):
        pass
    assert len(log.getvalue().splitlines()) == 1


def test_a_terminal_shows_the_step_before_anything_has_come(log, clock):
    progress = Progress(console(log, terminal=True), clock=clock)
    with progress.step("vLLM alone [1]", "computing the prompt") as step:
        assert "vLLM alone [1]: computing the prompt, 0 s" in log.getvalue()
        clock.now += 24
        step.state = "48 of 48 tokens"
    assert log.getvalue().endswith("vLLM alone [1]: 48 of 48 tokens, 24 s\n")


def test_every_wait_of_the_demo_is_a_step(monkeypatch, log, clock, capsys):
    """Both servers in turns, with what has come of each answer."""
    seen = []

    class Serving:
        def __init__(self, model, arguments, log, **_):
            self._name = "on" if "--kv-compress" in arguments else "off"

        def __enter__(self):
            return self._name

        def __exit__(self, *_):
            pass

    def answered(server, content, *, tokens, salt, on_tokens=lambda _: None):
        seen.append((server, content, salt))
        on_tokens(tokens)
        return Reply((1,), 6000, 12.0, 0.1, 5.0, None)

    monkeypatch.setattr(demo, "serve", Serving)
    monkeypatch.setattr(demo, "ask", answered)
    args = demo.parse_args(["--rounds", "2", "--max-tokens", "9"])
    progress = Progress(console(log, terminal=False), clock=clock)
    off, on = demo.replies(args, "folder", "a question", "a request", progress)
    assert (len(off), len(on)) == (3, 3)
    assert [server for server, *_ in seen] == ["off", "on"] * 4
    assert [content for _, content, _ in seen[2:]] == ["a question"] * 4 + ["a request"] * 2
    assert len({salt for _, _, salt in seen}) == 4
    assert log.getvalue().splitlines() == [
        "vLLM alone: the server is up, 0 s",
        "compressed: the server is up, 0 s",
        "vLLM alone: the server is warm, 0 s",
        "compressed: the server is warm, 0 s",
        "vLLM alone, question 1 of 2: 9 of 9 tokens, 0 s",
        "compressed, question 1 of 2: 9 of 9 tokens, 0 s",
        "vLLM alone, question 2 of 2: 9 of 9 tokens, 0 s",
        "compressed, question 2 of 2: 9 of 9 tokens, 0 s",
        "vLLM alone, request: 9 of 9 tokens, 0 s",
        "compressed, request: 9 of 9 tokens, 0 s",
    ]
    assert capsys.readouterr().out.count("vllm serve") == 2
