"""``kvcompress compare`` as it is typed, and a server to ask that needs no vLLM."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from fake_vllm import FakeVllm
from loopback import server
from vllm_kvcompress.cli import main
from vllm_kvcompress.compare import client


@dataclass(frozen=True, slots=True)
class Typed:
    """What the command did in this process."""

    status: int
    out: str
    err: str


@pytest.fixture
def compare(monkeypatch, capsys, tmp_path) -> Callable[..., Typed]:
    """Type the command; it writes to ``out`` in an empty folder and repeats requests at once."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(client, "_WAITS_S", (0.0, 0.0, 0.0))
    monkeypatch.chdir(tmp_path)

    def typing(*arguments: object) -> Typed:
        monkeypatch.setattr(
            sys, "argv", ["kvcompress", "compare", "--out", "out", *map(str, arguments)]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Typed(int(ended.value.code or 0), captured.out, captured.err)

    return typing


@pytest.fixture
def fake():
    """A server whose full cache is right and whose methods forget; it can be told to misbehave."""
    vllm = FakeVllm()
    with server(vllm) as url:
        vllm.url = url
        yield vllm
