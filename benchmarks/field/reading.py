"""Questions of HotpotQA and SQuAD about documents, with long outputs and in second turns.

RULER's `qa_1` and `qa_2` ask for a few words, which come before a look-ahead of 32 tokens ends.
Here the model quotes the supporting sentences first (``*_reasons``), or has answered another
question about the same documents before (``*_second_turn``).
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.field.data import FieldData
from benchmarks.field.ruler import first_fitting, numbered_documents
from vllm_kvcompress.compare.tasks import CountTokens, Item, Message
from vllm_kvcompress.compare.tasks.items import largest_fitting
from vllm_kvcompress.errors import ConfigError

_REASONS_TOKENS, _SECOND_TURN_TOKENS = 128, 48
_INTRO = "Read the following documents. You will answer questions about them."
_WITH_REASONS = (
    "Answer the question from the documents alone. First quote, word for word, the sentences of the"
    ' documents that support your answer. Then write a last line that begins with "Answer:" and'
    " gives the answer in a few words."
)
_QUOTE = 'Sentences that support the answer:\n1. "'
"""Beginning of the output with reasons. Small models answer at once without it."""
_SHORTLY = "Answer in one short sentence."


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question with its accepted answers and the documents that it needs."""

    question: str
    answers: Sequence[str]
    documents: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Two questions about different documents, and other documents to hide them among."""

    first: Asked
    second: Asked
    others: Sequence[str]


def hotpotqa(data: FieldData, rng: random.Random) -> Reading:
    """Return two questions of HotpotQA; each needs its two supporting paragraphs."""
    found: list[Asked] = []
    others: list[str] = []
    for asked in rng.sample(data.hotpotqa, 2):
        titles = {title for title, _ in asked["supporting_facts"]}
        paragraphs = {
            title: f"{title}\n{''.join(sentences)}" for title, sentences in asked["context"]
        }
        supporting = [text for title, text in paragraphs.items() if title in titles]
        others += [text for title, text in paragraphs.items() if title not in titles]
        found.append(
            Asked(question=asked["question"], answers=[asked["answer"]], documents=supporting)
        )
    rng.shuffle(others)
    first, second = found
    needed = [*first.documents, *second.documents]
    return Reading(
        first=first, second=second, others=[text for text in others if text not in needed]
    )


def squad(data: FieldData, rng: random.Random) -> Reading:
    """Return two questions about different paragraphs of one SQuAD article."""
    article = rng.choice(data.squad)
    with_answers = [
        p for p in article["paragraphs"] if any(not q["is_impossible"] for q in p["qas"])
    ]
    found = []
    for paragraph in rng.sample(with_answers, 2):
        asked = rng.choice([q for q in paragraph["qas"] if not q["is_impossible"]])
        answers = list(dict.fromkeys(answer["text"] for answer in asked["answers"]))
        found.append(
            Asked(question=asked["question"], answers=answers, documents=[paragraph["context"]])
        )
    needed = [document for each in found for document in each.documents]
    others = [p["context"] for p in article["paragraphs"] if p["context"] not in needed]
    rng.shuffle(others)
    return Reading(first=found[0], second=found[1], others=others)


SOURCES: Mapping[str, Callable[[FieldData, random.Random], Reading]] = {
    "hotpotqa": hotpotqa,
    "squad": squad,
}


def with_reasons(
    data: FieldData, name: str, *, count: int, tokens: int, seed: int, count_tokens: CountTokens
) -> list[Item]:
    """Return prompts whose output quotes sentences and then answers (`field_items`).

    The score is SQuAD's token F1 of what follows the last "Answer:".
    """
    source = SOURCES[name.partition("_")[0]]

    def draw(rng: random.Random) -> Item:
        reading = source(data, rng)
        asked = reading.first

        def content(documents: str) -> str:
            return f"{_INTRO}\n\n{documents}\n\n{_WITH_REASONS}\n\nQuestion: {asked.question}"

        documents = _documents(
            name,
            asked.documents,
            [*reading.second.documents, *reading.others],
            rng.random(),
            tokens - _REASONS_TOKENS,
            lambda text: count_tokens(f"{content(text)}\n{_QUOTE}"),
        )
        return Item(
            name="",
            task=name,
            messages=(
                {"role": "user", "content": content(documents)},
                {"role": "assistant", "content": _QUOTE},
            ),
            answers=tuple(asked.answers),
            max_tokens=_REASONS_TOKENS,
            match="f1",
        )

    return [first_fitting(f"{seed}:{name}:{number}", draw) for number in range(count)]


def second_turn(
    data: FieldData, name: str, *, count: int, tokens: int, seed: int, count_tokens: CountTokens
) -> list[Item]:
    """Return chats whose second question needs other documents than the first (`field_items`).

    The assistant's first answer is the right one. The request of the second turn is measured: its
    prompt has the documents, both questions and the first answer.
    """
    source = SOURCES[name.partition("_")[0]]

    def draw(rng: random.Random) -> Item:
        reading = source(data, rng)

        def chat(documents: str) -> tuple[Message, ...]:
            first = f"{_INTRO}\n\n{documents}\n\n{_SHORTLY}\n\nQuestion: {reading.first.question}"
            return (
                {"role": "user", "content": first},
                {"role": "assistant", "content": reading.first.answers[0]},
                {"role": "user", "content": f"Question: {reading.second.question}"},
            )

        documents = _documents(
            name,
            [*reading.first.documents, *reading.second.documents],
            reading.others,
            rng.random(),
            tokens - _SECOND_TURN_TOKENS,
            lambda text: count_tokens("\n".join(message["content"] for message in chat(text))),
        )
        return Item(
            name="",
            task=name,
            messages=chat(documents),
            answers=tuple(reading.second.answers),
            max_tokens=_SECOND_TURN_TOKENS,
            turns=(1,),
            match="f1",
        )

    return [first_fitting(f"{seed}:{name}:{number}", draw) for number in range(count)]


def _documents(
    name: str,
    needed: Sequence[str],
    others: Sequence[str],
    seed: float,
    tokens: int,
    prompt_tokens: Callable[[str], int],
) -> str:
    """Return numbered documents: the needed ones among as many others as fit in `tokens`."""

    def text(num_others: int) -> str:
        documents = [*needed, *others[:num_others]]
        random.Random(seed).shuffle(documents)
        return numbered_documents(documents)

    if (min_tokens := prompt_tokens(text(0))) > tokens:
        raise ConfigError(f"task {name!r} needs prompts of {min_tokens} tokens, got {tokens}")

    def fits(num_others: int) -> bool:
        return num_others <= len(others) and prompt_tokens(text(num_others)) <= tokens

    return text(largest_fitting(fits, 0))


TASKS: Mapping[str, Callable[..., list[Item]]] = {
    **{f"{source}_reasons": with_reasons for source in SOURCES},
    **{f"{source}_second_turn": second_turn for source in SOURCES},
}
