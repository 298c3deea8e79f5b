"""What a task hands out: prompts, and what a right answer names."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

QuestionAt = Literal["last", "first"]
"""Whether a prompt asks after its text, where an observation window sees it, or before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One prompt.

    Args:
        name: unlike any other of the run: the task, the number of the text, that of the question.
        task: what it belongs to.
        messages: chat messages, each with ``role`` and ``content``. Where the last one is the
            assistant's, it begins the answer, and the model goes on from there.
        answers: what a full answer names; empty where nobody knows.
        max_tokens: tokens that a full answer has room in.
        group: prompts over the same text, which are no independent samples; None for one that
            stands alone.
    """

    name: str
    task: str
    messages: tuple[dict[str, str], ...]
    answers: tuple[str, ...]
    max_tokens: int
    group: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about a text.

    Args:
        ask: the question.
        begin: how the answer begins, so that a model that talks much answers all the same; empty
            where it begins itself.
        answers: what a full answer names; empty where nobody knows.
        max_tokens: tokens that it has room in.
    """

    ask: str
    begin: str
    answers: tuple[str, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """A text of any length, and questions about it.

    Args:
        intro: what the reader is told before it.
        pieces: the text in so many pieces; more pieces make a longer text.
        least: fewest pieces that answer every question.
        joiner: what stands between two pieces.
        questions: each can be answered from the text alone.
    """

    intro: str
    pieces: Callable[[int], list[str]]
    least: int
    joiner: str
    questions: Sequence[Question]

    def text(self, count: int) -> str:
        return self.joiner.join(self.pieces(count))


class CountTokens(Protocol):
    """How many tokens a model makes of a text."""

    def __call__(self, text: str, /) -> int: ...


def score(answers: Sequence[str], text: str) -> float:
    """Share of `answers` that `text` names, as whole words, capital letters or not.

    A number must stand alone: 123 is not named by 41234. Nothing to name scores 0.
    """
    if not answers:
        return 0.0
    named = [re.search(rf"(?<!\w){re.escape(a)}(?!\w)", text, re.IGNORECASE) for a in answers]
    return sum(found is not None for found in named) / len(answers)
