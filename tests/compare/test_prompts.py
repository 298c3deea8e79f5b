"""Reading prompts from a JSONL file, and the errors for invalid lines."""

import json

import pytest

from vllm_kvcompress.compare.prompts import keys, read_prompts
from vllm_kvcompress.errors import ConfigError


def read(tmp_path, *lines):
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return read_prompts(path, max_tokens=64)


def test_a_line_has_messages_or_a_prompt(tmp_path):
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who?"}]
    first, second, third = read(
        tmp_path,
        {"messages": chat, "model": "gpt", "temperature": 0.7, "max_completion_tokens": 9},
        "",
        {"prompt": "Where?", "answer": "Here"},
        {"messages": chat, "answers": ["a", "b"], "max_tokens": 3},
    )
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
        (
            {"messages": [{"role": "assistant", "content": "", "audio": []}]},
            "has audio, but a message may only have",
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
            "tool_calls must be a list of calls, each with a function",
        ),
        ({"messages": [{"role": "tool", "content": None}]}, "must be an object with role and"),
        ({"prompt": "secret", "tools": [{"function": {}}]}, "tools need messages"),
        (
            {"messages": [{"role": "user", "content": "secret"}], "tools": ["secret"]},
            "tools must be a list of objects, each with a function",
        ),
        ({"prompt": "secret", "functions": []}, "has functions, which would change the prompt"),
        ({"prompt": "secret", "max_tokens": "9"}, "max_tokens must be an integer"),
        ({"prompt": "secret", "max_tokens": True}, "max_tokens must be an integer"),
        ({"prompt": "secret", "max_tokens": 1}, "at least 2"),
        ({"prompt": "secret", "answer": 4}, "answer must be a string"),
        ({"prompt": "secret", "answers": [" "]}, "answer must be a string"),
        (
            {"prompt": "secret", "answer": "a", "answers": ["a"]},
            "either answer or answers, not both",
        ),
    ],
)
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
