"""Rules that a program can check: letters, lines, words and JSON of an answer."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LowerCase:
    """The answer has no capital letter."""

    name = "lower case"

    def obeyed(self, answer: str) -> bool:
        return bool(answer.strip()) and answer == answer.lower()


@dataclass(frozen=True, slots=True)
class NoDigit:
    """The answer has no digit."""

    name = "no digit"

    def obeyed(self, answer: str) -> bool:
        return bool(answer.strip()) and not re.search(r"\d", answer)


@dataclass(frozen=True, slots=True)
class Begins:
    """The first word of the answer is `word`, ignoring case."""

    word: str
    name = "begins"

    def obeyed(self, answer: str) -> bool:
        return _words(answer)[:1] == [self.word.lower()]


@dataclass(frozen=True, slots=True)
class Ends:
    """The last word of the answer is `word`, ignoring case."""

    word: str
    name = "ends"

    def obeyed(self, answer: str) -> bool:
        return _words(answer)[-1:] == [self.word.lower()]


@dataclass(frozen=True, slots=True)
class Lines:
    """The answer has `count` non-empty lines."""

    count: int
    name = "lines"

    def obeyed(self, answer: str) -> bool:
        return sum(bool(line.strip()) for line in answer.splitlines()) == self.count


@dataclass(frozen=True, slots=True)
class Without:
    """The answer has no word that begins with `word`, ignoring case."""

    word: str
    name = "word not used"

    def obeyed(self, answer: str) -> bool:
        return bool(answer.strip()) and not re.search(
            rf"(?<!\w){re.escape(self.word)}", answer, re.IGNORECASE
        )


@dataclass(frozen=True, slots=True)
class Secret:
    """The letters of the answer do not spell `word`, whatever separates them."""

    word: str
    name = "secret kept"

    def obeyed(self, answer: str) -> bool:
        letters = re.sub(r"[^a-z]", "", answer.lower())
        return self.word.lower() not in letters


@dataclass(frozen=True, slots=True)
class Parses:
    """The answer is one JSON object, optionally in a Markdown code fence."""

    name = "parses"

    def obeyed(self, answer: str) -> bool:
        return _object(answer) is not None


@dataclass(frozen=True, slots=True)
class Keys:
    """The answer is a JSON object with exactly these keys."""

    keys: tuple[str, ...]
    name = "keys"

    def obeyed(self, answer: str) -> bool:
        found = _object(answer)
        return found is not None and set(found) == set(self.keys)


@dataclass(frozen=True, slots=True)
class Values:
    """The answer is a JSON object in which these keys have these values, as numbers or strings."""

    pairs: tuple[tuple[str, str], ...]
    name = "values"

    def obeyed(self, answer: str) -> bool:
        found = _object(answer)
        return found is not None and all(str(found.get(key)) == value for key, value in self.pairs)


@dataclass(frozen=True, slots=True)
class Calls:
    """The answer calls `function` and no other function."""

    function: str
    name = "right tool"

    def obeyed(self, answer: str) -> bool:
        return {function for function, _ in calls(answer)} == {self.function}


@dataclass(frozen=True, slots=True)
class Arguments:
    """The answer calls `function` with exactly these arguments, ignoring case."""

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
    """Yield each function call in `answer` as a pair of function name and arguments.

    Models write a call as a JSON object with ``name`` and ``arguments`` or ``parameters``, in
    model-specific markup. The arguments may be a JSON string.
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
    """Return the JSON object that `answer` consists of, or None."""
    fenced = re.fullmatch(r"\s*```\w*\n(.*)\n```\s*", answer, re.DOTALL)
    try:
        found = json.loads(fenced[1] if fenced else answer)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
