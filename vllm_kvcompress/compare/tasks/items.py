"""Data types of the built-in tasks: prompts, and texts with questions about them."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal, Self

from vllm_kvcompress.compare.tasks.matches import refusal_score, repetition_score, same_number
from vllm_kvcompress.compare.tasks.rules import Rule
from vllm_kvcompress.compare.tasks.short_answers import best_f1

QuestionAt = Literal["last", "first"]
"""Where the question stands: after the text, inside the observation window, or before the text."""
Match = Literal["words", "all", "any", "f1", "number", "refusal", "mrcr"]
"""How an output is compared with the expected answers.

* words: share of the answers that the output names as whole words, ignoring case.
* all: share of the answers that the output contains as substrings (RULER's string_match_all).
* any: 1 if the output contains one of them (RULER's string_match_part).
* f1: SQuAD's token F1 of the final answer with the best of them (`short_answers`).
* number: 1 if the output's result is one of them (`matches.same_number`).
* refusal: 1 if the output does what one of them says: "refused" or "answered".
* mrcr: similarity to a piece of text that follows a prefix (`matches.repetition_score`).
"""
_OF_ALL_ANSWERS: Mapping[Match, Callable[[Sequence[str], str], float]] = {
    "f1": best_f1,
    "number": same_number,
    "refusal": refusal_score,
    "mrcr": repetition_score,
}
"""Scores that take all expected answers together."""
Message = Mapping[str, Any]
"""A chat message in the format of the OpenAI API."""
CountTokens = Callable[[str], int]
"""Returns the number of tokens of a text for one model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One prompt with its expected answer.

    Args:
        name: unique within a run: task, text number and question number.
        task: name of the task.
        messages: chat messages in the format of the OpenAI API. If the last message is the
            assistant's, the model continues it.
        answers: words that a complete answer names. Empty if the right answer is unknown.
        max_tokens: output tokens that a complete answer fits in.
        group: shared by prompts over the same text, which are not independent samples. None for
            a prompt whose text nobody else uses.
        rules: rules that a right answer obeys. Their names are distinct.
        tools: function schemas in the format of the OpenAI API.
        turns: for each earlier turn of the chat, how many of the first messages it sends. Its
            output is discarded if the next message is the assistant's. Otherwise the full cache's
            output becomes that message, in every cell (`with_replies`).
        match: how an output is compared with `answers`.
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
    match: Match = "words"

    @property
    def known(self) -> bool:
        """Return whether the prompt has expected answers or rules."""
        return bool(self.answers or self.rules)

    @property
    def needs_replies(self) -> bool:
        """Return whether `messages` lacks the assistant's reply to an earlier turn."""
        return any(self.messages[end]["role"] != "assistant" for end in self.turns)

    def with_replies(self, replies: Sequence[str]) -> Self:
        """Return the chat with the missing replies to its first ``len(replies)`` turns."""
        messages, turns = list(self.messages), list(self.turns)
        for turn, reply in enumerate(replies):
            end = turns[turn]
            if messages[end]["role"] != "assistant":
                messages.insert(end, {"role": "assistant", "content": reply})
                turns[turn + 1 :] = [later + 1 for later in turns[turn + 1 :]]
        return replace(self, messages=tuple(messages), turns=tuple(turns))

    def obeyed(self, answer: str) -> dict[str, bool]:
        """Return for each rule name whether `answer` obeys the rule."""
        return {rule.name: rule.obeyed(answer) for rule in self.rules}

    def score(self, answer: str) -> float:
        """Return the mean over rules and expected answers, or 0 if the prompt has neither.

        With `match` "words" or "all", each expected answer counts, and else all of them as one.
        """
        checks = [*map(float, self.obeyed(answer).values()), *self.matched(answer)]
        return fmean(checks) if checks else 0.0

    def matched(self, answer: str) -> list[float]:
        """Return how well `answer` matches the expected answers, each number in [0, 1].

        One number for each expected answer with `match` "words" or "all", and else one for all of
        them. Empty without expected answers.
        """
        if not self.answers:
            return []
        if self.match == "words":
            return [float(_names(expected, answer)) for expected in self.answers]
        if self.match in _OF_ALL_ANSWERS:
            return [_OF_ALL_ANSWERS[self.match](self.answers, answer)]
        contained = [float(expected.lower() in answer.lower()) for expected in self.answers]
        return contained if self.match == "all" else [max(contained)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about a text.

    Args:
        ask: the question.
        begin: first words of the answer, sent as the assistant's message so that a talkative model
            answers within `max_tokens`. Empty to let the model begin.
        answers, max_tokens, rules, tools, turns: as in `Item`.
        chat: called with the message that holds text and question, and with the text alone.
            Returns the chat to send. None sends the message, followed by `begin` if there is one.
    """

    ask: str
    max_tokens: int
    begin: str = ""
    answers: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    chat: Callable[[str, str], Sequence[Message]] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    turns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """A text of any length, and questions about it.

    Args:
        intro: sentence before the text.
        pieces: returns the text as the given number of pieces. More pieces make a longer text.
        min_pieces: fewest pieces with which every question can be answered.
        joiner: separator between two pieces.
        questions: questions that the text alone answers.
    """

    intro: str
    pieces: Callable[[int], list[str]]
    min_pieces: int = 0
    joiner: str = " "
    questions: Sequence[Question]

    def text(self, count: int) -> str:
        """Return the text made of `count` pieces."""
        return self.joiner.join(self.pieces(count))


Task = Callable[[random.Random], Material]
"""Draws a text with its questions."""


def largest_fitting(fits: Callable[[int], bool], low: int, *, coarse: bool = False) -> int:
    """Return the largest count that fits, found by doubling and bisection.

    Args:
        fits: whether a count fits. Larger counts than one that does not fit do not fit either.
        low: a count that fits.
        coarse: return a count that is up to 1 % smaller, with fewer calls.
    """
    high = low + 1
    while fits(high):
        low, high = high, high * 2
    while high - low > (max(1, low // 100) if coarse else 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _names(answer: str, text: str) -> bool:
    """Return whether `text` contains `answer` as a whole word, ignoring case."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None
