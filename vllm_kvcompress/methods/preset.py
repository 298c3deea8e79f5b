"""A method's preset, the parameters published for a model, and refusal of invalid combinations."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Allocator, Reads, Scorer, ScoreUse, Selector

T = TypeVar("T")

Params = tuple[tuple[str, int | float | str | bool | tuple[int, ...]], ...]
Merge = bool | Literal["values"]
"""Whether evicted tokens are merged into their nearest kept tokens; "values" merges only values."""

ParamsByModel = tuple[tuple[tuple[str, ...], T], ...]
"""Entries ``(substrings, parameters)``. An entry fits a model whose name, in lower case, contains
all its substrings."""


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
        packed_dtype: format of kept tokens, as `CompressionConfig.packed.dtype`.
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
        """Return whether the user's parts are the preset's and no set parameter differs from it.

        Args:
            names: allocator, scorer and selector.
            params: parameters of the scorer and of the selector that the user set.
        """
        preset_params = {*self.scorer_params, *self.selector_params}
        return names == (self.allocator, self.scorer, self.selector) and preset_params.issuperset(
            params
        )


def params_of_model(table: ParamsByModel[T], model: str | None) -> T | None:
    """Return the parameters of the first entry that fits the model, or None.

    Args:
        model: name or path, such as ``meta-llama/Llama-3.1-8B-Instruct``.
    """
    name = (model or "").lower().replace("meta-llama-", "llama-")
    fits = (params for substrings, params in table if all(part in name for part in substrings))
    return next(fits, None)


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
