"""VllmHook `chat_parts`: which tokens of a chat are its system prompt, its tools and its question.

Templates decide where these stand, so they are found by rendering: the chat once more with another
text in their place, or with one more tool before and behind the others. What both have in common,
from the beginning and from the end, is not the part. Rendering a template takes a fraction of the
time that its tokens take; the tokens are made once, with the places of their letters.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from vllm.renderers.base import BaseRenderer

from vllm_kvcompress.engine.frontend.renderings import (
    STAND_IN,
    Letters,
    PartError,
    Span,
    Text,
    beside_tool,
    instead_of,
)
from vllm_kvcompress.engine.messages.settings import active_settings
from vllm_kvcompress.methods.spans import Spans, joined
from vllm_kvcompress.settings.protection import QUESTION, SYSTEM, TOOLS, WORDS

_INSTALLED = "_kvcompress_chat_parts"
_KEY = "kvcompress_chat"
_NO_PARAMETERS = {"type": "object", "properties": {}}
_MOST_MESSAGES, _MOST_OF_A_ROLE = 32, 128
"""Messages of a part that is protected, and of a role that is asked about, at most: the chat is
rendered once more for each."""
_ENDS = 256
"""Tokens at either end of a question that are protected."""

ROLES: Mapping[str, tuple[str, ...]] = {
    SYSTEM: ("system", "developer"),
    "user": ("user",),
    "assistant": ("assistant",),
    "tool": ("tool",),
}
"""What is told of roles, and the roles of messages that it is told of."""
TOLD = (TOOLS, *ROLES)

wanted: ContextVar[tuple[str, ...] | None] = ContextVar("kvcompress_wanted", default=None)
"""The parts that the chat which this server is answering needs; None where it is no chat."""


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

    Attributes:
        strange: whether it has messages of a role that nothing is told of.
    """

    renderer: Any
    messages: list[Any]
    params: Any
    tokenizing: Any
    prompt: Mapping[str, Any]
    strange: bool = field(init=False)
    _found: dict[str, Spans | PartError] = field(default_factory=dict)
    _letters: "Letters | None" = None

    def __post_init__(self) -> None:
        known = {role for roles in ROLES.values() for role in roles}
        named = {str(m.get("role")) for m in self.messages if isinstance(m, Mapping)}
        self.strange = not named <= known

    def spans(self, word: str) -> Spans:
        """The tokens of a part, or of a role's messages; none where the chat has no such part.

        Raises:
            PartError: it cannot be told which they are.
        """
        if word not in self._found and self.renderer is None:
            raise PartError("this endpoint does not look for it")
        if word not in self._found:
            with self._noting(word) as found:
                for variant in self._variants(word):
                    with _rendering():
                        made = self.renderer.render_messages(*variant)[1]
                    found.append(self._span(word, variant, made))
        spans = self._found[word]
        if isinstance(spans, PartError):
            raise spans
        return spans

    async def find(self, words: Iterable[str]) -> None:
        """Find some parts for good, where other requests go on meanwhile.

        What that took is forgotten: this lives as long as the request.
        """
        for word in dict.fromkeys(words):
            with self._noting(word) as found:
                for variant in self._variants(word):
                    with _rendering():
                        made = (await self.renderer.render_messages_async(*variant))[1]
                    found.append(self._span(word, variant, made))
        self.renderer = self.params = self.tokenizing = self._letters = None
        self.messages, self.prompt = [], {}

    @contextmanager
    def _noting(self, word: str) -> Iterator[list[Span | None]]:
        """Note the spans that were found, or why none could be."""
        found: list[Span | None] = []
        try:
            yield found
        except PartError as e:
            self._found[word] = e
            return
        spans = [span for span in found if span is not None]
        if word == TOOLS and spans:
            # behind one more in front of them, and before one more behind them
            start, stop = spans[0][0], spans[-1][1]
            spans = [(start, stop)] if start < stop else []
        if word == QUESTION:
            spans = [end for span in spans for end in _ends(*span)]
        self._found[word] = joined(spans)

    # -- what is rendered beside the chat itself ------------------------------------------------

    def _variants(self, word: str) -> Iterator[_Variant]:
        if word == TOOLS:
            yield from self._with_one_more_tool()
            return
        places = self._messages_of(word)
        most = _MOST_MESSAGES if word in WORDS else _MOST_OF_A_ROLE
        if len(places) > most:
            raise PartError(f"it has more than {most} messages")
        for at in places:
            before, behind = self.messages[:at], self.messages[at + 1 :]
            yield _Variant([*before, self._stand_in(at), *behind], self.params)

    def _with_one_more_tool(self) -> Iterator[_Variant]:
        if any(isinstance(message, Mapping) and message.get("tools") for message in self.messages):
            raise PartError("some of them are in its messages")
        kwargs = self.params.chat_template_kwargs
        if not (tools := kwargs.get("tools")):
            return
        other = {"name": STAND_IN, "description": STAND_IN, "parameters": _NO_PARAMETERS}
        one = [{"type": "function", "function": other}]
        for more in ([*one, *tools], [*tools, *one]):
            own = {**kwargs, "tools": more}
            yield _Variant(self.messages, replace(self.params, chat_template_kwargs=own))

    def _messages_of(self, word: str) -> list[int]:
        """The places of a part's or a role's messages that have a text."""
        roles = ("user",) if word == QUESTION else ROLES[word]
        found = [
            at
            for at, message in enumerate(self.messages)
            if isinstance(message, Mapping) and message.get("role") in roles
        ]
        found = found[-1:] if word == QUESTION else found
        if any(_has_more_than_text(self.messages[at]) for at in found):
            raise PartError("its messages hold more than text")
        return [at for at in found if _text_of(self.messages[at]).strip()]

    def _stand_in(self, at: int) -> dict[str, Any]:
        """A message with another text, which begins and ends with other letters."""
        message = self.messages[at]
        text = _text_of(message).strip()
        first, last = ("Q" if text[end] != "Q" else "Z" for end in (0, -1))
        return {**message, "content": f"{first}{STAND_IN}{last}"}

    # -- where the part is ----------------------------------------------------------------------

    def _span(self, word: str, variant: _Variant, made: Mapping[str, Any]) -> Span | None:
        """The tokens that a variant tells of; None where the template leaves the part out."""
        if self.prompt.get("type") != "token" or any(map(_has_more_than_text, self.messages)):
            raise PartError("a message of the chat holds more than text")
        if self.tokenizing.truncate_prompt_tokens is not None:
            raise PartError("truncate_prompt_tokens may have cut it")
        # tokens where the renderer has its own tokenizer, whatever text they were put back into
        kind = "prompt" if "prompt" in made else "prompt_token_ids"
        whole: Text = self.prompt[kind]
        other: Text = made[kind]
        if word != TOOLS:
            found = instead_of(whole, other)
        else:
            names = _names_of(variant)
            front = names[0] == STAND_IN
            found = beside_tool(whole, other, names[1:] if front else names[:-1], front=front)
        if found is None or isinstance(whole, list):
            return found
        if self._letters is None:
            self._letters = Letters.of(self.prompt, self.renderer, self.tokenizing)
        return self._letters.tokens(*found)


@contextmanager
def _rendering() -> Iterator[None]:
    """A template takes another text, or another tool, or it cannot be told where they stand."""
    try:
        yield
    except Exception as e:
        # Anything may go wrong in a template.
        raise PartError(f"the chat template takes no other in its place ({e})"[:200]) from None


def _names_of(variant: _Variant) -> list[str]:
    """The names of a variant's tools."""
    tools = variant.params.chat_template_kwargs["tools"]
    return [str(tool.get("function", tool).get("name", "")) for tool in tools]


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = (part if isinstance(part, str) else part.get("text") for part in parts)
    return "\n".join(text for text in texts if isinstance(text, str))


def _has_more_than_text(message: Any) -> bool:
    """Whether a message has a part that is no text, or nothing that is known to be one."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if content is None or isinstance(content, str):
        return False
    return not isinstance(content, list) or not all(
        isinstance(part, str) or (isinstance(part, Mapping) and isinstance(part.get("text"), str))
        for part in content
    )


def _ends(start: int, stop: int) -> Iterator[Span]:
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
            prompt[_KEY] = ChatParts(self, chat, chat_params, used, dict(prompt))
        return made, prompts

    @functools.wraps(render_chat_async)
    async def rendering_async(
        self: Any, conversations: Any, chat_params: Any, tok_params: Any = None, **more: Any
    ) -> Any:
        settings, words = active_settings(self.config.additional_config), wanted.get()
        if settings is None or words == ():
            return await render_chat_async(self, conversations, chat_params, tok_params, **more)
        chats = [_at_hand(chat) for chat in conversations]
        used = self.default_chat_tok_params if tok_params is None else tok_params
        asking = replace(used, return_token_offsets=bool(words) or used.return_token_offsets)
        made, prompts = await render_chat_async(self, chats, chat_params, asking, **more)
        for chat, prompt in zip(chats, prompts, strict=True):
            parts = prompt[_KEY] = ChatParts(self, chat, chat_params, used, dict(prompt))
            # of another endpoint: whether an answer is wanted, and what of it, is known later
            if words:
                await parts.find(words)
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
