"""Fixtures that run ``kvcompress compare`` in this process, and a fake vLLM server."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from fake_vllm import FakeVllm
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

    Failed requests are retried without a delay.
    """
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(client, "_RETRY_DELAYS_S", (0.0, 0.0, 0.0))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> CommandResult:
        monkeypatch.setattr(
            sys, "argv", ["kvcompress", "compare", "--out", "out", *map(str, arguments)]
        )
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
