"""The preset of a method, and the queries that it needs."""

from dataclasses import dataclass
from typing import Literal

from vllm_kvcompress.methods.base import Reads

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
