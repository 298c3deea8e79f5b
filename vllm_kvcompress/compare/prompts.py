"""Reader of the user's own prompts: a JSONL file with one prompt per line."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_kvcompress.compare.tasks import Item
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.settings.text import RepeatedKeyError, parse_json

TASK = "prompts"
"""Task name of the user's own prompts."""

_CHANGES_THE_PROMPT = frozenset(
    {"functions", "response_format", "structured_outputs", "chat_template"}
    | {"chat_template_kwargs", "documents", "mm_processor_kwargs"}
)
"""Fields of a chat body that change the prompt or the output, and that are not sent."""
_MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
_FORM = '{"messages": [...]} as in an OpenAI chat body, or {"prompt": "..."}'


def read_prompts(path: Path, *, max_tokens: int) -> list[Item]:
    """Return the prompts of a JSONL file, in file order.

    A line is ``{"messages": [...]}`` or ``{"prompt": "..."}``, optionally with ``max_tokens`` (or
    ``max_completion_tokens``), and with ``answer`` or ``answers`` if they are known. A chat may
    have ``tools``, messages that call them, and their results. Sampling parameters are ignored:
    every output is greedy.

    Args:
        max_tokens: output tokens for prompts without their own ``max_tokens``.

    Raises:
        ConfigError: The file cannot be read, has no prompt, or has an invalid line. The message
            gives the line number and never quotes the line.
    """
    try:
        # splitlines would also split at U+2028 and similar characters inside JSON strings.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--prompts {path} cannot be read as UTF-8 text ({e})") from None
    items = [
        _item(line, f"{path}, line {number}", number, max_tokens)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not items:
        raise ConfigError(f"--prompts {path} must have one prompt per line, but it is empty")
    return items


def key(item: Item) -> str:
    """Return the SHA-256 of what is sent for a prompt: a key that does not reveal the prompt."""
    sent = [item.messages, item.max_tokens, *([item.tools] if item.tools else ())]
    text = json.dumps(sent, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def keys(items: Sequence[Item]) -> list[str]:
    """Return the `key` of each prompt, with ``#2``, ``#3`` and so on for repeated prompts."""
    counts: dict[str, int] = {}
    unique_keys = []
    for item in items:
        name = key(item)
        counts[name] = counts.get(name, 0) + 1
        unique_keys.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return unique_keys


def _item(line: str, where: str, number: int, max_tokens: int) -> Item:
    try:
        body = parse_json(line)
        # The request nests the prompt four levels deeper, which must stay within json's limit.
        json.dumps([[[[body]]]])
    except json.JSONDecodeError as e:
        # Only the rule and the position: the message must not quote the line.
        raise ConfigError(f"{where} must be JSON, {_FORM}; {e.msg} (column {e.colno})") from None
    except RepeatedKeyError:
        raise ConfigError(
            f"{where} must be JSON, {_FORM}; an object has the same key twice, remove one"
        ) from None
    except ValueError as e:
        raise ConfigError(f"{where} must be JSON, {_FORM}; {e}") from None
    except RecursionError:
        raise ConfigError(f"{where} must be JSON, {_FORM}; it is nested too deeply") from None
    if not isinstance(body, dict):
        raise ConfigError(f"{where} must be an object, {_FORM}; got {_kind(body)}")
    if unsupported := sorted(_CHANGES_THE_PROMPT & body.keys()):
        raise ConfigError(
            f"{where} has {', '.join(unsupported)}, which would change the prompt or the output and"
            " is not supported; remove the field or the line"
        )
    limit = body.get("max_tokens", body.get("max_completion_tokens"))
    limit = max_tokens if limit is None else limit
    if type(limit) is not int or limit < 2:
        raise ConfigError(
            f"{where}: max_tokens must be an integer of at least 2, because the first token always"
            f" comes from the full cache; got {limit if type(limit) is int else _kind(limit)}"
        )
    return Item(
        name=f"{TASK}/{number}",
        task=TASK,
        messages=_messages(body, where),
        answers=_answers(body, where),
        max_tokens=limit,
        tools=_tools(body, where),
    )


def _messages(body: dict[str, Any], where: str) -> tuple[dict[str, Any], ...]:
    if ("messages" in body) == ("prompt" in body):
        raise ConfigError(f"{where} must have either messages or prompt: {_FORM}")
    if "prompt" in body:
        if not isinstance(body["prompt"], str) or not body["prompt"]:
            raise ConfigError(f"{where}: prompt must be a non-empty string")
        return ({"role": "user", "content": body["prompt"]},)
    messages = body["messages"]
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages must be a non-empty list")
    for number, message in enumerate(messages, 1):
        _check_message(message, f"{where}: message {number}")
    return tuple(messages)


def _check_message(message: Any, where: str) -> None:
    """Raise ConfigError if `message` is not a chat message."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ConfigError(f"{where} must be an object with role and content, both strings")
    calls = message.get("tool_calls")
    content = message.get("content")
    if not isinstance(content, str | list) and not (calls and content is None):
        raise ConfigError(f"{where} must be an object with role and content, both strings")
    if calls is not None and not (
        isinstance(calls, list)
        and all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls)
    ):
        raise ConfigError(f"{where}: tool_calls must be a list of calls, each with a function")
    if extra := sorted(message.keys() - _MESSAGE_FIELDS):
        raise ConfigError(
            f"{where} has {', '.join(extra)}, but a message may only have"
            f" {', '.join(sorted(_MESSAGE_FIELDS))}; remove the field or the line"
        )


def _tools(body: dict[str, Any], where: str) -> tuple[dict[str, Any], ...]:
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools
    ):
        raise ConfigError(f"{where}: tools must be a list of objects, each with a function")
    if tools and "prompt" in body:
        raise ConfigError(f"{where}: tools need messages, got prompt; use messages")
    return tuple(tools)


def _answers(body: dict[str, Any], where: str) -> tuple[str, ...]:
    if "answer" in body and "answers" in body:
        raise ConfigError(f"{where} must have either answer or answers, not both")
    expected = body.get("answers", body.get("answer"))
    if expected is None:
        return ()
    answers = [expected] if isinstance(expected, str) else expected
    if not isinstance(answers, list) or not all(isinstance(a, str) and a.strip() for a in answers):
        raise ConfigError(f"{where}: answer must be a string, and answers a list of strings")
    return tuple(answers)


def _kind(value: Any) -> str:
    """Return a description of a JSON value's type."""
    return {"list": "a list", "str": "a string", "dict": "an object", "NoneType": "null"}.get(
        type(value).__name__, f"a {type(value).__name__}"
    )
