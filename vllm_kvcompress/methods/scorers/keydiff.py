"""Rank by how little a key looks like the others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvcompress_kernels.key_cosines import key_cosines
from vllm_kvcompress.methods.base import BY_KEYS, Reads, Use
from vllm_kvcompress.methods.budget_spec import AttentionStats


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDiff:
    """KeyDiff (Park et al. 2025, arXiv:2504.15364): distinctive keys are kept.

    ``score[g, j] = -cos(k_j, a_g)`` with the KV head's anchor ``a_g = mean_j k_j / |k_j|`` over ALL
    tokens, the window's too. No query is read. The paper evicts while it prefills, after each
    block of tokens, and so takes the mean of what is still cached; here it is the whole prompt's.
    """

    reads: ClassVar[Reads] = Reads.KEYS
    needs_whole_prompt: ClassVar[str] = BY_KEYS
    # Cosines are of one scale in all layers, so that layers may be compared by them as they are.
    unfit: ClassVar[Mapping[Use, str]] = {Use.AS_SHARES: "has scores below 0, which have no shares"}

    def score(self, columns: AttentionStats) -> torch.Tensor:
        """``[Hkv, P]`` float32 in [-1, 1], up to rounding."""
        keys = columns.keys
        if keys is None:
            raise ValueError("keydiff needs the cached keys; got none")
        return -key_cosines(keys.key_pages, keys.pages, keys.tokens)[:, : columns.past]
