"""Reader of the user's own prompts: a JSONL file with one prompt per line."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from vllm_kvcompress.compare.tasks import Item, Message
from vllm_kvcompress.compare.tasks.items import Match
from vllm_kvcompress.compare.tasks.matches import answers_rule
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


class _InvalidLine(Exception):
    """What is wrong with a line. The text continues ``FILE, line N`` and never quotes the line."""


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
    items = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                items.append(_item(_body(line), number, max_tokens, names))
            except _InvalidLine as e:
                raise ConfigError(f"{path}, line {number}{e}") from None
    if not items:
        raise ConfigError(f"--prompts {path} must have one prompt per line, but it is empty")
    return items


def keys(items: Sequence[Item]) -> list[str]:
    """Return for each prompt the SHA-256 of what is sent: a key that does not reveal the prompt.

    Repeated prompts get ``#2``, ``#3`` and so on.
    """
    counts: Counter[str] = Counter()
    unique_keys = []
    for item in items:
        sent = [
            item.messages,
            item.max_tokens,
            *([item.tools] if item.tools else ()),
            *([item.turns] if item.needs_replies else ()),
        ]
        text = json.dumps(sent, sort_keys=True, ensure_ascii=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        counts[key] += 1
        unique_keys.append(key if counts[key] == 1 else f"{key}#{counts[key]}")
    return unique_keys


def _body(line: str) -> dict[str, Any]:
    """Return the JSON object of a line."""
    must = f" must be JSON, {_FORM};"
    try:
        body = parse_json(line)
        # The request nests the prompt four levels deeper, which must stay within json's limit.
        json.dumps([[[[body]]]])
    except json.JSONDecodeError as e:
        # Only the rule and the position: the message must not quote the line.
        raise _InvalidLine(f"{must} {e.msg} (column {e.colno})") from None
    except RepeatedKeyError:
        raise _InvalidLine(f"{must} an object has the same key twice, remove one") from None
    except ValueError as e:
        raise _InvalidLine(f"{must} {e}") from None
    except RecursionError:
        raise _InvalidLine(f"{must} it is nested too deeply") from None
    if not isinstance(body, dict):
        raise _InvalidLine(f" must be an object, {_FORM}; got {_kind(body)}")
    return body


def _item(body: dict[str, Any], number: int, max_tokens: int, names: Sequence[str]) -> Item:
    """Return the prompt of a line.

    Args:
        number: number of the line.
        names: names of the file and of its folder, which may name a task of RULER.
    """
    if unsupported := sorted(_CHANGES_THE_PROMPT & body.keys()):
        raise _InvalidLine(
            f" has {', '.join(unsupported)}, which would change the prompt or the output and is not"
            " supported; remove the field or the line"
        )
    if choices := sorted(_CHOICES & body.keys()):
        raise _InvalidLine(
            f" has {', '.join(choices)}, and a multiple-choice line would be sent without its"
            " choices; write the whole request into prompt"
        )
    if isinstance(body.get("prompt"), list) and "turns" not in body:
        # MT-Bench on Hugging Face.
        body["turns"] = body.pop("prompt")
    form = _form(body)
    limits = (body.get(field) for field in _LIMIT_FIELDS)
    limit = next((limit for limit in limits if limit is not None), max_tokens)
    if type(limit) is not int or limit < 2:
        raise _InvalidLine(
            ": max_tokens must be an integer of at least 2, because the first token always comes"
            f" from the full cache; got {limit if type(limit) is int else _kind(limit)}"
        )
    messages = _messages(body, form)
    # Longer texts are no names of tasks.
    named = (name for name in map(body.get, _TASK_FIELDS) if isinstance(name, str))
    task = next((name for name in named if _TASK_NAME.fullmatch(name)), None)
    answers, match = _answers(body, form), _match(body, form, [task] if task else names)
    if (rule := answers_rule(match, answers)) is not None:
        raise _InvalidLine(f": with match {match}, {rule}")
    return Item(
        name=f"{TASK}/{number}",
        task=task or TASK,
        messages=messages,
        answers=answers,
        max_tokens=limit,
        tools=_tools(body, form),
        turns=tuple(range(1, len(messages))) if form == "turns" else (),
        match=match,
    )


def _form(body: dict[str, Any]) -> _Form:
    found: list[_Form] = [form for form in ("messages", "prompt", "turns") if form in body]
    if not found and {"input", "outputs"} <= body.keys():
        found = ["RULER"]
    if not found and "context" in body and {"question", "input"} & body.keys():
        found = ["context"]
    if len(found) != 1:
        raise _InvalidLine(
            f" must have either messages or prompt or turns, or the fields of a data set: {_FORM}"
        )
    return found[0]


def _match(body: dict[str, Any], form: _Form, names: Sequence[str]) -> Match:
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
            raise _InvalidLine(f": match must be one of {', '.join(get_args(Match))}")
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


def _messages(body: dict[str, Any], form: _Form) -> tuple[Message, ...]:
    if form == "turns":
        turns = _non_empty_list(body, form)
        contents = (_turn(turn, number) for number, turn in enumerate(turns, 1))
        return tuple({"role": "user", "content": content} for content in contents)
    if form == "messages":
        messages = _non_empty_list(body, form)
        for number, message in enumerate(messages, 1):
            _check_message(message, f": message {number}")
        return tuple(messages)
    user = {"role": "user", "content": _content(body, form)}
    prefix = body.get("answer_prefix")
    if not isinstance(prefix, str | None):
        raise _InvalidLine(f": answer_prefix must be a string; got {_kind(prefix)}")
    # Chat templates may strip the message, and vLLM must find it in the prompt to continue it.
    stripped = (prefix or "").strip()
    return (user, {"role": "assistant", "content": stripped}) if stripped else (user,)


def _non_empty_list(body: dict[str, Any], field: str) -> list[Any]:
    found = body[field]
    if not isinstance(found, list) or not found:
        raise _InvalidLine(f": {field} must be a non-empty list")
    return found


def _turn(turn: Any, number: int) -> str:
    """Return the user's message of a turn."""
    content = turn.get("content") if isinstance(turn, dict) else turn
    if not isinstance(content, str) or not content:
        raise _InvalidLine(
            f": turn {number} must be a non-empty string, or an object whose content is one"
        )
    if isinstance(turn, dict) and turn.get("role", "user") != "user":
        raise _InvalidLine(
            f": turn {number} must be the user's, because the model writes the replies; use"
            " messages for a chat with given replies"
        )
    return content


def _content(body: dict[str, Any], form: _Form) -> str:
    """Return the user's message of a line with a single question."""
    if form != "context":
        field = "prompt" if form == "prompt" else "input"
        text = body[field]
        if not isinstance(text, str) or not text:
            raise _InvalidLine(f": {field} must be a non-empty string")
        return text
    context = _context(body["context"])
    field = "question" if "question" in body else "input"
    question = body[field]
    if not isinstance(question, str):
        raise _InvalidLine(f": {field} must be a string; got {_kind(question)}")
    # Data sets that split one text in two keep the whitespace between them.
    is_separated = not question or context[-1].isspace() or question[0].isspace()
    return context + ("" if is_separated else "\n\n") + question


def _context(context: Any) -> str:
    """Return the text of a context: a string, or paragraphs as in HotpotQA.

    Paragraphs are strings, or titles with lists of sentences: as pairs, or on Hugging Face as an
    object with a list of each.
    """
    match context:
        case {"title": [*titles], "sentences": [*sentences]}:
            context = list(zip(titles, sentences, strict=False))
    if isinstance(context, list):
        texts = [_paragraph(paragraph) for paragraph in context]
        context = None if None in texts else "\n\n".join(filter(None, texts))
    if not isinstance(context, str) or not context:
        raise _InvalidLine(
            ": context must be a non-empty string, or a list of paragraphs: strings, or titles with"
            " their sentences"
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


def _check_message(message: Any, where: str) -> None:
    """Raise _InvalidLine if `message` is not a chat message."""
    fields = message if isinstance(message, dict) else {}
    calls, content = fields.get("tool_calls"), fields.get("content")
    has_content = isinstance(content, str | list) or (calls and content is None)
    if not isinstance(fields.get("role"), str) or not has_content:
        raise _InvalidLine(f"{where} must be an object with role and content, both strings")
    if calls is not None and not _have_functions(calls):
        raise _InvalidLine(f"{where}: tool_calls must be a list of calls, each with a function")
    if extra := sorted(fields.keys() - _MESSAGE_FIELDS):
        raise _InvalidLine(
            f"{where} has {', '.join(extra)}, but a message may only have"
            f" {', '.join(sorted(_MESSAGE_FIELDS))}; remove the field or the line"
        )


def _tools(body: dict[str, Any], form: _Form) -> tuple[dict[str, Any], ...]:
    tools = body.get("tools") or []
    if not _have_functions(tools):
        raise _InvalidLine(": tools must be a list of objects, each with a function")
    if tools and form != "messages":
        raise _InvalidLine(": tools need messages; use messages for the prompt")
    return tuple(tools)


def _have_functions(found: Any) -> bool:
    """Return whether this is a list of objects that each have a function."""
    return isinstance(found, list) and all(
        isinstance(each, dict) and isinstance(each.get("function"), dict) for each in found
    )


def _answers(body: dict[str, Any], form: _Form) -> tuple[str, ...]:
    holders = [body]
    if form == "turns" and isinstance(body["turns"][-1], dict):
        holders.append(body["turns"][-1])
    fields = ("outputs",) if form == "RULER" else ("answer", "answers")
    found = [each[field] for each in holders for field in fields if field in each]
    if len(found) > 1:
        raise _InvalidLine(" must have either answer or answers, not both")
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
        raise _InvalidLine(
            ": answer must be a non-empty string or a number, and answers or outputs a list of them"
        )
    return tuple(answers)


def _kind(value: Any) -> str:
    """Return a description of a JSON value's type."""
    return {"list": "a list", "str": "a string", "dict": "an object", "NoneType": "null"}.get(
        type(value).__name__, f"a {type(value).__name__}"
    )
