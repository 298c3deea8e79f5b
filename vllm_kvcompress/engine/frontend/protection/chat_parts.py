"""VllmHook `chat_parts`: find the tokens of a chat's system prompt, tools and question.

Only the chat template knows where they are, so the chat is rendered again with a placeholder in a
message, or with one more tool. The text outside the common prefix and suffix is the part. Rendering
takes a fraction of the time of tokenizing, and the chat is tokenized only once, with offsets.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from vllm.renderers.base import BaseRenderer

from vllm_kvcompress.engine.frontend.protection.renderings import (
    PLACEHOLDER,
    PartError,
    Span,
    Text,
    TokenOffsets,
    replaced_span,
    tools_span,
)
from vllm_kvcompress.engine.messages.settings import active_settings
from vllm_kvcompress.methods.spans import Spans, merge_spans
from vllm_kvcompress.settings.protection import QUESTION, SYSTEM, TOOLS, WORDS

_INSTALLED = "_kvcompress_chat_parts"
_KEY = "kvcompress_chat"
_NO_PARAMETERS = {"type": "object", "properties": {}}
_MAX_PROTECTED_MESSAGES, _MAX_ROLE_MESSAGES = 32, 128
"""Maximum messages of a protected part, and of a role in a report. The chat is rendered once more
for each message."""
_QUESTION_END = 256
"""Tokens at each end of a long question that are protected."""

ROLES: Mapping[str, tuple[str, ...]] = {
    SYSTEM: ("system", "developer"),
    "user": ("user",),
    "assistant": ("assistant",),
    "tool": ("tool",),
}
"""Message roles that each role in a report includes."""
REPORTED = (TOOLS, *ROLES)

needed_parts: ContextVar[tuple[str, ...] | None] = ContextVar("kvcompress_parts", default=None)
"""Parts that the current request needs from its chat; None if it is not a chat."""


class _Variant(NamedTuple):
    """A chat with a placeholder in one message, or with one more tool."""

    messages: list[Any]
    params: Any


@dataclass(slots=True)
class ChatParts:
    """Finds the token spans of a chat's parts, each on first use.

    Args:
        renderer: vLLM's renderer.
        messages: messages of the chat as the client sent them.
        params: vLLM's template parameters.
        tokenizing: vLLM's tokenizer parameters.
        prompt: the rendered prompt as it goes to the engine.

    Attributes:
        has_other_roles: whether the chat has a message of a role that is not in `ROLES`.
    """

    renderer: Any
    messages: list[Any]
    params: Any
    tokenizing: Any
    prompt: Mapping[str, Any]
    has_other_roles: bool = field(init=False)
    _found: dict[str, Spans | PartError] = field(default_factory=dict)
    _offsets: "TokenOffsets | None" = None

    def __post_init__(self) -> None:
        known = {role for roles in ROLES.values() for role in roles}
        named = {str(m.get("role")) for m in self.messages if isinstance(m, Mapping)}
        self.has_other_roles = not named <= known

    def spans(self, word: str) -> Spans:
        """Return the token spans of a part or role; () if the chat has none.

        Args:
            word: `system`, `tools` or `question`, or a key of `ROLES`.

        Raises:
            PartError: the spans cannot be found.
        """
        if word not in self._found:
            if self.renderer is None:
                raise PartError("this endpoint does not search for it")
            with self._storing(word) as found:
                for variant in self._variants(word):
                    with _rendering():
                        variant_prompt = self.renderer.render_messages(*variant)[1]
                    found.append(self._span(word, variant, variant_prompt))
        spans = self._found[word]
        if isinstance(spans, PartError):
            raise spans
        return spans

    async def find(self, words: Iterable[str]) -> None:
        """Find some parts now, while other requests run, and drop what only the search needs.

        Otherwise that would stay in memory with this object, until the request ends.
        """
        for word in dict.fromkeys(words):
            with self._storing(word) as found:
                for variant in self._variants(word):
                    with _rendering():
                        variant_prompt = (await self.renderer.render_messages_async(*variant))[1]
                    found.append(self._span(word, variant, variant_prompt))
        self.renderer = self.params = self.tokenizing = self._offsets = None
        self.messages, self.prompt = [], {}

    @contextmanager
    def _storing(self, word: str) -> Iterator[list[Span | None]]:
        """Store the spans that the caller finds, or the reason why it finds none."""
        found: list[Span | None] = []
        try:
            yield found
        except PartError as e:
            self._found[word] = e
            return
        spans = [span for span in found if span is not None]
        if word == TOOLS and spans:
            # The first variant has one more tool in front, the second one at the end.
            start, stop = spans[0][0], spans[-1][1]
            spans = [(start, stop)] if start < stop else []
        if word == QUESTION:
            spans = [end for span in spans for end in _ends(*span)]
        self._found[word] = merge_spans(spans)

    # -- variants to render -------------------------------------------------------------------

    def _variants(self, word: str) -> Iterator[_Variant]:
        """Yield the variants that locate a part.

        Raises:
            PartError: the part cannot be found in this chat.
        """
        if word == TOOLS:
            yield from self._with_one_more_tool()
            return
        indices = self._messages_of(word)
        limit = _MAX_PROTECTED_MESSAGES if word in WORDS else _MAX_ROLE_MESSAGES
        if len(indices) > limit:
            raise PartError(f"it has more than {limit} messages")
        for index in indices:
            before, after = self.messages[:index], self.messages[index + 1 :]
            yield _Variant([*before, self._placeholder(index), *after], self.params)

    def _with_one_more_tool(self) -> Iterator[_Variant]:
        """Yield the chat with one more tool in front, then with one more at the end."""
        if any(isinstance(message, Mapping) and message.get("tools") for message in self.messages):
            raise PartError("some of them are in its messages")
        kwargs = self.params.chat_template_kwargs
        if not (tools := kwargs.get("tools")):
            return
        function = {
            "name": PLACEHOLDER,
            "description": PLACEHOLDER,
            "parameters": _NO_PARAMETERS,
        }
        added = [{"type": "function", "function": function}]
        for more_tools in ([*added, *tools], [*tools, *added]):
            more_kwargs = {**kwargs, "tools": more_tools}
            yield _Variant(self.messages, replace(self.params, chat_template_kwargs=more_kwargs))

    def _messages_of(self, word: str) -> list[int]:
        """Return the indices of a part's or role's messages that have text."""
        roles = ("user",) if word == QUESTION else ROLES[word]
        found = [
            index
            for index, message in enumerate(self.messages)
            if isinstance(message, Mapping) and message.get("role") in roles
        ]
        found = found[-1:] if word == QUESTION else found
        if any(_has_more_than_text(self.messages[index]) for index in found):
            raise PartError("its messages contain more than text")
        return [index for index in found if _text_of(self.messages[index]).strip()]

    def _placeholder(self, index: int) -> dict[str, Any]:
        """Return a message with a placeholder that begins and ends unlike the message's text."""
        message = self.messages[index]
        text = _text_of(message).strip()
        first, last = ("Q" if text[end] != "Q" else "Z" for end in (0, -1))
        return {**message, "content": f"{first}{PLACEHOLDER}{last}"}

    # -- spans --------------------------------------------------------------------------------

    def _span(self, word: str, variant: _Variant, variant_prompt: Mapping[str, Any]) -> Span | None:
        """Return the span that a variant locates; None if the template omits the part."""
        if self.prompt.get("type") != "token" or any(map(_has_more_than_text, self.messages)):
            raise PartError("a message of the chat contains more than text")
        if self.tokenizing.truncate_prompt_tokens is not None:
            raise PartError("truncate_prompt_tokens may have removed it")
        # Compare token ids if the renderer has its own tokenizer: text is then only decoded ids.
        kind = "prompt" if "prompt" in variant_prompt else "prompt_token_ids"
        original: Text = self.prompt[kind]
        rendered: Text = variant_prompt[kind]
        if word != TOOLS:
            found = replaced_span(original, rendered)
        else:
            names = _names_of(variant)
            front = names[0] == PLACEHOLDER
            own_names = names[1:] if front else names[:-1]
            found = tools_span(original, rendered, own_names, front=front)
        if found is None or isinstance(original, list):
            return found
        if self._offsets is None:
            self._offsets = TokenOffsets.of(self.prompt, self.renderer, self.tokenizing)
        return self._offsets.tokens(*found)


@contextmanager
def _rendering() -> Iterator[None]:
    """Turn any exception while rendering a variant into a PartError."""
    try:
        yield
    except Exception:
        # A chat template can raise anything, with any text.
        raise PartError("the chat template cannot render a variant of the chat") from None


def _names_of(variant: _Variant) -> list[str]:
    """Return the names of a variant's tools."""
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
    """Return whether a message has a part that is not known to be text."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if content is None or isinstance(content, str):
        return False
    return not isinstance(content, list) or not all(
        isinstance(part, str) or (isinstance(part, Mapping) and isinstance(part.get("text"), str))
        for part in content
    )


def _ends(start: int, stop: int) -> Iterator[Span]:
    """Yield a span, or its first and last tokens if it is longer than both together."""
    if stop - start <= 2 * _QUESTION_END:
        yield start, stop
    else:
        yield start, start + _QUESTION_END
        yield stop - _QUESTION_END, stop


def parts_of(prompt: Any) -> ChatParts | None:
    """Return the parts of the chat that a prompt was rendered from; None if there is none."""
    found = prompt.get(_KEY) if isinstance(prompt, Mapping) else None
    return found if isinstance(found, ChatParts) else None


def install() -> None:
    """Wrap the methods that render chats; safe to call twice."""
    if getattr(BaseRenderer, _INSTALLED, False):
        return
    render_chat, render_chat_async = BaseRenderer.render_chat, BaseRenderer.render_chat_async

    @functools.wraps(render_chat)
    def rendering(
        self: Any, conversations: Any, chat_params: Any, tok_params: Any = None, **more: Any
    ) -> Any:
        if active_settings(self.config.additional_config) is None:
            return render_chat(self, conversations, chat_params, tok_params, **more)
        chats = [_reusable(chat) for chat in conversations]
        rendered_chats, prompts = render_chat(self, chats, chat_params, tok_params, **more)
        used = self.default_chat_tok_params if tok_params is None else tok_params
        for chat, prompt in zip(chats, prompts, strict=True):
            # Which parts a request needs is known only later, with its parameters.
            prompt[_KEY] = ChatParts(self, chat, chat_params, used, dict(prompt))
        return rendered_chats, prompts

    @functools.wraps(render_chat_async)
    async def rendering_async(
        self: Any, conversations: Any, chat_params: Any, tok_params: Any = None, **more: Any
    ) -> Any:
        settings, words = active_settings(self.config.additional_config), needed_parts.get()
        if settings is None or words == ():
            return await render_chat_async(self, conversations, chat_params, tok_params, **more)
        chats = [_reusable(chat) for chat in conversations]
        used = self.default_chat_tok_params if tok_params is None else tok_params
        tokenizing = replace(used, return_token_offsets=bool(words) or used.return_token_offsets)
        rendered_chats, prompts = await render_chat_async(
            self, chats, chat_params, tokenizing, **more
        )
        for chat, prompt in zip(chats, prompts, strict=True):
            parts = prompt[_KEY] = ChatParts(self, chat, chat_params, used, dict(prompt))
            # `words` is None on other endpoints, where the needed parts are known only later.
            if words:
                await parts.find(words)
            if not used.return_token_offsets:
                prompt.pop("prompt_token_offsets", None)
        return rendered_chats, prompts

    BaseRenderer.render_chat = rendering
    BaseRenderer.render_chat_async = rendering_async
    setattr(BaseRenderer, _INSTALLED, True)


def _reusable(chat: Iterable[Any]) -> list[Any]:
    """Return the messages of a chat with content that can be read more than once."""
    messages: list[Any] = []
    for message in chat:
        reusable = message
        if isinstance(message, Mapping):
            content = message.get("content")
            if content is not None and not isinstance(content, str | list):
                reusable = {**message, "content": list(content)}
        messages.append(reusable)
    return messages
