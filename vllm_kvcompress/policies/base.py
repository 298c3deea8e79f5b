"""The roles a method can play, and how a name becomes a class."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Protocol, TypeVar

import torch

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.plan import LayerStats, Prompt, WindowColumns

T = TypeVar("T")


class Allocator(Protocol):
    """Gives each layer its share of the budget."""

    needs_stats: ClassVar[bool]

    def allocate(self, prompt: Prompt, stats: Sequence[LayerStats] | None) -> list[int]:
        """Past tokens to keep in each layer: N ints in [0, P] with sum ``N * min(base, P)``."""
        ...


class Scorer(Protocol):
    """Ranks the past tokens of one layer."""

    reads_window: ClassVar[bool]
    needs_variance: ClassVar[bool]

    def score(self, columns: WindowColumns) -> torch.Tensor:
        """``[Hkv, P]`` float32; higher is kept."""
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
