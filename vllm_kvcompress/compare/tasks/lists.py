"""Tasks over lists: values of variables, words to count, keys and their values.

Variable tracking, common words and frequent words follow RULER (Hsieh et al. 2024,
arXiv:2404.06654); key-value recall follows Liu et al. 2023 (arXiv:2307.03172).
"""

import random
from collections.abc import Iterator
from itertools import chain, islice, repeat

from vllm_kvcompress.compare.tasks.items import Material, Question
from vllm_kvcompress.compare.tasks.prose import THINGS, number, pairs, sentences, syllables

_CHAINS, _HOPS = 4, 4
_COMMON, _COMMON_REPEATS, _RARE_REPEATS = 10, 30, 3
_FREQUENT = 3


def variable_tracking(rng: random.Random) -> Material:
    """Four chains of five variables in prose; asks which have a value (RULER vt has one chain)."""
    taken: set[str] = set()
    lines: list[list[str]] = []
    questions = []
    for _ in range(_CHAINS):
        value = number(rng, taken)
        names = [syllables(rng, taken, 2).upper() for _ in range(_HOPS + 1)]
        sources = [value, *names[:-1]]
        lines.append([f"VAR {n} = {s}." for n, s in zip(names, sources, strict=True)])
        questions.append(
            Question(
                ask=f"Which variables have the value {value}, directly or through others?",
                begin=f"The five variables that have the value {value} are",
                answers=tuple(names),
                max_tokens=48,
            )
        )
    # Interleave the chains, keeping the lines of each chain in order.
    line_order = rng.sample(
        [c for c in range(_CHAINS) for _ in range(_HOPS + 1)], _CHAINS * (_HOPS + 1)
    )
    rest = [iter(each) for each in lines]
    ordered = [next(rest[chain_index]) for chain_index in line_order]
    depths = sorted(rng.random() for _ in ordered)
    seed = rng.random()

    def pieces(count: int) -> list[str]:
        text = list(islice(sentences(random.Random(seed)), count))
        for depth, line in reversed(list(zip(depths, ordered, strict=True))):
            text.insert(round(depth * count), line)
        return text

    return Material(
        intro="Variables are assigned in the following text. Keep track of their values.",
        pieces=pieces,
        questions=questions,
    )


def common_words(rng: random.Random) -> Material:
    """A word list in which ten words occur thirty times and the others three times (RULER cwe)."""
    names = rng.sample(THINGS, len(THINGS))
    common, others = names[:_COMMON], names[_COMMON:]
    seed, taken = rng.random(), set(names)

    def rare_words() -> Iterator[str]:
        more = random.Random(seed)
        used = set(taken)
        return chain(others, (syllables(more, used) for _ in repeat(None)))

    def pieces(count: int) -> list[str]:
        rare = islice(rare_words(), max(count - _COMMON * _COMMON_REPEATS, 0) // _RARE_REPEATS)
        words = [word for word in common for _ in range(_COMMON_REPEATS)]
        words += [word for word in rare for _ in range(_RARE_REPEATS)]
        random.Random(seed).shuffle(words)
        return [f"{place}. {word}" for place, word in enumerate(words, 1)]

    question = Question(
        ask="Which ten words appear most often in the list?",
        begin="The ten words that appear most often are",
        answers=tuple(common),
        max_tokens=80,
    )
    return Material(
        intro="Below is a numbered list of words. Some words appear much more often than others.",
        pieces=pieces,
        min_pieces=_COMMON * _COMMON_REPEATS,
        joiner="\n",
        questions=[question],
    )


def frequent_words(rng: random.Random) -> Material:
    """Coded words with frequency 1 / rank^2; asks for the three most frequent (RULER fwe)."""
    taken: set[str] = set()
    words = [syllables(rng, taken) for _ in range(400)]
    weights = [(rank + 1) ** -2.0 for rank in range(len(words))]
    seed = rng.random()

    def pieces(count: int) -> list[str]:
        text = [
            word
            for word, weight in zip(words, weights, strict=True)
            for _ in range(round(count * weight / sum(weights)))
        ]
        random.Random(seed).shuffle(text)
        return text

    question = Question(
        ask="Which three coded words appear most often in the text?",
        begin="The three coded words that appear most often are",
        answers=tuple(words[:_FREQUENT]),
        max_tokens=32,
    )
    return Material(
        intro="The following text is made of coded words. Watch how often each of them appears.",
        pieces=pieces,
        min_pieces=50,
        questions=[question],
    )


def key_values(rng: random.Random) -> Material:
    """A table of names and numbers, with ten questions for one row each."""
    seed = rng.random()

    def rows() -> Iterator[tuple[str, str]]:
        table_rng, taken = random.Random(seed), set[str]()
        return ((name, number(table_rng, taken)) for name in pairs(table_rng))

    asked = rng.sample(range(30), 10)
    known = list(islice(rows(), 30))

    def pieces(count: int) -> list[str]:
        text = [f'"{name}": {value},' for name, value in islice(rows(), count)]
        random.Random(seed).shuffle(text)
        return text

    return Material(
        intro="Below is a table of keys and their values.",
        pieces=pieces,
        min_pieces=30,
        joiner="\n",
        questions=[_value_of(*known[row]) for row in asked],
    )


def _value_of(name: str, value: str) -> Question:
    return Question(
        ask=f'What is the value of the key "{name}" in the table?',
        begin=f'The value of the key "{name}" is',
        answers=(value,),
        max_tokens=8,
    )
