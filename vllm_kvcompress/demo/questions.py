"""The demo's texts, its question and its ordinary request.

A model of 135M parameters cannot answer questions about the language reference itself. So the text
contains short notes, and the question asks for several of them: the answer's end is written after
the compression. The uncompressed model's answers alone chose the question: of those that it answers
right with the text and wrong without it, the one whose tokens are the surest.
``benchmarks/results/demo_question.json`` has the answers, the command and the commit.
"""

import re
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


CHOSEN = Question(
    (
        Note(
            "The old map is hidden behind the piano.",
            "Where is the old map hidden?",
            "behind the piano",
        ),
        Note(
            "The new teacher comes from Iceland.",
            "Where does the new teacher come from?",
            "Iceland",
        ),
        Note(
            "The front door is painted purple.",
            "What colour is the front door painted?",
            "purple",
        ),
        Note(
            "The keeper of the lighthouse is Tobias Finch.",
            "Who is the keeper of the lighthouse?",
            "Tobias Finch",
        ),
    )
)
"""The demo's question."""
NOTES = (
    "The spare key is under the flower pot.",
    "The captain of the Aurora is Helen Marsh.",
    "The password of the printer is marmalade.",
    "The office cat is called Pepper.",
    "The meeting on Friday is in the blue kitchen.",
    "The train to Lisbon leaves from platform seven.",
    "The winner of the chess game is Ingrid Holm.",
    "The secret ingredient of the soup is cinnamon.",
    *(note.text for note in CHOSEN.notes),
)
"""All notes of the text, most of which the question does not ask for."""


def noted_text(tokenizer: Any, num_tokens: int) -> str:
    """Return about `num_tokens` tokens: the start of `english`, with each note `TIMES` times.

    The notes take turns at evenly spaced paragraph ends, so each third of the text contains every
    note.

    Args:
        tokenizer: a Hugging Face tokenizer.

    Raises:
        ValueError: the notes alone have `num_tokens` tokens or more.
    """
    notes = NOTES * TIMES
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
