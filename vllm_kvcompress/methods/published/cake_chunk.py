"""CAKE-chunk, ours: CAKE's layer budgets, and runs of tokens that one query attends to.

docs/methods.md 4.10. Without its look-ahead, or if the look-ahead ends early, it keeps the chunks
(`chunkkv`) of the highest attention. After the look-ahead, `Runs` scores as CAKE does, but ranks
runs of tokens that one query attends to above all other tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import pad

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads, ScoreUse
from vllm_kvcompress.methods.budget_spec import AttentionStats
from vllm_kvcompress.methods.preset import Preset
from vllm_kvcompress.methods.published.cake import CakeIndicator

_UNFIT_REASON = "ranks entire runs of tokens above all other tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """CAKE's indicator (arXiv:2503.12491, eq. 9), with runs that one query attends to first; ours.

    Let ``t[g, j]`` be CAKE's indicator, ``m[g, j]`` the maximum over the query heads of g of
    `AttentionStats.maximum` at token j, and ``r[g, j]`` the sum of ``m[g, i]`` over the run of
    `size` tokens that j lies in. Runs are counted from the first token. Then ``score[g, j]`` is
    ``(1 + gamma) * r[g, j] / attention`` if r is at least `attention`, and otherwise ``t[g, j]``,
    which is below ``1 + gamma``.

    When output tokens score the prompt, CAKE's indicator uses the output's queries and `maximum`
    the prompt's last queries (`Reads.PROMPT_MAXIMUM`). This keeps the passages that the question
    attends to, as runs instead of single tokens, even if the first output tokens do not attend to
    them. If the prompt's last queries attend to nothing in particular, few runs reach `attention`.

    Args:
        size: tokens of a run.
        attention: minimum sum over a run's tokens, in (0, `size`].
        gamma, kernel: of CAKE's indicator.
    """

    reads: ClassVar[Reads] = CakeIndicator.reads | Reads.MAXIMUM | Reads.PROMPT_MAXIMUM
    needs_whole_prompt: ClassVar[str] = ""
    unfit: ClassVar[Mapping[ScoreUse, str]] = dict.fromkeys(ScoreUse, _UNFIT_REASON)

    size: int = 20
    attention: float = 0.6
    gamma: float = 200.0
    kernel: int = 5

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"runs.size must be a whole number >= 1, got {self.size}")
        if not (math.isfinite(self.attention) and 0 < self.attention <= self.size):
            raise ConfigError(
                f"runs.attention must be in (0, {self.size}], at most the tokens of a run, got"
                f" {self.attention}"
            )
        self._indicator()

    def _indicator(self) -> CakeIndicator:
        return CakeIndicator(gamma=self.gamma, kernel=self.kernel)

    def score(self, stats: AttentionStats) -> torch.Tensor:
        """Return ``[Hkv, P]`` float32 scores."""
        if stats.maximum is None:
            raise ValueError("runs needs the maximum of the window's attention; got none")
        token_scores, past = self._indicator().score(stats), stats.past
        maximum = stats.maximum[:, :past].reshape(stats.num_kv_heads, -1, past).amax(1)
        num_runs = -(-past // self.size)
        runs = pad(maximum, (0, num_runs * self.size - past))
        runs = runs.view(len(maximum), num_runs, self.size)
        # float64, because a GPU's order of summation depends on how many layers are scored together
        sums = runs.sum(-1, keepdim=True, dtype=torch.float64).float()
        run_attention = sums.expand_as(runs).flatten(1)[:, :past]
        run_scores = run_attention * ((1 + self.gamma) / self.attention)
        return torch.where(run_attention >= self.attention, run_scores, token_scores)


PRESET = Preset(
    allocator="cake",
    scorer="snapkv",
    window=16,
    selector="chunks",
    scorer_params=(("aggregate", "max"),),
    selector_params=(("size", 20),),
    lookahead=32,
    prompt_window=16,
    output_scorer="runs",
)
