"""The first layers of a real model, as a checkpoint of its own."""

import json
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

LAYERS = 8
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def first_layers(folder: Path, model: str) -> str:
    """Write them into `folder`, with its tokenizer; return its path.

    For tests that want trained weights and steps that take their time, and no sense: a prompt costs
    a quarter of what it costs the whole model.
    """
    for file in Path(model).iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = LAYERS
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(Path(model, "model.safetensors"))
    kept = {
        name: weight
        for name, weight in weights.items()
        if (layer := _LAYER.search(name)) is None or int(layer[1]) < LAYERS
    }
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return str(folder)
