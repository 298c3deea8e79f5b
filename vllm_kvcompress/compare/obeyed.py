"""How many of the rules that the full cache obeys a compressed cache obeys too."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from vllm_kvcompress.compare.statistics import Estimate, estimate


class RuleResults(NamedTuple):
    """Rule results of one prompt under one method and budget."""

    task: str
    rules: Mapping[str, Sequence[bool]]
    """For each rule name: whether the compressed cache obeys it, and whether the full one does."""
    drawn_with: Hashable
    """Prompts with the same value are not independent samples."""


def shares_obeyed(prompts: Iterable[RuleResults]) -> dict[str, Estimate]:
    """Return the share of rules that are still obeyed, by task and by ``task: rule``.

    Counts only rules that the full cache obeys: the others say nothing about compression. A rule
    that the full cache never obeys is left out.
    """
    prompts = [prompt for prompt in prompts if prompt.rules]
    shares: dict[str, Estimate] = {}
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        task_prompts = [prompt for prompt in prompts if prompt.task == task]
        rules = list(dict.fromkeys(rule for prompt in task_prompts for rule in prompt.rules))
        for name, names in ((task, rules), *((f"{task}: {rule}", [rule]) for rule in rules)):
            if (share := _share(task_prompts, names)) is not None:
                shares[name] = share
    return shares


def _share(prompts: Sequence[RuleResults], rules: Sequence[str]) -> Estimate | None:
    obeyed_by_both, obeyed_by_full, groups = [], [], []
    for prompt in prompts:
        pairs = [prompt.rules[rule] for rule in rules if rule in prompt.rules]
        if count := sum(full for _, full in pairs):
            obeyed_by_both.append(sum(compressed and full for compressed, full in pairs))
            obeyed_by_full.append(count)
            groups.append(prompt.drawn_with)
    if not obeyed_by_both:
        return None
    return estimate(obeyed_by_both, groups, sizes=obeyed_by_full)
