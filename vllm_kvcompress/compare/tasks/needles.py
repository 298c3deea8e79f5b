"""Needles in a haystack: facts hidden in a text, and questions about some of them.

These follow the families of RULER (Hsieh et al. 2024, arXiv:2404.06654) with our own words: a
single needle; several keys, in prose or among other needles only; several values per key; several
keys per question. RULER asks one question per text. We ask one about each fact in the text.
"""

import random
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from vllm_kvcompress.compare.tasks.items import Material, Question
from vllm_kvcompress.compare.tasks.prose import CITIES, number, pairs, sentences

_ONE_NUMBER, _FOUR_NUMBERS, _ONE_ID = 8, 48, 48
_INTRO = (
    "Some special numbers are hidden in the following text. Keep them in mind: you will be asked."
)


def fact(key: str, value: str) -> str:
    """Return the needle, a sentence that states the number of `key`."""
    return f"The special number for {key} is {value}."


def numbered_cities(rng: random.Random, count: int) -> dict[str, str]:
    """Return `count` random cities, each with a number of its own."""
    taken: set[str] = set()
    return {city: number(rng, taken) for city in rng.sample(CITIES, count)}


def _ask(key: str, value: str, max_tokens: int = _ONE_NUMBER) -> Question:
    return Question(
        ask=f"What is the special number for {key} in the text?",
        begin=f"The special number for {key} is",
        answers=(value,),
        max_tokens=max_tokens,
    )


def _spread(
    facts: Sequence[str], noise: Callable[[], Iterator[str]], rng: random.Random
) -> Callable[[int], list[str]]:
    """Return a function that spreads `facts` over `noise` at relative depths fixed by `rng`."""
    depths = [(i + rng.random()) / len(facts) for i in range(len(facts))]
    order = rng.sample(range(len(facts)), len(facts))

    def pieces(count: int) -> list[str]:
        text = list(islice(noise(), count))
        for depth, place in sorted(zip(depths, order, strict=True), reverse=True):
            text.insert(round(depth * count), facts[place])
        return text

    return pieces


def prose(facts: Sequence[str], questions: Sequence[Question], rng: random.Random) -> Material:
    """Return filler prose with `facts` hidden in it, and the questions about them."""
    seed = rng.random()
    pieces = _spread(facts, lambda: sentences(random.Random(seed)), rng)
    return Material(intro=_INTRO, pieces=pieces, questions=questions)


def cities_in_prose(
    known: Mapping[str, str], questions: Sequence[Question], rng: random.Random
) -> Material:
    """Return filler prose that states the number of each city, and the questions about them."""
    return prose([fact(*pair) for pair in known.items()], questions, rng)


def _keys_in_prose(rng: random.Random, count: int) -> Material:
    known = numbered_cities(rng, count)
    return cities_in_prose(known, [_ask(*pair) for pair in known.items()], rng)


def single(rng: random.Random) -> Material:
    """One needle in prose (RULER's niah_single)."""
    return _keys_in_prose(rng, 1)


def multikey_1(rng: random.Random) -> Material:
    """Ten needles in prose, one question each (RULER's niah_multikey_1 has four)."""
    return _keys_in_prose(rng, 10)


def _needles_only(
    draw: Callable[[random.Random], Iterator[tuple[str, str]]], max_tokens: int, rng: random.Random
) -> Material:
    """Return a text of needles only, with questions about ten of them."""
    seed = rng.random()
    known = list(islice(draw(random.Random(seed)), 10))

    def noise() -> Iterator[str]:
        return (fact(*pair) for pair in islice(draw(random.Random(seed)), 10, None))

    return Material(
        intro=_INTRO,
        pieces=_spread([fact(*pair) for pair in known], noise, rng),
        joiner="\n",
        questions=[_ask(key, value, max_tokens) for key, value in known],
    )


def _named_numbers(rng: random.Random) -> Iterator[tuple[str, str]]:
    taken: set[str] = set()
    return ((name, number(rng, taken)) for name in pairs(rng))


def _identifiers(rng: random.Random) -> Iterator[tuple[str, str]]:
    while True:
        key, value = (str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(2))
        yield key, value


def multikey_2(rng: random.Random) -> Material:
    """A text of needles only, with two-word keys and numbers (niah_multikey_2)."""
    return _needles_only(_named_numbers, _ONE_NUMBER, rng)


def multikey_3(rng: random.Random) -> Material:
    """A text of needles only, with UUIDs as keys and values (niah_multikey_3)."""
    return _needles_only(_identifiers, _ONE_ID, rng)


def multivalue(rng: random.Random) -> Material:
    """Four keys with four values each; asks for all values of one key (niah_multivalue)."""
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
    """Twelve keys in prose, four per question (niah_multiquery)."""
    known = numbered_cities(rng, 12)
    questions = []
    for start in range(0, 12, 4):
        cities = list(known)[start : start + 4]
        named = f"{', '.join(cities[:-1])} and {cities[-1]}"
        questions.append(
            Question(
                ask=f"What are the special numbers for {named} in the text?",
                begin=f"The special numbers for {named} are",
                answers=tuple(known[city] for city in cities),
                max_tokens=_FOUR_NUMBERS,
            )
        )
    return cities_in_prose(known, questions, rng)
