"""Needles in a haystack: facts hidden in a text, and questions about some of them.

After RULER (Hsieh et al. 2024, arXiv:2404.06654), whose families these follow with words of our
own: a single needle; several keys, in prose or among nothing but other needles; several values of a
key; several keys in one question. Where RULER asks once about a text, we ask about each fact of it.
"""

import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from vllm_kvcompress.compare.tasks.items import Material, Question
from vllm_kvcompress.compare.tasks.prose import CITIES, number, pairs, sentences

_ONE_NUMBER, _FOUR_NUMBERS, _ONE_ID = 8, 48, 48
_INTRO = (
    "Some special numbers are hidden in the following text. Keep them in mind: you will be asked."
)


def fact(key: str, value: str) -> str:
    """A needle: the sentence that tells a key's number."""
    return f"The special number for {key} is {value}."


def _ask(key: str, answers: tuple[str, ...], room: int = _ONE_NUMBER) -> Question:
    return Question(
        ask=f"What is the special number for {key} in the text?",
        begin=f"The special number for {key} is",
        answers=answers,
        max_tokens=room,
    )


def _spread(
    facts: Sequence[str], noise: Callable[[], Iterator[str]], rng: random.Random
) -> Callable[[int], list[str]]:
    """Pieces of `noise` with the facts among them, at depths that do not move with the length."""
    depths = [(i + rng.random()) / len(facts) for i in range(len(facts))]
    order = rng.sample(range(len(facts)), len(facts))

    def pieces(count: int) -> list[str]:
        text = list(islice(noise(), count))
        for depth, place in sorted(zip(depths, order, strict=True), reverse=True):
            text.insert(round(depth * count), facts[place])
        return text

    return pieces


def prose(facts: Sequence[str], questions: Sequence[Question], rng: random.Random) -> Material:
    """Facts in prose that says nothing to remember, and questions about them."""
    seed = rng.random()
    pieces = _spread(facts, lambda: sentences(random.Random(seed)), rng)
    return Material(intro=_INTRO, pieces=pieces, least=0, joiner=" ", questions=questions)


def _keys_in_prose(rng: random.Random, count: int) -> Material:
    taken: set[str] = set()
    known = {city: number(rng, taken) for city in rng.sample(CITIES, count)}
    return prose(
        [fact(*pair) for pair in known.items()],
        [_ask(key, (value,)) for key, value in known.items()],
        rng,
    )


def single(rng: random.Random) -> Material:
    """One needle in prose (RULER's niah_single)."""
    return _keys_in_prose(rng, 1)


def multikey_1(rng: random.Random) -> Material:
    """Ten needles in prose, asked one at a time (niah_multikey_1, which has four)."""
    return _keys_in_prose(rng, 10)


def _needles_only(
    draw: Callable[[random.Random], Iterator[tuple[str, str]]], room: int, rng: random.Random
) -> Material:
    """Nothing but needles: ten are asked for, the others stand in the way."""
    seed = rng.random()
    known = list(islice(draw(random.Random(seed)), 10))

    def noise() -> Iterator[str]:
        return (fact(*pair) for pair in islice(draw(random.Random(seed)), 10, None))

    return Material(
        intro=_INTRO,
        pieces=_spread([fact(*pair) for pair in known], noise, rng),
        least=0,
        joiner="\n",
        questions=[_ask(key, (value,), room) for key, value in known],
    )


def _named_numbers(rng: random.Random) -> Iterator[tuple[str, str]]:
    taken: set[str] = set()
    return ((name, number(rng, taken)) for name in pairs(rng))


def _identifiers(rng: random.Random) -> Iterator[tuple[str, str]]:
    while True:
        key, value = (str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(2))
        yield key, value


def multikey_2(rng: random.Random) -> Material:
    """A text of needles alone, two-word keys and numbers (niah_multikey_2)."""
    return _needles_only(_named_numbers, _ONE_NUMBER, rng)


def multikey_3(rng: random.Random) -> Material:
    """A text of needles alone whose keys and values are UUIDs (niah_multikey_3)."""
    return _needles_only(_identifiers, _ONE_ID, rng)


def multivalue(rng: random.Random) -> Material:
    """Four keys of four values each, asked for all values of a key (niah_multivalue)."""
    taken: set[str] = set()
    known = {city: [number(rng, taken) for _ in range(4)] for city in rng.sample(CITIES, 4)}
    facts = [
        f"One of the special numbers for {city} is {value}."
        for city, values in known.items()
        for value in values
    ]
    questions = [
        Question(
            ask=f"What are all four special numbers for {city} in the text?",
            begin=f"The four special numbers for {city} are",
            answers=tuple(values),
            max_tokens=_FOUR_NUMBERS,
        )
        for city, values in known.items()
    ]
    return prose(facts, questions, rng)


def multiquery(rng: random.Random) -> Material:
    """Twelve keys in prose, asked four at a time (niah_multiquery)."""
    taken: set[str] = set()
    known = {city: number(rng, taken) for city in rng.sample(CITIES, 12)}
    questions = []
    for start in range(0, 12, 4):
        some = list(known)[start : start + 4]
        named = f"{', '.join(some[:-1])} and {some[-1]}"
        questions.append(
            Question(
                ask=f"What are the special numbers for {named} in the text?",
                begin=f"The special numbers for {named} are",
                answers=tuple(known[city] for city in some),
                max_tokens=_FOUR_NUMBERS,
            )
        )
    return prose([fact(*pair) for pair in known.items()], questions, rng)
