"""Shared fixtures of the docker/ and deploy/ tests: rendered overlays and one installed image."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from build_context import copy_context
from checkpoints import text_checkpoint
from dockerfiles import stages
from image_root import ImageRoot
from manifests import NAMES, ROOT, kubectl, render
from tools import missing


@pytest.fixture(scope="session")
def kubectl_binary(tmp_path_factory):
    return kubectl(tmp_path_factory.mktemp("kubectl"))


@pytest.fixture(scope="session")
def rendered(kubectl_binary):
    """The rendered objects by overlay name."""
    return {name: render(kubectl_binary, name) for name in NAMES}


@pytest.fixture(scope="module")
def image(demo_model, tool) -> Iterator[ImageRoot]:
    """The CPU image, built with the steps of its Dockerfile."""
    if os.geteuid() != 0:
        missing("this test mounts file systems as a container engine does; run it as root")
    for name, package in (("unshare", "util-linux"), ("tini", "tini"), ("g++", "g++")):
        tool(name, f"Debian's package {package}")
    install, final = stages(ROOT / "docker" / "Dockerfile.cpu")
    # Hard links need the file system of the test environment.
    with tempfile.TemporaryDirectory(prefix="kvcompress-image-", dir=sys.prefix) as folder:
        root = ImageRoot(Path(folder, "root"))
        copy_context(root.path / "src")
        for lock in ("cpu", "pictures"):
            root.link_packages(ROOT / "requirements" / f"{lock}.lock", "/opt/kvcompress")
        root.build(install.run[0])
        # `make test` has already run install-packages.sh, so the image uses the machine's packages.
        root.build("/src/docker/make-user.sh")
        shutil.copy(ROOT / final.copy[1][0], root.path / "opt" / "entrypoint.sh")
        shutil.rmtree(root.path / "src")
        model = root.path / "models" / "demo"
        Path(text_checkpoint(model.parent, demo_model)).rename(model)
        for path in (model, *model.iterdir()):
            path.chmod(path.stat().st_mode | 0o555 if path.is_dir() else 0o444)
        yield root
