"""The presets that users type, the defaults of their parts, and combinations that are refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Allocator, Reads, Scorer, Selector, Use

Params = tuple[tuple[str, int | float | str | bool | tuple[int, ...]], ...]
Merge = bool | Literal["values"]
"""Whether evicted tokens are folded into their nearest kept ones: keys and values, or values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What a method's name stands for.

    Args:
        allocator: name in ALLOCATORS.
        scorer: name in SCORERS.
        window: observation window in tokens; 0 where none is needed.
        selector: name in SELECTORS.
        scorer_params: parameters of the scorer that differ from its defaults.
        selector_params: likewise of the selector.
        merge: whether evicted tokens are folded into their nearest kept ones, or "values": their
            values alone.
        lookahead: tokens of an answer that its prompt stays whole for, and that judge it then.
        prompt_window: the prompt's last queries that judge beside all of an answer's; 0 where the
            answer's judge alone, and no more of them than `window`.
        answer_scorer: name in SCORERS of what ranks tokens one by one once an answer judges; empty
            where `scorer` and `selector` choose them then too.
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
    answer_scorer: str = ""

    def is_made_of(self, names: tuple[str, str, str], params: Params) -> bool:
        """Whether an allocator, a scorer and a selector are its own, and so are these parameters.

        Args:
            params: of the scorer and of the selector, as far as they were given.
        """
        own = {*self.scorer_params, *self.selector_params}
        return names == (self.allocator, self.scorer, self.selector) and own.issuperset(params)


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
        answer_scorer="runs",
    ),
    "random": Preset(allocator="uniform", scorer="random", window=32),
}

RECOMMENDED = "cake-chunk"
"""What the manifests name and `kvcompress plan` takes by itself (docs/measurements.md)."""
CUSTOM = "custom"
METHODS = ("off", *PRESETS, CUSTOM)
CAOTES = frozenset({"caote", "fastcaote"})


def usual_window(allocator: str, scorer: str, base: str) -> int:
    """The window of a scorer outside its preset; CAOTE takes that of its base, and CAKE its own."""
    if allocator == "cake":
        return PRESETS["cake"].window
    if (allocator, scorer) == ("dynamickv", "snapkv"):
        return PRESETS["dynamickv"].window
    name = base if scorer in CAOTES else scorer
    return PRESETS[name].window if name in PRESETS else 32


def least_window(reads: Reads) -> int:
    """Queries that a method needs to judge, by what it reads: for CAKE's variance two."""
    return 2 if Reads.VARIANCE in reads else int(Reads.WINDOW in reads)


def refuse_window(scorer: str, reads: Reads, window: int) -> None:
    """Raise ConfigError where an observation window has too few queries for what is read."""
    if window >= least_window(reads):
        return
    if Reads.VARIANCE in reads:
        raise ConfigError(f"CAKE needs a variance; set window to at least 2, got {window}")
    raise ConfigError(
        f"scorer {scorer!r} reads the attention of an observation window; set window to at least"
        f" 1, got {window}"
    )


def refuse_base(scorer: str, base: str | None, scorer_params: Mapping[str, object]) -> None:
    """Raise ConfigError where `base` names a scorer's weights that it does not take, or twice."""
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


def refuse_nonsense(
    names: Preset, allocator: Allocator, scorer: Scorer, selector: Selector
) -> None:
    """Refuse parts that run together but mean nothing, by what they declare (`Use`).

    Args:
        names: what the parts are called.

    Raises:
        ConfigError: with the reason.
    """
    unfit: Mapping[Use, str] = getattr(scorer, "unfit", {})
    users = (("allocator", names.allocator, allocator), ("selector", names.selector, selector))
    for role, name, part in users:
        for use in getattr(part, "uses", ()):
            if use in unfit:
                raise ConfigError(
                    f"{role} {name!r} {use.verb}, but scorer {names.scorer!r} {unfit[use]};"
                    f" {use.cure}"
                )
