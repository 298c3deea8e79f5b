"""Create tiny random checkpoints of vision-language models with processors, and test pictures.

Tokenizer, template and image processor are real and created without a network. Each letter is a
token, and a picture has one token for each 28 x 28 or 32 x 32 pixels.
"""

import base64
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3VLMoeForConditionalGeneration
from transformers import Qwen2_5_VLForConditionalGeneration as Qwen25
from transformers import Qwen3VLForConditionalGeneration as Qwen3

import no_videos
from checkpoints import EXPERTS, llama_sizes

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
SPECIAL += ("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
ID = {token: number for number, token in enumerate([*SPECIAL, *LETTERS])}
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
{%- if part.type == 'text' %}{{ part.text }}
{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>
{%- else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True, slots=True)
class Family:
    """Size of one architecture: model class, layers, heads and extra configuration keys.

    Args:
        patch: side of a patch in pixels; four patches are a token.
        text, vision: extra keys of the text and the vision configuration.
        sections: M-RoPE sections, which add up to half the head size.
    """

    model: Any
    patch: int
    sections: tuple[int, int, int]
    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    block: int = 32
    dtype: str = "float32"


_QWEN3 = dict(out_hidden_size=128, num_position_embeddings=64, deepstack_visual_indexes=[0])
FAMILIES = {
    "qwen2.5-vl": Family(
        Qwen25, 14, (4, 6, 6), vision={"out_hidden_size": 128, "fullatt_block_indexes": [1]}
    ),
    "qwen3-vl": Family(Qwen3, 16, (6, 5, 5), vision=_QWEN3),
    "qwen3-vl-moe": Family(
        Qwen3VLMoeForConditionalGeneration, 16, (6, 5, 5),
        text={"num_experts": 8, "norm_topk_prob": True, **EXPERTS}, vision=_QWEN3,
    ),
}  # fmt: skip
# a head dim that k4v3 can pack
WIDE = {
    "qwen3-vl-d64": Family(
        Qwen3, 16, (12, 10, 10), vision=_QWEN3 | {"out_hidden_size": 256}, head_dim=64
    )
}


def make(name: str, folder: Path) -> str:
    """Write the checkpoint `name` below `folder` once; return its path."""
    path = folder / name
    if (path / "config.json").exists():
        return str(path)
    family = (FAMILIES | WIDE)[name]
    text_config = {
        **llama_sizes(family.layers, family.heads, family.kv_heads, family.head_dim),
        "bos_token_id": 0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": list(family.sections),
            "mrope_interleaved": family.model is not Qwen25,
        },
    }
    vision_config = {"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2}
    config = family.model.config_class(
        text_config={**text_config, **family.text},
        vision_config={**vision_config, "patch_size": family.patch, **family.vision},
        image_token_id=ID["<|image_pad|>"],
        video_token_id=ID["<|video_pad|>"],
        vision_start_token_id=ID["<|vision_start|>"],
        vision_end_token_id=ID["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(len(name))
    family.model(config).save_pretrained(path)
    if "num_experts" in family.text:
        _as_published(path / "model.safetensors")
    _write_processor(path, family)
    return str(path)


def _as_published(file: Path) -> None:
    """Transpose the experts' weights to published checkpoints' layout: input dim, output dim."""
    weights = load_file(file)
    transposed = {
        name: value.transpose(1, 2).contiguous() if ".experts." in name else value
        for name, value in weights.items()
    }
    save_file(transposed, file, metadata={"format": "pt"})


def _write_processor(path: Path, family: Family) -> None:
    raw = Tokenizer(models.BPE(vocab=ID, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", additional_special_tokens=list(SPECIAL)
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    newer = family.model is not Qwen25
    pictures = {"processor_class": "Qwen3VLProcessor" if newer else "Qwen2_5_VLProcessor"}
    pictures |= {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": family.patch}
    pictures |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "merge_size": 2}
    pictures |= {"temporal_patch_size": 2, "size": {"shortest_edge": 4096, "longest_edge": 262144}}
    (path / "preprocessor_config.json").write_text(json.dumps(pictures))


def picture(columns: int, rows: int, seed: int) -> Image.Image:
    """Return a picture of noise with ``columns * rows`` tokens in every family."""
    pixels = torch.randint(
        256, (rows, columns, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return Image.fromarray(pixels.numpy()).resize((columns * 32, rows * 32), Image.NEAREST)


def data_url(*images: Image.Image) -> str:
    """Return the data URL of one image, or of a video made of several images."""
    kind = "image/png" if len(images) == 1 else "video/jpeg"
    encoded = list[str]()
    for image in images:
        image.save(out := io.BytesIO(), "PNG" if kind == "image/png" else "JPEG")
        encoded.append(base64.b64encode(out.getvalue()).decode())
    return f"data:{kind};base64,{','.join(encoded)}"


@pytest.fixture(scope="module")
def without_videos():
    """Allow image and video processors to be created without torchvision."""
    with pytest.MonkeyPatch.context() as patch:
        no_videos.stand_in(patch)
        yield
