"""Method presets, default windows, and refusal of invalid combinations of parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Allocator, Reads, Scorer, ScoreUse, Selector

Params = tuple[tuple[str, int | float | str | bool | tuple[int, ...]], ...]
Merge = bool | Literal["values"]
"""Whether evicted tokens are merged into their nearest kept tokens; "values" merges only values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The parts and parameters that a method name stands for.

    Args:
        allocator: name in ALLOCATORS.
        scorer: name in SCORERS.
        window: observation window in tokens; 0 if none is needed.
        selector: name in SELECTORS.
        scorer_params: parameters of the scorer that differ from its defaults.
        selector_params: parameters of the selector that differ from its defaults.
        merge: whether evicted tokens are merged into their nearest kept tokens; "values" merges
            only their values.
        lookahead: output tokens that compression waits for. Their queries then score the prompt.
        prompt_window: the prompt's last queries that score it together with the output's queries,
            at most `window`; 0 if only the output's queries score.
        output_scorer: name in SCORERS of the scorer used when output tokens score the prompt, token
            by token; empty to use `scorer` and `selector` then too.
        packed_dtype: format of kept tokens, as `CompressionConfig.packed_dtype`.
    """

    allocator: str
    scorer: str
    window: int
    selector: str = "topk"
    scorer_params: Params = ()
    selector_params: Params = ()
    merge: Merge = False
    lookahead: int = 0
    prompt_window: int = 0
    output_scorer: str = ""
    packed_dtype: Literal["auto", "k4v3"] = "auto"

    def matches(self, names: tuple[str, str, str], params: Params) -> bool:
        """Return whether the names and parameters are those of this preset.

        Args:
            names: allocator, scorer and selector.
            params: parameters of the scorer and of the selector that the user set.
        """
        preset_params = {*self.scorer_params, *self.selector_params}
        return names == (self.allocator, self.scorer, self.selector) and preset_params.issuperset(
            params
        )


_DEFENSIVE: Params = (("aggregate", "defensive"), ("value_norm", True))

PRESETS: Mapping[str, Preset] = {
    "snapkv": Preset(allocator="uniform", scorer="snapkv", window=32),
    "pyramidkv": Preset(allocator="pyramid", scorer="snapkv", window=32),
    "h2o": Preset(allocator="uniform", scorer="h2o", window=32),
    "tova": Preset(allocator="uniform", scorer="tova", window=1),
    "streamingllm": Preset(allocator="uniform", scorer="streamingllm", window=0),
    "cake": Preset(allocator="cake", scorer="cake", window=32),
    "dynamickv": Preset(allocator="dynamickv", scorer="snapkv", window=8),
    "d2o": Preset(allocator="d2o", scorer="h2o", window=0, selector="heavy_recent", merge=True),
    "chunkkv": Preset(
        allocator="uniform",
        scorer="snapkv",
        window=32,
        selector="chunks",
        scorer_params=(("kernel", 1),),
    ),
    "caote": Preset(allocator="uniform", scorer="caote", window=32),
    "fastcaote": Preset(allocator="uniform", scorer="fastcaote", window=32),
    "defensivekv": Preset(
        allocator="uniform", scorer="snapkv", window=32, scorer_params=_DEFENSIVE
    ),
    "layer-defensivekv": Preset(
        allocator="global", scorer="snapkv", window=32, scorer_params=_DEFENSIVE
    ),
    "keydiff": Preset(allocator="uniform", scorer="keydiff", window=32),
    "lagkv": Preset(allocator="uniform", scorer="lagkv", window=32),
    "cake-chunk": Preset(
        allocator="cake",
        scorer="snapkv",
        window=16,
        selector="chunks",
        scorer_params=(("aggregate", "max"),),
        selector_params=(("size", 20),),
        lookahead=32,
        prompt_window=16,
        output_scorer="runs",
    ),
    "random": Preset(allocator="uniform", scorer="random", window=32),
}

RECOMMENDED = "cake-chunk"
"""The method in the manifests and the default of `kvcompress plan` (docs/measurements.md)."""
RECOMMENDED_BUDGETS: Mapping[str, float] = {"safe": 1.0, "balanced": 0.6, "small": 0.4}
"""Budgets of `RECOMMENDED` in k4v3."""
RECOMMENDED_MEMORY: Mapping[str, float] = {"safe": 0.26, "balanced": 0.16, "small": 0.11}
"""Measured share of its 16-bit KV memory that a prompt takes at each of `RECOMMENDED_BUDGETS`
(docs/measurements.md)."""
CUSTOM = "custom"
METHODS = ("off", *PRESETS, CUSTOM)
CAOTES = frozenset({"caote", "fastcaote"})


def fallback_window(allocator: str, scorer: str, base: str) -> int:
    """Return the window of a scorer outside its preset.

    CAOTE takes the window of its base scorer, and allocator CAKE its own.
    """
    if allocator == "cake":
        return PRESETS["cake"].window
    if (allocator, scorer) == ("dynamickv", "snapkv"):
        return PRESETS["dynamickv"].window
    name = base if scorer in CAOTES else scorer
    return PRESETS[name].window if name in PRESETS else 32


def min_window(reads: Reads) -> int:
    """Return the fewest window queries that a method can score with.

    CAKE's variance needs two, other attention one, and a method that reads no window none.
    """
    return 2 if Reads.VARIANCE in reads else int(Reads.WINDOW in reads)


def refuse_window(scorer: str, reads: Reads, window: int) -> None:
    """Raise ConfigError if the observation window has too few queries for what the method reads."""
    if window >= min_window(reads):
        return
    if Reads.VARIANCE in reads:
        raise ConfigError(f"CAKE needs a variance; set window to at least 2, got {window}")
    raise ConfigError(
        f"scorer {scorer!r} reads the attention of an observation window; set window to at least"
        f" 1, got {window}"
    )


def refuse_base(scorer: str, base: str | None, scorer_params: Mapping[str, object]) -> None:
    """Raise ConfigError if `base` is set for a scorer that takes none, or is set twice."""
    if base is None:
        return
    if scorer not in CAOTES:
        raise ConfigError(
            f"base={base!r} needs one of the scorers {sorted(CAOTES)}, got {scorer!r}; remove base,"
            " or set scorer to caote"
        )
    if (other := scorer_params.get("base", base)) != base:
        raise ConfigError(
            f"base is given twice, {base!r} and in scorer_params {other!r}; remove one"
        )


def refuse_meaningless_parts(
    names: Preset, allocator: Allocator, scorer: Scorer, selector: Selector
) -> None:
    """Refuse parts that run together but give meaningless results, as declared in `ScoreUse`.

    Args:
        names: the names of the parts.

    Raises:
        ConfigError: the message gives the reason.
    """
    unfit: Mapping[ScoreUse, str] = getattr(scorer, "unfit", {})
    users = (("allocator", names.allocator, allocator), ("selector", names.selector, selector))
    for role, name, part in users:
        for use in getattr(part, "uses", ()):
            if use in unfit:
                raise ConfigError(
                    f"{role} {name!r} {use.action}, but scorer {names.scorer!r} {unfit[use]};"
                    f" {use.fix}"
                )
