"""StreamingLLM (Xiao et al. 2023, arXiv:2309.17453): the first and the latest tokens.

docs/methods.md 4.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads, ScoreUse
from vllm_kvcompress.methods.budget_spec import AttentionStats
from vllm_kvcompress.methods.preset import Preset


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingLLM:
    """StreamingLLM (Xiao et al. 2023, arXiv:2309.17453): keep the first and the latest tokens.

    Keys keep their original positions; the authors' code rotates keys by their place in the cache.

    Args:
        sinks: first tokens that are kept before any other (4 in the paper).
    """

    reads: ClassVar[Reads] = Reads.NOTHING
    needs_whole_prompt: ClassVar[str] = ""
    unfit: ClassVar[Mapping[ScoreUse, str]] = dict.fromkeys(
        (ScoreUse.ACROSS_LAYERS, ScoreUse.AS_WEIGHTS), "ranks by position"
    )

    sinks: int = 4

    def __post_init__(self) -> None:
        if not (isinstance(self.sinks, int) and self.sinks >= 0):
            raise ConfigError(
                f"streamingllm.sinks must be a whole number >= 0, got {self.sinks};"
                " the default is 4"
            )

    def score(self, stats: AttentionStats) -> torch.Tensor:
        """Return ``[Hkv, P]`` float32: +inf for sinks, then the position.

        Float32 holds every position below 2**24 exactly.
        """
        position = torch.arange(stats.past, dtype=torch.float32, device=stats.device)
        position[: self.sinks] = torch.inf
        return position.expand(stats.num_kv_heads, -1)


PRESET = Preset(allocator="uniform", scorer="streamingllm", window=0)
