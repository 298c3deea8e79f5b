"""What the tests of docker/ and deploy/ share: tools that must be there, rendered objects."""

import shutil
import sys
from pathlib import Path

import pytest

from manifests import OVERLAYS, kubectl, render


@pytest.fixture(scope="session")
def tool():
    """Path of a command; the test fails, and says what to install, when it is missing."""

    def find(name: str, package: str) -> str:
        found = shutil.which(name, path=f"{Path(sys.executable).parent}:/usr/bin:/bin")
        if found is None:
            pytest.fail(f"this test needs the command `{name}`; install {package}")
        return found

    return find


@pytest.fixture(scope="session")
def kubectl_binary(tmp_path_factory):
    return kubectl(tmp_path_factory.mktemp("kubectl"))


@pytest.fixture(scope="session")
def rendered(kubectl_binary):
    """Overlay name -> its objects."""
    return {path.name: render(kubectl_binary, path.name) for path in sorted(OVERLAYS.iterdir())}
