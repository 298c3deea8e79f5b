"""KeyDiff (Park et al. 2025, arXiv:2504.15364): keys that differ from the mean key.

docs/methods.md 4.8.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvcompress_kernels.key_cosines import key_cosines_of_rows
from vllm_kvcompress.methods.base import COMPARES_ALL_KEYS, Reads, ScoreUse
from vllm_kvcompress.methods.budget_spec import AttentionStats
from vllm_kvcompress.methods.preset import Preset


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDiff:
    """KeyDiff (Park et al. 2025, arXiv:2504.15364): keep distinctive keys.

    ``score[g, j] = -cos(k_j, a_g)`` with the KV head's anchor ``a_g = mean_j k_j / |k_j|`` over ALL
    tokens, including the window's. No query is read. The paper evicts during prefill, after each
    block of tokens, so its mean covers the keys still cached; here it covers the whole prompt.
    """

    reads: ClassVar[Reads] = Reads.KEYS
    needs_whole_prompt: ClassVar[str] = COMPARES_ALL_KEYS
    # Cosines have the same scale in all layers, so they can be compared across layers.
    unfit: ClassVar[Mapping[ScoreUse, str]] = {ScoreUse.AS_SHARES: "has scores below 0"}

    def score(self, stats: AttentionStats) -> torch.Tensor:
        """Return ``[Hkv, P]`` float32 in [-1, 1], up to rounding."""
        keys = stats.keys
        if keys is None:
            raise ValueError("keydiff needs the cached keys; got none")
        cosines = key_cosines_of_rows(keys.key_pages, keys.pages_by_layer, keys.tokens)
        return -cosines.flatten(0, 1)[:, : stats.past]


PRESET = Preset(allocator="uniform", scorer="keydiff", window=32)
