"""CAOTE and FastCAOTE (Goel et al. 2025, arXiv:2504.14051): the change of the attention output.

docs/methods.md 4.6. Their weights are those of `snapkv`, `tova` or `h2o`, computed per query head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvcompress_kernels.value_scores import value_scores_of_rows
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import AttentionStats
from vllm_kvcompress.methods.parts import aggregates, pooling
from vllm_kvcompress.methods.preset import Preset

BASES = {"snapkv": Reads.WINDOW, "tova": Reads.WINDOW | Reads.LAST, "h2o": Reads.COLUMN_SUMS}
REDUCTIONS = ("mean", "l2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caote:
    """CAOTE (Goel et al. 2025, arXiv:2504.14051, eq. 9 to 15), on top of another scorer's weights.

    ``c_j = h_j / (1 - h_j) * || o - v_j ||`` per query head, with weights h >= 0 of sum 1 over ALL
    tokens and ``o = sum_j h_j v_j``. With the true attention of the last query, it is exactly the
    change of the head's output when token j is dropped.

    Weights by `base`: TOVA's last query; H2O's column sums divided by their sum; SnapKV's window
    mean over every column, with the past pooled, divided by its sum (the paper does not say how).
    With an `aggregate` other than the mean, the past is aggregated per query head, pooling
    included, the window's columns take the maximum over its queries, and both are divided by their
    sum.

    Args:
        base: "snapkv", "tova" or "h2o".
        reduce: over the query heads of a KV head: "mean", or "l2", the exact joint error.
        pooling: of SnapKV's past, "max" or "avg".
        kernel: pooling width in tokens, odd.
        aggregate: over SnapKV's window queries, "mean", "max" or "defensive" (`aggregates`).
    """

    fast: ClassVar[bool] = False

    base: str = "snapkv"
    reduce: str = "mean"
    pooling: str = "max"
    kernel: int = 7
    aggregate: str = "mean"

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
                f"caote.aggregate={self.aggregate!r} needs SnapKV's window, which base"
                f" {self.base!r} does not have; set base to snapkv, or remove aggregate"
            )

    @property
    def reads(self) -> Reads:
        reads = BASES[self.base] | Reads.VALUES
        return reads | aggregates.AGGREGATES[self.aggregate] if self.base == "snapkv" else reads

    @property
    def needs_whole_prompt(self) -> str:
        if self.base == "h2o":
            # Repeated compression keeps only the mean over a KV head's query heads.
            return "it needs column sums per query head, and only their mean per KV head is kept"
        return aggregates.needs_whole_prompt(self.aggregate) if self.base == "snapkv" else ""

    @property
    def unused(self) -> Mapping[str, str]:
        return aggregates.unused(self.aggregate)

    def weights(self, stats: AttentionStats) -> torch.Tensor:
        """Return ``[Hq, S]`` float32 weights of the base scorer, with sum 1 for each query head.

        Every column is at its slot, even if layers differ in length.
        """
        if self.base == "tova" and stats.last is not None:
            # The attention sink's share belongs to no token.
            return stats.last / _row_sums(stats.last)
        if self.base == "h2o" and stats.sums is not None:
            return stats.sums / _row_sums(stats.sums)
        if self.base == "snapkv" and stats.total is not None and stats.recent is not None:
            num_heads, kind, kernel = len(stats.total), self.pooling, self.kernel
            recent = stats.recent
            if stats.maximum is not None and self.aggregate != "mean":
                recent = stats.maximum[:, stats.past :]
            past = aggregates.past_scores(stats, self.aggregate, num_heads, kind, kernel)
            columns = torch.cat([past, recent], dim=-1)
            del past  # frees its memory before the sums are computed in float64
            if stats.lengths is not None:
                columns = _in_slots(columns, stats, stats.lengths)
            return columns.div_(_row_sums(columns))
        raise ValueError(f"caote over {self.base} needs the attention that {self.base} reads")

    def score(self, stats: AttentionStats) -> torch.Tensor:
        """Return ``[Hkv, P]`` float32 scores."""
        values = stats.values
        if values is None:
            raise ValueError("caote needs the cached values; got none")
        weights = self.weights(stats)
        scores = value_scores_of_rows(
            weights.view(stats.num_layers, -1, weights.shape[1]),
            values.value_pages,
            values.pages_by_layer,
            values.tokens,
            lengths=stats.lengths,
            fast=self.fast,
            reduce=self.reduce,
        )
        scale = values.scale
        scores *= scale[:, None, None] if isinstance(scale, torch.Tensor) else scale
        return scores.flatten(0, 1)[:, : stats.past]


def _row_sums(attention: torch.Tensor) -> torch.Tensor:
    """Return ``[Hq, 1]`` float32, the sum of each row.

    The sum is computed in float64, because a GPU's order of summation depends on the number of
    rows, and a layer's scores must not depend on the layers that are scored with it.
    """
    return attention.sum(-1, keepdim=True, dtype=torch.float64).float()


def _in_slots(columns: torch.Tensor, stats: AttentionStats, lengths: torch.Tensor) -> torch.Tensor:
    """Return ``[Hq, S]`` with the window's columns moved to where each layer's tokens end.

    Args:
        columns: ``[Hq, S]``, the past's columns followed by the window's. Values that pooling
            spread after a shorter layer's past are dropped.
    """
    slot = torch.arange(columns.shape[1], device=columns.device)
    # [num_layers, S]: index within the window, negative in the past
    window_index = slot - (lengths - stats.num_queries)[:, None]
    column = torch.where(window_index < 0, slot, stats.past + window_index).clamp(max=len(slot) - 1)
    per_layer = columns.view(stats.num_layers, -1, len(slot))
    placed = per_layer.gather(2, column[:, None].expand_as(per_layer))
    return placed.masked_fill_((window_index >= stats.num_queries)[:, None], 0).flatten(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FastCaote(Caote):
    """FastCAOTE: `Caote` with ``o = mean_j v_j`` over all tokens instead of the output."""

    fast: ClassVar[bool] = True


PRESET = Preset(allocator="uniform", scorer="caote", window=32)
FAST_PRESET = Preset(allocator="uniform", scorer="fastcaote", window=32)
