"""The demo's texts, its question and its ordinary request.

A model of 135M parameters cannot answer questions about the language reference itself. So the text
contains short notes, and the question asks for several of them: the answer's end is written after
the compression. `surest` chooses the question by the answers of the uncompressed model alone.
``benchmarks/results/demo_question.json`` has the answers of both models, and the command.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_kvcompress.serving.text import english

UNCOMPRESSED = 33
"""Output tokens before the compression: one of the prefill, and the default look-ahead."""
TIMES = 3
"""Number of times that the text states each note."""
REQUEST = "Summarise the text above in your own words, point by point."
"""An ordinary request: it needs all of the text, and the text does not contain its output.

Chosen by the uncompressed model's output alone. With most other instructions of the quality tasks,
the demo model repeats the same words again and again.
"""
INSTRUCTION = "Answer these questions, each in a full sentence:"
ASKED_NOTES = 4
"""Notes per question. Most answers to fewer end before the compression."""


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence in the text, a question about it, and the fact that a right answer contains."""

    text: str
    question: str
    fact: str


@dataclass(frozen=True, slots=True)
class Question:
    """The numbered questions about `notes` that end a prompt."""

    notes: tuple[Note, ...]

    @property
    def asked(self) -> str:
        """Return the questions as they appear in the prompt."""
        lines = (f"{number}. {note.question}" for number, note in enumerate(self.notes, 1))
        return "\n".join([INSTRUCTION, *lines])

    def named(self, answer: str) -> list[str]:
        """Return the facts that `answer` contains, ignoring case."""
        return [note.fact for note in self.notes if note.fact.lower() in answer.lower()]


NOTES = (
    Note(
        "The spare key is under the flower pot.", "Where is the spare key?", "under the flower pot"
    ),
    Note(
        "The captain of the Aurora is Helen Marsh.",
        "Who is the captain of the Aurora?",
        "Helen Marsh",
    ),
    Note(
        "The password of the printer is marmalade.",
        "What is the password of the printer?",
        "marmalade",
    ),
    Note("The office cat is called Pepper.", "What is the office cat called?", "Pepper"),
    Note(
        "The meeting on Friday is in the blue kitchen.",
        "Where is the meeting on Friday?",
        "blue kitchen",
    ),
    Note(
        "The train to Lisbon leaves from platform seven.",
        "Where does the train to Lisbon leave from?",
        "platform seven",
    ),
    Note(
        "The winner of the chess game is Ingrid Holm.",
        "Who is the winner of the chess game?",
        "Ingrid Holm",
    ),
    Note(
        "The secret ingredient of the soup is cinnamon.",
        "What is the secret ingredient of the soup?",
        "cinnamon",
    ),
    Note(
        "The old map is hidden behind the piano.",
        "Where is the old map hidden?",
        "behind the piano",
    ),
    Note("The new teacher comes from Iceland.", "Where does the new teacher come from?", "Iceland"),
    Note("The front door is painted purple.", "What colour is the front door painted?", "purple"),
    Note(
        "The keeper of the lighthouse is Tobias Finch.",
        "Who is the keeper of the lighthouse?",
        "Tobias Finch",
    ),
)


QUESTIONS = tuple(
    Question(tuple(NOTES[(first + at) % len(NOTES)] for at in range(ASKED_NOTES)))
    for first in range(len(NOTES))
)
"""One question for each note that can be the first."""


def noted_text(tokenizer: Any, num_tokens: int) -> str:
    """Return about `num_tokens` tokens: the start of `english`, with each note `TIMES` times.

    The notes take turns at evenly spaced paragraph ends, so each third of the text contains every
    note.

    Args:
        tokenizer: a Hugging Face tokenizer.

    Raises:
        ValueError: the notes alone have `num_tokens` tokens or more.
    """
    notes = [note.text for note in NOTES] * TIMES
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


def sections(tokenizer: Any, num_tokens: int, count: int) -> list[str]:
    """Return `count` parts of `english`: whole paragraphs of up to `num_tokens` tokens each."""
    text, start, found = english(), 0, []
    for _ in range(count):
        ids = tokenizer.encode(text[start : start + num_tokens * 12], add_special_tokens=False)
        part: str = tokenizer.decode(ids[:num_tokens])
        part = part[: part.rfind("\n\n")]
        found.append(part)
        start += len(part) + 2
    return found


@dataclass(frozen=True, slots=True)
class Asked:
    """The uncompressed model's answers to a question.

    Args:
        answer: the answer to the question after the text.
        late: the part of it after the first `UNCOMPRESSED` tokens.
        without_text: the answer to the question alone.
        gap: the difference between the probabilities of the chosen token and of the runner-up, in
            [0, 1]; minimum over the answer's tokens.
    """

    question: Question
    answer: str
    late: str
    without_text: str
    gap: float

    @property
    def known_from_the_text(self) -> bool:
        """Return whether all facts are right with the text, the last one late, and it is wrong
        without the text."""
        named, last = self.question.named, self.question.notes[-1].fact
        return (
            len(named(self.answer)) == len(self.question.notes)
            and last in named(self.late)
            and last not in named(self.without_text)
        )


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


CHOSEN = QUESTIONS[8]
"""The demo's question. A test checks that `surest` chooses it from the recorded answers."""
