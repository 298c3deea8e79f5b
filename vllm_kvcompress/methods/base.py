"""Interfaces of a method's parts (allocator, scorer, selector), and how a part is built by name."""

import dataclasses
import difflib
import enum
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from vllm_kvcompress.errors import ConfigError, shorten
from vllm_kvcompress.methods.budget_spec import AttentionStats, BudgetSpec, LayerStats

T = TypeVar("T")

MAX_INT_PARAM = 4096
"""Largest absolute value of a method's whole-number parameters (tokens or layers)."""
MIN_FLOAT_PARAM, MAX_FLOAT_PARAM = 1e-6, 1e6
"""Smallest and largest absolute value of a float parameter. Float32 holds their powers."""
_MAX_COMPARED = 64
"""Characters of an unknown name that are compared with known ones."""


class Reads(enum.Flag):
    """Statistics that a method reads. Statistics that no part reads are not computed."""

    NOTHING = 0
    WINDOW = enum.auto()
    """Attention of the observation window."""
    VARIANCE = enum.auto()
    """Variance of the attention over the window's queries. Only together with WINDOW."""
    LAST = enum.auto()
    """Attention of the window's last query alone. Only together with WINDOW."""
    MAXIMUM = enum.auto()
    """Maximum of the attention over the window's queries. Only together with WINDOW."""
    POOLED = enum.auto()
    """Maximum of the pooled attention of each query. Only together with MAXIMUM."""
    PROMPT_MAXIMUM = enum.auto()
    """The maximum over the prompt's queries alone, when output tokens score the prompt.

    All other statistics then cover the output's queries. This matters only if the window reaches
    back into the prompt. Scorers only.
    """
    KV_HEADS = enum.auto()
    """The scorer needs one line per KV head of the window's statistics, not one per query head.

    Each line is the mean over the KV head's query heads, and in MAXIMUM their maximum. Only
    together with WINDOW. Scorers only.
    """
    COLUMN_SUMS = enum.auto()
    """Column sums of the whole causal attention. Every prompt token must be computed."""
    COLUMN_MEANS = enum.auto()
    """Column means over the queries that see a token. Only with COLUMN_SUMS, allocators only."""
    VALUES = enum.auto()
    """The cached values."""
    KEYS = enum.auto()
    """The cached keys."""
    SCORES = enum.auto()
    """The scorer's scores of every layer (allocators only)."""


COMPARES_ALL_KEYS = "it compares the cached keys, which is not supported after tokens were dropped"
COMPARES_ALL_SCORES = "it divides the budget by the scores of the whole prompt"
COUNTS_QUERIES = (
    "it divides by the number of queries that saw a token, which is not counted during output"
)
"""Reasons why a part needs all tokens of a prompt (`needs_whole_prompt`)."""


class ScoreUse(enum.Enum):
    """A use of scores, by an allocator or selector, that not every scorer's scores allow.

    An allocator or selector lists its uses in `uses`. A scorer whose scores do not allow a use
    gives the reason in `unfit`.
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
    def action(self) -> str:
        """Return what the part does, as a phrase that follows its name in an error message."""
        return self.value[0]

    @property
    def fix(self) -> str:
        """Return how to fix a combination in which the scorer's scores do not allow this use."""
        return self.value[1]


class Allocator(Protocol):
    """Divides the budget among the layers."""

    exact_ratio: ClassVar[bool]
    """Whether a ratio is rounded once over all layers instead of rounded down in each layer."""
    equal_shares: ClassVar[bool]
    """Whether every layer gets the same share."""

    @property
    def reads(self) -> Reads: ...

    @property
    def needs_whole_prompt(self) -> str:
        """Return why the part needs all tokens of a prompt; empty if it does not."""
        ...

    def __hash__(self) -> int:
        """Hash the parameters: budgets that depend on lengths alone are cached by allocator."""
        ...

    def allocate(self, spec: BudgetSpec, stats: LayerStats | None) -> torch.Tensor:
        """Return the number of past tokens to keep in each layer.

        Returns:
            ``[N]`` int64 in [0, P] with sum `spec.past_total`, on the device of the statistics
            (without waiting for it), or on the CPU if the allocator reads none.
        """
        ...


class Scorer(Protocol):
    """Scores the past tokens of a layer."""

    @property
    def reads(self) -> Reads: ...

    @property
    def needs_whole_prompt(self) -> str:
        """Return why the part needs all tokens of a prompt; empty if it does not.

        If it is empty, `score` may get layers of different lengths (`AttentionStats`).
        """
        ...

    def score(self, stats: AttentionStats) -> torch.Tensor:
        """Return ``[Hkv, P]`` float32 scores. Tokens with higher scores are kept.

        Several layers come as one layer with the heads of all of them (`AttentionStats`).
        """
        ...


class Selector(Protocol):
    """Chooses the kept positions from the layers' scores."""

    def source(self, layer: int) -> int:
        """Return the layer whose scores `layer` uses: itself or an earlier layer."""
        ...

    def protect(self, scores: torch.Tensor, keep: torch.Tensor, kept_after: int) -> torch.Tensor:
        """Return `scores` ``[L, Hkv, n]`` with +inf at positions kept whatever their score."""
        ...

    def select(
        self,
        scores: torch.Tensor,
        past: int | torch.Tensor,
        keep: torch.Tensor,
        kept_after: int,
        width: int,
    ) -> torch.Tensor:
        """Return ``[L, Hkv, width]`` int32 kept positions, ascending, with -1 after the last one.

        Args:
            scores: ``[L, Hkv, W]`` float32, contiguous. Fastest if W is a multiple of 16.
            past: number n of valid scores per row, for all layers or ``[L]`` for each. Scores after
                them are ignored.
            keep: ``[L]`` integers on the device of the scores, clamped to 0 .. min(n, width).
            kept_after: tokens after these n that are always kept.
            width: size of the result's last dimension, known on the host.
        """
        ...


def closest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known name, or "" if none is near."""
    matches = difflib.get_close_matches(name[:_MAX_COMPARED], list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def choose(role: str, table: Mapping[str, T], name: str) -> T:
    """Return `table[name]`.

    Raises:
        ConfigError: the name is unknown. The message lists all names and the nearest one.
    """
    if name in table:
        return table[name]
    hint = closest(name, table) or ";"
    raise ConfigError(f"{role}={shorten(name)} is unknown{hint} choose from {sorted(table)}")


def _range_error(value: Any, expected_type: type, max_value: int) -> str | None:
    """Return the allowed range if `value` is outside of it, else None.

    The result is also None for a value that is not a number. Each class checks on its own that its
    numbers are finite and not below their minimum.
    """
    if expected_type is float:
        size = abs(value)
        # NaN is left to the class; math.isnan fails for an int that no float holds
        special = size == 0 or size == math.inf or size != size
        if special or MIN_FLOAT_PARAM <= size <= MAX_FLOAT_PARAM:
            return None
        return f"0, or between {MIN_FLOAT_PARAM:g} and {MAX_FLOAT_PARAM:g} in absolute value"
    if expected_type is tuple:
        in_range = all(type(item) is int and abs(item) <= max_value for item in value)
        return None if in_range else f"whole numbers of at most {max_value} in absolute value"
    if expected_type is int and not isinstance(value, bool) and abs(value) > max_value:
        return f"at most {max_value}"
    return None


def build(
    role: str,
    table: Mapping[str, type[Any]],
    name: str,
    defaults: Mapping[str, Any],
    params: Iterable[tuple[str, Any]],
) -> Any:
    """Return an instance of the class `table[name]` with the given parameters.

    Args:
        role: allocator, scorer or selector.
        defaults: values that replace the class's own defaults.
        params: parameters that the user set. They override both kinds of defaults.

    Raises:
        ConfigError: the name or a parameter is unknown; a value has the wrong type or is too large
            or too small (a class can set other limits for whole numbers in `max_values`); the class
            has a parameter without a default; or a parameter has no effect with the other
            parameters (`unused` of the class, a mapping from name to reason).
    """
    part_type = choose(role, table, name)
    known = {f.name: f for f in dataclasses.fields(part_type)}
    for field in known.values():
        if not isinstance(field.default, bool | int | float | str | tuple):
            raise ConfigError(
                f"{role} {name!r}: parameter {field.name!r} must have a default that is a bool,"
                " int, float, str or tuple, because its type checks the settings; give it one"
            )
    for key, value in params:
        if key not in known:
            raise ConfigError(
                f"{role} {name!r} has no parameter {key!r}{closest(key, known)}"
                f" (known: {sorted(known)})"
            )
        expected_type = type(known[key].default)
        fits = isinstance(value, expected_type) or (
            expected_type is float and isinstance(value, int)
        )
        if isinstance(value, bool) is not (expected_type is bool) or not fits:
            raise ConfigError(
                f"{role} {name!r}: {key} must be a {expected_type.__name__} like"
                f" {known[key].default!r}, got {value!r}"
            )
        max_value = getattr(part_type, "max_values", {}).get(key, MAX_INT_PARAM)
        if (allowed := _range_error(value, expected_type, max_value)) is not None:
            raise ConfigError(
                f"{role} {name!r}: {key} must be {allowed}, got {value!r};"
                f" the default is {known[key].default!r}"
            )
    user_params = dict(params)
    part = part_type(**{**defaults, **user_params})
    for key, reason in getattr(part, "unused", {}).items():
        if key in user_params:
            raise ConfigError(f"{role} {name!r}: {key}={user_params[key]!r} {reason}")
    return part
