"""An operator's own prompts: a line of JSON each."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_kvcompress.compare.tasks import Item
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.settings.text import RepeatedKeyError, parse_json

TASK = "prompts"
"""What an operator's own prompts belong to."""

_CHANGES_THE_PROMPT = frozenset(
    {"functions", "response_format", "structured_outputs", "chat_template"}
    | {"chat_template_kwargs", "documents", "mm_processor_kwargs"}
)
"""Fields of a chat body that would make another prompt or answer of it, and are not sent."""
_OF_A_MESSAGE = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
_FORM = '{"messages": [...]} as in an OpenAI chat body, or {"prompt": "..."}'


def read_prompts(path: Path, *, max_tokens: int) -> list[Item]:
    """The prompts of a JSONL file, in its order.

    A line is ``{"messages": [...]}`` or ``{"prompt": "..."}``, with ``max_tokens`` (or
    ``max_completion_tokens``), and ``answer`` or ``answers`` where they are known. A chat may have
    ``tools``, and messages that call them and tell what came of it. Of a body's other fields, those
    that say how to sample are left out: every answer here is greedy.

    Args:
        max_tokens: of prompts that do not say it themselves.

    Raises:
        ConfigError: the file cannot be read, has no prompt, or has a line that is none; it names
            the line and never quotes it.
    """
    try:
        # Not splitlines: a text in JSON may have U+2028 and other ends of lines in it.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--prompts {path} cannot be read as UTF-8 text ({e})") from None
    items = [
        _item(line, f"{path}, line {number}", number, max_tokens)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not items:
        raise ConfigError(f"--prompts {path} must have a prompt in each line, and is empty")
    return items


def key(item: Item) -> str:
    """A name for a prompt that does not tell it: SHA-256 over what is sent."""
    sent = [item.messages, item.max_tokens, *([item.tools] if item.tools else ())]
    written = json.dumps(sent, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(written.encode()).hexdigest()


def keys(items: Sequence[Item]) -> list[str]:
    """Of each prompt its `key`, and a number behind it where the same one comes again."""
    seen: dict[str, int] = {}
    named = []
    for item in items:
        name = key(item)
        seen[name] = seen.get(name, 0) + 1
        named.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return named


def _item(line: str, where: str, number: int, max_tokens: int) -> Item:
    try:
        body = parse_json(line)
        # What is sent has it a little deeper.
        json.dumps([[[[body]]]])
    except json.JSONDecodeError as e:
        # The rule and the place, and nothing of the line.
        raise ConfigError(f"{where} must be JSON, {_FORM}; {e.msg} (column {e.colno})") from None
    except RepeatedKeyError:
        raise ConfigError(
            f"{where} must be JSON, {_FORM}; an object in it has a key twice, remove one of them"
        ) from None
    except ValueError as e:
        raise ConfigError(f"{where} must be JSON, {_FORM}; {e}") from None
    except RecursionError:
        raise ConfigError(f"{where} must be JSON, {_FORM}; it is nested too deep") from None
    if not isinstance(body, dict):
        raise ConfigError(f"{where} must be an object, {_FORM}; got {_kind(body)}")
    if changed := sorted(_CHANGES_THE_PROMPT & body.keys()):
        raise ConfigError(
            f"{where} has {', '.join(changed)}, which would change what is asked and is not"
            " supported; take it out, or the line"
        )
    limit = body.get("max_tokens", body.get("max_completion_tokens"))
    limit = max_tokens if limit is None else limit
    if type(limit) is not int or limit < 2:
        raise ConfigError(
            f"{where}: max_tokens must be a whole number of at least 2, since the first token"
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
        raise ConfigError(f"{where} must have one of messages and prompt: {_FORM}")
    if "prompt" in body:
        if not isinstance(body["prompt"], str) or not body["prompt"]:
            raise ConfigError(f"{where}: prompt must be a text that is not empty")
        return ({"role": "user", "content": body["prompt"]},)
    messages = body["messages"]
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages must be a list that is not empty")
    for place, message in enumerate(messages, 1):
        _check_message(message, f"{where}: message {place}")
    return tuple(messages)


def _check_message(message: Any, which: str) -> None:
    """Refuse what is no message of a chat."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ConfigError(f"{which} must be an object with role and content, both texts")
    calls = message.get("tool_calls")
    content = message.get("content")
    if not isinstance(content, str | list) and not (calls and content is None):
        raise ConfigError(f"{which} must be an object with role and content, both texts")
    if calls is not None and not (
        isinstance(calls, list)
        and all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls)
    ):
        raise ConfigError(f"{which}: tool_calls must be a list of calls, each with its function")
    if more := sorted(message.keys() - _OF_A_MESSAGE):
        raise ConfigError(
            f"{which} may have {', '.join(sorted(_OF_A_MESSAGE))}, got {', '.join(more)} as well;"
            " take it out, or the line"
        )


def _tools(body: dict[str, Any], where: str) -> tuple[dict[str, Any], ...]:
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools
    ):
        raise ConfigError(f"{where}: tools must be a list of objects, each with its function")
    if tools and "prompt" in body:
        raise ConfigError(f"{where}: tools need messages, and a prompt is given; write messages")
    return tuple(tools)


def _answers(body: dict[str, Any], where: str) -> tuple[str, ...]:
    if "answer" in body and "answers" in body:
        raise ConfigError(f"{where} must have one of answer and answers")
    given = body.get("answers", body.get("answer"))
    if given is None:
        return ()
    answers = [given] if isinstance(given, str) else given
    if not isinstance(answers, list) or not all(isinstance(a, str) and a.strip() for a in answers):
        raise ConfigError(f"{where}: answer must be a text, and answers a list of texts")
    return tuple(answers)


def _kind(value: Any) -> str:
    return {"list": "a list", "str": "a text", "dict": "an object", "NoneType": "null"}.get(
        type(value).__name__, f"a {type(value).__name__}"
    )
