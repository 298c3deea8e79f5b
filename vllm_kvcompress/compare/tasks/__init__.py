"""Built-in tasks, built offline: some after RULER, ordinary requests, and tests of trust."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from vllm_kvcompress.compare.tasks import lists, needles
from vllm_kvcompress.compare.tasks.items import (
    CountTokens,
    Item,
    Material,
    Message,
    Question,
    QuestionAt,
    score,
)
from vllm_kvcompress.compare.tasks.ordinary import ORDINARY
from vllm_kvcompress.compare.tasks.trust import TRUST
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import choose

__all__ = [
    "JUDGED",
    "KNOWN",
    "ORDINARY",
    "TASKS",
    "TRUST",
    "CountTokens",
    "Item",
    "Message",
    "QuestionAt",
    "build_items",
    "score",
]

KNOWN: Mapping[str, Callable[[random.Random], Material]] = {
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
JUDGED: Mapping[str, Callable[[random.Random], Material]] = {**KNOWN, **TRUST}
"""Tasks whose answers a program judges; the full cache's may be wrong."""
TASKS: Mapping[str, Callable[[random.Random], Material]] = {**KNOWN, **ORDINARY, **TRUST}


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
    """`count` prompts of each task; the same ones for the same arguments.

    Args:
        names: of TASKS.
        count: prompts of each task.
        tokens: longest prompt, by `count_tokens` of its messages; what a chat template adds comes
            on top. Texts end with a whole piece, so prompts are a little shorter.
        seed: of everything that is drawn.
        question: "last", after the text, or "first", before it. With the question first, how the
            answer begins does not name what is asked: nothing behind the text does. What is asked
            in a later turn than the text is asked there.
        count_tokens: the model's.
        questions_per_text: most questions about one text; None asks all that it has. Prompts of
            one text share a group.

    Raises:
        ConfigError: a task is unknown, or its shortest text does not fit.
    """
    items: list[Item] = []
    for name in names:
        make = choose("task", TASKS, name)
        made = 0
        text_number = 0
        while made < count:
            material = make(random.Random(f"{seed}:{name}:{text_number}"))
            asked = list(islice(material.questions, questions_per_text))[: count - made]
            text = _fitting(name, material, asked, tokens, question, count_tokens)
            items += [
                _item(name, f"{name}/{text_number}", number, material, text, each, question)
                for number, each in enumerate(asked)
            ]
            made += len(asked)
            text_number += 1
    return items


def _messages(
    material: Material, text: str, asked: Question, question: QuestionAt
) -> tuple[Message, ...]:
    # A text may end with an empty line.
    told = f"{material.intro}\n\n{text.rstrip()}"
    if not asked.begin:
        # An ordinary request begins no answer and repeats nothing behind its text.
        both = (told, asked.ask) if question == "last" else (f"{asked.ask} The text follows.", told)
        content = "\n\n".join(both)
        if asked.chat is not None:
            return tuple(asked.chat(content, text))
        return ({"role": "user", "content": content},)
    if question == "last":
        content = f"{told}\n\n{asked.ask}"
        begin = asked.begin
    else:
        content = (
            f"{asked.ask} The text follows.\n\n{told}\n\n"
            "Answer the question that was asked before the text."
        )
        begin = "The answer is"
    return {"role": "user", "content": content}, {"role": "assistant", "content": begin}


def _written(messages: Sequence[Message], asked: Question) -> str:
    """All that a prompt says, tools and their calls as JSON."""
    parts = [json.dumps(tool) for tool in asked.tools]
    for message in messages:
        parts += [json.dumps(call) for call in message.get("tool_calls", ())]
        parts.append(message["content"])
    return "\n".join(parts)


def _item(
    task: str,
    group: str,
    number: int,
    material: Material,
    text: str,
    asked: Question,
    question: QuestionAt,
) -> Item:
    return Item(
        name=f"{group}/{number}",
        task=task,
        messages=_messages(material, text, asked, question),
        answers=asked.answers,
        max_tokens=asked.max_tokens,
        group=group,
        rules=asked.rules,
        tools=asked.tools,
        turns=asked.turns,
    )


def _fitting(
    name: str,
    material: Material,
    asked: Sequence[Question],
    tokens: int,
    question: QuestionAt,
    count_tokens: CountTokens,
) -> str:
    """The longest text whose longest question still fits."""
    longest = max(asked, key=lambda each: len(each.ask) + len(each.begin))

    def length(pieces: int) -> int:
        messages = _messages(material, material.text(pieces), longest, question)
        return count_tokens(_written(messages, longest))

    low, high = material.least, material.least + 1
    if (least := length(low)) > tokens:
        raise ConfigError(
            f"task {name!r} needs prompts of at least {least} tokens, got a length of {tokens}"
        )
    while length(high) <= tokens:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        if length(middle) <= tokens:
            low = middle
        else:
            high = middle
    return material.text(low)
