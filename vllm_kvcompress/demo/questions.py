"""The demo's text, its question and its ordinary request.

A model of 135M parameters cannot answer questions about the language reference itself. So the text
contains short notes, and the question asks for one of them. `surest` chooses the question by the
answers of the uncompressed model alone. ``benchmarks/demo_question.py`` records the answers of the
uncompressed and of the compressed model, with the text of ``make demo ARGS=--long``.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_kvcompress.serving.text import english

TIMES = 3
"""Number of times that the text states each note."""
REQUEST = "Summarise the text above in your own words, point by point."
"""An ordinary request: it needs all of the text, and the text does not contain its output.

Chosen by the uncompressed model's output alone. With most other instructions of the quality tasks,
the demo model repeats the same words again and again.
"""
REQUEST_TOKENS = 1500
"""Length of the text before the ordinary request, in tokens."""
MANNER = "Answer in a few words."
"""Ends the question. Without it, the uncompressed model keeps writing after its answer."""


@dataclass(frozen=True, slots=True)
class Question:
    """A note in the text, a question about it, and the fact that a right answer contains."""

    note: str
    text: str
    fact: str

    @property
    def asked(self) -> str:
        """Return the question with `MANNER`, as it appears in the prompt."""
        return f"{self.text} {MANNER}"

    def answered_by(self, answer: str) -> bool:
        """Return whether `answer` contains the fact, ignoring case."""
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
    """Return about `num_tokens` tokens: the start of `english`, with each note `TIMES` times.

    The notes take turns at evenly spaced paragraph ends, so each third of the text contains every
    note.

    Args:
        tokenizer: a Hugging Face tokenizer.

    Raises:
        ValueError: the notes alone have `num_tokens` tokens or more.
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
    """Return `noted_text`, followed by the question."""
    return f"{noted_text(tokenizer, num_tokens)}\n\n{question.asked}"


@dataclass(frozen=True, slots=True)
class Asked:
    """The uncompressed model's answers to a question.

    Args:
        answer: the answer to the question after the text.
        without_text: the answer to the question alone.
        gap: the difference between the probabilities of the chosen token and of the runner-up, in
            [0, 1]; minimum over the answer's tokens.
    """

    question: Question
    answer: str
    without_text: str
    gap: float

    @property
    def known_from_the_text(self) -> bool:
        """Return whether the answer is right with the text, and wrong without it."""
        right = self.question.answered_by
        return right(self.answer) and not right(self.without_text)


def surest(asked: Iterable[Asked]) -> Asked:
    """Return the element with the largest gap among those known from the text.

    Raises:
        ValueError: no element is known from the text.
    """
    known: Sequence[Asked] = [item for item in asked if item.known_from_the_text]
    if not known:
        raise ValueError(
            "the uncompressed model must answer a question from the text, but it answered none;"
            " try other questions"
        )
    return max(known, key=lambda item: item.gap)


CHOSEN = QUESTIONS[7]
"""The demo's question. A test checks that `surest` chooses it from the recorded answers."""
