"""Reader of the user's own prompts: a JSONL file with one prompt per line."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from vllm_kvcompress.compare.tasks import Item, Message
from vllm_kvcompress.compare.tasks.items import Match
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.settings.text import RepeatedKeyError, parse_json

TASK = "prompts"
"""Task name of prompts that do not name their task."""
_TASK_NAME = re.compile(r"[\w.-]{1,40}")
_RULER_QA, _RULER_OTHER = {"qa"}, {"niah", "vt", "cwe", "fwe", "variable", "common", "freq"}
"""Words in the names of RULER's tasks, such as ``qa_1`` or ``ruler_niah_single_1``."""
_CHOICES = frozenset({"choices", "options", "choice_A"})
"""Fields of multiple-choice data sets."""
_TASK_FIELDS = ("task", "dataset")
_LIMIT_FIELDS = ("max_tokens", "max_completion_tokens", "max_new_tokens")
_Form = Literal["messages", "prompt", "turns", "RULER", "context"]
"""The fields of a line that hold its prompt.

* RULER: ``input`` and ``outputs``.
* context: ``context`` with ``question``, or with ``input`` as in LongBench.
"""

_CHANGES_THE_PROMPT = frozenset(
    {"functions", "response_format", "structured_outputs", "chat_template"}
    | {"chat_template_kwargs", "documents", "mm_processor_kwargs"}
)
"""Fields of a chat body that change the prompt or the output, and that are not sent."""
_MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
_FORM = (
    '{"messages": [...]} as in an OpenAI chat body, {"prompt": "..."}, {"turns": [...]},'
    ' {"input": "...", "outputs": [...]}, or {"context": "...", "question": "..."}'
)


def read_prompts(path: Path, *, max_tokens: int) -> list[Item]:
    """Return the prompts of a JSONL file, in file order.

    A line is one of these forms, optionally with ``max_tokens`` (or ``max_completion_tokens``, or
    ``max_new_tokens``), ``task``, and ``match`` (`items.Match`):

    * ``messages``: a chat, perhaps with ``tools``, messages that call them, and their results.
    * ``prompt``: the user's message.
    * ``turns``: the user's messages as strings, or as objects with ``content``.
    * ``input`` with ``outputs``: a line of RULER.
    * ``context`` with ``question`` or ``input``: a line of kvpress or LongBench.

    All but RULER's have ``answer`` or ``answers`` if they are known, and turns have them in the
    last turn. ``answer_prefix`` begins the output, except in a chat or after turns. Sampling
    parameters are ignored: every output is greedy.

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
    # RULER writes a folder per task, and its lines do not name the task.
    names = (path.stem, path.absolute().parent.name)
    items = [
        _item(line, f"{path}, line {number}", number, max_tokens, names)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not items:
        raise ConfigError(f"--prompts {path} must have one prompt per line, but it is empty")
    return items


def key(item: Item) -> str:
    """Return the SHA-256 of what is sent for a prompt: a key that does not reveal the prompt."""
    sent = [
        item.messages,
        item.max_tokens,
        *([item.tools] if item.tools else ()),
        *([item.turns] if item.needs_replies else ()),
    ]
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


def _item(line: str, where: str, number: int, max_tokens: int, names: Sequence[str]) -> Item:
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
    if choices := sorted(_CHOICES & body.keys()):
        raise ConfigError(
            f"{where} has {', '.join(choices)}, and a multiple-choice line would be sent without"
            " its choices; write the whole request into prompt"
        )
    if isinstance(body.get("prompt"), list) and "turns" not in body:
        # MT-Bench on Hugging Face.
        body["turns"] = body.pop("prompt")
    form = _form(body, where)
    limits = (body.get(field) for field in _LIMIT_FIELDS)
    limit = next((limit for limit in limits if limit is not None), max_tokens)
    if type(limit) is not int or limit < 2:
        raise ConfigError(
            f"{where}: max_tokens must be an integer of at least 2, because the first token always"
            f" comes from the full cache; got {limit if type(limit) is int else _kind(limit)}"
        )
    messages = _messages(body, form, where)
    task = _task(body)
    return Item(
        name=f"{TASK}/{number}",
        task=task or TASK,
        messages=messages,
        answers=_answers(body, form, where),
        max_tokens=limit,
        tools=_tools(body, form, where),
        turns=tuple(range(1, len(messages))) if form == "turns" else (),
        match=_match(body, form, [task] if task else names, where),
    )


def _form(body: dict[str, Any], where: str) -> _Form:
    found: list[_Form] = [form for form in ("messages", "prompt", "turns") if form in body]
    if not found and {"input", "outputs"} <= body.keys():
        found = ["RULER"]
    if not found and "context" in body and {"question", "input"} & body.keys():
        found = ["context"]
    if len(found) != 1:
        raise ConfigError(
            f"{where} must have either messages or prompt or turns, or the fields of a data set:"
            f" {_FORM}"
        )
    return found[0]


def _task(body: dict[str, Any]) -> str | None:
    """Return the task that a line names, or None. Longer texts are ignored."""
    names = (body.get(field) for field in _TASK_FIELDS)
    return next(
        (name for name in names if isinstance(name, str) and _TASK_NAME.fullmatch(name)), None
    )


def _match(body: dict[str, Any], form: _Form, names: Sequence[str], where: str) -> Match:
    """Return how a line's answers are compared: by its own `match`, or the default of its form.

    RULER requires all answers, and any of them in its question answering. Other data sets list
    alternative answers.

    Args:
        names: the line's task, or else the names of its file and folder. The first one that has a
            word of RULER's tasks counts.
    """
    if body.get("match") is not None:
        match: Match | None = next((m for m in get_args(Match) if m == body["match"]), None)
        if match is None:
            raise ConfigError(f"{where}: match must be one of {', '.join(get_args(Match))}")
        return match
    if form not in ("RULER", "context"):
        return "words"
    for name in names:
        words = set(re.split(r"[\W_]+", name.lower()))
        if words & _RULER_QA:
            return "any"
        if words & _RULER_OTHER:
            return "all"
    return "all" if form == "RULER" else "any"


def _messages(body: dict[str, Any], form: _Form, where: str) -> tuple[Message, ...]:
    if form == "turns":
        return tuple({"role": "user", "content": turn} for turn in _turns(body["turns"], where))
    if form != "messages":
        return _with_answer_prefix(body, _content(body, form, where), where)
    messages = body["messages"]
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages must be a non-empty list")
    for number, message in enumerate(messages, 1):
        _check_message(message, f"{where}: message {number}")
    return tuple(messages)


def _turns(turns: Any, where: str) -> list[str]:
    """Return the user's messages of the turns."""
    if not isinstance(turns, list) or not turns:
        raise ConfigError(f"{where}: turns must be a non-empty list")
    contents = []
    for number, turn in enumerate(turns, 1):
        content = turn.get("content") if isinstance(turn, dict) else turn
        if not isinstance(content, str) or not content:
            raise ConfigError(
                f"{where}: turn {number} must be a non-empty string, or an object whose content is"
                " one"
            )
        if isinstance(turn, dict) and turn.get("role", "user") != "user":
            raise ConfigError(
                f"{where}: turn {number} must be the user's, because the model writes the replies;"
                " use messages for a chat with given replies"
            )
        contents.append(content)
    return contents


def _content(body: dict[str, Any], form: _Form, where: str) -> str:
    """Return the user's message of a line with a single question."""
    if form != "context":
        return _text(body, "prompt" if form == "prompt" else "input", where)
    context = _context(body["context"], where)
    field = "question" if "question" in body else "input"
    question = body[field]
    if not isinstance(question, str):
        raise ConfigError(f"{where}: {field} must be a string; got {_kind(question)}")
    # Data sets that split one text in two keep the whitespace between them.
    is_separated = not question or context[-1].isspace() or question[0].isspace()
    return context + ("" if is_separated else "\n\n") + question


def _context(context: Any, where: str) -> str:
    """Return the text of a context: a string, or paragraphs as in HotpotQA.

    Paragraphs are strings, or titles with lists of sentences: as pairs, or on Hugging Face as an
    object with a list of each.
    """
    paragraphs = context
    if isinstance(context, dict) and {"title", "sentences"} <= context.keys():
        titles, sentences = context["title"], context["sentences"]
        if isinstance(titles, list) and isinstance(sentences, list):
            paragraphs = list(zip(titles, sentences, strict=False))
    if isinstance(paragraphs, list):
        texts = [_paragraph(paragraph) for paragraph in paragraphs]
        context = None if None in texts else "\n\n".join(filter(None, texts))
    if not isinstance(context, str) or not context:
        raise ConfigError(
            f"{where}: context must be a non-empty string, or a list of paragraphs: strings, or"
            " titles with their sentences"
        )
    return context


def _paragraph(paragraph: Any) -> str | None:
    """Return a paragraph's text, or None if it is not one."""
    match paragraph:
        case str():
            return paragraph
        case [str() as title, [*sentences]] if all(isinstance(each, str) for each in sentences):
            return f"{title}\n{''.join(sentences)}"
    return None


def _text(body: dict[str, Any], field: str, where: str) -> str:
    text = body[field]
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{where}: {field} must be a non-empty string")
    return text


def _with_answer_prefix(body: dict[str, Any], content: str, where: str) -> tuple[Message, ...]:
    prefix = body.get("answer_prefix")
    if not isinstance(prefix, str | None):
        raise ConfigError(f"{where}: answer_prefix must be a string; got {_kind(prefix)}")
    user = {"role": "user", "content": content}
    # Chat templates may strip the message, and vLLM must find it in the prompt to continue it.
    stripped = (prefix or "").strip()
    return (user, {"role": "assistant", "content": stripped}) if stripped else (user,)


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


def _tools(body: dict[str, Any], form: _Form, where: str) -> tuple[dict[str, Any], ...]:
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools
    ):
        raise ConfigError(f"{where}: tools must be a list of objects, each with a function")
    if tools and form != "messages":
        raise ConfigError(f"{where}: tools need messages; use messages for the prompt")
    return tuple(tools)


def _answers(body: dict[str, Any], form: _Form, where: str) -> tuple[str, ...]:
    fields: list[tuple[dict[str, Any], str]]
    if form == "RULER":
        fields = [(body, "outputs")]
    else:
        holders = [body]
        if form == "turns" and isinstance(body["turns"][-1], dict):
            holders.append(body["turns"][-1])
        fields = [(each, name) for each in holders for name in ("answer", "answers")]
    found = [each[name] for each, name in fields if name in each]
    if len(found) > 1:
        raise ConfigError(f"{where} must have either answer or answers, not both")
    expected = found[0] if found else None
    if isinstance(expected, dict) and form == "context":
        # SQuAD on Hugging Face: {"text": [...], "answer_start": [...]}.
        expected = expected.get("text")
    if expected is None:
        return ()
    answers = expected if isinstance(expected, list) else [expected]
    # Numbers are answers, too; True and False would be searched for in the output as words.
    answers = [str(a) if type(a) in (int, float) else a for a in answers]
    if not all(isinstance(a, str) and a.strip() for a in answers):
        raise ConfigError(
            f"{where}: answer must be a non-empty string or a number, and answers or outputs a list"
            " of them"
        )
    return tuple(answers)


def _kind(value: Any) -> str:
    """Return a description of a JSON value's type."""
    return {"list": "a list", "str": "a string", "dict": "an object", "NoneType": "null"}.get(
        type(value).__name__, f"a {type(value).__name__}"
    )
