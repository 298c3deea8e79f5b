"""The presets users type, and what is usual or senseless between their parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vllm_kvcompress.errors import ConfigError

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
    """

    allocator: str
    scorer: str
    window: int
    selector: str = "topk"
    scorer_params: Params = ()
    selector_params: Params = ()
    merge: Merge = False


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
    ),
    "random": Preset(allocator="uniform", scorer="random", window=32),
}

RECOMMENDED = "cake-chunk"
"""What the manifests name and `kvcompress plan` takes by itself (docs/measurements.md)."""
CUSTOM = "custom"
METHODS = ("off", *PRESETS, CUSTOM)
CAOTES = frozenset({"caote", "fastcaote"})
_ALIKE_IN_EVERY_LAYER = {
    "streamingllm": "ranks by position",
    "random": "ranks at random",
    "lagkv": "ranks within partitions",
}
"""Scorers that cannot tell one layer from another, and why."""


def usual_window(allocator: str, scorer: str, base: str) -> int:
    """The window of a scorer outside its preset; CAOTE has its base's, CAKE needs one of rows."""
    if allocator == "cake":
        return PRESETS["cake"].window
    if (allocator, scorer) == ("dynamickv", "snapkv"):
        return PRESETS["dynamickv"].window
    name = base if scorer in CAOTES else scorer
    return PRESETS[name].window if name in PRESETS else 32


def refuse_nonsense(names: Preset) -> None:
    """Combinations that run but mean nothing.

    Raises:
        ConfigError: with the reason.
    """
    if names.allocator in {"dynamickv", "global"} and names.scorer in _ALIKE_IN_EVERY_LAYER:
        raise ConfigError(
            f"allocator {names.allocator!r} compares scores between layers, but scorer"
            f" {names.scorer!r} {_ALIKE_IN_EVERY_LAYER[names.scorer]}; choose a scorer that reads"
            " attention, or allocator 'uniform'"
        )
    if (names.allocator, names.scorer) == ("global", "keydiff"):
        # Cosines are of one scale in all layers, so that dynamickv may compare them as they are.
        raise ConfigError(
            "allocator 'global' divides scores by their sum, but scorer 'keydiff' has scores below"
            " 0, which have no shares; choose a scorer that reads attention, or allocator"
            " 'dynamickv'"
        )
    if names.selector != "topk" and names.scorer in {"streamingllm", "lagkv"}:
        # LagKV's last partition scores its position, beside which no mean of ranks counts.
        raise ConfigError(
            f"selector {names.selector!r} ranks by attention, but scorer {names.scorer!r}"
            f" {_ALIKE_IN_EVERY_LAYER[names.scorer]}; choose another scorer, or selector 'topk'"
        )
