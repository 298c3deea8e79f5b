"""The roles a method can play, and how a name becomes a class."""

import dataclasses
import difflib
import enum
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.prompt import Columns, LayerStats, Prompt

T = TypeVar("T")

MOST_TOKENS = 4096
"""Largest parameter of a method that is a number of tokens or layers."""
SMALLEST, LARGEST = 1e-6, 1e6
"""Smallest and largest size of a method's other parameters: float32 holds their powers."""


class Reads(enum.Flag):
    """What a method reads of a prompt. What no part reads is not computed."""

    NOTHING = 0
    WINDOW = enum.auto()
    """Attention of the observation window."""
    VARIANCE = enum.auto()
    """Its variance over the window's rows; to be asked for together with WINDOW."""
    MAXIMUM = enum.auto()
    """Its maximum over the window's rows; to be asked for together with WINDOW."""
    POOLED = enum.auto()
    """That maximum of pooled rows; to be asked for together with MAXIMUM."""
    APART = enum.auto()
    """That maximum of the prompt's last queries alone, and all else of the answer's alone, once
    an answer judges its prompt and the window reaches behind it (scorers only)."""
    COLUMN_SUMS = enum.auto()
    """Column sums of the whole causal attention: every token of the prompt must be computed."""
    COLUMN_MEANS = enum.auto()
    """Their means over the queries that see a token, beside COLUMN_SUMS (allocators only)."""
    VALUES = enum.auto()
    """The cached values."""
    KEYS = enum.auto()
    """The cached keys."""
    SCORES = enum.auto()
    """The scorer's scores of every layer (allocators only)."""


BY_KEYS = "it compares the cached keys, which is not done once tokens are dropped"
BY_SCORES = "it shares the budget by the scores of the whole prompt"
BY_QUERIES = "it divides by the queries that saw a token, which are not counted for an answer"
"""Why a part of a method needs all tokens of a prompt (`needs_whole_prompt`)."""


class Use(enum.Enum):
    """What a part does with scores, and what the scores of some scorers do not bear.

    Such a part names it in `uses`; a scorer whose scores do not bear it says why in `unfit`.
    """

    ACROSS_LAYERS = (
        "compares scores between layers",
        "choose a scorer that reads attention, or allocator 'uniform'",
    )
    AS_SHARES = (
        "divides scores by their sum",
        "choose a scorer that reads attention, or allocator 'dynamickv'",
    )
    AS_WEIGHTS = ("ranks by attention", "choose another scorer, or selector 'topk'")

    @property
    def verb(self) -> str:
        """What the part does, behind its name."""
        return self.value[0]

    @property
    def cure(self) -> str:
        """What to do where the scorer's scores do not bear it."""
        return self.value[1]


class Allocator(Protocol):
    """Gives each layer its share of the budget."""

    exact_ratio: ClassVar[bool]
    """Whether a ratio is rounded once over all layers, instead of down in each."""
    even: ClassVar[bool]
    """Whether every layer gets the same share."""

    @property
    def reads(self) -> Reads: ...

    @property
    def needs_whole_prompt(self) -> str:
        """Why all tokens of a prompt must be there, for a refusal; empty where they need not."""
        ...

    def allocate(self, prompt: Prompt, stats: LayerStats | None) -> torch.Tensor:
        """Past tokens to keep in each layer: ``[N]`` int64 in [0, P] with sum `prompt.past_total`.

        On the device of the statistics, which nothing waits for; on the CPU if it reads none.
        """
        ...


class Scorer(Protocol):
    """Ranks the past tokens of one layer."""

    @property
    def reads(self) -> Reads: ...

    @property
    def needs_whole_prompt(self) -> str:
        """Why all tokens of a prompt must be there, for a refusal; empty where they need not.

        Where it is empty, several layers come at once and differ in length (`Columns`).
        """
        ...

    def score(self, columns: Columns) -> torch.Tensor:
        """``[Hkv, P]`` float32; higher is kept."""
        ...


class Selector(Protocol):
    """Chooses positions by the layers' scores."""

    def source(self, layer: int) -> int:
        """The layer whose scores `layer` uses: itself, or an earlier one."""
        ...

    def protect(self, scores: torch.Tensor, keep: torch.Tensor, after: int) -> torch.Tensor:
        """`scores` ``[L, Hkv, n]`` with +inf where a position is kept whatever its score."""
        ...

    def select(
        self,
        scores: torch.Tensor,
        past: int | torch.Tensor,
        keep: torch.Tensor,
        after: int,
        most: int,
    ) -> torch.Tensor:
        """``[L, Hkv, most]`` int32 ascending positions, -1 behind the last one of each row.

        Args:
            scores: ``[L, Hkv, W]`` float32, contiguous; fastest where W is a multiple of 16.
            past: scores of each row that count, n, of all layers or ``[L]`` of each; what lies
                behind them does not matter.
            keep: ``[L]`` integers on the device of the scores, clamped to 0 .. min(n, most).
            after: tokens that are kept in any case after these n.
            most: width of the result, known to the host.
        """
        ...


def closest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing when no known name is near."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def choose(role: str, table: Mapping[str, T], name: str) -> T:
    """`table[name]`, or a ConfigError that lists the names and the nearest one."""
    if name in table:
        return table[name]
    hint = closest(name, table) or ";"
    raise ConfigError(f"{role}={name!r} is unknown{hint} choose from {sorted(table)}")


def _out_of_range(value: Any, wants: type, largest: int) -> str | None:
    """Return the range that a number is outside of; None inside it, and for all else.

    A class checks itself that a number is finite and not below its own least value.
    """
    if wants is float:
        size = abs(value)
        if size == 0 or size == math.inf or size != size or SMALLEST <= size <= LARGEST:
            return None
        return f"0, or between {SMALLEST:g} and {LARGEST:g} in size"
    if wants is tuple:
        whole = all(type(each) is int and abs(each) <= largest for each in value)
        return None if whole else f"whole numbers of at most {largest} in size"
    if wants is int and not isinstance(value, bool) and abs(value) > largest:
        return f"at most {largest}"
    return None


def build(
    role: str,
    table: Mapping[str, type[Any]],
    name: str,
    defaults: Mapping[str, Any],
    params: Iterable[tuple[str, Any]],
) -> Any:
    """The class that `table` has under `name`, made with its parameters.

    Args:
        role: allocator, scorer or selector.
        defaults: what stands in for the class's own defaults.
        params: what was asked for; wins over both.

    Raises:
        ConfigError: the name or a parameter is unknown, a value is of another type or too large
            or small (`largest` of the class has other limits of whole numbers), the class
            has a parameter without a default, or one was asked for that has no effect beside the
            others (`unused` of the class, where it has that: a name and the reason each).
    """
    policy = choose(role, table, name)
    known = {f.name: f for f in dataclasses.fields(policy)}
    for field in known.values():
        if not isinstance(field.default, bool | int | float | str | tuple):
            raise ConfigError(
                f"{role} {name!r}: parameter {field.name!r} must have a default that is a bool,"
                " int, float, str or tuple: settings are checked against its type; give it one"
            )
    for key, value in params:
        if key not in known:
            raise ConfigError(
                f"{role} {name!r} has no parameter {key!r}{closest(key, known)}"
                f" (known: {sorted(known)})"
            )
        wants = type(known[key].default)
        fits = isinstance(value, wants) or (wants is float and isinstance(value, int))
        if isinstance(value, bool) is not (wants is bool) or not fits:
            raise ConfigError(
                f"{role} {name!r}: {key} must be a {wants.__name__} like {known[key].default!r},"
                f" got {value!r}"
            )
        largest = getattr(policy, "largest", {}).get(key, MOST_TOKENS)
        if (rule := _out_of_range(value, wants, largest)) is not None:
            raise ConfigError(
                f"{role} {name!r}: {key} must be {rule}, got {value!r};"
                f" {known[key].default!r} is usual"
            )
    given = dict(params)
    made = policy(**{**defaults, **given})
    for key, reason in getattr(made, "unused", {}).items():
        if key in given:
            raise ConfigError(f"{role} {name!r}: {key}={given[key]!r} {reason}")
    return made
