"""What a task hands out: prompts, and what a right answer names and obeys."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, Protocol

QuestionAt = Literal["last", "first"]
"""Whether a prompt asks after its text, where an observation window sees it, or before it."""
Message = Mapping[str, Any]
"""A message of a chat, as OpenAI's bodies have it."""


class Rule(Protocol):
    """What a program can check of an answer."""

    @property
    def name(self) -> str:
        """What figures of it are called; alike rules of different prompts share it."""

    def obeyed(self, answer: str) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One prompt.

    Args:
        name: unlike any other of the run: the task, the number of the text, that of the question.
        task: what it belongs to.
        messages: chat messages, as a body has them. Where the last one is the assistant's, it
            begins the answer, and the model goes on from there.
        answers: what a full answer names; empty where nobody knows.
        rules: what a right answer obeys; no two have the same name.
        max_tokens: tokens that a full answer has room in.
        group: prompts over the same text, which are no independent samples; None for one that
            stands alone.
        tools: schemas of functions that the model is told of, as a body has them.
        turns: numbers of its first messages that are asked before, as earlier turns of the same
            chat; what is answered then is not used.
    """

    name: str
    task: str
    messages: tuple[Message, ...]
    answers: tuple[str, ...]
    max_tokens: int
    group: str | None = None
    rules: tuple[Rule, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    turns: tuple[int, ...] = ()

    @property
    def known(self) -> bool:
        """Whether anything is known of a right answer."""
        return bool(self.answers or self.rules)

    def obeyed(self, answer: str) -> dict[str, bool]:
        """Of each rule, by its name, whether this answer obeys it."""
        return {rule.name: rule.obeyed(answer) for rule in self.rules}

    def score(self, answer: str) -> float:
        """Share of what is known of a right answer that holds of this one; 0 where nothing is."""
        held = [float(each) for each in self.obeyed(answer).values()]
        held += [float(names(each, answer)) for each in self.answers]
        return fmean(held) if held else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about a text.

    Args:
        ask: the question.
        begin: how the answer begins, so that a model that talks much answers all the same; empty
            where it begins itself.
        answers: what a full answer names; empty where nobody knows.
        max_tokens: tokens that it has room in.
        rules: what a right answer obeys.
        chat: of the message with text and question, and of the text alone, the chat around it; None
            where that message is all, and how the answer begins.
        tools: as in `Item`.
        turns: likewise.
    """

    ask: str
    begin: str
    answers: tuple[str, ...]
    max_tokens: int
    rules: tuple[Rule, ...] = ()
    chat: Callable[[str, str], Sequence[Message]] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    turns: tuple[int, ...] = ()


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
    return sum(names(answer, text) for answer in answers) / len(answers)


def names(answer: str, text: str) -> bool:
    """Whether a text names an answer, as a whole word, capital letters or not."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None
