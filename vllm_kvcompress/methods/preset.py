"""A method's preset, the parameters published for a model, and refusal of invalid combinations."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Allocator, Reads, Scorer, ScoreUse, Selector

T = TypeVar("T")

MAX_WINDOW = 1024
"""Largest observation window in tokens."""
MAX_LOOKAHEAD = 1024
"""Longest look-ahead in output tokens."""

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


def scores_by_window(reads: Reads) -> bool:
    """Return whether a method with these `reads` scores tokens with the latest queries alone.

    A method that sums attention over all queries (H2O) uses hundreds of prompt queries as well.
    """
    return Reads.WINDOW in reads and Reads.COLUMN_SUMS not in reads


def misused_part(
    names: Preset, allocator: Allocator, scorer: Scorer, selector: Selector
) -> tuple[str, str] | None:
    """Return why parts run together but give meaningless results, as in `ScoreUse`, and a fix.

    Args:
        names: the names of the parts.
    """
    unfit: Mapping[ScoreUse, str] = getattr(scorer, "unfit", {})
    users = (("allocator", names.allocator, allocator), ("selector", names.selector, selector))
    for role, name, part in users:
        for use in getattr(part, "uses", ()):
            if use in unfit:
                reason = f"{role} {name!r} {use.action}, but scorer {names.scorer!r} {unfit[use]}"
                return reason, use.fix
    return None


def refuse_values(preset: Preset, reads: Reads) -> None:
    """Raise ConfigError unless a preset's numbers and words are in their ranges.

    Args:
        reads: statistics that its allocator and scorer read.
    """
    limits = {
        "window": (min_window(reads), preset.window, MAX_WINDOW),
        "lookahead": (0, preset.lookahead, MAX_LOOKAHEAD),
        "prompt_window": (0, preset.prompt_window, preset.window),
    }
    for name, (minimum, value, limit) in limits.items():
        if type(value) is not int or not minimum <= value <= limit:
            raise ConfigError(
                f"{name} of a preset must be a whole number from {minimum} to {limit} for its"
                f" parts, got {value!r}; correct it"
            )
    words: Mapping[str, tuple[object, ...]] = {
        "merge": (True, False, "values"),
        "packed_dtype": ("auto", "k4v3"),
    }
    for name, allowed in words.items():
        if (value := getattr(preset, name)) not in allowed:
            raise ConfigError(
                f"{name} of a preset must be one of {list(allowed)}, got {value!r}; correct it"
            )
    if preset.lookahead and not (
        scores_by_window(reads) and preset.lookahead >= max(min_window(reads), 1)
    ):
        raise ConfigError(
            f"a look-ahead needs at least {max(min_window(reads), 1)} output tokens and a scorer"
            f" that reads the window alone, got lookahead={preset.lookahead}; set it to 0"
        )
    if preset.output_scorer and not preset.lookahead:
        raise ConfigError(
            f"output_scorer={preset.output_scorer!r} scores after a look-ahead, got lookahead=0;"
            " set lookahead, or remove output_scorer"
        )
