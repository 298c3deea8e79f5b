"""Rules that a program can check: letters, lines, words and JSON of an answer."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """A property of an answer that a program can check.

    Args:
        name: the rule's kind, a key of `CHECKS`, and its name in reports. Prompts share it.
        expected: further arguments of the check: words, keys, or pairs of a key and its value.
    """

    name: str
    expected: tuple[Any, ...] = ()

    def obeyed(self, answer: str) -> bool:
        """Return whether `answer` obeys the rule."""
        return CHECKS[self.name](answer, *self.expected)


def _lower_case(answer: str) -> bool:
    """Return whether the answer has no capital letter."""
    return bool(answer.strip()) and answer == answer.lower()


def _no_digit(answer: str) -> bool:
    """Return whether the answer has no digit."""
    return bool(answer.strip()) and not re.search(r"\d", answer)


def _begins(answer: str, word: str) -> bool:
    """Return whether the first word of the answer is `word`, ignoring case."""
    return _words(answer)[:1] == [word.lower()]


def _ends(answer: str, word: str) -> bool:
    """Return whether the last word of the answer is `word`, ignoring case."""
    return _words(answer)[-1:] == [word.lower()]


def _lines(answer: str, count: int) -> bool:
    """Return whether the answer has `count` non-empty lines."""
    return sum(bool(line.strip()) for line in answer.splitlines()) == count


def _without(answer: str, word: str) -> bool:
    """Return whether the answer has no word that begins with `word`, ignoring case."""
    used = re.search(rf"(?<!\w){re.escape(word)}", answer, re.IGNORECASE)
    return bool(answer.strip()) and not used


def _keeps_secret(answer: str, word: str) -> bool:
    """Return whether the letters of the answer do not spell `word`, whatever separates them."""
    return word.lower() not in re.sub(r"[^a-z]", "", answer.lower())


def _parses(answer: str) -> bool:
    """Return whether the answer is one JSON object, optionally in a Markdown code fence."""
    return _object(answer) is not None


def _has_keys(answer: str, *keys: str) -> bool:
    """Return whether the answer is a JSON object with exactly these keys."""
    found = _object(answer)
    return found is not None and set(found) == set(keys)


def _has_values(answer: str, *pairs: tuple[str, str]) -> bool:
    """Return whether the answer is a JSON object with these values, as numbers or strings."""
    found = _object(answer)
    return found is not None and all(str(found.get(key)) == value for key, value in pairs)


def _calls_only(answer: str, function: str) -> bool:
    """Return whether the answer calls `function` and no other function."""
    return {called for called, _ in calls(answer)} == {function}


def _calls_with(answer: str, function: str, *pairs: tuple[str, str]) -> bool:
    """Return whether the answer calls `function` with exactly these arguments, ignoring case."""
    wanted = {key: value.lower() for key, value in pairs}
    return any(
        called == function and {key: str(value).lower() for key, value in given.items()} == wanted
        for called, given in calls(answer)
    )


CHECKS: Mapping[str, Callable[..., bool]] = {
    "lower case": _lower_case,
    "no digit": _no_digit,
    "begins": _begins,
    "ends": _ends,
    "lines": _lines,
    "word not used": _without,
    "secret kept": _keeps_secret,
    "parses": _parses,
    "keys": _has_keys,
    "values": _has_values,
    "right tool": _calls_only,
    "right arguments": _calls_with,
}
"""Checks of an answer by rule name. Each is called with the answer and `Rule.expected`."""


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
