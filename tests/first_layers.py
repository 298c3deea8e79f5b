"""Save the first layers of a trained model as a separate checkpoint."""

import json
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

LAYERS = 8
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def first_layers(folder: Path, model: str) -> str:
    """Write the first `LAYERS` layers and the tokenizer of `model` to `folder`; return its path.

    For tests that need trained weights and realistic step times but no meaningful output: a prompt
    costs a quarter of the compute of the full model.
    """
    for file in Path(model).iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = LAYERS
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(Path(model, "model.safetensors"))
    kept_weights = {
        name: weight
        for name, weight in weights.items()
        if (layer := _LAYER.search(name)) is None or int(layer[1]) < LAYERS
    }
    save_file(kept_weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)
