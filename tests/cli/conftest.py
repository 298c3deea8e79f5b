"""Fixtures that run ``kvcompress`` as a process or in this process."""

import functools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from checkpoints import make
from engines import keep_heap_frozen, replace_kernels_once
from site_patches import write_site
from vllm_kvcompress.cli import main
from vllm_kvcompress.doctor import child_process
from vllm_kvcompress.doctor.checks import Check, Report

COMMAND = str(Path(sys.executable).with_name("kvcompress"))
Run = Callable[..., subprocess.CompletedProcess[str]]


def kvcompress(
    folder: Path, *arguments: object, site: str = "", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``kvcompress`` in a folder.

    Args:
        site: Python code that runs at the start of each of its processes.
        environment: additional environment variables.
    """
    variables = {"COLUMNS": "100", **(environment or {})}
    if site:
        (folder / "site").mkdir(exist_ok=True)
        write_site(folder / "site", site)
        variables["PYTHONPATH"] = str(folder / "site")
    result = subprocess.run(
        [COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        cwd=folder,
        env={**os.environ, **variables},
    )
    assert "Traceback" not in result.stdout, result.stdout
    return result


@pytest.fixture(scope="session")
def run_in() -> Run:
    """Return a function that runs ``kvcompress`` in a folder."""
    return kvcompress


@pytest.fixture
def run(tmp_path) -> Run:
    """Return a function that runs ``kvcompress`` in an empty folder."""
    return functools.partial(kvcompress, tmp_path)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> str:
    """Return a checkpoint with 4 layers and without a tokenizer."""
    return make("llama-gqa", tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def wide(tmp_path_factory) -> str:
    """Return a checkpoint with 3 layers and heads of 64, which k4v3 can pack, as `tiny`."""
    return make("qwen3", tmp_path_factory.mktemp("wide"))


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str


@pytest.fixture
def run_in_process(monkeypatch, capfd) -> Callable[..., CommandResult]:
    """Return a function that runs ``kvcompress`` in this process, without starting Python."""

    def command(*arguments: object) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["kvcompress", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        captured = capfd.readouterr()
        return CommandResult(int(exit_info.value.code or 0), captured.out, captured.err)

    return command


@pytest.fixture
def plan_text(run_in_process) -> Callable[..., str]:
    """Return a function that returns the text of ``kvcompress plan`` on one line."""

    def plan(*arguments: object) -> str:
        done = run_in_process("plan", *arguments)
        assert done.status == 0, done.err
        return " ".join(done.out.split())

    return plan


@pytest.fixture
def plan_json(run_in_process) -> Callable[..., dict[str, Any]]:
    """Return a function that returns the JSON document of ``kvcompress plan``."""
    return lambda *arguments: json.loads(run_in_process("plan", *arguments, "--json").out)


@pytest.fixture
def run_doctor_in_process(run_in_process, monkeypatch) -> Callable[..., CommandResult]:
    """Return a function that runs ``kvcompress doctor`` with its child's checks in this process.

    Monkeypatches apply to the checks, and vLLM is imported once. Tests that use `run` cover the
    real child process and its failures.
    """
    from vllm_kvcompress.engine.doctor import run_checks

    def examine(spec, *, on_check, timeout_s, verbose=False) -> Report:
        checks: list[Check] = []
        kept = run_checks.examine(
            json.loads(json.dumps(spec)), lambda check: (checks.append(check), on_check(check))
        )
        return Report(checks=checks, kept=kept)

    keep_heap_frozen()
    replace_kernels_once()
    # Keep vLLM's log out of the captured output, as with a child process.
    for handler in logging.getLogger("vllm").handlers:
        if type(handler) is logging.StreamHandler:  # vLLM's handler, not a subclass of pytest's
            monkeypatch.setattr(handler, "stream", sys.__stderr__)
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    monkeypatch.setattr(child_process, "examine", examine)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return run_in_process
