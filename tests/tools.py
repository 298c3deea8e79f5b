"""Commands that a test needs of its machine."""

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest


def missing(sentence: str) -> NoReturn:
    """What a test needs is not on this machine: it is skipped, and fails where CI runs it."""
    if os.environ.get("CI") == "true":
        pytest.fail(sentence)
    pytest.skip(sentence)


def find(name: str, package: str) -> str:
    """Path of the command `name`; the test says that it needs `package` if there is none."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    if found is None:
        missing(f"this test needs the command `{name}`; install {package}")
    return found
