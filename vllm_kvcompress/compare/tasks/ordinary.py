"""Ordinary requests: an instruction about a text, without a known right answer.

A needle task asks for one place in a text. These requests depend on the whole text and take
outputs of a hundred tokens or more. They are compared with the output of the uncompressed model.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import cycle, islice

from vllm_kvcompress.compare.tasks.items import Material, Question, Task
from vllm_kvcompress.serving.text import english

_MAX_TOKENS = 160
"""Output tokens, enough that most of the output follows the look-ahead."""
_INTRO = "This is a part of a manual."

_INSTRUCTIONS: Mapping[str, Sequence[str]] = {
    "summary": (
        "Summarise the text in your own words, point by point.",
        "Summarise the text for somebody who has no time to read it, in two paragraphs.",
        "Say in your own words what the text is about and what it says about it.",
        "Write a summary of the text in about eight sentences.",
    ),
    "points": (
        "List all rules that the text states, one in a line, and keep their order.",
        "List the names and keywords that the text explains, each with what it does.",
        "Make a numbered list of the most important facts of the text.",
        "List everything that the text says is an error or is not allowed, and why.",
    ),
    "explain": (
        "Explain the text to a beginner, with the exact terms that it uses.",
        "Explain how what the text describes works, step by step, with the text's exact terms.",
        "Explain the beginning, the middle and the end of the text, with its exact terms.",
        "Explain with the exact terms of the text when a programmer needs what it describes.",
    ),
    "rewrite": (
        "Rewrite the text in simpler and shorter sentences.",
        "Rewrite the text as questions and answers.",
        "Rewrite the text as a friendly letter to a colleague.",
        "Rewrite the text as notes for a talk, and leave no subject out.",
    ),
    "questions": (
        "What is the most important point of the text, and which sentences support it?",
        "What does the text say about exceptions and special cases? Answer in whole sentences.",
        "Which examples does the text give, and what does each of them show?",
        "What should a reader be careful about, after the text? Answer in whole sentences.",
    ),
}


def material(rng: random.Random) -> Material:
    """Return an excerpt of the manual that starts at a random paragraph, without questions."""
    lines, starts = _lines()
    start = rng.choice(starts)

    def pieces(count: int) -> list[str]:
        # Continue from the beginning of the manual when the text reaches its end.
        return list(islice(cycle(lines), start, start + count))

    return Material(intro=_INTRO, pieces=pieces, min_pieces=1, joiner="\n", questions=[])


def _request(kind: str, rng: random.Random) -> Material:
    """Return an excerpt of the manual with one instruction of this kind."""
    text, ask = material(rng), rng.choice(_INSTRUCTIONS[kind])
    return replace(text, questions=[Question(ask=ask, max_tokens=_MAX_TOKENS)])


@cache
def _lines() -> tuple[Sequence[str], Sequence[int]]:
    """Return the lines of the manual, and the indices of lines that begin a paragraph."""
    lines = english().splitlines()
    starts = [
        number
        for number, (before, line) in enumerate(zip(["", *lines], lines, strict=False))
        if not before.strip() and re.match(r"[A-Z]", line)
    ]
    return lines, starts


ORDINARY: Mapping[str, Task] = {kind: partial(_request, kind) for kind in _INSTRUCTIONS}
"""By name; nothing is known of their answers."""
