"""The roles a method can play, and how a name becomes a class."""

import difflib
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Protocol, TypeVar

import torch

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.plan import Columns, LayerStats, Prompt

T = TypeVar("T")


class Reads(enum.Flag):
    """What of a prompt a method must be shown; everything else is not computed."""

    NOTHING = 0
    WINDOW = enum.auto()
    """Attention of the observation window."""
    VARIANCE = enum.auto()
    """Its variance over the window's rows; comes with WINDOW."""
    COLUMN_SUMS = enum.auto()
    """Column sums of the whole causal attention: every token of the prompt must be computed."""
    VALUES = enum.auto()
    """The cached values."""
    SCORES = enum.auto()
    """The scorer's scores of every layer (allocators only)."""


class Allocator(Protocol):
    """Gives each layer its share of the budget."""

    reads: ClassVar[Reads]
    exact_ratio: ClassVar[bool]
    """Whether a ratio is rounded once over all layers, instead of down in each."""

    def allocate(self, prompt: Prompt, stats: Sequence[LayerStats] | None) -> list[int]:
        """Past tokens to keep in each layer: N ints in [0, P] with sum `prompt.past_total`."""
        ...


class Scorer(Protocol):
    """Ranks the past tokens of one layer."""

    @property
    def reads(self) -> Reads: ...

    def score(self, columns: Columns) -> torch.Tensor:
        """``[Hkv, P]`` float32; higher is kept."""
        ...


class Selector(Protocol):
    """Turns one layer's scores into positions."""

    def source(self, layer: int) -> int:
        """The layer whose scores `layer` uses: itself, or an earlier one."""
        ...

    def protect(self, scores: torch.Tensor, keep: int, after: int) -> torch.Tensor:
        """`scores` with +inf where the selector keeps a position whatever its score."""
        ...

    def select(self, scores: torch.Tensor, keep: int, after: int) -> torch.Tensor:
        """``[Hkv, keep]`` int64 ascending positions.

        Args:
            scores: ``[Hkv, n]`` float32.
            keep: 0 to n.
            after: tokens that are kept in any case after these n.
        """
        ...


def closest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing when no known name is near."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def choose(role: str, table: Mapping[str, T], name: str) -> T:
    """`table[name]`, or a ConfigError that lists the names and the nearest one."""
    if name in table:
        return table[name]
    hint = closest(name, table) or ";"
    raise ConfigError(f"{role}={name!r} is unknown{hint} choose from {sorted(table)}")
