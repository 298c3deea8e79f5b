"""Built-in tasks: lengths, expected answers, groups and reproducibility of their prompts."""

import json
import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvcompress.compare.tasks import KNOWN, ORDINARY, TASKS, Item, build_items
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.serving.text import english


def words(text: str) -> int:
    """Return the number of words and punctuation marks: the tests' token count."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def prompt_words(item: Item) -> int:
    """Return the length of a prompt in `words`, with tools and tool calls as JSON."""
    calls = [call for message in item.messages for call in message.get("tool_calls", ())]
    parts = [json.dumps(each) for each in (*item.tools, *calls)]
    return sum(map(words, [*parts, *(message["content"] for message in item.messages)]))


def score(answers: Sequence[str], text: str) -> float:
    """Return the score of an output of a prompt with these expected answers."""
    item = Item(name="x", task="x", messages=(), answers=tuple(answers), max_tokens=1)
    return item.score(text)


def items(task: str, **changes: object) -> list[Item]:
    options = {"count": 5, "tokens": 1200, "seed": 3, "question": "last", "count_tokens": words}
    return build_items([task], **(options | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("task", KNOWN)
@pytest.mark.parametrize("question", ["last", "first"])
def test_a_prompt_fills_its_length_and_contains_its_answers(task: str, question: str) -> None:
    for item in items(task, question=question):
        user, begun = item.messages
        assert (user["role"], begun["role"]) == ("user", "assistant")
        size = words(user["content"]) + words(begun["content"])
        assert 0.8 * 1200 < size <= 1200
        assert item.answers
        assert item.max_tokens >= 2 * len(item.answers)
        for answer in item.answers:
            assert score([answer], user["content"]) == 1.0
        # Neither the question nor the beginning of the answer contains the answer.
        text = user["content"].split("\n\n")[1 if question == "last" else 2]
        outside = user["content"].replace(text, "") + begun["content"]
        assert score(item.answers, outside) == 0.0


@pytest.mark.parametrize("task", TASKS)
def test_prompts_depend_on_the_arguments_and_the_seed_only(task: str) -> None:
    assert items(task) == items(task)
    assert items(task) != items(task, seed=4)
    assert items(task, count=7)[:5] == items(task)
    assert len({item.name for item in items(task, count=20)}) == 20


@pytest.mark.parametrize("task", ORDINARY)
@pytest.mark.parametrize("question", ["last", "first"])
def test_an_ordinary_request_is_an_instruction_about_a_part_of_the_manual(
    task: str, question: str
) -> None:
    made = items(task, question=question, count=8)
    instructions, texts = set(), set()
    for item in made:
        (user,) = item.messages
        assert user["role"] == "user"
        assert 0.9 * 1200 < words(user["content"]) <= 1200
        assert item.answers == ()
        assert item.max_tokens >= 100
        parts = user["content"].split("\n\n")
        assert parts[0 if question == "last" else 1] == "This is a part of a manual."
        instructions.add(parts[-1 if question == "last" else 0])
        text = "\n\n".join(parts[1:-1] if question == "last" else parts[2:])
        assert text in english() * 2  # The text wraps around at the end of the manual.
        texts.add(text)
    assert len(texts) == len({item.group for item in made}) == 8
    assert len(instructions) > 1


def test_ordinary_requests_have_different_instructions() -> None:
    assert len(ORDINARY) >= 5
    instructions = {
        item.messages[0]["content"].split("\n\n")[-1] for t in ORDINARY for item in items(t)
    }
    assert len(instructions) > 10


def test_a_text_longer_than_the_manual_wraps_around() -> None:
    (item,) = items("summary", count=1, tokens=150_000)
    assert words(item.messages[0]["content"]) > 149_000


def test_only_prompts_of_one_group_share_a_text() -> None:
    made = items("niah-multikey-1", count=20, questions_per_text=4)
    assert [item.group for item in made] == [f"niah-multikey-1/{i // 4}" for i in range(20)]
    texts = [item.messages[0]["content"].rsplit("\n\n", 1)[0] for item in made]
    for (item, next_item), (text, next_text) in zip(pairwise(made), pairwise(texts), strict=True):
        assert (item.group == next_item.group) is (text == next_text)


def test_with_the_question_first_the_key_does_not_occur_after_the_text() -> None:
    for item in items("niah-multikey-2", question="first"):
        user, begun = item.messages
        key = re.match(r"What is the special number for (.+?) in", user["content"])
        assert key is not None
        assert key[1] not in user["content"].rsplit("\n\n", 1)[1] + begun["content"]


def test_variables_of_a_chain_are_assigned_in_order() -> None:
    for item in items("variable-tracking"):
        text = item.messages[0]["content"]
        positions = [text.index(f"VAR {name} = ") for name in item.answers]
        assert positions == sorted(positions)


def test_common_words_occur_thirty_times_and_others_three() -> None:
    (item,) = items("common-words", count=1, tokens=2000)
    listed = re.findall(r"^\d+\. (\w+)$", item.messages[0]["content"], re.MULTILINE)
    counts = {word: listed.count(word) for word in listed}
    assert {word for word, count in counts.items() if count == 30} == set(item.answers)
    assert set(counts.values()) == {30, 3}


@settings(max_examples=15, deadline=None, derandomize=True)
@given(task=st.sampled_from(sorted(TASKS)), tokens=st.integers(1200, 6000), seed=st.integers(0, 99))
def test_prompts_fit_any_length_and_seed(task: str, tokens: int, seed: int) -> None:
    for item in items(task, count=2, tokens=tokens, seed=seed):
        assert tokens - 120 < prompt_words(item) <= tokens


def test_unknown_tasks_and_too_short_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'niah-single'"):
        items("niah-singel")
    with pytest.raises(ConfigError, match=r"'common-words' needs prompts of at least \d+ tokens"):
        items("common-words", tokens=200)


@pytest.mark.parametrize(
    ("answers", "text", "share"),
    [
        (("123",), "It is 123.", 1.0),
        (("123",), "It is 41234.", 0.0),
        (("Mobeda", "zavitu"), "mobeda, and nothing else", 0.5),
        (("a.b",), "axb", 0.0),
        ((), "anything", 0.0),
        (("12",), "", 0.0),
    ],
)
def test_score_counts_whole_words(answers: tuple[str, ...], text: str, share: float) -> None:
    assert score(answers, text) == share
