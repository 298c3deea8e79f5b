"""What a comparison cannot conclude, known from its prompts before any request."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from vllm_kvcompress.compare import prompts
from vllm_kvcompress.compare.statistics import prompts_needed, unseen_share
from vllm_kvcompress.compare.summary import Measure
from vllm_kvcompress.compare.tasks import SCORED, Item
from vllm_kvcompress.errors import ConfigError

_MAX_NAMES = 5


class Planned(NamedTuple):
    """A prompt that a run will send."""

    name: str
    """Its task, or its line as in ``line 3``."""
    drawn_with: Hashable
    """Prompts with the same value are not independent samples."""
    known: bool
    """Whether it has an answer or rules."""


def planned_lines(items: Sequence[Item]) -> list[Planned]:
    """Return the prompts of a file of prompts."""
    return [
        Planned(f"line {item.name.rpartition('/')[2]}", key.partition("#")[0], item.known)
        for item, key in zip(items, prompts.keys(items), strict=True)
    ]


def planned_tasks(names: Sequence[str], count: int) -> list[Planned]:
    """Return `count` prompts of each task, each over its own text."""
    return [Planned(name, (name, n), name in SCORED) for name in names for n in range(count)]


def find_limits(planned: Sequence[Planned], *, by: Measure | None, max_drop: float) -> list[str]:
    """Return a sentence for each thing that the run cannot conclude.

    Args:
        by: the requested loss measure, None for the default.
        max_drop: the largest acceptable loss.

    Raises:
        ConfigError: `by` cannot be measured.
    """
    known = [each for each in planned if each.known]
    if by == "score" and not known:
        raise ConfigError(
            "--by score needs prompts with an answer, but none has one; add answers, or use"
            " --by similarity"
        )
    by_score = by == "score" or (by is None and bool(known))
    sentences = []
    unknown = list(dict.fromkeys(each.name for each in planned if not each.known))
    if by_score and unknown:
        names = ", ".join(unknown[:_MAX_NAMES])
        more = f" and {len(unknown) - _MAX_NAMES:,} more" if len(unknown) > _MAX_NAMES else ""
        sentences.append(
            f"{len(planned) - len(known):,} of {len(planned):,} prompts have no answer ({names}"
            f"{more}). The recommendation is by score and counts the other {len(known):,}; all"
            " count in similarity and agreement. To decide by all prompts, add --by similarity."
        )
    independent = len({each.drawn_with for each in (known if by_score else planned)})
    if unseen_share(independent) > max_drop:
        noun = "different prompt" if independent == 1 else "different prompts"
        verb = "is" if independent == 1 else "are"
        answered = " with an answer" if by_score else ""
        sentences.append(
            f"{independent:,} {noun}{answered} {verb} too few for a recommendation: to confirm a"
            f" loss of at most {max_drop:g} at 95 % confidence, a run needs"
            f" {prompts_needed(max_drop):,}. This run only measures. Add prompts, or accept a loss"
            f" of {_rounded_up(unseen_share(independent)):g} with --max-drop."
        )
    return sentences


def _rounded_up(share: float) -> float:
    """Return `share` rounded up to a hundredth, and below 1."""
    return min(-(-share // 0.01) / 100, 0.99)
