"""The presets that users type, the defaults of their parts, and combinations that are refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Allocator, Scorer, Selector, Use

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


def usual_window(allocator: str, scorer: str, base: str) -> int:
    """The window of a scorer outside its preset; CAOTE takes that of its base, and CAKE its own."""
    if allocator == "cake":
        return PRESETS["cake"].window
    if (allocator, scorer) == ("dynamickv", "snapkv"):
        return PRESETS["dynamickv"].window
    name = base if scorer in CAOTES else scorer
    return PRESETS[name].window if name in PRESETS else 32


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
