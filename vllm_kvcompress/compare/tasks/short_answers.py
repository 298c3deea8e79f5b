"""SQuAD's measures of short answers (Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1)."""

import re
import string
from collections import Counter
from collections.abc import Sequence

_MARK = re.compile(r"\banswer\s*:", re.IGNORECASE)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def final_answer(text: str) -> str:
    """Return the line after the last "Answer:", or the whole text if it has none."""
    marks = list(_MARK.finditer(text))
    return text[marks[-1].end() :].strip().partition("\n")[0] if marks else text


def normalised(answer: str) -> list[str]:
    """Return the words of an answer in lower case, without articles and punctuation."""
    words = answer.lower().translate(_PUNCTUATION).split()
    return [word for word in words if word not in ("a", "an", "the")]


def exact_match(answer: str, expected: str) -> bool:
    """Return whether both have the same normalised words."""
    return normalised(answer) == normalised(expected)


def token_f1(answer: str, expected: str) -> float:
    """Return the harmonic mean of precision and recall over normalised words.

    If one side has no words, it is 1 if the other has none either, and 0 otherwise.
    """
    found, wanted = normalised(answer), normalised(expected)
    if not found or not wanted:
        return float(found == wanted)
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted))


def best_f1(answers: Sequence[str], text: str) -> float:
    """Return the largest `token_f1` of the final answer in `text`; 0 without `answers`."""
    answer = final_answer(text)
    return max((token_f1(answer, expected) for expected in answers), default=0.0)
