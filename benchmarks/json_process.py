"""A child process that answers each line of JSON on its standard input with a line of JSON."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, TextIO

SHUTDOWN_SECONDS = 20  # then the process is killed


class JsonProcess:
    """The parent's side.

    Args:
        arguments: arguments of Python.
        environment: variables to add to this process's.
    """

    def __init__(self, arguments: Sequence[str], **environment: str) -> None:
        self.name = " ".join(arguments)
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def ask(self, question: Any) -> Any:
        """Send a question and return the reply.

        Raises:
            RuntimeError: the process died.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> Any:
        """Return the next reply.

        Raises:
            RuntimeError: the process died.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}: ended with status {self.process.wait()}; see the log")
        return json.loads(line)

    def close(self) -> None:
        """End the process; kill it if that takes too long. Safe to call twice."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(SHUTDOWN_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Replies:
    """The child's side; from now on, whatever else prints goes to standard error."""

    def __init__(self) -> None:
        self._out: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def send(self, reply: Any) -> None:
        print(json.dumps(reply), file=self._out, flush=True)
