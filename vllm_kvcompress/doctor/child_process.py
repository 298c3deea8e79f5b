"""Runs the checks that need vLLM in a child process.

With a child process, a crash of the engine still leaves a report, and the output of vLLM and its
libraries does not mix with ours.
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

from vllm_kvcompress.doctor.checks import Check, CheckCallback, Report
from vllm_kvcompress.errors import ConfigError

_MODULE = "vllm_kvcompress.engine.doctor.run_checks"
_ENVIRONMENT = {
    # The checks read the scheduler's state, so it must run in the child's own process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_MAX_LOG_LINES = 25
# If one of these checks fails, the end of the engine's log is shown.
_CHECKS_WITH_LOG = {"engine", "worker"}


def examine(
    spec: dict[str, Any],
    *,
    on_check: CheckCallback,
    timeout_s: float,
    verbose: bool = False,
) -> Report:
    """Run the checks of `engine.doctor.run_checks` and return their report.

    Args:
        spec: as in `engine.doctor.run_checks.examine`.
        on_check: called with each check as soon as it is made.
        timeout_s: time limit in seconds.
        verbose: whether to print vLLM's log to stderr.

    Raises:
        ConfigError: vLLM rejected a flag; the message is vLLM's.
    """
    if find_spec("vllm") is None:
        missing = Check(
            name="versions",
            ok=False,
            detail="vLLM is not installed for this Python; install it beside the plugin (pip"
            " install vllm), or check a running server with --url",
        )
        on_check(missing)
        return Report(checks=[missing])
    checks: list[Check] = []
    kept: dict[str, Any] | None = None
    with tempfile.TemporaryFile("w+") as log:
        process, lines = _start(None if verbose else log)
        timer = threading.Timer(timeout_s, _kill, (process,))
        timer.start()
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
                    on_check(checks[-1])
            status = process.wait()
        finally:
            timed_out = not timer.is_alive() and process.returncode != 0
            timer.cancel()
            lines.close()
            _kill(process)
        if status == 2:
            raise ConfigError(_last_sentence(log, verbose))
        if status or not checks:
            checks.append(_crash(status, timed_out, timeout_s))
            on_check(checks[-1])
        report = Report(checks=checks, kept=kept)
        if not verbose and any(not c.ok and c.name in _CHECKS_WITH_LOG for c in checks):
            _show_end_of(log)
    return report


def _start(log: IO[str] | None) -> tuple[subprocess.Popen[str], IO[str]]:
    """Start the child process; return it and the stream of its messages, one JSON a line.

    Args:
        log: file for the child's output; None for stderr.
    """
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
    """Kill the child and all processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _crash(status: int, timed_out: bool, timeout_s: float) -> Check:
    """Return a failed check for a child that exited early or ran out of time."""
    if timed_out:
        reason = f"not finished after {timeout_s:.0f} s; raise the limit with --timeout"
    elif status < 0:
        reason = f"its process was killed by signal {-status}; see its log with --verbose"
    else:
        reason = f"its process exited with status {status}; see its log with --verbose"
    return Check(name="engine", ok=False, detail=reason)


def _last_sentence(log: IO[str], verbose: bool) -> str:
    """Return vLLM's last error message from the log, or a generic one."""
    if verbose:
        return "vLLM rejected these flags; see its message above"
    log.seek(0)
    lines = [line.strip() for line in log if "error:" in line]
    return lines[-1].partition("error:")[2].strip() if lines else "vLLM rejected these flags"


def _show_end_of(log: IO[str]) -> None:
    """Print the last lines of the engine's log to stderr."""
    log.seek(0)
    lines = log.read().splitlines()[-_MAX_LOG_LINES:]
    if lines:
        sys.stderr.write("\n".join(["The end of vLLM's log:", *lines]) + "\n")
