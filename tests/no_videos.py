"""Replace the video processor, which needs torchvision; the CPU build of torch has none.

Images use the real image processor.
"""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from transformers import BatchFeature
from transformers import processing_utils as processing

from site_patches import patch_on_import

# For a server's processes: apply the patch once the module that it replaces is imported.
SITE = patch_on_import(
    processing.__name__,
    f"sys.path.append({str(Path(__file__).parent)!r}); import no_videos;"
    " no_videos.stand_in(no_videos.pytest.MonkeyPatch())",
)


class NoVideos(dict[str, Any]):
    """Replace Qwen3-VL's video processor: the token counts are right, but all pixels are black."""

    valid_kwargs = processing.VideosKwargs
    size: ClassVar = {"shortest_edge": 4096, "longest_edge": 262144}
    patch_size, merge_size, temporal_patch_size = 16, 2, 2
    fps, min_frames, max_frames = 2, 4, 8

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> "NoVideos":
        return cls()

    def __call__(self, videos: Any, *, video_metadata: Any, **_: Any) -> BatchFeature:
        """Process one video; its frames have one shape and are not resized."""
        ((frames,),), ((metadata,),) = videos, video_metadata
        sides = [side // self.patch_size for side in frames.shape[1:3]]
        grid = [len(frames) // self.temporal_patch_size, *sides]
        values = 3 * self.temporal_patch_size * self.patch_size**2
        indices = list(metadata["frames_indices"])
        metadata_out = SimpleNamespace(fps=metadata["fps"], frames_indices=indices)
        pixels = torch.zeros(int(torch.tensor(grid).prod()), values)
        result = {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([grid])}
        return BatchFeature(result | {"video_metadata": [metadata_out]})


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Install `NoVideos` and stubs of torchvision, so that multimodal processors can be created."""
    base = processing.MODALITY_TO_BASE_CLASS_MAPPING["video_processor"]
    patch.setattr(processing.transformers_module, base, NoVideos, raising=False)
    # vLLM's Qwen3-VL imports, for their names, processors that import it
    for name in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional"):
        module = ModuleType(f"torchvision{name}")
        module.__spec__ = ModuleSpec(module.__name__, None)
        patch.setitem(sys.modules, module.__name__, module)
    sys.modules["torchvision.transforms.v2"].functional = module
    names = processing._LazyAutoProcessorMapping._MAPPING_NAMES
    patch.setitem(names, "video_processor", (__name__, NoVideos.__name__))
