"""Built-in tasks, generated offline: RULER-style tasks, ordinary requests and trust tests."""

import json
import random
from collections.abc import Mapping, Sequence
from itertools import islice

from vllm_kvcompress.compare.tasks import lists, needles
from vllm_kvcompress.compare.tasks.items import (
    CountTokens,
    Item,
    Material,
    Message,
    Question,
    QuestionAt,
    Task,
    largest_fitting,
)
from vllm_kvcompress.compare.tasks.ordinary import ORDINARY
from vllm_kvcompress.compare.tasks.trust import TRUST
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import choose

__all__ = [
    "KNOWN",
    "ORDINARY",
    "SCORED",
    "TASKS",
    "TRUST",
    "CountTokens",
    "Item",
    "Message",
    "QuestionAt",
    "build_items",
]

KNOWN: Mapping[str, Task] = {
    "niah-single": needles.single,
    "niah-multikey-1": needles.multikey_1,
    "niah-multikey-2": needles.multikey_2,
    "niah-multikey-3": needles.multikey_3,
    "niah-multivalue": needles.multivalue,
    "niah-multiquery": needles.multiquery,
    "variable-tracking": lists.variable_tracking,
    "common-words": lists.common_words,
    "frequent-words": lists.frequent_words,
    "key-values": lists.key_values,
}
"""Tasks whose right answers are known."""
SCORED: Mapping[str, Task] = {**KNOWN, **TRUST}
"""Tasks whose answers a program scores. The uncompressed model may answer wrongly."""
TASKS: Mapping[str, Task] = {**KNOWN, **ORDINARY, **TRUST}


def build_items(
    names: Sequence[str],
    *,
    count: int,
    tokens: int,
    seed: int,
    question: QuestionAt,
    count_tokens: CountTokens,
    questions_per_text: int | None = None,
) -> list[Item]:
    """Return `count` prompts of each task. Equal arguments give equal prompts.

    Args:
        names: names of tasks, keys of TASKS.
        count: prompts per task.
        tokens: maximum prompt length in tokens, by `count_tokens` of its messages. The chat
            template adds tokens to it. A text ends with a complete piece, so prompts are a little
            shorter.
        seed: seed of every random draw.
        question: "last" puts the question after the text, "first" before it. With "first", the
            beginning of the answer does not repeat the question, so that nothing after the text
            names it. A question of a later turn stays in that turn.
        count_tokens: the model's token count.
        questions_per_text: maximum questions about one text, None for all. Prompts over one text
            share a group.

    Raises:
        ConfigError: A task is unknown, or its shortest text does not fit in `tokens`.
    """
    items: list[Item] = []
    for task in names:
        draw = choose("task", TASKS, task)
        end = len(items) + count
        text_number = 0
        while len(items) < end:
            material = draw(random.Random(f"{seed}:{task}:{text_number}"))
            asked = list(islice(material.questions, questions_per_text))[: end - len(items)]
            text = _fitting(task, material, asked, tokens, question, count_tokens)
            group = f"{task}/{text_number}"
            items += [
                Item(
                    name=f"{group}/{number}",
                    task=task,
                    messages=_messages(material, text, each, question),
                    answers=each.answers,
                    max_tokens=each.max_tokens,
                    group=group,
                    rules=each.rules,
                    tools=each.tools,
                    turns=each.turns,
                )
                for number, each in enumerate(asked)
            ]
            text_number += 1
    return items


def _messages(
    material: Material, text: str, asked: Question, question: QuestionAt
) -> tuple[Message, ...]:
    # The text may end with an empty line.
    parts = [f"{material.intro}\n\n{text.rstrip()}"]
    if question == "last":
        parts.append(asked.ask)
    else:
        parts.insert(0, f"{asked.ask} The text follows.")
        # An ordinary request does not begin the answer and repeats nothing after the text.
        if asked.begin:
            parts.append("Answer the question that was asked before the text.")
    content = "\n\n".join(parts)
    if asked.chat is not None:
        return tuple(asked.chat(content, text))
    user = {"role": "user", "content": content}
    if not asked.begin:
        return (user,)
    begin = asked.begin if question == "last" else "The answer is"
    return user, {"role": "assistant", "content": begin}


def _plain_text(messages: Sequence[Message], asked: Question) -> str:
    """Return the text of a prompt, with tools and tool calls as JSON."""
    parts = [json.dumps(tool) for tool in asked.tools]
    for message in messages:
        parts += [json.dumps(call) for call in message.get("tool_calls", ())]
        parts.append(message["content"])
    return "\n".join(parts)


def _fitting(
    name: str,
    material: Material,
    asked: Sequence[Question],
    tokens: int,
    question: QuestionAt,
    count_tokens: CountTokens,
) -> str:
    """Return the longest text that fits in `tokens` together with its longest question."""
    longest = max(asked, key=lambda each: len(each.ask) + len(each.begin))

    def prompt_tokens(pieces: int) -> int:
        messages = _messages(material, material.text(pieces), longest, question)
        return count_tokens(_plain_text(messages, longest))

    fewest = material.min_pieces
    if (min_tokens := prompt_tokens(fewest)) > tokens:
        raise ConfigError(
            f"task {name!r} needs prompts of at least {min_tokens} tokens, got a length of {tokens}"
        )
    return material.text(largest_fitting(lambda pieces: prompt_tokens(pieces) <= tokens, fewest))
