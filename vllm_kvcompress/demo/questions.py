"""What the demo asks: facts that its text states, and which of them is asked for.

A model of 135M parameters answers no question about the language reference itself, so short notes
stand in between, each several times. `surest` chooses one by what the full cache answers, and by no
compressed answer: see ``benchmarks/demo_question.py``, which records both.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_kvcompress.serving.text import english

TIMES = 3
"""How often the text states each note."""
REQUEST = "Summarise the text above in your own words, point by point."
"""An ordinary request: its answer is nowhere in the text, and all of the text matters to it.

Chosen by the full cache's answers alone: to most others of our tasks' instructions the demo model
says the same words again and again, of which a demo shows nothing.
"""
REQUEST_TOKENS = 1500
"""Tokens of its text."""
MANNER = "Answer in a few words."
"""Ends the prompt: without it the full cache goes on after its answer."""


@dataclass(frozen=True, slots=True)
class Question:
    """A note in the text, what is asked about it, and what a right answer contains."""

    note: str
    text: str
    fact: str

    @property
    def asked(self) -> str:
        """The question as the model reads it."""
        return f"{self.text} {MANNER}"

    def answered_by(self, answer: str) -> bool:
        """Whether `answer` has the fact in it, in upper or lower case."""
        return self.fact.lower() in answer.lower()


QUESTIONS = (
    Question(
        "The spare key is under the flower pot.", "Where is the spare key?", "under the flower pot"
    ),
    Question(
        "The captain of the Aurora is Helen Marsh.",
        "Who is the captain of the Aurora?",
        "Helen Marsh",
    ),
    Question(
        "The password of the printer is marmalade.",
        "What is the password of the printer?",
        "marmalade",
    ),
    Question("The office cat is called Pepper.", "What is the office cat called?", "Pepper"),
    Question(
        "The meeting on Friday is in the blue kitchen.",
        "Where is the meeting on Friday?",
        "blue kitchen",
    ),
    Question(
        "The train to Lisbon leaves from platform seven.",
        "Where does the train to Lisbon leave from?",
        "platform seven",
    ),
    Question(
        "The winner of the chess game is Ingrid Holm.",
        "Who is the winner of the chess game?",
        "Ingrid Holm",
    ),
    Question(
        "The secret ingredient of the soup is cinnamon.",
        "What is the secret ingredient of the soup?",
        "cinnamon",
    ),
    Question(
        "The old map is hidden behind the piano.",
        "Where is the old map hidden?",
        "behind the piano",
    ),
    Question(
        "The new teacher comes from Iceland.", "Where does the new teacher come from?", "Iceland"
    ),
    Question(
        "The front door is painted purple.", "What colour is the front door painted?", "purple"
    ),
    Question(
        "The keeper of the lighthouse is Tobias Finch.",
        "Who is the keeper of the lighthouse?",
        "Tobias Finch",
    ),
)


def noted_text(tokenizer: Any, num_tokens: int) -> str:
    """The start of `english` with every note `TIMES` times in it, about `num_tokens` tokens.

    The notes take turns at evenly spaced places, each the end of a paragraph, so that every note
    is in each third of the text.

    Args:
        tokenizer: a Hugging Face tokenizer.

    Raises:
        ValueError: the notes alone are longer than `num_tokens`.
    """
    notes = [question.note for question in QUESTIONS] * TIMES
    room = num_tokens - len(tokenizer.encode("\n\n".join(notes), add_special_tokens=False))
    if room <= 0:
        raise ValueError(
            f"the text must be longer than its notes, {num_tokens - room} tokens, got {num_tokens}"
        )
    ids = tokenizer.encode(english()[: room * 12], add_special_tokens=False)[:room]
    text: str = tokenizer.decode(ids)
    ends = [match.start() for match in re.finditer(r"\n\n", text)] or [len(text)]
    noted, start = "", 0
    for number, note in enumerate(notes, 1):
        wanted = len(text) * number // (len(notes) + 1)
        end = min(ends, key=lambda at: abs(at - wanted))
        noted += f"{text[start:end]}\n\n{note}"
        start = end
    return noted + text[start:]


def prompt(tokenizer: Any, num_tokens: int, question: Question) -> str:
    """`noted_text` and the question after it."""
    return f"{noted_text(tokenizer, num_tokens)}\n\n{question.asked}"


@dataclass(frozen=True, slots=True)
class Asked:
    """How the full cache answered a question.

    Args:
        answer: with the text before the question.
        without_text: with the question alone.
        gap: the least difference, over the answer's tokens, between the probabilities of the
            token taken and of the next likely one, in [0, 1].
    """

    question: Question
    answer: str
    without_text: str
    gap: float

    @property
    def known_from_the_text(self) -> bool:
        """It is right, and only because of the text."""
        right = self.question.answered_by
        return right(self.answer) and not right(self.without_text)


def surest(asked: Iterable[Asked]) -> Asked:
    """The one with the largest gap among those that the full cache knows from the text.

    Raises:
        ValueError: there is none.
    """
    known: Sequence[Asked] = [question for question in asked if question.known_from_the_text]
    if not known:
        raise ValueError(
            "the full cache must answer a question from the text, got none; ask others"
        )
    return max(known, key=lambda question: question.gap)


CHOSEN = QUESTIONS[7]
"""The demo's question. A test holds that `surest` chooses it from the recorded answers."""
