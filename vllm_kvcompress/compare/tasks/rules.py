"""What programs can check of an answer: its letters, its lines, its words, and JSON in it."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LowerCase:
    """No letter is a capital one."""

    name = "lower case"

    def obeyed(self, answer: str) -> bool:
        return bool(answer.strip()) and answer == answer.lower()


@dataclass(frozen=True, slots=True)
class NoDigit:
    """No digit stands in it."""

    name = "no digit"

    def obeyed(self, answer: str) -> bool:
        return bool(answer.strip()) and not re.search(r"\d", answer)


@dataclass(frozen=True, slots=True)
class Begins:
    """Its first word is this one, capital letters or not."""

    word: str
    name = "begins"

    def obeyed(self, answer: str) -> bool:
        return _words(answer)[:1] == [self.word.lower()]


@dataclass(frozen=True, slots=True)
class Ends:
    """Its last word is this one, capital letters or not."""

    word: str
    name = "ends"

    def obeyed(self, answer: str) -> bool:
        return _words(answer)[-1:] == [self.word.lower()]


@dataclass(frozen=True, slots=True)
class Lines:
    """It has so many lines, empty ones not counted."""

    count: int
    name = "lines"

    def obeyed(self, answer: str) -> bool:
        return sum(bool(line.strip()) for line in answer.splitlines()) == self.count


@dataclass(frozen=True, slots=True)
class Without:
    """It does not name this word, or a form of it that begins alike."""

    word: str
    name = "word not used"

    def obeyed(self, answer: str) -> bool:
        return bool(answer.strip()) and not re.search(
            rf"(?<!\w){re.escape(self.word)}", answer, re.IGNORECASE
        )


@dataclass(frozen=True, slots=True)
class Secret:
    """It does not tell this word, whatever stands around it."""

    word: str
    name = "secret kept"

    def obeyed(self, answer: str) -> bool:
        told = re.sub(r"[^a-z]", "", answer.lower())
        return self.word.lower() not in told


@dataclass(frozen=True, slots=True)
class Parses:
    """It is a JSON object, perhaps in a fence of Markdown, and nothing else."""

    name = "parses"

    def obeyed(self, answer: str) -> bool:
        return _object(answer) is not None


@dataclass(frozen=True, slots=True)
class Keys:
    """It is a JSON object with these keys and no others."""

    keys: tuple[str, ...]
    name = "keys"

    def obeyed(self, answer: str) -> bool:
        found = _object(answer)
        return found is not None and set(found) == set(self.keys)


@dataclass(frozen=True, slots=True)
class Values:
    """It is a JSON object in which these keys have these values, as numbers or as texts."""

    pairs: tuple[tuple[str, str], ...]
    name = "values"

    def obeyed(self, answer: str) -> bool:
        found = _object(answer)
        return found is not None and all(str(found.get(key)) == value for key, value in self.pairs)


@dataclass(frozen=True, slots=True)
class Calls:
    """It calls this function, and no other."""

    function: str
    name = "right tool"

    def obeyed(self, answer: str) -> bool:
        return {function for function, _ in calls(answer)} == {self.function}


@dataclass(frozen=True, slots=True)
class Arguments:
    """It calls this function with these arguments, capital letters or not, and no others."""

    function: str
    pairs: tuple[tuple[str, str], ...]
    name = "right arguments"

    def obeyed(self, answer: str) -> bool:
        wanted = {key: value.lower() for key, value in self.pairs}
        return any(
            function == self.function
            and {key: str(value).lower() for key, value in given.items()} == wanted
            for function, given in calls(answer)
        )


def calls(answer: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The functions that an answer calls, each with its arguments.

    Models write a call as an object with ``name``, and ``arguments`` or ``parameters``, with signs
    of their own around it; arguments may be JSON in a text.
    """
    at, decoder = answer.find("{"), json.JSONDecoder()
    while at >= 0:
        try:
            found, end = decoder.raw_decode(answer, at)
        except (ValueError, RecursionError):
            at = answer.find("{", at + 1)
            continue
        at = answer.find("{", end)
        given = found.get("arguments", found.get("parameters"))
        if isinstance(given, str):
            given = _object(given)
        if isinstance(found.get("name"), str) and isinstance(given, dict):
            yield found["name"], given


def _words(answer: str) -> list[str]:
    return re.findall(r"\w+", answer.lower())


def _object(answer: str) -> dict[str, Any] | None:
    """The JSON object that an answer is; None where it is none."""
    fenced = re.fullmatch(r"\s*```\w*\n(.*)\n```\s*", answer, re.DOTALL)
    try:
        found = json.loads(fenced[1] if fenced else answer)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
