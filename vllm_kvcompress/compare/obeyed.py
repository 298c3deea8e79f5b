"""Of the rules that the full cache obeys, which share a compressed one obeys too."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from vllm_kvcompress.compare.statistics import Estimate, estimate


class Ruled(NamedTuple):
    """A prompt with rules, under one method and budget."""

    task: str
    rules: Mapping[str, Sequence[bool]]
    """Of each rule, by its name, whether it is obeyed, and whether the full cache obeys it."""
    drawn_with: Hashable
    """What the prompt is no independent sample of."""


def shares_obeyed(prompts: Iterable[Ruled]) -> dict[str, Estimate]:
    """By task, and by ``task: rule``: the share obeyed of what the full cache obeys.

    What that does not obey says nothing of compression. A rule that it obeys nowhere is left out.
    """
    prompts = [prompt for prompt in prompts if prompt.rules]
    found: dict[str, Estimate] = {}
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        of_task = [prompt for prompt in prompts if prompt.task == task]
        rules = list(dict.fromkeys(rule for prompt in of_task for rule in prompt.rules))
        for name, some in ((task, rules), *((f"{task}: {rule}", [rule]) for rule in rules)):
            if (share := _share(of_task, some)) is not None:
                found[name] = share
    return found


def _share(prompts: Sequence[Ruled], rules: Sequence[str]) -> Estimate | None:
    kept, right, groups = [], [], []
    for prompt in prompts:
        pairs = [prompt.rules[rule] for rule in rules if rule in prompt.rules]
        if count := sum(whole for _, whole in pairs):
            kept.append(sum(own and whole for own, whole in pairs))
            right.append(count)
            groups.append(prompt.drawn_with)
    return estimate(kept, groups, sizes=right) if kept else None
