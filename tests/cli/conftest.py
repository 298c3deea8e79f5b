"""The command as it is typed."""

import functools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from broken_sites import write_site
from checkpoints import make
from engines import spare_repetitions
from vllm_kvcompress.cli import main
from vllm_kvcompress.doctor import child
from vllm_kvcompress.doctor.checks import Check, Report

COMMAND = str(Path(sys.executable).with_name("kvcompress"))
Run = Callable[..., subprocess.CompletedProcess[str]]


def kvcompress(
    folder: Path, *arguments: object, site: str = "", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder; `site` is Python that runs first in each of its processes."""
    more = {"COLUMNS": "100", **(environment or {})}
    if site:
        (folder / "site").mkdir(exist_ok=True)
        write_site(folder / "site", site)
        more["PYTHONPATH"] = str(folder / "site")
    done = subprocess.run(
        [COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        cwd=folder,
        env={**os.environ, **more},
    )
    assert "Traceback" not in done.stdout, done.stdout
    return done


@pytest.fixture(scope="session")
def run_in() -> Run:
    """Run ``kvcompress`` in a folder."""
    return kvcompress


@pytest.fixture
def run(tmp_path) -> Run:
    """Run ``kvcompress`` in an empty folder."""
    return functools.partial(kvcompress, tmp_path)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> str:
    """A checkpoint of 4 layers without a tokenizer."""
    return make("llama-gqa", tmp_path_factory.mktemp("checkpoints"))


@dataclass(frozen=True, slots=True)
class Typed:
    """What the command did in this process."""

    status: int
    out: str
    err: str


@pytest.fixture
def typed(monkeypatch, capfd) -> Callable[..., Typed]:
    """Type ``kvcompress`` in this process: no new Python has to start."""

    def typing(*arguments: object) -> Typed:
        monkeypatch.setattr(sys, "argv", ["kvcompress", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capfd.readouterr()
        return Typed(int(ended.value.code or 0), captured.out, captured.err)

    return typing


@pytest.fixture
def examined(typed, monkeypatch) -> Callable[..., Typed]:
    """Type ``kvcompress doctor`` with its child's checks made in this process as well.

    What is broken in here is broken for them, and vLLM is imported once. That the child is a
    process, and what becomes of one that ends badly, is shown by the tests that `run` the command.
    """
    from vllm_kvcompress.engine.diagnosis import doctor

    def examine(spec, *, tell, timeout_s, verbose=False) -> Report:
        checks: list[Check] = []
        kept = doctor.examine(
            json.loads(json.dumps(spec)), lambda check: (checks.append(check), tell(check))
        )
        return Report(checks=checks, kept=kept)

    spare_repetitions()
    # A child's log is not the command's output: that of an engine in here goes elsewhere too.
    for handler in logging.getLogger("vllm").handlers:
        if type(handler) is logging.StreamHandler:  # vLLM's, and not pytest's own
            monkeypatch.setattr(handler, "stream", sys.__stderr__)
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    monkeypatch.setattr(child, "examine", examine)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return typed
