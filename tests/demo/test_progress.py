"""The demo's progress lines, the order of its requests, and its figures. No server starts."""

import io
import json
import queue
import sys
import threading

import pytest
from rich.console import Console

from vllm_kvcompress.demo import __main__ as demo
from vllm_kvcompress.demo import progress
from vllm_kvcompress.demo.ask import Measured, Reply
from vllm_kvcompress.demo.chats import CHATS, Turn
from vllm_kvcompress.demo.progress import EVERY_S, show_step
from vllm_kvcompress.demo.questions import CHOSEN, REQUEST
from vllm_kvcompress.serving.process import Compressed


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
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "monotonic", clock)
    return clock


@pytest.fixture
def ticks(monkeypatch):
    ticks = Ticks()
    monkeypatch.setattr(progress, "Event", lambda: ticks)
    return ticks


@pytest.fixture
def log():
    return io.StringIO()


def console(file: io.StringIO, *, terminal: bool = False) -> Console:
    return Console(file=file, width=100, force_terminal=terminal, color_system=None)


def test_a_pipe_gets_a_line_after_each_interval(log, clock, ticks):
    with show_step(console(log), "vLLM alone", "computing the prompt") as step:
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


def test_a_failed_step_prints_no_line_and_leaves_no_thread(log):
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="the server ended"), show_step(console(log), "a", "b"):
        raise RuntimeError("the server ended")
    assert log.getvalue() == ""
    assert threading.active_count() == before


def test_a_long_line_is_not_wrapped_in_a_pipe(log):
    with show_step(console(log), "a " * 100, "done"):
        pass
    assert len(log.getvalue().splitlines()) == 1


def test_a_terminal_shows_the_step_from_its_start(log, clock):
    terminal = console(log, terminal=True)
    with show_step(terminal, "vLLM alone [1]", "computing the prompt") as step:
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

    def answer(self, prompts, *, tokens, salt, on_tokens):
        self._events.append((self._name, prompts, tokens, salt))
        on_tokens(tokens * len(prompts))
        log, blocks = None, 14.0
        if self._name == "on":
            log, blocks = Compressed("id", 1500, 300.0, 32, 13, 4, (290, 310)), 5.0
        reply = Reply("", tuple(range(100, 100 + tokens)), 1500, 0, 2.0, 6.0, log)
        replies = (reply,) * len(prompts)
        return Measured(replies, 7.0, 9.0, 1.0, 2.0, blocks, blocks, blocks, 0, 2.0, 2.0, 0.0)

    def chat(self, requests):
        self._events.append(f"chats {self._name}")
        for turn in (1, 2):
            for number in range(len(requests)):
                yield Turn(
                    chat=number, turn=turn, prompt_tokens=8, cached_tokens=4, first_token_s=2.0
                )


@pytest.fixture
def events(monkeypatch):
    """The starts, ends and requests of both servers, in their order."""
    seen = []
    monkeypatch.setattr(
        demo, "launch", lambda _, arguments, *__, **___: FakeServer(seen, arguments)
    )
    monkeypatch.setattr(demo, "ask_all", FakeServer.answer)
    monkeypatch.setattr(demo.chats, "run", FakeServer.chat)
    return seen


def test_both_servers_start_before_the_demo_waits_for_either(events, log, clock, capsys):
    with demo.both_servers(demo.server_flags(demo.parse_args([])), "folder") as servers:
        assert list(servers) == ["vLLM alone", "compressed"]
        demo.wait_healthy(servers, console(log))
    assert events == ["start off", "start on", "healthy off", "healthy on", "end on", "end off"]
    assert log.getvalue() == "both servers: up, 0 s\n"
    assert capsys.readouterr().out.count("vllm serve") == 2


def test_both_servers_end_if_one_does_not_start(monkeypatch, log, clock):
    seen = []

    def launch(_, arguments, *__, **___):
        error = RuntimeError("the server ended") if "--kv-compress" in arguments else None
        return FakeServer(seen, arguments, error)

    monkeypatch.setattr(demo, "launch", launch)
    with (
        pytest.raises(RuntimeError, match="the server ended"),
        demo.both_servers(demo.server_flags(demo.parse_args([])), "folder") as servers,
    ):
        demo.wait_healthy(servers, console(log))
    assert seen == ["start off", "start on", "healthy off", "end on", "end off"]


def test_the_servers_take_turns_and_each_turn_is_a_step(events, log, clock):
    with demo.both_servers(demo.server_flags(demo.parse_args([])), "folder") as servers:
        del events[:]
        off, on = demo.measure(servers, "requests at once", ["A", "B"], 9, console(log))
        assert events == [(name, ["A", "B"], 9, "requests at once") for name in ("off", "on")]
    assert (off.replies[0].compressed, on.replies[1].compressed.kept_tokens) == (None, 300.0)
    assert log.getvalue().splitlines() == [
        f"{name}, requests at once: 18 of 18 output tokens, 0 s"
        for name in ("vLLM alone", "compressed")
    ]


def test_the_demo_sends_the_question_alone_and_then_all_requests(
    events, demo_model, capsys, monkeypatch, tmp_path
):
    """Run the command with stand-ins for both servers, which write the same tokens."""
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    saved = tmp_path / "figures.json"
    arguments = ["--model", demo_model, "--requests", "3", "--json", str(saved)]
    assert demo.main(arguments) == 0
    assert events[:2] == ["start off", "start on"]
    turns = [event for event in events if isinstance(event, tuple)]
    assert [name for name, *_ in turns] == ["off", "on"] * 4
    assert events.index("end off") < events.index("start off", 1), "two servers run at a time"
    assert [event for event in events if event[:5] == "chats"] == ["chats off", "chats on"]
    (_, (question,), *_), (_, requests, tokens, _) = turns[2], turns[4]
    assert question.endswith(CHOSEN.asked)
    assert len(set(requests)) == 3
    assert all(text.endswith(REQUEST) for text in requests)
    assert "285 of 285 output tokens after the compression" in capsys.readouterr().out

    figures = json.loads(saved.read_text())
    assert all(figures[key] for key in ("machine", "commit", "vllm", "command", "date", "flags"))
    assert figures["pool"]["block_tokens"] == 128
    assert figures["losses"] == figures["failures"] == []
    assert figures["at_once"]["equal"] == 3 * (tokens - 33)
    for server in ("off", "on"):
        assert [turn["chat"] for turn in figures["chats"][server]] == [*range(CHATS)] * 2
    for part, number in ((figures["at_once"], 3), (figures["question"], 1)):
        assert part["off"]["wall_s"] == part["on"]["wall_s"] == 7.0
        assert (part["off"]["mean_running"], part["on"]["max_running"]) == (1.0, 2.0)
        assert (part["off"]["max_blocks"], part["on"]["preemptions"]) == (14.0, 0)
        assert len(part["agreements"]) == number
        for server, after in (("off", None), ("on", 4)):
            assert len(part[server]["replies"]) == number
            for reply in part[server]["replies"]:
                assert (reply["first_token_s"], reply["end_s"]) == (2.0, 6.0)
                assert reply["token_ids"]
                assert (reply["compressed"] or {}).get("blocks_after") == after


def test_figures_need_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "benchmarks.origin", None)
    with pytest.raises(SystemExit, match="run the demo in a checkout's folder"):
        demo.main(["--json", str(tmp_path / "figures.json")])
