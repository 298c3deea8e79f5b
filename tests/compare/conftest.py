"""Fixtures that run ``kvcompress compare`` in this process, and a fake vLLM server."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from fake_vllm import FakeVllm, write_prompts
from loopback import server
from vllm_kvcompress.cli import main
from vllm_kvcompress.compare import client


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str


@pytest.fixture
def compare(monkeypatch, capsys, tmp_path) -> Callable[..., CommandResult]:
    """Return a function that runs ``kvcompress compare`` with ``--out out`` in an empty folder.

    Its first argument is split as a shell does, and further ones are passed on as they are. Failed
    requests are retried without a delay.
    """
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(client, "_RETRY_DELAYS_S", (0.0, 0.0, 0.0))
    monkeypatch.chdir(tmp_path)

    def run(line: str, *arguments: object) -> CommandResult:
        argv = ["kvcompress", "compare", "--out", "out", *shlex.split(line), *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as exit_info:
            main()
        captured = capsys.readouterr()
        return CommandResult(int(exit_info.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def fake():
    """Yield a running fake server, whose attributes change its behaviour."""
    vllm = FakeVllm()
    with server(vllm) as url:
        vllm.url = url
        yield vllm


@pytest.fixture
def run_compare(compare, fake, tmp_path):
    """Return a function that compares ten prompts, one at a time, on the fake server.

    Arguments are as those of `compare`. `numbers` are the numbers of `write_prompts`; with None,
    ``mine.jsonl`` stays as it is.
    """

    def run(line="", *arguments, numbers=range(10)):
        if numbers is not None:
            write_prompts(tmp_path / "mine.jsonl", numbers)
        flags = "--concurrency 1 --methods cake,snapkv --budgets 0.5,0.2"
        return compare(f"--url {fake.url} --prompts mine.jsonl {flags} {line}", *arguments)

    return run
