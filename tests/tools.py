"""Find commands that a test needs."""

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest


def missing(sentence: str) -> NoReturn:
    """Skip the test because a requirement is missing; in CI, fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(sentence)
    pytest.skip(sentence)


def find(name: str, package: str) -> str:
    """Return the path of the command `name`.

    If the command is not installed, skip the test, or fail it in CI, naming `package`.
    """
    path = shutil.which(name, path=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    if path is None:
        missing(f"this test needs the command `{name}`; install {package}")
    return path
