"""Rank by how much a token's removal would change the attention output."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvcompress_kernels.value_scores import value_scores, value_scores_of_rows
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import AttentionStats
from vllm_kvcompress.methods.scorers import aggregates, pooling
from vllm_kvcompress.methods.scorers.accumulated import column_means

BASES = {"snapkv": Reads.WINDOW, "tova": Reads.WINDOW, "h2o": Reads.COLUMN_SUMS}
REDUCTIONS = ("mean", "l2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caote:
    """CAOTE (Goel et al. 2025, arXiv:2504.14051, eq. 9 to 15), a scorer over another's weights.

    ``c_j = h_j / (1 - h_j) * || o - v_j ||`` per query head, with weights h >= 0 of sum 1 over ALL
    tokens and ``o = sum_j h_j v_j``; with the true last row of attention it is exactly the change
    of the head's output when token j goes. Weights by `base`: TOVA's last row; H2O's column sums
    over their sum; SnapKV's window mean over every column, the past pooled, over its sum (the
    paper does not say how). With another `aggregate` than the mean the past's columns are
    aggregated per query head, pooling included, the window's own take the maximum over its rows,
    and both are divided by their sum.

    Args:
        base: "snapkv", "tova" or "h2o".
        reduce: over the query heads of a KV head: "mean", or "l2", the exact joint error.
        pooling: of SnapKV's past, "max" or "avg".
        kernel: pooling width in tokens, odd.
        aggregate: of SnapKV's rows, "mean", "max" or "defensive" (`aggregates`).
        per_query: of H2O's columns, the means and not the sums (`column_means`).
    """

    fast: ClassVar[bool] = False

    base: str = "snapkv"
    reduce: str = "mean"
    pooling: str = "max"
    kernel: int = 7
    aggregate: str = "mean"
    per_query: bool = False

    def __post_init__(self) -> None:
        if self.base not in BASES:
            raise ConfigError(f"caote.base must be one of {sorted(BASES)}, got {self.base!r}")
        if self.reduce not in REDUCTIONS:
            raise ConfigError(
                f"caote.reduce must be one of {list(REDUCTIONS)}, got {self.reduce!r}"
            )
        pooling.check("caote", self.pooling, self.kernel)
        aggregates.check("caote", self.aggregate)
        if self.aggregate != "mean" and self.base != "snapkv":
            raise ConfigError(
                f"caote.aggregate={self.aggregate!r} is over the rows of SnapKV's window, and base"
                f" {self.base!r} has none; set base to snapkv, or remove aggregate"
            )
        if self.per_query and self.base != "h2o":
            raise ConfigError(
                f"caote.per_query is for base 'h2o', and the base is {self.base!r}; set base to"
                " 'h2o', or remove per_query"
            )

    @property
    def reads(self) -> Reads:
        reads = BASES[self.base] | Reads.VALUES
        return reads | aggregates.AGGREGATES[self.aggregate] if self.base == "snapkv" else reads

    @property
    def needs_whole_prompt(self) -> str:
        if self.base == "h2o":
            # of what is packed more than once the mean over a KV head's query heads is kept
            return (
                "it weighs the sums of every query head, of which the mean over a KV head's is kept"
            )
        return aggregates.needs_whole_prompt(self.aggregate) if self.base == "snapkv" else ""

    @property
    def unused(self) -> Mapping[str, str]:
        return aggregates.unused(self.aggregate)

    def weights(self, columns: AttentionStats) -> torch.Tensor:
        """``[Hq, S]`` float32 weights of the base scorer, each row of sum 1.

        Every column in its slot, also where layers differ in length.
        """
        if self.base == "tova" and columns.last is not None:
            # what a sink takes of the row is no token's
            return columns.last / columns.last.sum(-1, keepdim=True)
        if self.base == "h2o" and columns.sums is not None:
            seen = column_means(columns.sums) if self.per_query else columns.sums
            return seen / seen.sum(-1, keepdim=True)
        if self.base == "snapkv" and columns.total is not None and columns.recent is not None:
            lines, kind, kernel = len(columns.total), self.pooling, self.kernel
            past = aggregates.past_scores(columns, self.aggregate, lines, kind, kernel)
            recent = columns.recent
            if columns.maximum is not None and self.aggregate != "mean":
                recent = columns.maximum[:, columns.past :]
            every = torch.cat([past, recent], dim=-1)
            if columns.lengths is not None:
                every = _in_slots(every, columns, columns.lengths)
            return every.div_(every.sum(-1, keepdim=True))
        raise ValueError(f"caote over {self.base} needs the attention that {self.base} reads")

    def score(self, columns: AttentionStats) -> torch.Tensor:
        """``[Hkv, P]`` float32."""
        if columns.values is None:
            raise ValueError("caote needs the cached values; got none")
        weights = self.weights(columns)
        where = columns.values.value_pages, columns.values.pages, columns.values.tokens
        if columns.lengths is None:
            scores = value_scores(weights, *where, fast=self.fast, reduce=self.reduce)
            scores *= columns.values.scale
        else:
            scores = value_scores_of_rows(
                weights.view(columns.layers, -1, weights.shape[1]),
                *where,
                lengths=columns.lengths,
                fast=self.fast,
                reduce=self.reduce,
            ).flatten(0, 1)
        return scores[:, : columns.past]


def _in_slots(every: torch.Tensor, columns: AttentionStats, lengths: torch.Tensor) -> torch.Tensor:
    """``[Hq, S]`` of a past and a window behind it: the window moved to where each layer ends.

    What pooling spread behind a shorter layer's past falls away.
    """
    slot = torch.arange(every.shape[1], device=every.device)
    inside = slot - (lengths - columns.rows)[:, None]  # [layers, S], in the window from 0 on
    column = torch.where(inside < 0, slot, columns.past + inside).clamp(max=len(slot) - 1)
    own = every.view(columns.layers, -1, len(slot))
    placed = own.gather(2, column[:, None].expand_as(own))
    return placed.masked_fill_((inside >= columns.rows)[:, None], 0).flatten(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FastCaote(Caote):
    """FastCAOTE: `Caote` with ``o = mean_j v_j`` over all tokens in place of the output."""

    fast: ClassVar[bool] = True
