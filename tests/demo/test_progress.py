"""The demo's progress lines, and the order of its requests. No server starts."""

import io
import queue
import threading

import pytest
from rich.console import Console

from vllm_kvcompress.demo import __main__ as demo
from vllm_kvcompress.demo.ask import Reply
from vllm_kvcompress.demo.progress import EVERY_S, Progress
from vllm_kvcompress.demo.questions import CHOSEN, REQUEST


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Ticks:
    """A stand-in for an event: each wait ends when the test says so, without real time passing."""

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
        """Let one wait time out; return when the next wait has begun."""
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
    """Progress whose output is a pipe."""
    return Progress(console(log, terminal=False), clock=clock, ended=lambda: ticks)


def test_a_pipe_gets_a_line_after_each_interval(progress, log, clock, ticks):
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


def test_a_failed_step_prints_no_line_and_leaves_no_thread(progress, log):
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="the server ended"), progress.step("a", "b"):
        raise RuntimeError("the server ended")
    assert log.getvalue() == ""
    assert threading.active_count() == before


def test_a_long_line_is_not_wrapped_in_a_pipe(progress, log):
    with progress.step("a " * 100, "done"):
        pass
    assert len(log.getvalue().splitlines()) == 1


def test_a_terminal_shows_the_step_from_its_start(log, clock):
    progress = Progress(console(log, terminal=True), clock=clock)
    with progress.step("vLLM alone [1]", "computing the prompt") as step:
        assert "vLLM alone [1]: computing the prompt, 0 s" in log.getvalue()
        clock.now += 24
        step.state = "48 of 48 tokens"
    assert log.getvalue().endswith("vLLM alone [1]: 48 of 48 tokens, 24 s\n")


class FakeServer:
    """A stand-in for a server, that writes what happens to it into `events`."""

    def __init__(self, events, arguments, error=None):
        self._name = "on" if "--kv-compress" in arguments else "off"
        self._events, self._error = events, error

    def __enter__(self):
        self._events.append(f"start {self._name}")
        return self

    def __exit__(self, *_):
        self._events.append(f"end {self._name}")

    def wait_healthy(self, deadline_s):
        assert deadline_s == 600
        if self._error:
            raise self._error
        self._events.append(f"healthy {self._name}")

    def answer(self, content, *, tokens, salt, on_tokens=lambda _: None):
        self._events.append((self._name, content, salt))
        on_tokens(tokens)
        return Reply((1,), 6000, 12.0, 0.1, 5.0, None)


@pytest.fixture
def events(monkeypatch):
    """The starts, ends and requests of both servers, in their order."""
    seen = []
    monkeypatch.setattr(
        demo, "launch", lambda _, arguments, *__, **___: FakeServer(seen, arguments)
    )
    monkeypatch.setattr(demo, "ask", FakeServer.answer)
    return seen


def test_both_servers_start_before_the_demo_waits_for_either(events, log, clock, capsys):
    progress = Progress(console(log, terminal=False), clock=clock)
    with demo.both_servers(demo.parse_args([]), "folder") as servers:
        assert list(servers) == ["vLLM alone", "compressed"]
        demo.wait_healthy(servers, progress)
    assert events == ["start off", "start on", "healthy off", "healthy on", "end on", "end off"]
    assert log.getvalue() == "both servers: up, 0 s\n"
    assert capsys.readouterr().out.count("vllm serve") == 2


def test_both_servers_end_if_one_does_not_start(monkeypatch, log, clock):
    seen = []

    def launch(_, arguments, *__, **___):
        error = RuntimeError("the server ended") if "--kv-compress" in arguments else None
        return FakeServer(seen, arguments, error)

    monkeypatch.setattr(demo, "launch", launch)
    progress = Progress(console(log, terminal=False), clock=clock)
    with (
        pytest.raises(RuntimeError, match="the server ended"),
        demo.both_servers(demo.parse_args([]), "folder") as servers,
    ):
        demo.wait_healthy(servers, progress)
    assert seen == ["start off", "start on", "healthy off", "end on", "end off"]


@pytest.mark.parametrize(
    ("flags", "rounds"),
    [([], ["question"]), (["--rounds", "2"], ["question 1 of 2", "question 2 of 2"])],
    ids=["once", "twice"],
)
def test_the_servers_take_turns_and_each_request_is_a_step(events, log, clock, flags, rounds):
    args = demo.parse_args(["--max-tokens", "9", *flags])
    progress = Progress(console(log, terminal=False), clock=clock)
    with demo.both_servers(args, "folder") as servers:
        del events[:]
        replies = demo.replies(args, servers, "Where?", "Summarise.", progress)
        asked = list(events)
    assert {name: len(each) for name, each in replies.items()} == {
        "vLLM alone": len(rounds) + 1,
        "compressed": len(rounds) + 1,
    }
    salts = ["warm-up", *rounds, "ordinary request"]
    contents = ["Where?"] * (len(rounds) + 1) + ["Summarise."]
    assert asked == [
        (name, content, salt)
        for content, salt in zip(contents, salts, strict=True)
        for name in ("off", "on")
    ]
    assert log.getvalue().splitlines() == [
        "vLLM alone: warm, 0 s",
        "compressed: warm, 0 s",
        *(
            f"{name}, {what}: 9 of 9 output tokens, 0 s"
            for what in salts[1:]
            for name in ("vLLM alone", "compressed")
        ),
    ]


def test_the_demo_sends_one_question_and_one_request(events, demo_model, capsys, monkeypatch):
    """Run the command with stand-ins for both servers. They compress no prompt, so it fails."""
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    assert demo.main(["--model", demo_model]) == 1
    asked = [event for event in events if isinstance(event, tuple)]
    assert [salt for _, _, salt in asked[2:]] == ["question"] * 2 + ["ordinary request"] * 2
    assert asked[2][1].endswith(CHOSEN.asked)
    assert asked[4][1].endswith(REQUEST)
    assert events[:2] == ["start off", "start on"]
    out = capsys.readouterr().out
    assert "The prompt of 6000 tokens was not compressed" in out
    assert "This prompt was not compressed" in out
