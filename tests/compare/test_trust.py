"""Trust tasks: the rules that a program checks, and the prompts that set them."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outcomes import outcome
from test_tasks import items, prompt_words
from vllm_kvcompress.compare.client import Cell
from vllm_kvcompress.compare.summary import summarise
from vllm_kvcompress.compare.tasks import TRUST, Item
from vllm_kvcompress.compare.tasks.rules import CHECKS, Rule


@pytest.mark.parametrize(
    ("name", "expected", "obeying", "breaking"),
    [
        ("lower case", (), ["all of it, 3 times"], ["Not all", "", " "]),
        ("no digit", (), ["three"], ["3", "x3y", ""]),
        ("begins", ("gladly",), ["Gladly, I", '"gladly" it is'], ["I gladly do", "", "gladlyness"]),
        ("ends", ("indeed",), ["So it is, indeed.", "INDEED"], ["indeed it is", "", "indeed so"]),
        ("lines", (3,), ["a\nb\n\nc\n"], ["a b c", "a\nb", "a\nb\nc\nd", ""]),
        ("word not used", ("value",), ["a number"], ["Its Values are", "the value", ""]),
        ("secret kept", ("ovenriver",), ["No.", "an oven, a", ""], ["Oven-River!", "OVENRIVER"]),
        ("parses", (), ['{"a": 1}', '```json\n{"a": 1}\n```'], ['Here: {"a": 1}', "[1]", "{", ""]),
        ("keys", ("a", "b"), ['{"b": 1, "a": 2}'], ['{"a": 1}', '{"a": 1, "b": 2, "c": 3}', "{}"]),
        ("values", (("a", "12"),), ['{"a": 12}', '{"a": "12"}'], ['{"a": 13}', '{"b": 12}', "12"]),
    ],
)
def test_a_rule_accepts_obeying_and_rejects_breaking_answers(
    name: str, expected: tuple[Any, ...], obeying: list[str], breaking: list[str]
) -> None:
    rule = Rule(name, expected)
    assert [rule.obeyed(answer) for answer in obeying] == [True] * len(obeying)
    assert [rule.obeyed(answer) for answer in breaking] == [False] * len(breaking)


@pytest.mark.parametrize(
    "written",
    [
        '<tool_call>\n{"name": "f", "arguments": {"a": "X", "b": 2}}\n</tool_call>',
        '{"name": "f", "parameters": {"b": "2", "a": "x"}}',
        '[TOOL_CALLS][{"name": "f", "arguments": "{\\"a\\": \\"x\\", \\"b\\": \\"2\\"}"}]',
        'I call it {now}: {"name": "f", "arguments": {"a": "x", "b": "2"}} and wait.',
    ],
)
def test_tool_calls_are_parsed_in_every_model_format(written: str) -> None:
    right_tool, right_arguments = CHECKS["right tool"], CHECKS["right arguments"]
    assert right_tool(written, "f")
    assert right_arguments(written, "f", ("a", "x"), ("b", "2"))
    for other in ((("a", "y"), ("b", "2")), (("a", "x"),)):
        assert not right_arguments(written, "f", *other)
    assert not right_tool(written, "g")
    assert not right_tool(written + ' {"name": "g", "arguments": {}}', "f")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text('{}[]":,nameargumts \\1x'))
def test_any_answer_gets_a_score(answer: str) -> None:
    for task in TRUST:
        for item in items(task, count=1):
            assert 0 <= item.score(answer) <= 1


@pytest.mark.parametrize("task", TRUST)
@pytest.mark.parametrize("question", ["last", "first"])
def test_a_trust_prompt_fills_its_length(task: str, question: str) -> None:
    made = items(task, question=question, count=8)
    assert len({item.name for item in made}) == 8
    for item in made:
        assert item.known
        assert len({rule.name for rule in item.rules}) == len(item.rules)
        longest = max(item.messages, key=lambda message: len(message["content"]))
        assert longest["role"] == ("tool" if task == "tool-call" else "user")
        assert 0.8 * 1200 < prompt_words(item) <= 1200


def system(item: Item) -> str:
    assert item.messages[0]["role"] == "system"
    return str(item.messages[0]["content"])


def test_two_rules_are_in_the_system_prompt_in_both_orders() -> None:
    made = items("instructions", count=40)
    wordings: dict[str, set[str]] = {}
    for item, swapped in zip(made[::2], made[1::2], strict=True):
        assert item.rules == swapped.rules[::-1]
        assert item.messages[1] == swapped.messages[1]
        first, second = re.split(r" The (?:first|second) rule: ", system(item))[1:]
        assert system(swapped).endswith(f"The first rule: {second} The second rule: {first}")
        for rule, wording in zip(item.rules, (first, second), strict=True):
            wordings.setdefault(rule.name, set()).add(wording)
        for word in re.findall(r'word "(\w+)"', first + second):
            assert any((word,) == rule.expected for rule in item.rules)
    assert len(wordings) == 6


def test_the_secret_occurs_in_the_system_prompt_only() -> None:
    for item in items("secret", count=8):
        (rule,) = item.rules
        assert not rule.obeyed(system(item))
        assert rule.obeyed(item.messages[1]["content"])


def test_the_values_of_the_json_object_are_in_the_text() -> None:
    for item in items("json", count=6):
        keys = next(rule.expected for rule in item.rules if rule.name == "keys")
        text = item.messages[1]["content"]
        found = {key: re.search(rf"for {key} is (\d+)\.", text) for key in keys}
        right = {key: value[1] for key, value in found.items() if value}
        assert item.score(json.dumps(right)) == 1
        wrong = json.dumps(right | {keys[0]: right[keys[1]]})
        assert item.obeyed(wrong) == {"parses": True, "keys": True, "values": False}


def test_every_tool_is_needed_by_some_request() -> None:
    needed = set()
    for item in items("tool-call", count=5):
        functions = {tool["function"]["name"]: tool["function"] for tool in item.tools}
        (_, _, called, result, _, request) = item.messages
        assert called["tool_calls"][0]["id"] == result["tool_call_id"]
        assert json.loads(called["tool_calls"][0]["function"]["arguments"])
        rule = next(rule for rule in item.rules if rule.name == "right arguments")
        function, *pairs = rule.expected
        assert functions[function]["parameters"]["required"] == [key for key, _ in pairs]
        assert all(value in request["content"] for _, value in pairs)
        call = {"name": function, "arguments": dict(pairs)}
        assert item.score(f"<tool_call>{json.dumps(call)}</tool_call>") == 1
        needed.add(function)
    assert needed == set(functions)


def test_a_second_turn_asks_for_another_number() -> None:
    for item in items("two-turns", count=5):
        first_question, first_answer, _, begun = item.messages
        assert item.turns == (1,)
        assert first_answer["content"].rstrip(".").split()[-1] in first_question["content"]
        assert item.score(first_question["content"]) == 1
        assert item.score(first_answer["content"] + begun["content"]) == 0


CELL = Cell(method="snapkv", budget=0.2)


def obeyed(*rules: dict[str, tuple[bool, bool]], **more: Any) -> dict[str, Any]:
    made = [outcome(f"{n}", CELL, task="t", rules=each, **more) for n, each in enumerate(rules)]
    (found,) = summarise([CELL], made, by="score", none_compressed=False)
    return found.obeyed


def test_only_rules_that_the_full_cache_obeys_count() -> None:
    found = obeyed(
        {"a": (True, True), "b": (False, True)},
        {"a": (True, False), "b": (True, True)},
        {"a": (True, True), "b": (False, False)},
        {"a": (True, False), "b": (True, False)},
    )
    figures = {name: (each.mean, each.prompts) for name, each in found.items()}
    assert figures == {"t": (0.75, 3), "t: a": (1.0, 2), "t: b": (0.5, 2)}
    assert obeyed({"a": (True, False)}) == {}
    assert obeyed({}) == {}
