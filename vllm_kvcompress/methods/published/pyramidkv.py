"""PyramidKV (Cai et al. 2024, arXiv:2406.02069): layer budgets that decrease linearly.

docs/methods.md 2.2. Tokens are scored as in `snapkv`.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvcompress_kernels.apportion import apportion
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import BudgetSpec, LayerStats
from vllm_kvcompress.methods.preset import Preset


@dataclass(frozen=True, slots=True, kw_only=True)
class Pyramid:
    """PyramidKV (Cai et al. 2024, arXiv:2406.02069): budgets decrease linearly over the N layers.

    ``x_l = hi - l * (hi - lo) / (N - 1)``, ``lo = base / beta``, ``hi = 2 * base - lo``; with P
    past tokens, if ``hi > P``: ``hi = P``, ``lo = 2 * base - P``. The authors' code floors `lo` and
    the step, and so exceeds the budget: by 375 tokens at N=30, base=120. Here x is rounded once and
    the sum is exact.

    Args:
        beta: steepness, finite and > 1 (20 in the authors' code). A larger beta gives the last
            layers fewer tokens.
    """

    reads: ClassVar[Reads] = Reads.NOTHING
    exact_ratio: ClassVar[bool] = False
    equal_shares: ClassVar[bool] = False
    needs_whole_prompt: ClassVar[str] = ""

    beta: float = 20.0

    def __post_init__(self) -> None:
        if not (self.beta > 1 and math.isfinite(self.beta)):
            raise ConfigError(
                f"pyramid.beta must be > 1 and finite, got {self.beta}; the default is 20;"
                " for equal layers use allocator 'uniform'"
            )

    def allocate(self, spec: BudgetSpec, stats: LayerStats | None = None) -> torch.Tensor:
        """Return ``[N]`` int64 on the CPU, past tokens to keep.

        Each is in [0, P], and the sum is ``N * min(base, P)``.
        """
        n, past, base = spec.num_layers, spec.past, min(spec.base, spec.past)
        hi = min(2 * base - base / self.beta, past) if n > 1 else base
        step = 2 * (hi - base) / max(n - 1, 1)
        line = hi - step * torch.arange(n, dtype=torch.float64)
        return apportion(line, n * base, past)


PRESET = Preset(allocator="pyramid", scorer="snapkv", window=32)
