"""Questions about facts in the demo's text, and which of them the demo asks.

The list was written before anything was run. `surest` chooses from what the full cache answers,
without any compressed answer: see ``benchmarks/demo_question.py``, which records both.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked after the text, and what an answer must contain to be right."""

    text: str
    fact: str

    def answered_by(self, answer: str) -> bool:
        """Whether `answer` has the fact in it, in upper or lower case."""
        return self.fact.lower() in answer.lower()


# In the order of the text's first 6,000 tokens, a fact each.
QUESTIONS = (
    Question("Which command line option requests optimization?", "-O"),
    Question('When is the value for the built-in variable "__debug__" determined?', "starts"),
    Question("Which exception is raised if the index is out of range?", "IndexError"),
    Question("Which method is called with user-defined objects for a subscription?", "__setitem__"),
    Question('What does the program that starts with "x = [0, 1]" print?', "[0, 2]"),
    Question("Which PEP is about Extended Iterable Unpacking?", "3132"),
    Question("How many times is the target of an augmented assignment evaluated?", "once"),
    Question("In which special attribute are annotations stored?", "__annotations__"),
    Question("Which PEP is about Syntax for Variable Annotations?", "526"),
    Question("Which PEP is about Type hints?", "484"),
    Question('Which module did the proposal about "Type hints" add?', "typing"),
    Question("In which version of Python were coroutines new?", "3.5"),
    Question('Since which version are "await" and "async" keywords?', "3.7"),
    Question('Which error is an "async for" outside of a coroutine function?', "SyntaxError"),
    Question("Which PEP is about Coroutines with async and await syntax?", "492"),
    Question("Which flag does a builtin class need to be a sequence?", "Py_TPFLAGS_SEQUENCE"),
    Question("Which flag does a builtin class need to be a mapping?", "Py_TPFLAGS_MAPPING"),
    Question("Which standard library classes are mappings?", "MappingProxyType"),
    Question('What is "__spam" in a class named "Ham" transformed to?', "_Ham__spam"),
    Question("How many characters make a transformed name extremely long?", "255"),
    Question('What does "dir()" convert the returned sequence to?', "list"),
    Question('Which class does "VerboseModule" inherit from?', "ModuleType"),
    Question('Since which version is the "__class__" module attribute writable?', "3.5"),
    Question('Which PEP is about "Module __getattr__ and __dir__"?', "562"),
    Question('Which PEP specifies that "__get__()" is callable with two arguments?', "252"),
)


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
    known: Sequence[Asked] = [one for one in asked if one.known_from_the_text]
    if not known:
        raise ValueError(
            "the full cache must answer a question from the text, got none; ask others"
        )
    return max(known, key=lambda one: one.gap)
