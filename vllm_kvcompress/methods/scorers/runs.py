"""Rank as CAKE does, and before all others the runs of tokens that one query looks at."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import pad

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads, Use
from vllm_kvcompress.methods.budget_spec import AttentionStats
from vllm_kvcompress.methods.scorers.cake import CakeIndicator

_WHY = "puts whole runs of tokens before all others, whatever their attention is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """CAKE's indicator (arXiv:2503.12491, eq. 9), and whole runs that one query looks at; ours.

    Let ``t[g, j]`` be CAKE's indicator, ``m[g, j]`` the maximum over the query heads of g of
    `AttentionStats.maximum` at token j, and ``r[g, j]`` the sum of ``m[g, i]`` over the run of
    `size` tokens that j lies in, the first one from the first token on. Then ``score[g, j]`` is
    ``(1 + gamma) * r[g, j] / attention`` where r is at least `attention`, and ``t[g, j]``, which
    is below ``1 + gamma``, elsewhere.

    Once an answer judges its prompt, CAKE's indicator is of the answer's queries and `maximum` of
    the prompt's last ones (`Reads.APART`). So what the question asks for stays, runs of it and not
    single tokens, though the answer's first words say nothing of it. Where the prompt's last
    queries ask for nothing, there are few such runs.

    Args:
        size: tokens of a run.
        attention: what a run's tokens must get together, in (0, `size`].
        gamma, kernel: of CAKE's indicator.
    """

    reads: ClassVar[Reads] = Reads.WINDOW | Reads.VARIANCE | Reads.MAXIMUM | Reads.APART
    needs_whole_prompt: ClassVar[str] = ""
    unfit: ClassVar[Mapping[Use, str]] = dict.fromkeys(Use, _WHY)

    size: int = 20
    attention: float = 0.6
    gamma: float = 200.0
    kernel: int = 5

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"runs.size must be a whole number >= 1, got {self.size}")
        if not (math.isfinite(self.attention) and 0 < self.attention <= self.size):
            raise ConfigError(
                f"runs.attention must be in (0, {self.size}], the tokens of a run, got"
                f" {self.attention}"
            )
        self._indicator()

    def _indicator(self) -> CakeIndicator:
        return CakeIndicator(gamma=self.gamma, kernel=self.kernel)

    def score(self, columns: AttentionStats) -> torch.Tensor:
        """``[Hkv, P]`` float32."""
        if columns.maximum is None:
            raise ValueError("runs needs the maximum of the window's attention; got none")
        tokens, past = self._indicator().score(columns), columns.past
        most = columns.maximum[:, :past].reshape(columns.num_kv_heads, -1, past).amax(1)
        number = -(-past // self.size)
        runs = pad(most, (0, number * self.size - past)).view(len(most), number, self.size)
        paid = runs.sum(-1, keepdim=True).expand_as(runs).flatten(1)[:, :past]
        first = paid * ((1 + self.gamma) / self.attention)
        return torch.where(paid >= self.attention, first, tokens)
