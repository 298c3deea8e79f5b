"""Built-in tasks: what a prompt asks is in its text, once, at any length and for any seed."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvcompress.compare.tasks import KNOWN, ORDINARY, TASKS, Item, build_items, score
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.serving.text import english


def words(text: str) -> int:
    """A tokenizer for tests: words and signs."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def items(task: str, **changes: object) -> list[Item]:
    asked = {"count": 5, "tokens": 1200, "seed": 3, "question": "last", "count_tokens": words}
    return build_items([task], **(asked | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("task", KNOWN)
@pytest.mark.parametrize("question", ["last", "first"])
def test_a_prompt_fills_its_length_and_holds_its_answers(task: str, question: str) -> None:
    for item in items(task, question=question):
        user, begun = item.messages
        assert (user["role"], begun["role"]) == ("user", "assistant")
        size = words(user["content"]) + words(begun["content"])
        assert 0.8 * 1200 < size <= 1200
        assert item.answers
        assert item.max_tokens >= 2 * len(item.answers)
        for answer in item.answers:
            assert score([answer], user["content"]) == 1.0
        # the answer is in the text alone: neither the question nor how it begins tells it
        text = user["content"].split("\n\n")[1 if question == "last" else 2]
        outside = user["content"].replace(text, "") + begun["content"]
        assert score(item.answers, outside) == 0.0


@pytest.mark.parametrize("task", TASKS)
def test_the_same_arguments_give_the_same_prompts_and_a_seed_gives_others(task: str) -> None:
    assert items(task) == items(task)
    assert items(task) != items(task, seed=4)
    assert items(task, count=7)[:5] == items(task)
    assert len({item.name for item in items(task, count=20)}) == 20


@pytest.mark.parametrize("task", ORDINARY)
@pytest.mark.parametrize("question", ["last", "first"])
def test_an_ordinary_request_is_an_instruction_over_a_part_of_the_manual(
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
        assert text in english() * 2  # where the manual ends, it begins again
        texts.add(text)
    assert len(texts) == len({item.group for item in made}) == 8
    assert len(instructions) > 1


def test_ordinary_requests_ask_for_different_things() -> None:
    assert len(ORDINARY) >= 5
    asked = {item.messages[0]["content"].split("\n\n")[-1] for t in ORDINARY for item in items(t)}
    assert len(asked) > 10


def test_a_text_that_reaches_the_manuals_end_goes_on_from_its_beginning() -> None:
    (item,) = items("summary", count=1, tokens=150_000)
    assert words(item.messages[0]["content"]) > 149_000


def test_prompts_of_a_group_share_their_text_and_others_do_not() -> None:
    made = items("niah-multikey-1", count=20, questions_per_text=4)
    assert [item.group for item in made] == [f"niah-multikey-1/{i // 4}" for i in range(20)]
    texts = [item.messages[0]["content"].rsplit("\n\n", 1)[0] for item in made]
    for (one, other), (a, b) in zip(pairwise(made), pairwise(texts), strict=True):
        assert (one.group == other.group) is (a == b)


def test_with_the_question_first_nothing_behind_the_text_names_what_is_asked() -> None:
    for item in items("niah-multikey-2", question="first"):
        user, begun = item.messages
        key = re.match(r"What is the special number for (.+?) in", user["content"])
        assert key is not None
        assert key[1] not in user["content"].rsplit("\n\n", 1)[1] + begun["content"]


def test_variables_of_a_chain_stand_in_their_order() -> None:
    for item in items("variable-tracking"):
        text = item.messages[0]["content"]
        places = [text.index(f"VAR {name} = ") for name in item.answers]
        assert places == sorted(places)


def test_common_words_stand_thirty_times_and_the_others_three() -> None:
    (item,) = items("common-words", count=1, tokens=2000)
    listed = re.findall(r"^\d+\. (\w+)$", item.messages[0]["content"], re.MULTILINE)
    counts = {word: listed.count(word) for word in listed}
    assert {word for word, count in counts.items() if count == 30} == set(item.answers)
    assert set(counts.values()) == {30, 3}


@settings(max_examples=15, deadline=None, derandomize=True)
@given(task=st.sampled_from(sorted(TASKS)), tokens=st.integers(1200, 6000), seed=st.integers(0, 99))
def test_any_length_and_seed(task: str, tokens: int, seed: int) -> None:
    for item in items(task, count=2, tokens=tokens, seed=seed):
        size = sum(words(message["content"]) for message in item.messages)
        assert tokens - 120 < size <= tokens


def test_an_unknown_task_and_a_length_that_is_too_short_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'niah-single'"):
        items("niah-singel")
    with pytest.raises(ConfigError, match=r"'common-words' needs prompts of at least \d+ tokens"):
        items("common-words", tokens=200)


@pytest.mark.parametrize(
    ("answers", "text", "named"),
    [
        (("123",), "It is 123.", 1.0),
        (("123",), "It is 41234.", 0.0),
        (("Mobeda", "zavitu"), "mobeda, and nothing else", 0.5),
        (("a.b",), "axb", 0.0),
        ((), "anything", 0.0),
        (("12",), "", 0.0),
    ],
)
def test_score_counts_whole_words(answers: tuple[str, ...], text: str, named: float) -> None:
    assert score(answers, text) == named
