"""The checks that need vLLM, made in a child process of their own.

A child, because an engine that crashes must leave a report, and because what vLLM and its libraries
print would get into ours.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from importlib.util import find_spec
from typing import IO, Any

from vllm_kvcompress.doctor.checks import Check, Report, Tell
from vllm_kvcompress.errors import ConfigError

_MODULE = "vllm_kvcompress.engine.diagnosis.doctor"
_ENVIRONMENT = {
    # The scheduler must be in this process, within reach.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_LAST_LINES = 25
# The engine's log may tell more about these checks.
_OF_THE_ENGINE = {"engine", "worker"}


def examine(
    spec: dict[str, Any],
    *,
    tell: Tell,
    timeout_s: float,
    verbose: bool = False,
) -> Report:
    """Make the checks of `engine.diagnosis.doctor`.

    Args:
        spec: as `engine.diagnosis.doctor.examine` takes it.
        tell: is told of each check as it is made.
        verbose: let vLLM's log through to stderr.

    Raises:
        ConfigError: a flag is wrong, in vLLM's words.
    """
    if find_spec("vllm") is None:
        missing = Check(
            name="versions",
            ok=False,
            detail="vLLM is not installed for this Python; install it beside the plugin (pip"
            " install vllm), or ask a running server with --url",
        )
        tell(missing)
        return Report(checks=[missing])
    checks: list[Check] = []
    kept: dict[str, Any] | None = None
    with tempfile.TemporaryFile("w+") as log:
        process, lines = _start(None if verbose else log)
        late = threading.Timer(timeout_s, _kill, (process,))
        late.start()
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin:
                json.dump(spec, process.stdin)
            for line in lines:
                message = json.loads(line)
                if "kept" in message:
                    kept = message["kept"]
                else:
                    checks.append(Check(**message["check"]))
                    tell(checks[-1])
            status = process.wait()
        finally:
            too_late = not late.is_alive() and process.returncode != 0
            late.cancel()
            lines.close()
            _kill(process)
        if status == 2:
            raise ConfigError(_last_sentence(log, verbose))
        if status or not checks:
            checks.append(_crash(status, too_late, timeout_s))
            tell(checks[-1])
        report = Report(checks=checks, kept=kept)
        if not verbose and any(not c.ok and c.name in _OF_THE_ENGINE for c in checks):
            _show_end(log)
    return report


def _start(log: IO[str] | None) -> tuple[subprocess.Popen[str], IO[str]]:
    read, write = os.pipe()
    out = sys.stderr if log is None else log
    process = subprocess.Popen(
        [sys.executable, "-m", _MODULE, str(write)],
        stdin=subprocess.PIPE,
        stdout=out,
        stderr=out,
        text=True,
        pass_fds=(write,),
        env={**os.environ, **_ENVIRONMENT},
        start_new_session=True,
    )
    os.close(write)
    return process, os.fdopen(read)


def _kill(process: subprocess.Popen[str]) -> None:
    """End the child and everything it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _crash(status: int, too_late: bool, timeout_s: float) -> Check:
    if too_late:
        why = f"it was not done after {timeout_s:.0f} s; give it more with --timeout"
    elif status < 0:
        why = f"its process was ended by signal {-status}; see its log with --verbose"
    else:
        why = f"its process ended with status {status}; see its log with --verbose"
    return Check(name="engine", ok=False, detail=why)


def _last_sentence(log: IO[str], verbose: bool) -> str:
    if verbose:
        return "vLLM did not take these flags, see above"
    log.seek(0)
    lines = [line.strip() for line in log if "error:" in line]
    return lines[-1].partition("error:")[2].strip() if lines else "vLLM did not take these flags"


def _show_end(log: IO[str]) -> None:
    """The last lines of the engine's log, for whoever must find out why."""
    log.seek(0)
    lines = log.read().splitlines()[-_LAST_LINES:]
    if lines:
        sys.stderr.write("\n".join(["The end of vLLM's log:", *lines]) + "\n")
