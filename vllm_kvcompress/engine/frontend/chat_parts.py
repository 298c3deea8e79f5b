"""Seam `chat_parts`: which tokens of a chat are its system prompt, its tools and its question.

Templates decide where these stand, so they are found by rendering: the chat once more with another
text in their place, or with one more tool before and behind the others. What both have in common,
from the beginning and from the end, is not the part. Rendering a template takes a fraction of the
time that its tokens take; the tokens are made once, with the places of their letters.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from vllm.renderers.base import BaseRenderer

from vllm_kvcompress.engine.messages.settings import active_settings
from vllm_kvcompress.methods.spans import Spans, joined
from vllm_kvcompress.settings.protection import QUESTION, SYSTEM, TOOLS

_INSTALLED = "_kvcompress_chat_parts"
_KEY = "kvcompress_chat"
_STAND_IN = "kvcompress0stands0here"
_NO_PARAMETERS = {"type": "object", "properties": {}}
_ENDS = 256
"""Tokens at either end of a question that are protected."""

Text = str | list[int]
"""What a template makes of a chat: text, or tokens where the renderer has its own tokenizer."""

wanted: ContextVar[tuple[str, ...] | None] = ContextVar("kvcompress_wanted", default=None)
"""The parts that the chat which this server is answering needs; None where it is no chat."""


class PartError(ValueError):
    """A part of a chat cannot be found; the message is half a sentence that says why."""


class _Variant(NamedTuple):
    """The chat with something in the place of a part, or beside it."""

    messages: list[Any]
    params: Any


@dataclass(slots=True)
class ChatParts:
    """Finds the parts of one chat, each when it is asked for.

    Args:
        renderer: vLLM's.
        messages: of the chat, as they came.
        params: vLLM's parameters of the template.
        tokenizing: vLLM's parameters of the tokenizer.
        prompt: what vLLM made of it for the engine.
    """

    renderer: Any
    messages: list[Any]
    params: Any
    tokenizing: Any
    prompt: Mapping[str, Any]
    _found: dict[str, Spans | PartError] = field(default_factory=dict)
    _offsets: list[tuple[int, int]] | None = None

    def spans(self, word: str) -> Spans:
        """The tokens of a part; none where the chat has no such part.

        Raises:
            PartError: it cannot be told which they are.
        """
        if word not in self._found:
            variants = self._variants(word)
            made = [self.renderer.render_messages(*variant)[1] for variant in variants]
            self._take(word, made)
        return self._told(word)

    async def find(self, words: Iterable[str]) -> None:
        """Find some parts, where other requests go on meanwhile."""
        for word in words:
            made = []
            for variant in self._variants(word):
                made.append((await self.renderer.render_messages_async(*variant))[1])
            self._take(word, made)

    def _told(self, word: str) -> Spans:
        found = self._found[word]
        if isinstance(found, PartError):
            raise found
        return found

    def _take(self, word: str, made: Sequence[Mapping[str, Any]]) -> None:
        try:
            self._found[word] = self._spans(word, made)
        except PartError as e:
            self._found[word] = e

    # -- what is rendered beside the chat itself ------------------------------------------------

    def _variants(self, word: str) -> list[_Variant]:
        if word == TOOLS:
            kwargs = self.params.chat_template_kwargs
            if not (tools := kwargs.get("tools")):
                return []
            other = {"name": _STAND_IN, "description": _STAND_IN, "parameters": _NO_PARAMETERS}
            one = [{"type": "function", "function": other}]
            both = [*one, *tools], [*tools, *one]
            every = [
                replace(self.params, chat_template_kwargs={**kwargs, "tools": t}) for t in both
            ]
            return [_Variant(self.messages, params) for params in every]
        return [
            _Variant(
                [*self.messages[:at], self._stand_in(at), *self.messages[at + 1 :]], self.params
            )
            for at in self._messages_of(word)
        ]

    def _messages_of(self, word: str) -> list[int]:
        """The places of a part's messages that have a text."""
        roles = {SYSTEM: ("system", "developer"), QUESTION: ("user",)}[word]
        found = [
            at
            for at, message in enumerate(self.messages)
            if isinstance(message, Mapping)
            and message.get("role") in roles
            and _text_of(message).strip()
        ]
        return found[-1:] if word == QUESTION else found

    def _stand_in(self, at: int) -> dict[str, Any]:
        """A message with another text, which begins and ends with other letters."""
        message = self.messages[at]
        text = _text_of(message).strip()
        first, last = ("Q" if text[end] != "Q" else "Z" for end in (0, -1))
        return {**message, "content": f"{first}{_STAND_IN}{last}"}

    # -- where the part is ----------------------------------------------------------------------

    def _spans(self, word: str, made: Sequence[Mapping[str, Any]]) -> Spans:
        if not made:
            return ()
        if self.prompt.get("type") != "token" or any(map(_has_more_than_text, self.messages)):
            raise PartError("its messages hold more than text")
        if self.tokenizing.truncate_prompt_tokens is not None:
            raise PartError("truncate_prompt_tokens may have cut it")
        own = self.prompt.get("prompt")
        whole: Text = self.prompt["prompt_token_ids"] if own is None else own
        others: list[Text] = [
            each["prompt_token_ids"] if own is None else each["prompt"] for each in made
        ]
        if word == TOOLS:
            found = [_between_tools(whole, *others)]
        else:
            found = [_instead_of(whole, other) for other in others]
        spans = [self._tokens(*each) for each in found if each is not None]
        if word == QUESTION:
            spans = [end for span in spans for end in _ends(*span)]
        return joined(spans)

    def _tokens(self, start: int, stop: int) -> tuple[int, int]:
        """The tokens that have any of these letters, or are these."""
        if self.prompt.get("prompt") is None:
            return start, stop
        if self._offsets is None:
            self._offsets = self.prompt.get("prompt_token_offsets") or self._places()
        own = [at for at, (a, b) in enumerate(self._offsets) if a < stop and b > start]
        if not own:
            raise PartError("its tokenizer does not tell which letters a token has")
        return own[0], own[-1] + 1

    def _places(self) -> list[tuple[int, int]]:
        """First letter of each token and the one behind its last."""
        asking = replace(self.tokenizing, return_token_offsets=True)
        made = self.renderer.tokenize_prompt({"prompt": self.prompt["prompt"]}, asking)
        offsets = made.get("prompt_token_offsets") or []
        same = made["prompt_token_ids"] == self.prompt["prompt_token_ids"]
        return offsets if same else []


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    return "\n".join(text for text in texts if isinstance(text, str))


def _has_more_than_text(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and not isinstance(part.get("text"), str) for part in content
    )


def _in_common(a: Text, b: Text, *, most: int, backwards: bool = False) -> int:
    """Letters or tokens that both begin with, or end with, at most `most`."""
    low, high = 0, min(len(a), len(b), most)
    while low < high:
        count = (low + high + 1) // 2
        same = a[len(a) - count :] == b[len(b) - count :] if backwards else a[:count] == b[:count]
        low, high = (count, high) if same else (low, count - 1)
    return low


def _instead_of(whole: Text, other: Text) -> tuple[int, int] | None:
    """What of the chat a stand-in took the place of; None where the template leaves it out."""
    if whole == other:
        return None
    start = _in_common(whole, other, most=len(whole))
    behind = _in_common(whole, other, most=min(len(whole), len(other)) - start, backwards=True)
    stop, there = len(whole) - behind, other[start : len(other) - behind]
    whole_there = isinstance(there, list) or _STAND_IN in there
    if start >= stop or not whole_there or len(there) > len(_STAND_IN) + 2:
        raise PartError("the chat template changes other text with it")
    return start, stop


def _between_tools(whole: Text, before: Text, behind: Text) -> tuple[int, int] | None:
    """What lies between one more tool before the others, and one more behind them."""
    if whole in (before, behind):
        return None
    start = len(whole) - _in_common(whole, before, most=len(whole), backwards=True)
    stop = _in_common(whole, behind, most=len(whole))
    tokens = isinstance(whole, list)
    # a tool is put in between, and what was there stays; tokens merge where it is put in
    for at, other in ((start, before), (stop, behind)):
        first = _in_common(whole, other, most=len(whole))
        last = _in_common(whole, other, most=len(whole), backwards=True)
        if first + last < len(whole) - 4 * tokens or not 0 <= at <= len(whole):
            raise PartError("the chat template writes them in more than one place")
    start, stop = max(start - tokens, 0), min(stop + tokens, len(whole))
    if start >= stop:
        raise PartError("the chat template changes other text with them")
    return start, stop


def _ends(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """A span, or its first and last tokens where it is longer than both."""
    if stop - start <= 2 * _ENDS:
        yield start, stop
    else:
        yield start, start + _ENDS
        yield stop - _ENDS, stop


def parts_of(prompt: Any) -> ChatParts | None:
    """The parts of the chat that a prompt for the engine was made of; None where it was none."""
    found = prompt.get(_KEY) if isinstance(prompt, Mapping) else None
    return found if isinstance(found, ChatParts) else None


def install() -> None:
    """Wrap where vLLM renders chats; safe to call twice."""
    if getattr(BaseRenderer, _INSTALLED, False):
        return
    render_chat, render_chat_async = BaseRenderer.render_chat, BaseRenderer.render_chat_async

    @functools.wraps(render_chat)
    def rendering(
        self: Any, conversations: Any, chat_params: Any, tok_params: Any = None, **more: Any
    ) -> Any:
        if active_settings(self.config.additional_config) is None:
            return render_chat(self, conversations, chat_params, tok_params, **more)
        chats = [_at_hand(chat) for chat in conversations]
        made, prompts = render_chat(self, chats, chat_params, tok_params, **more)
        used = self.default_chat_tok_params if tok_params is None else tok_params
        for chat, prompt in zip(chats, prompts, strict=True):
            # which parts will be asked for is known with the parameters of each request
            prompt[_KEY] = ChatParts(self, chat, chat_params, used, prompt)
        return made, prompts

    @functools.wraps(render_chat_async)
    async def rendering_async(
        self: Any, conversations: Any, chat_params: Any, tok_params: Any = None, **more: Any
    ) -> Any:
        settings = active_settings(self.config.additional_config)
        words = wanted.get()
        if words is None and settings is not None:
            words = settings.protect  # a handler that no request's choice is known of
        if settings is None or not words:
            return await render_chat_async(self, conversations, chat_params, tok_params, **more)
        chats = [_at_hand(chat) for chat in conversations]
        used = self.default_chat_tok_params if tok_params is None else tok_params
        asking = replace(used, return_token_offsets=True)
        made, prompts = await render_chat_async(self, chats, chat_params, asking, **more)
        for chat, prompt in zip(chats, prompts, strict=True):
            parts = ChatParts(self, chat, chat_params, used, dict(prompt))
            await parts.find(words)
            prompt[_KEY] = parts
            if not used.return_token_offsets:
                prompt.pop("prompt_token_offsets", None)
        return made, prompts

    BaseRenderer.render_chat = rendering
    BaseRenderer.render_chat_async = rendering_async
    setattr(BaseRenderer, _INSTALLED, True)


def _at_hand(chat: Iterable[Any]) -> list[Any]:
    """The messages of a chat, whose parts can be read more than once."""
    messages: list[Any] = []
    for message in chat:
        own = message
        if isinstance(message, Mapping):
            content = message.get("content")
            if content is not None and not isinstance(content, str | list):
                own = {**message, "content": list(content)}
        messages.append(own)
    return messages
