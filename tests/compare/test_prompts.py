"""Reading prompts from a JSONL file, and the errors for invalid lines."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvcompress.compare.prompts import keys, read_prompts
from vllm_kvcompress.errors import ConfigError


def read(tmp_path, *lines):
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return read_prompts(path, max_tokens=64)


def test_a_line_has_messages_or_a_prompt(tmp_path):
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who?"}]
    lines = [{"messages": chat, "model": "gpt", "temperature": 0.7, "max_completion_tokens": 9}]
    lines += ["", {"prompt": "Where?", "answer": "Here"}]
    lines += [{"messages": chat, "answers": ["a", "b"], "max_tokens": 3}]
    first, second, third = read(tmp_path, *lines)
    assert first.messages == tuple(chat)
    assert [i.max_tokens for i in (first, second, third)] == [9, 64, 3]
    assert [i.answers for i in (first, second, third)] == [(), ("Here",), ("a", "b")]
    assert second.messages == ({"role": "user", "content": "Where?"},)
    assert second.name == "prompts/3"  # the line number
    assert {i.task for i in (first, second, third)} == {"prompts"}


def test_messages_with_tool_calls_are_accepted(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = [
        {"role": "user", "content": "Which?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "that one"},
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    bare, with_tools = read(
        tmp_path, {"messages": chat}, {"messages": chat, "tools": [tool], "tool_choice": "auto"}
    )
    assert (bare.messages, bare.tools) == (tuple(chat), ())
    assert (with_tools.messages, with_tools.tools) == (tuple(chat), (tool,))
    assert len({*keys([bare, with_tools])}) == 2


RULER = {"index": 3, "input": "Text. What?", "outputs": ["8231", "77"], "length": 4012}
LONG_BENCH = {"input": "Who?", "context": "Text.", "answers": ["a", "b"], "all_classes": None}


def user(content):
    return {"role": "user", "content": content}


def test_a_line_of_ruler_continues_the_answer_prefix(tmp_path):
    old, new, none = read(
        tmp_path, RULER, {**RULER, "answer_prefix": " It is "}, {**RULER, "answer_prefix": ""}
    )
    assert old.messages == none.messages == (user("Text. What?"),)
    assert new.messages == (user("Text. What?"), {"role": "assistant", "content": "It is"})
    assert {(i.answers, i.match, i.max_tokens) for i in (old, new)} == {(("8231", "77"), "all", 64)}


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({**LONG_BENCH, "dataset": "hotpotqa"}, "Text.\n\nWho?"),
        ({**LONG_BENCH, "input": ""}, "Text."),
        ({"context": "Text.\n", "question": "Who?", "input": "-", "answer": ["a", "b"]},
         "Text.\nWho?"),
        ({"context": "Text.", "question": " Who?", "answers": {"text": ["a", "b"]}}, "Text. Who?"),
    ],
)  # fmt: skip
def test_a_question_follows_its_context(tmp_path, fields, content):
    (item,) = read(tmp_path, {**fields, "max_new_tokens": 32, "answer_prefix": "He"})
    assert item.messages == (user(content), {"role": "assistant", "content": "He"})
    assert (item.answers, item.match, item.max_tokens) == (("a", "b"), "any", 32)
    assert item.task == fields.get("dataset", "prompts")


@pytest.mark.parametrize("folder", ["data", "vt", "qa_2"])
@pytest.mark.parametrize(
    ("line", "match", "matches_in_a_folder"),
    [
        (RULER, "all", {"qa_2": "any"}),
        (RULER | {"task": "qa_1"}, "any", {}),
        (RULER | {"task": "cwe"}, "all", {}),
        (RULER | {"match": "f1"}, "f1", {}),
        (RULER | {"task": "ruler_qa_squad"}, "any", {}),
        (LONG_BENCH | {"task": "ruler_vt"}, "all", {}),
        (LONG_BENCH, "any", {"vt": "all"}),
        (LONG_BENCH | {"task": "niah_multikey_3"}, "all", {}),
        (LONG_BENCH | {"dataset": "squad"}, "any", {}),
        ({"prompt": "a", "answer": "b"}, "words", {}),
        ({"prompt": "a", "answer": "b", "match": "all"}, "all", {}),
        ({"turns": ["a", {"content": "b", "answer": "c"}]}, "words", {}),
    ],
)
def test_answers_match_as_the_task_of_the_line_or_folder_requires(
    tmp_path, line, match, matches_in_a_folder, folder
):
    (tmp_path / folder).mkdir()
    (item,) = read(tmp_path / folder, line)
    assert item.match == matches_in_a_folder.get(folder, match)
    assert item.task == (line.get("task") or line.get("dataset") or "prompts")


def test_a_files_own_name_tells_the_task(tmp_path):
    path = tmp_path / "ruler_qa_hotpot-4096.jsonl"
    path.write_text(json.dumps(RULER))
    (item,) = read_prompts(path, max_tokens=64)
    assert item.match == "any"


@pytest.mark.parametrize(
    "context",
    [
        [["Title", ["One. ", "Two."]], ["Other", ["Three."]]],
        {"title": ["Title", "Other"], "sentences": [["One. ", "Two."], ["Three."]]},
        ["Title\nOne. Two.", "Other\nThree."],
    ],
)
def test_paragraphs_become_one_context(tmp_path, context):
    """Lines of HotpotQA, as its authors and as Hugging Face write them."""
    (item,) = read(tmp_path, {"question": "Who?", "answer": 4, "context": context, "level": "hard"})
    assert item.messages == (user("Title\nOne. Two.\n\nOther\nThree.\n\nWho?"),)
    assert (item.answers, item.match) == (("4",), "any")


def test_a_list_of_prompts_is_a_chat_in_turns(tmp_path):
    """MT-Bench on Hugging Face."""
    (item,) = read(tmp_path, {"prompt": ["One?", "Two?"], "category": "writing", "reference": []})
    assert (item.messages, item.turns) == ((user("One?"), user("Two?")), (1,))


def test_texts_are_not_task_names(tmp_path):
    for task in ("a secret", "", 7, None, "x" * 41, "[bold]"):
        (item,) = read(tmp_path, {"prompt": "a", "task": task})
        assert item.task == "prompts"


def test_turns_are_the_users_messages(tmp_path):
    bench = {"question_id": 81, "category": "writing", "turns": ["One?", "Two?"], "reference": []}
    first = {"content": "One?", "role": "user", "answer": "not scored"}
    answered, outside, mt_bench, chat, single = read(
        tmp_path,
        {"turns": [first, {"content": "Two?", "answers": ["a", "b"]}], "max_tokens": 9},
        {"turns": ["One?", "Two?"], "answer": "c"},
        bench,
        {"messages": [user("One?"), user("Two?")]},
        {"turns": ["One?"]},
    )
    assert answered.messages == mt_bench.messages == (user("One?"), user("Two?"))
    assert [i.turns for i in (answered, mt_bench, chat, single)] == [(1,), (1,), (), ()]
    assert [i.answers for i in (answered, outside, mt_bench)] == [("a", "b"), ("c",), ()]
    assert answered.max_tokens == 9
    # Two turns are two requests, and a chat is one.
    assert len({*keys([outside, mt_bench, chat, single])}) == 4
    assert keys([mt_bench, chat])[0] != keys([chat])[0]


SECRET = st.sampled_from(["secret", "a secret text", "secret\n", " "])
FIELDS = ["messages", "prompt", "turns", "input", "outputs", "context", "question", "answer",
          "answers", "answer_prefix", "match", "task", "dataset", "max_tokens", "max_new_tokens",
          "tools", "role", "content", "text"]  # fmt: skip
BODIES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 99) | SECRET | st.sampled_from(["all", "user"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=6)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(
    fields=st.dictionaries(st.sampled_from(FIELDS), BODIES | SECRET, max_size=6),
    form=st.sampled_from([{}, RULER, LONG_BENCH, {"prompt": "secret"}, {"turns": ["secret", "b"]}]),
)
def test_any_line_is_a_prompt_or_an_error_that_does_not_quote_it(fields, form, tmp_path_factory):
    line, error = fields | form, ""
    try:
        (item,) = read(tmp_path_factory.getbasetemp(), line)
    except ConfigError as e:
        error = str(e)
    if error:
        assert "mine.jsonl, line 1" in error
        assert "secret" not in error
        return
    assert item.max_tokens >= 2
    assert all(answer.strip() for answer in item.answers)
    (hashed,) = keys([item])
    assert len(hashed) == 64
    sent = item.with_replies(["r"] * len(item.turns))
    assert not sent.needs_replies
    assert len(sent.messages) == len(item.messages) + len(item.turns)
    if "messages" not in line:
        roles = [message["role"] for message in sent.messages]
        assert roles == (["user", "assistant"] * len(roles))[: len(roles)]


SAID = {"role": "assistant", "content": ""}
BY_MODEL = {"role": "assistant", "content": "secret"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{secret", "Expecting property name enclosed in double quotes (column 2)"),
        ('{"prompt": "secret', "must be JSON"),
        ('{"prompt": "secret", "n": ' + "[" * 100_000, "it is nested too deeply"),
        ('{"prompt": "secret", "max_tokens": ' + "9" * 5000 + "}", "must be JSON"),
        ('["secret"]', "must be an object"),
        ({"text": "secret"}, "must have either messages or prompt"),
        ({"prompt": "secret", "messages": []}, "must have either messages or prompt"),
        ({"prompt": ""}, "prompt must be a non-empty string"),
        ({"messages": []}, "messages must be a non-empty list"),
        ({"messages": [{"role": "user"}]}, "message 1 must be an object with role and content"),
        ({"messages": ["secret"]}, "message 1 must be an object with role and content"),
        ({"messages": [SAID | {"audio": []}]}, "has audio, but a message may only have"),
        ({"messages": [SAID | {"content": None, "tool_calls": [{"id": "1"}]}]},
         "tool_calls must be a list of calls, each with a function"),
        ({"messages": [{"role": "tool", "content": None}]}, "must be an object with role and"),
        ({"prompt": "secret", "tools": [{"function": {}}]}, "tools need messages"),
        ({"messages": [BY_MODEL], "tools": ["secret"]},
         "tools must be a list of objects, each with a function"),
        ({"prompt": "secret", "functions": []}, "has functions, which would change the prompt"),
        ({"prompt": "secret", "max_tokens": "9"}, "max_tokens must be an integer"),
        ({"prompt": "secret", "max_tokens": True}, "max_tokens must be an integer"),
        ({"prompt": "secret", "max_tokens": 1}, "at least 2"),
        ({"prompt": "secret", "answer": True}, "answer must be a non-empty string or a number"),
        ({"prompt": "secret", "answers": [" "]}, "answer must be a non-empty string or a number"),
        ({"prompt": "secret", "turns": ["secret"]}, "either messages or prompt or turns"),
        ({"input": "secret", "answers": ["secret"]}, "or the fields of a data set"),
        ({"question": "secret", "answers": ["secret"]}, "or the fields of a data set"),
        ({"input": "", "outputs": ["secret"]}, "input must be a non-empty string"),
        ({"input": "secret", "outputs": [["secret"]]}, "answers or outputs a list of them"),
        ({"input": "secret", "outputs": {"text": ["secret"]}}, "answers or outputs a list"),
        ({"input": "secret", "context": ["secret", 3]}, "context must be a non-empty string, or a"),
        ({"input": "secret", "context": []}, "context must be a non-empty string, or a list"),
        ({"context": "secret", "question": "secret", "choice_A": "secret", "answer": "C"},
         "has choice_A, and a multiple-choice line would be sent without its choices"),
        ({"question": ["secret"], "context": "secret"}, "question must be a string; got a list"),
        ({"prompt": "secret", "answer_prefix": ["secret"]}, "answer_prefix must be a string"),
        ({"prompt": "secret", "match": "secret"}, "match must be one of words, all, any, f1"),
        ({"prompt": "secret", "match": "number", "answers": ["3", "secret"]},
         "with match number, each answer must contain a number"),
        ({"prompt": "secret", "match": "refusal", "answer": "Refused"},
         'each answer must be "refused" or "answered"'),
        ({"prompt": "secret", "match": "mrcr", "answers": ["secret"]},
         "answers must be the prefix, then one or more pieces"),
        ({"turns": "secret"}, "turns must be a non-empty list"),
        ({"turns": ["secret", ""]}, "turn 2 must be a non-empty string, or an object"),
        ({"turns": [{"text": "secret"}]}, "turn 1 must be a non-empty string, or an object"),
        ({"turns": ["secret", BY_MODEL]},
         "turn 2 must be the user's, because the model writes the replies"),
        ({"turns": ["secret", {"content": "b", "answer": "secret"}], "answer": "secret"},
         "either answer or answers, not both"),
        ({"turns": ["secret"], "tools": [{"function": {}}]}, "tools need messages"),
        ({"prompt": "secret", "answer": "a", "answers": ["a"]},
         "either answer or answers, not both"),
    ],
)  # fmt: skip
def test_an_invalid_line_is_named_by_number_and_not_quoted(tmp_path, line, message):
    with pytest.raises(ConfigError, match=r"mine\.jsonl, line 2") as exc_info:
        read(tmp_path, {"prompt": "fine"}, line)
    assert message in str(exc_info.value)
    assert "secret" not in str(exc_info.value)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match="must have one prompt per line, but it is empty"):
        read(tmp_path, text)


def test_an_unreadable_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl", max_tokens=8)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_prompts(tmp_path / "bytes", max_tokens=8)


def test_a_prompt_may_contain_any_character(tmp_path):
    """Unicode line separators do not split lines, a byte order mark is skipped, and a lone
    surrogate is kept."""
    text = "one\u2028two\u0085three\x0bfour \U0001f600"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False), '{"prompt": "\\ud83d"}']
    for start in ("", "\ufeff"):
        first, second = read(tmp_path, start + lines[0] + "\r", lines[1])
        assert first.messages[0]["content"] == text
        assert (second.name, second.messages[0]["content"]) == ("prompts/2", "\ud83d")
        assert len({*keys([first, second])}) == 2


def test_every_accepted_nesting_depth_can_be_sent(tmp_path):
    refused = set()
    for depth in range(900, 1000):
        parts = "[" * depth + "]" * depth
        try:
            (item,) = read(tmp_path, f'{{"messages": [{{"role": "user", "content": {parts}}}]}}')
        except ConfigError as e:
            refused.add(str(e).partition(";")[2])
        else:
            assert keys([item])
            json.dumps({"messages": item.messages})
    assert refused <= {" it is nested too deeply"}


def test_keys_are_unique_hashes_of_the_prompts(tmp_path):
    items = read(tmp_path, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}, {"prompt": "a"})
    first, other, second, third = keys(items)
    assert first != other
    assert (second, third) == (f"{first}#2", f"{first}#3")
    longer = read(tmp_path, {"prompt": "a", "max_tokens": 9})
    assert keys(longer)[0] != first
    assert len(first) == 64
